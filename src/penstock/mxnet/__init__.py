"""penstock for MXNet 1.9.1: a Gluon trainer whose gradients are averaged by the same exchange as in PyTorch.

    import penstock.mxnet as pk
    from mxnet import gluon

    pk.init()                                                  # ranks of mpirun or Slurm
    pk.broadcast_parameters(net.collect_params())              # rank 0's
    trainer = pk.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, codec="onebit")
    trainer.step(batch_size)                                   # of this rank: gradients are averaged over ranks

Names and arguments are Horovod's where it has them: its scripts change the import. MXNet is retired: its last release
wants numpy below 2, and an environment of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

if "bool" not in vars(np):  # numpy 1.24 to 1.26 have no such name, which MXNet reads when it is imported
    vars(np)["bool"] = bool

from penstock.errors import MismatchError, PlanError, naming_extra

with naming_extra():
    import mxnet as mx
    from mxnet import gluon

from penstock.adaptor import current
from penstock.adaptor.buckets import Gradient
from penstock.adaptor.current import (
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
    absent,
    allgather_object,
    broadcast_object,
    chosen_op,
    init,
    is_initialized,
    local_rank,
    local_size,
    nothing_else,
    rank,
    shutdown,
    size,
    take_options,
)
from penstock.adaptor.session import Session
from penstock.exchange import compression as exchange_compression
from penstock.exchange.state import State
from penstock.exchange.traffic import Traffic
from penstock.planning.planning import Planning
from penstock.timeline import Timeline

__all__ = [
    "Average",
    "Compression",
    "DistributedTrainer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

_DENSE = "default"  # how MXNet calls arrays that are not sparse


# Collectives: all ranks make the same calls in one order, which each call compares; no gradients flow through them.


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **horovod: Any,
) -> Any:
    """Return the average (or what `op` says) of an array over all ranks, in a new array.

    `average` is Horovod's older way to say `op`. `name`, here and below, and Horovod's `priority` have no effect.
    """
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return grouped_allreduce([tensor], average, op=op, **factors, **horovod)[0]


def allreduce_(tensor: Any, *arguments: Any, **options: Any) -> Any:
    """Replace an array by what `allreduce` returns for it; return it."""
    return grouped_allreduce_([tensor], *arguments, **options)[0]


def grouped_allreduce(tensors: Sequence[Any], *arguments: Any, **options: Any) -> list[Any]:
    """Return the same of several arrays, which travel together."""
    return grouped_allreduce_([each.copy() for each in tensors], *arguments, **options)


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    *,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **horovod: Any,
) -> list[Any]:
    """Replace several arrays; return them."""
    nothing_else(horovod)
    values = [each.asnumpy() for each in tensors]
    found = current.world().all_reduce(values, chosen_op(average, op), prescale_factor, postscale_factor)
    return [_filled(*each) for each in zip(tensors, found, strict=True)]


def allgather(tensor: Any, name: str | None = None, **horovod: Any) -> Any:
    """Return all ranks' arrays behind one another; they may have different numbers of rows."""
    nothing_else(horovod)
    values = current.world().all_gather(tensor.asnumpy())
    return mx.nd.array(values, ctx=tensor.context, dtype=values.dtype)


def grouped_allgather(tensors: Sequence[Any], name: str | None = None, **horovod: Any) -> list[Any]:
    """Return the same of several arrays."""
    return [allgather(each, **horovod) for each in tensors]


def broadcast(tensor: Any, root_rank: int, name: str | None = None, **horovod: Any) -> Any:
    """Return the root's array on every rank, in a new array."""
    return broadcast_(tensor.copy(), root_rank, **horovod)


def broadcast_(tensor: Any, root_rank: int, name: str | None = None, **horovod: Any) -> Any:
    """Replace an array by the root's; return it."""
    nothing_else(horovod)
    _share([tensor], root_rank)
    return tensor


def broadcast_parameters(parameters: Mapping[str, Any], root_rank: int = 0, prefix: str | None = None) -> None:
    """Overwrite parameters, or arrays, with those of one rank; every rank must call this.

    Parameters whose shapes are not known before the first forward pass are sent there, as they get their values; all
    ranks make it together. `prefix`, of Horovod, has no effect.
    """
    known = []
    for _, each in sorted(parameters.items()):
        if isinstance(each, mx.nd.NDArray):
            known.append(each)
        elif each._data is not None:
            known.append(each.data())
        elif each._deferred_init:
            _share_later(each, root_rank)
        else:
            raise PlanError(f"parameter {each.name!r} has no values; call initialize() first, on all ranks")
    _share(known, root_rank)


def _share(arrays: Sequence[Any], root_rank: int) -> None:
    found = current.world().broadcast([each.asnumpy() for each in arrays], root_rank)
    for each in zip(arrays, found, strict=True):
        _filled(*each)


