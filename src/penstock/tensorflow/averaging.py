"""Hands TensorFlow's gradients to a session as they are computed, and its averages back: in eager mode and in graphs.

For each gradient there is one call of Python in the graph, which runs as soon as the gradient is there, and for all of
them one that waits. The graph does not depend on buckets: they change between two iterations, when a plan comes, and
nothing is traced anew. TensorFlow may run calls without state in any order: the session starts buckets in its own,
which is the same on all ranks. The call that waits takes what they return, so that none of them is optimised away.
"""

import re
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from penstock.adaptor.buckets import Gradient
from penstock.adaptor.current import Average, Sum, world
from penstock.adaptor.session import Session
from penstock.errors import PlanError
from penstock.exchange.state import State

Array = NDArray[Any]
plain = tf.autograph.experimental.do_not_convert  # runs as it is while a graph is traced
_NUMBER = re.compile(r"^(.*?)(?:_(\d+))?$")
_sessions: list["weakref.ref[Session]"] = []


def sessions() -> list[Session]:
    """Return the sessions of this process, those made first first: of optimizers and tapes that have averaged."""
    return [found for each in _sessions if (found := each()) is not None]


class Averager:
    """Averages the gradients of some variables over all ranks; makes its session with the first of them.

    All ranks must come with the first gradients at the same time: their models and options are compared then.
    """

    def __init__(
        self, op: str = Average, sparse_as_dense: bool = False, scale_local: bool = True, **options: Any
    ) -> None:
        """`op`: average or sum; `options` are those of a `Session`."""
        self._op, self._sparse_as_dense, self._scale_local, self._options = op, sparse_as_dense, scale_local, options
        self.local: set[int] = set()  # ids of variables whose gradients are this rank's own
        self._session: Session | None = None
        self._numbers: dict[int, int] = {}  # of the session's gradients, by position among the variables
        self._sparse: dict[int, tuple[Any, Any]] = {}  # types of indices and rows, by position; of the first iteration
        self._has_met = False  # ranks have compared what they have gradients of
        self._changing: Any = None  # a variable: of constants alone TensorFlow would make a call once
        self._loaded: Sequence[State] | None = None  # states that wait for the session

    @property
    def has_session(self) -> bool:
        """Whether gradients have come."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """What averages; there is none before the first gradients have come."""
        if self._session is None:
            raise PlanError("nothing was averaged yet; take a step first, on all ranks")
        return self._session

    def load_state_dict(self, states: Sequence[State]) -> None:
        """Take over from the states of all ranks of an earlier run; before the first step, with it."""
        if self._session is None:
            self._loaded = states
        else:
            self._session.load_state_dict(states)

    @plain  # type: ignore[untyped-decorator]
    def average(
        self, gradients: Sequence[Any], variables: Sequence[Any], name: str = "", lend: bool = False
    ) -> list[Any]:
        """Return the averages over all ranks, or their sums; slices stay slices unless they are made dense.

        What is None on all ranks in the first iteration stays None. What is None later counts as zeros on this rank,
        which is given the average as all others are: weights stay the same.

        TensorFlow takes aligned arrays over without a copy. With `lend` these are the buckets' memory, for averages of
        which nothing is kept until the next iteration: buckets would have to move, and feedback that codecs put off is
        settled then, in other bits. Without, they are copies.
        """
        found = [self._prepared(each) for each in gradients]
        ours = [index for index, each in enumerate(variables) if id(each) not in self.local]
        dense = [index for index in ours if found[index] is not None and not _is_sparse(found[index])]
        if ours and not self._has_met:
            self._meet(found, variables, ours, dense)
        if self._session is None and dense:
            self._session = self._make_session(found, variables, dense, name)
        after = self._average_dense(found, variables, ours, dense, lend) if self._session is not None else []
        with tf.control_dependencies(after):
            for index in ours:
                if found[index] is None and index in self._sparse:  # now: other ranks may have some
                    found[index] = _no_slices(variables[index], *self._sparse[index])
                if _is_sparse(found[index]):
                    found[index] = self._average_sparse(found[index], _names(variables)[index])
        if self._scale_local:
            for index in set(range(len(found))) - set(ours):
                found[index] = _times(found[index], 1.0 / world().size)
        if self._op == Sum:
            for index in ours:
                found[index] = _times(found[index], world().size)
        return found

    def _prepared(self, gradient: Any) -> Any:
        return tf.convert_to_tensor(gradient) if _is_sparse(gradient) and self._sparse_as_dense else gradient

    def _meet(self, found: list[Any], variables: Sequence[Any], ours: Sequence[int], dense: Sequence[int]) -> None:
        """Raise the same on all ranks where some would wait for gradients that others do not have; a session compares.

        That is what it does with dense gradients, where every rank has one.
        """
        names, slices = _names(variables), {index: found[index] for index in ours if _is_sparse(found[index])}
        held = world().gather((bool(dense), [names[index] for index in slices]), "comparing the first gradients")
        for rank, (has_dense, sparse) in enumerate(held):
            if has_dense != held[0][0] or sparse != held[0][1]:
                raise PlanError(
                    f"in the first iteration rank 0 has {_in_words(*held[0])}, and rank {rank} has "
                    f"{_in_words(has_dense, sparse)}; give every rank gradients of the same variables then (multiply "
                    "what is unused by 0)"
                )
        self._sparse = {index: (each.indices.dtype, each.dtype) for index, each in slices.items()}
        self._has_met = True

    def _make_session(
        self, gradients: Sequence[Any], variables: Sequence[Any], dense: Sequence[int], name: str
    ) -> Session:
        names = _names(variables)
        given = []
        for index in dense:
            shape = gradients[index].shape if gradients[index].shape.is_fully_defined() else variables[index].shape
            given.append(Gradient(names[index], tuple(shape), tf.as_dtype(gradients[index].dtype).name))
        session = Session(world(), given, framework="tensorflow", model=name or "model", **self._options)
        self._numbers = {index: number for number, index in enumerate(dense)}
        with tf.init_scope():
            self._changing = tf.Variable(0, trainable=False)
        _sessions.append(weakref.ref(session))
        if self._loaded is not None:
            session.load_state_dict(self._loaded)
            self._loaded = None
        return session

    def _average_dense(
        self, found: list[Any], variables: Sequence[Any], ours: Sequence[int], dense: Sequence[int], lend: bool
    ) -> list[Any]:
        """Replace dense gradients by their averages, and return something that is there once they are."""
        session = self.session
        for index in ours:
            known = "dense" if index in self._numbers else "slices" if index in self._sparse else "none"
            kind = "none" if found[index] is None else "slices" if _is_sparse(found[index]) else "dense"
            if kind not in ("none", known):  # perhaps on this rank alone
                session.refuse(
                    f"the gradient of {_names(variables)[index]!r} is {kind} now, and was {known} in the first "
                    "iteration; give it the same kind in every iteration (multiply what is unused by 0), or leave the "
                    "variable out"
                )
        tokens = [self._put(index, found[index], session) for index in dense]
        for index in sorted(self._numbers.keys() - set(dense)):  # None now: other ranks may have one
            tokens.append(self._put(index, tf.zeros(session.gradients[self._numbers[index]].shape), session))
        averages = self._wait(session, tokens, lend)
        for index in ours:
            if index in self._numbers and not _is_sparse(found[index]):
                average = averages[self._numbers[index]]
                average.set_shape(session.gradients[self._numbers[index]].shape)
                found[index] = average
        return averages[:1]

    def _put(self, index: int, gradient: Any, session: Session) -> Any:
        number = self._numbers[index]
        dtype = session.gradients[number].dtype

        def put(values: Array, _: Array) -> Any:
            if session.is_lent(number):
                _let_go()
            session.put(number, np.asarray(values), stays=True)
            return np.int32(0)

        return call_python(put, [tf.cast(gradient, dtype), self._changing], [tf.int32], stateful=False)[0]

    def _wait(self, session: Session, tokens: Sequence[Any], lend: bool) -> list[Any]:
        def wait(_: Array) -> list[Array]:
            return session.wait(lend=lend, copy=not lend)

        return call_python(wait, [tf.add_n(tokens)], [tf.as_dtype(each.dtype) for each in session.gradients])

    def _average_sparse(self, slices: Any, name: str) -> Any:
        """Return all ranks' slices behind one another, divided by the ranks: their sum is the average."""
        shape, session = slices.dense_shape, self._session

        def gather(indices: Array, rows: Array, numel: Array) -> tuple[Array, Array]:
            if session is not None:
                return session.gather_sparse(name, indices, rows, int(numel))
            return world().all_gather(indices), world().all_gather(rows) / np.asarray(world().size, rows.dtype)

        numel = tf.size(slices.values) if shape is None else tf.reduce_prod(shape)
        indices, rows = call_python(
            gather, [slices.indices, slices.values, numel], [slices.indices.dtype, slices.dtype]
        )
        indices.set_shape([None])
        rows.set_shape([None, *slices.values.shape[1:]])
        return tf.IndexedSlices(rows, indices, shape)


