"""Compiled programs call Python functions on the memory that they compute in."""

from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("jax.numpy") is None:  # tests/jax is no such thing
    pytest.skip("penstock.jax needs penstock[jax]", allow_module_level=True)

import jax
import jax.numpy as jnp

from penstock.jax.host_calls import HostCall


def like(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "uint32", "bool"])
def test_a_function_sees_arguments_and_writes_results_of_every_type_and_shape(shape, dtype):
    given = jnp.asarray(np.arange(np.prod(shape)).reshape(shape) % 2, dtype)

    def swap(arguments, results):
        assert [each.dtype.name for each in arguments] == [dtype, "float32"]
        results[0][...], results[1][...] = arguments[1], arguments[0]

    call, other = HostCall(swap), jnp.arange(3.0)
    first, second = jax.jit(lambda x, y: call([like(y), like(x)], [x, y]))(given, other)
    np.testing.assert_array_equal(first, other)
    np.testing.assert_array_equal(np.asarray(second), np.asarray(given))
    assert second.dtype == given.dtype


def test_nothing_is_copied():
    addresses = []

    def note(arguments, results):
        addresses.append((arguments[0].ctypes.data, arguments[0].nbytes))
        results[0][...] = 0

    call, given = HostCall(note), jnp.ones(1 << 20)
    jax.block_until_ready(jax.jit(lambda x: call([jax.ShapeDtypeStruct((), np.float32)], [x]))(given))
    assert addresses == [(given.unsafe_buffer_pointer(), 1 << 22)]


def test_what_a_function_raises_is_the_programs_error_in_one_line():
    def fail(arguments, results):
        raise ValueError("found 3; wanted 4")

    call = HostCall(fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: ValueError: found 3; wanted 4"):
        jax.block_until_ready(jax.jit(lambda x: call([like(x)], [x]))(jnp.ones(2)))


def test_calls_work_in_loops_and_branches():
    def double(arguments, results):
        results[0][...] = 2 * arguments[0]

    call = HostCall(double)

    @jax.jit
    def run(x):
        looped = jax.lax.fori_loop(0, 5, lambda _, x: call([like(x)], [x])[0], x)
        return jax.lax.cond(looped[0] > 0, lambda: call([like(x)], [looped])[0], lambda: looped)

    np.testing.assert_array_equal(run(jnp.ones(2)), [64.0, 64.0])
