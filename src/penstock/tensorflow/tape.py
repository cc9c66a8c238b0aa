"""`DistributedGradientTape`: the gradients of a tape, averaged over all ranks."""

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf

from penstock.adaptor.current import take_options
from penstock.adaptor.session import Session
from penstock.tensorflow.averaging import Averager, plain

_known: dict[tuple[Any, ...], Averager] = {}  # by options and variables: tapes are made anew in every step


class _DistributedTape(tf.GradientTape):  # type: ignore[misc]
    """A tape whose `gradient` averages; what was recorded on the tape that it is made from is on it."""

    def __init__(self, tape: tf.GradientTape, local: Sequence[Any], options: dict[str, Any]) -> None:
        super().__init__(tape._persistent, tape._watch_accessed_variables)
        self._tape, self._recording = tape._tape, tape._recording
        self._local, self._options = {id(each) for each in local}, options
        self._averager: Averager | None = None

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a variable as it is on this rank, divided by the ranks unless told otherwise."""
        self._local.add(id(source))

    @property
    def session(self) -> Session:
        """What averages: its `explain()`, `bytes_sent()`, `measured_timeline()`, ...; after the first gradients."""
        assert self._averager is not None, "call gradient() first"
        return self._averager.session

    @plain  # type: ignore[untyped-decorator]
    def gradient(self, target: Any, sources: Any, *arguments: Any, **options: Any) -> Any:
        """Return the gradients of `target` with respect to `sources`, averaged over all ranks."""
        gradients = super().gradient(target, sources, *arguments, **options)
        variables = tf.nest.flatten(sources)
        self._averager = _averager_of(variables, self._options)
        self._averager.local = self._local
        flat = [gradients] if len(variables) == 1 and not tf.nest.is_nested(sources) else _flatten(gradients, sources)
        averaged = self._averager.average(flat, variables)
        return averaged[0] if not tf.nest.is_nested(sources) else tf.nest.pack_sequence_as(sources, averaged)


def _flatten(gradients: Any, sources: Any) -> list[Any]:
    """Return the gradients in the order of the sources; slices are leaves."""
    return list(tf.nest.flatten_up_to(sources, gradients)) if hasattr(tf.nest, "flatten_up_to") else _leaves(gradients)


def _leaves(structure: Any) -> list[Any]:
    if isinstance(structure, dict):
        return [leaf for key in sorted(structure) for leaf in _leaves(structure[key])]
    if isinstance(structure, list | tuple) and not isinstance(structure, tf.IndexedSlices):
        return [leaf for each in structure for leaf in _leaves(each)]
    return [structure]


def _averager_of(variables: Sequence[Any], options: dict[str, Any]) -> Averager:
    """Return what averages these variables with these options, the same for every tape; it goes with the variables."""
    key = (repr(sorted(options.items(), key=lambda item: item[0])), *map(id, variables))
    if key not in _known:
        _known[key] = Averager(**options)
        with suppress(TypeError):  # a tensor of a graph
            weakref.finalize(variables[0], _known.pop, key, None)
    return _known[key]


def DistributedGradientTape(  # noqa: N802  # as Horovod calls it
    gradtape: tf.GradientTape,
    *,
    sparse_as_dense: bool = False,
    scale_local_gradients: bool = True,
    **options: Any,
) -> _DistributedTape:
    """Return a tape whose `gradient` averages over all ranks, with what was recorded on `gradtape`.

    sparse_as_dense: make `tf.IndexedSlices` dense and average them so; otherwise all ranks' slices are gathered.
    options: `codec`, `density`, `strategy`, `planner`, `plan`, ..., as in `penstock.torch.DistributedDataParallel`;
    and Horovod's: `op` (Average or Sum), `compression`, `gradient_predivide_factor`, `groups`, `device_dense`, ...
    The first call of `gradient` compares ranks; all of them make it together.
    """
    return PartialDistributedGradientTape(
        gradtape, sparse_as_dense=sparse_as_dense, scale_local_gradients=scale_local_gradients, **options
    )


def PartialDistributedGradientTape(  # noqa: N802  # as Horovod calls it
    gradtape: tf.GradientTape,
    *,
    local_layers: Any = (),
    scale_local_gradients: bool = True,
    sparse_as_dense: bool = False,
    **options: Any,
) -> _DistributedTape:
    """Return the same, but that gradients of `local_layers` stay this rank's own, divided by the ranks."""
    layers = local_layers if isinstance(local_layers, list | tuple | set) else [local_layers]
    local = [getattr(each, "value", each) for layer in layers for each in layer.trainable_variables]
    local += [each for layer in layers for each in layer.trainable_variables]
    op = take_options(options)
    given = {"op": op, "sparse_as_dense": sparse_as_dense, "scale_local": scale_local_gradients, **options}
    return _DistributedTape(gradtape, local, given)