def _let_go() -> None:
    """Have TensorFlow give up arrays whose tensors are gone.

    It keeps those of the last iteration in a list until some call holds Python's lock: after a call of Python in a
    graph, and where an eager tensor goes. Without this the first bucket would find its averages in use, and move.
    """
    tf.constant(0)


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _no_slices(variable: Any, indices: Any, rows: Any) -> tf.IndexedSlices:
    shape = list(variable.shape)
    return tf.IndexedSlices(tf.zeros([0, *shape[1:]], rows), tf.zeros([0], indices), tf.constant(shape, tf.int64))


def _times(gradient: Any, factor: float) -> Any:
    """Return a gradient multiplied, of whatever kind it is."""
    if gradient is None:
        return None
    if _is_sparse(gradient):
        return tf.IndexedSlices(_times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def _in_words(has_dense: bool, sparse: Sequence[str]) -> str:
    """Say what kinds of gradients a rank has, for an error.

    >>> _in_words(True, ["table"])
    "dense gradients and slices of ['table']"
    """
    words = ["dense gradients"] * has_dense + [f"slices of {list(sparse)}"] * bool(sparse)
    return " and ".join(words) or "no gradients"


def call_python(function: Any, given: Sequence[Any], dtypes: Sequence[Any], stateful: bool = True) -> list[Any]:
    """Return what a function of arrays makes of tensors, in a graph or not; AutoGraph leaves the function as it is."""
    if tf.executing_eagerly():
        results = function(*map(_array, map(tf.convert_to_tensor, given)))
        results = results if isinstance(results, list | tuple) else [results]
        return [tf.convert_to_tensor(each, dtype) for each, dtype in zip(results, dtypes, strict=True)]
    found = tf.numpy_function(plain(function), list(given), list(dtypes), stateful=stateful)
    return list(found) if isinstance(found, list | tuple) else [found]


def _array(tensor: Any) -> Array:
    """Return a tensor's memory; a bfloat16 without dimensions is no array to numpy."""
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())


def _names(variables: Sequence[Any]) -> list[str]:
    """Return a name for each variable, the same on all ranks whatever else a rank has made.

    Keras numbers layers through the whole process: here they are numbered as they come.

    >>> _names([type("", (), {"path": path}) for path in ("dense_7/kernel", "dense_9/kernel", "dense_9/bias")])
    ['dense/kernel', 'dense_1/kernel', 'dense_1/bias']
    """
    numbered: dict[str, dict[str, int]] = {}
    names: list[str] = []
    for index, variable in enumerate(variables):
        path = str(getattr(variable, "path", None) or getattr(variable, "name", None) or f"source {index}")
        name = "/".join(_renumbered(part, numbered) for part in path.removesuffix(":0").split("/"))
        names.append(name if name not in names else f"{name}#{index}")
    return names


def _renumbered(part: str, numbered: dict[str, dict[str, int]]) -> str:
    match = _NUMBER.match(part)
    base = match[1] if match is not None else part
    known = numbered.setdefault(base, {})
    number = known.setdefault(part, len(known))
    return f"{base}_{number}" if number else base
