"""Calls Python functions from inside a compiled JAX program, on the memory that XLA computes in.

`jax.experimental.io_callback` copies every argument into a JAX array first, and that copy waits for the very threads
that compute: with two cores and large gradients it can wait for ever. On a CPU we register a handler of XLA's foreign
function interface instead. It is written with ctypes against the C structures of `xla/ffi/api/c_api.h` (a stable
interface, the same in jax 0.5 and later), so nothing is compiled. The function sees arguments and results as numpy
arrays of XLA's own memory: no copies, and results are written in place. On a GPU `io_callback` is used: it copies from
and to the host, and the threads that it waits for are other ones.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, c_char, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache, partial
from itertools import count
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from numpy.typing import NDArray

from penstock.errors import PlanError

Views = list[NDArray[Any]]
HostFunction = Callable[[Views, Views], None]  # reads its arguments, writes its results; keeps neither
_TARGET = "penstock_host_call"
_INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
_METADATA = 1  # XLA_FFI_Extension_Metadata
_DTYPES = {  # XLA_FFI_DataType
    1: np.dtype(np.bool_),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    8: np.dtype(np.uint32),
    10: np.dtype(np.float16),
    11: np.dtype(np.float32),
    12: np.dtype(np.float64),
    16: np.dtype(jnp.bfloat16),
}


class _Buffer(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    )


class _Buffers(Structure):  # XLA_FFI_Args and XLA_FFI_Rets
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("size", c_int64),
        ("types", c_void_p),
        ("buffers", POINTER(POINTER(_Buffer))),
    )


class _Scalar(Structure):
    _fields_ = (("dtype", c_int), ("value", POINTER(c_int64)))


class _Attributes(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("size", c_int64),
        ("types", c_void_p),
        ("names", c_void_p),
        ("values", POINTER(POINTER(_Scalar))),
    )


class _Version(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int))


class _NewError(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int))


class _Api(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("version", _Version),
        ("internal", c_void_p),
        ("make_error", CFUNCTYPE(c_void_p, POINTER(_NewError))),
    )


class _Metadata(Structure):
    _fields_ = (("struct_size", c_size_t), ("version", _Version), ("traits", c_uint32))


class _MetadataExtension(Structure):
    _fields_ = (("struct_size", c_size_t), ("type", c_int), ("next", c_void_p), ("metadata", POINTER(_Metadata)))


class _Call(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", POINTER(_MetadataExtension)),
        ("api", POINTER(_Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("arguments", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    )


_functions: dict[int, HostFunction] = {}  # by the number that compiled programs hold
_numbers = count()


def copies_nothing() -> bool:
    """Say whether calls see XLA's own memory, as they do on a CPU; else all arguments and results are copied."""
    return bool(jax.default_backend() == "cpu")


class HostCall:
    """A Python function that compiled programs can call; they hold its number, so it is kept until it is closed."""

    def __init__(self, function: HostFunction) -> None:
        _register()
        self._number = next(_numbers)
        _functions[self._number] = function

    def close(self) -> None:
        """Let the function go; programs that call it fail from now on."""
        _functions.pop(self._number, None)

    def __call__(
        self,
        results: Sequence[jax.ShapeDtypeStruct],
        arguments: Sequence[Any],
        shared: Mapping[int, int] | None = None,  # argument: the result in whose memory it lies, where it may
    ) -> list[Any]:
        """Have the program that is being traced call the function; return its results.

        A result in memory of its own is slow to write: XLA asks the system for new pages in every execution.
        """
        if copies_nothing():
            call = jax.ffi.ffi_call(
                _TARGET, tuple(results), has_side_effect=True, input_output_aliases=dict(shared or {})
            )
            return list(call(*arguments, number=np.int64(self._number)))
        return list(io_callback(partial(self._with_copies, tuple(results)), tuple(results), *arguments))

    def _with_copies(self, results: tuple[jax.ShapeDtypeStruct, ...], *arguments: jax.Array) -> list[NDArray[Any]]:
        written = [np.empty(each.shape, each.dtype) for each in results]
        _function(self._number)([np.asarray(each) for each in arguments], written)
        return written


def _function(number: int) -> HostFunction:
    if number not in _functions:
        raise PlanError("average_gradients() of this program was closed; make another one, and compile the step anew")
    return _functions[number]


def _view(buffer: _Buffer) -> NDArray[Any]:
    dtype, shape = _DTYPES[buffer.dtype], tuple(buffer.dims[: buffer.rank])
    nbytes = prod(shape) * dtype.itemsize
    if not nbytes:
        return np.zeros(shape, dtype)
    return np.frombuffer((c_char * nbytes).from_address(buffer.data), dtype).reshape(shape)


def _views(buffers: _Buffers) -> Views:
    return [_view(buffers.buffers[index].contents) for index in range(buffers.size)]


def _handle(pointer: Any) -> int | None:
    """Call the function whose number the program gives; what it raises is the program's error."""
    call: _Call = pointer.contents
    if call.extension and call.extension.contents.type == _METADATA:  # XLA asks which interface this is written for
        ours, theirs = call.extension.contents.metadata.contents.version, call.api.contents.version
        ours.major, ours.minor = theirs.major, theirs.minor
        return None
    try:
        function = _function(call.attributes.values[0].contents.value[0])
        function(_views(call.arguments), _views(call.results))
    except BaseException as error:  # nothing may leave a C function
        text = f"{type(error).__name__}: {error}".encode()
        new = _NewError(ctypes.sizeof(_NewError), None, text, _INTERNAL)
        made: int = call.api.contents.make_error(ctypes.byref(new))
        return made
    return None


_HANDLER = CFUNCTYPE(c_void_p, POINTER(_Call))(_handle)  # kept: XLA knows its address


@cache
def _register() -> None:
    address = ctypes.cast(_HANDLER, c_void_p)
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(address), platform="cpu")