def _share_later(parameter: Any, root_rank: int) -> None:
    """Have a parameter overwritten by the root's as soon as it has values."""
    give_values = parameter._init_impl

    def and_share(*arguments: Any) -> None:
        give_values(*arguments)
        _share([parameter.data()], root_rank)

    parameter._init_impl = and_share


def _filled(array: Any, values: NDArray[Any]) -> Any:
    array[:] = values
    return array


class DistributedTrainer(gluon.Trainer):  # type: ignore[misc]  # MXNet has no types
    """Gluon's trainer; before each update, gradients are replaced by their average over all ranks.

    codec, plan, compression, planning, and the fields of these two as keywords mean what they do in
    `penstock.torch.DistributedDataParallel`; Horovod's `gradient_predivide_factor`, `prefix`, `num_groups` are taken
    too. `step(batch_size)` takes the batch of one rank, as MXNet's own does.
    Every parameter with a gradient must be used in every iteration; give others `grad_req="null"`.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Mapping[str, Any] | None = None,
        *,
        codec: Any = None,
        plan: Any = None,
        compression: exchange_compression.Compression | None = None,
        planning: Planning | None = None,
        **options: Any,
    ) -> None:
        if (op := take_options(options)) != Average:
            raise PlanError(f"op={op!r}; wanted Average: step(batch_size) divides by the batch of one rank")
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        given = {"codec": codec, "plan": plan, "compression": compression, "planning": planning}
        self._asked = options | {name: value for name, value in given.items() if value is not None}
        self._session: Session | None = None  # from the first step on, when all shapes are known
        self._averaged: list[Any] = [each for each in self._params if each.grad_req != "null"]
        _raise_together(next(filter(None, map(_complaint, self._averaged)), ""))

    @property
    def session(self) -> Session:
        """What averages; there is one from the first step on."""
        if self._session is None:
            raise PlanError("nothing is known of the gradients yet; call step() first")
        return self._session

    def explain(self, picture: bool = False) -> str:
        """Say what was planned and why."""
        return self.session.explain(picture)

    def bytes_sent(self) -> Traffic:
        """Return the bytes that this rank has sent so far, and what the same gradients take dense."""
        return self.session.bytes_sent()

    def measured_timeline(self) -> Timeline | None:
        """Return the last iteration as it was on this rank."""
        return self.session.measured_timeline()

    def exchange_state_dict(self) -> State:
        """Return what this rank still owes; save it beside `save_states`, which knows nothing of it."""
        return self.session.state_dict()

    def load_exchange_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over from the states of all ranks of an earlier run, all ranks together, once shapes are known."""
        self._start()
        self.session.load_state_dict(states)

    def close(self) -> None:
        """End the exchange, on all ranks together."""
        if self._session is not None:
            self._session.close()

    def _start(self) -> None:
        if self._session is None:
            gradients = [Gradient(each.name, tuple(each.shape), np.dtype(each.dtype).name) for each in self._averaged]
            self._session = Session(current.world(), gradients, framework="mxnet", **self._asked)

    def _allreduce_grads(self) -> None:
        """Replace all gradients by their averages; the last ones are computed first, and so sent first."""
        self._start()
        if stale := [each.name for each in self._averaged if not each.data()._fresh_grad]:
            self.session.refuse(  # others may have one
                f"no new gradient of {stale[0]!r} since the last step; give parameters that are not used "
                'grad_req="null", on all ranks'
            )
        for index, each in reversed(list(enumerate(self._averaged))):
            self.session.put(index, _view(each.grad()))
        for each, average in zip(self._averaged, self.session.wait(), strict=True):
            each.grad()._sync_copyfrom(average)


class _Shared:
    """An array in host memory as `numpy.from_dlpack` takes it, without a copy."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, stream: None = None) -> Any:
        return self._array.to_dlpack_for_read()  # once the array is computed

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU


def _view(array: Any) -> NDArray[Any]:
    """Return an array's values, once they are computed: where they lie in host memory, else a copy."""
    if array.context.device_type != "cpu":
        found: NDArray[Any] = array.asnumpy()
        return found
    return np.from_dlpack(_Shared(array))


def _complaint(parameter: Any) -> str:
    """Say why the gradient of a parameter cannot be averaged; empty where it can."""
    if parameter._grad_stype != _DENSE or parameter._stype != _DENSE:
        return (
            f"the gradient of {parameter.name!r} is {parameter._grad_stype}; wanted a dense one: make the layer with "
            "sparse_grad=False"
        )
    if len(parameter.list_ctx()) > 1:
        return f"{parameter.name!r} is on {len(parameter.list_ctx())} devices; wanted one, and a rank for each device"
    return ""


def _raise_together(complaint: str) -> None:
    """Raise what any rank finds wrong, on every rank."""
    held = current.world().gather(complaint, "comparing the parameters of ranks")
    for number, found in enumerate(held):
        if found:
            raise MismatchError(f"rank {number}: {found}")


def __getattr__(name: str) -> Any:
    raise absent(__name__, name)
