"""Collectives on tensors as Horovod has them, in eager mode and inside of `tf.function`; gradients flow through them.

All ranks make the same calls in the same order; inside of `tf.function` TensorFlow keeps the order of the program. Each
call compares what ranks bring (`adaptor/world.py`): they are for metrics, initial weights and the like. Gradients of
every iteration belong into `DistributedGradientTape` or `DistributedOptimizer`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from penstock.adaptor.current import (
    Average,
    Compression,
    Sum,
    chosen_op,
    local_rank,
    local_size,
    nothing_else,
    rank,
    size,
    world,
)
from penstock.exchange import compression as exchange_compression
from penstock.tensorflow.averaging import call_python, plain

Array = NDArray[Any]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    *,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: exchange_compression.Compression = Compression.none,
    name: str | None = None,
    **horovod: Any,
) -> Any:
    """Return the average (or what `op` says) of a tensor over all ranks; of `tf.IndexedSlices`, all ranks' slices.

    `average` is Horovod's older way to say `op`. With `Compression.fp16` float32 and float64 travel as float16.
    `name`, here and below, and Horovod's `device_dense`, ... have no effect.
    """
    return grouped_allreduce(
        [tensor],
        average,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
        name=name,
        **horovod,
    )[0]


@plain  # type: ignore[untyped-decorator]
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    *,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: exchange_compression.Compression = Compression.none,
    name: str | None = None,
    **horovod: Any,
) -> list[Any]:
    """Return the same of several tensors, which travel together."""
    nothing_else(horovod)
    op = chosen_op(average, op)
    found = list(tensors)
    sparse = [index for index, each in enumerate(found) if isinstance(each, tf.IndexedSlices)]
    if sparse and op not in (Average, Sum):
        raise NotImplementedError(f"op={op!r} of tf.IndexedSlices; wanted Average or Sum, or a dense tensor")
    if sparse and (prescale_factor, postscale_factor) != (1.0, 1.0):
        raise NotImplementedError("prescale_factor or postscale_factor of tf.IndexedSlices; scale the tensor itself")
    dense = [index for index in range(len(found)) if index not in sparse]
    if dense:
        given = [tf.convert_to_tensor(found[index]) for index in dense]
        narrow = [_narrow(each, compression) for each in given]
        summed = _all_reduce(narrow, op, prescale_factor, postscale_factor)
        for index, each, like in zip(dense, summed, given, strict=True):
            found[index] = tf.cast(each, like.dtype)
    for index in sparse:
        slices = found[index]
        values = allgather(slices.values)
        values = values / tf.cast(size(), values.dtype) if op == Average else values
        found[index] = tf.IndexedSlices(values, allgather(slices.indices), slices.dense_shape)
    return found


def _narrow(tensor: Any, compression: exchange_compression.Compression) -> Any:
    if compression.codec not in (None, "fp16"):
        raise ValueError(
            f"codec {compression.codec!r} in allreduce; wanted Compression.none or Compression.fp16: other codecs need "
            "the memory of DistributedOptimizer or DistributedGradientTape"
        )
    wide = compression.codec == "fp16" and tensor.dtype in (tf.float32, tf.float64)
    return tf.cast(tensor, tf.float16) if wide else tensor


def _all_reduce(tensors: Sequence[Any], op: str, prescale: float, postscale: float) -> list[Any]:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduced(*given: Any) -> Any:
        def call(*arrays: Array) -> list[Array]:
            return world().all_reduce([np.asarray(each) for each in arrays], op, prescale, postscale)

        def gradient(*upstream: Any) -> Any:
            if op not in (Average, Sum):
                raise NotImplementedError(f"the gradient of allreduce with op={op!r}; wanted Average or Sum")
            return _all_reduce(upstream, op, prescale, postscale)

        return _called(call, given, [each.dtype for each in given], [each.shape for each in given]), gradient

    return list(reduced(*tensors))


@plain  # type: ignore[untyped-decorator]
def allgather(tensor: Any, name: str | None = None, **horovod: Any) -> Any:
    """Return all ranks' tensors behind one another; they may have different numbers of rows."""
    nothing_else(horovod)
    tensor = tf.convert_to_tensor(tensor)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def gathered(given: Any) -> Any:
        (found,) = _called(
            lambda array: [world().all_gather(np.asarray(array))],
            [given],
            [given.dtype],
            [tf.TensorShape([None, *given.shape[1:]])],
        )

        def gradient(upstream: Any) -> Any:
            rows = tf.shape(given)[0]
            (counts,) = _called(
                lambda mine: [np.array(world().gather(int(mine)), np.int32)], [rows], [tf.int32], [[size()]]
            )
            (summed,) = _all_reduce([upstream], Sum, 1.0, 1.0)
            start = tf.reduce_sum(counts[: rank()])
            return summed[start : start + rows]

        return found, gradient

    return gathered(tensor)


def grouped_allgather(tensors: Sequence[Any], name: str | None = None, **horovod: Any) -> list[Any]:
    """Return the same of several tensors."""
    return [allgather(each, **horovod) for each in tensors]


@plain  # type: ignore[untyped-decorator]
def broadcast(tensor: Any, root_rank: int, name: str | None = None, **horovod: Any) -> Any:
    """Return the root's tensor on every rank."""
    nothing_else(horovod)
    tensor = tf.convert_to_tensor(tensor)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def sent(given: Any) -> Any:
        (found,) = _called(
            lambda array: world().broadcast([np.asarray(array)], root_rank), [given], [given.dtype], [given.shape]
        )

        def gradient(upstream: Any) -> Any:
            (summed,) = _all_reduce([upstream], Sum, 1.0, 1.0)
            return summed if rank() == root_rank else tf.zeros_like(summed)

        return found, gradient

    return sent(tensor)


@plain  # type: ignore[untyped-decorator]
def broadcast_variables(variables: Sequence[Any], root_rank: int = 0, inplace: bool = False, **horovod: Any) -> None:
    """Give all variables, of TensorFlow or of Keras, the root's values; all of them travel together."""
    nothing_else(horovod)
    targets = [getattr(each, "value", each) if not isinstance(each, tf.Variable) else each for each in variables]
    if not targets:
        return
    values = [tf.convert_to_tensor(each) for each in targets]
    found = _called(
        lambda *arrays: world().broadcast([np.asarray(each) for each in arrays], root_rank),
        values,
        [each.dtype for each in values],
        [each.shape for each in values],
    )
    for variable, value in zip(targets, found, strict=True):
        variable.assign(value)


def rank_op(name: str | None = None) -> Any:
    """Return `rank()` as a tensor."""
    return tf.constant(rank(), name=name)


def size_op(name: str | None = None) -> Any:
    """Return `size()` as a tensor."""
    return tf.constant(size(), name=name)


def local_rank_op(name: str | None = None) -> Any:
    """Return `local_rank()` as a tensor."""
    return tf.constant(local_rank(), name=name)


def local_size_op(name: str | None = None) -> Any:
    """Return `local_size()` as a tensor."""
    return tf.constant(local_size(), name=name)


def _called(function: Any, given: Sequence[Any], dtypes: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
    """Return what a function of arrays makes of tensors, as tensors of these types and shapes."""
    results = call_python(function, given, dtypes)
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return results
