"""penstock for MXNet 1.9.1: a Gluon trainer whose gradients are averaged by the same exchange as in PyTorch.

    import penstock.mxnet as pk
    from mxnet import gluon

    pk.init()                                                  # ranks of mpirun or Slurm
    pk.broadcast_parameters(net.collect_params())              # rank 0's
    trainer = pk.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, codec="onebit")
    trainer.step(batch_size)                                   # of this rank: gradients are averaged over ranks

MXNet is retired: its last release wants numpy below 2, and an environment of its own.
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
from penstock.adaptor.current import init, is_initialized, local_rank, local_size, rank, shutdown, size
from penstock.adaptor.session import Gradient, Session
from penstock.exchange.compression import Compression
from penstock.exchange.state import State
from penstock.exchange.traffic import Traffic
from penstock.planning.planning import Planning
from penstock.timeline import Timeline

__all__ = [
    "DistributedTrainer",
    "broadcast_parameters",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

_DENSE = "default"  # how MXNet calls arrays that are not sparse


def broadcast_parameters(parameters: Mapping[str, Any], root_rank: int = 0) -> None:
    """Overwrite parameters, or arrays, with those of one rank; every rank must call this.

    Parameters whose shapes are not known yet have no values to send: run one forward pass first.
    """
    arrays = {name: _values_of(each) for name, each in sorted(parameters.items())}
    found = current.world().broadcast([each.asnumpy() for each in arrays.values()], root_rank)
    for array, values in zip(arrays.values(), found, strict=True):
        array[:] = values


class DistributedTrainer(gluon.Trainer):  # type: ignore[misc]  # MXNet has no types
    """Gluon's trainer; before each update, gradients are replaced by their average over all ranks.

    codec, plan, compression, planning, and the fields of these two as keywords mean what they do in
    `penstock.torch.DistributedDataParallel`. `step(batch_size)` takes the batch of one rank, as MXNet's own does.
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
        compression: Compression | None = None,
        planning: Planning | None = None,
        **options: Any,
    ) -> None:
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
            raise PlanError(
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


def _values_of(parameter: Any) -> Any:
    if isinstance(parameter, mx.nd.NDArray):
        return parameter
    if parameter._data is None:
        raise PlanError(
            f"parameter {parameter.name!r} has no values yet (shape {parameter.shape}); run one forward pass before "
            "broadcast_parameters, on all ranks"
        )
    return parameter.data()


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
