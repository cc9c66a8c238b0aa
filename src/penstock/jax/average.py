"""Averages gradients over all ranks inside compiled JAX programs: an optax transformation, and marks on layers.

    average = average_gradients(codec="onebit")
    optimizer = optax.chain(average, optax.adam(1e-3))

    @jax.jit
    def step(parameters, state, batch):
        def loss_of(parameters):
            return loss(watch(parameters, state), batch)  # buckets are sent while the backward pass goes on
        gradients = jax.grad(loss_of)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

**What is owed is a value of the state.** What a codec did not send (the residual) goes into a step with the optimizer's
state and comes out of it with the next one, as all else in JAX does: so it is in every checkpoint, a step that is
undone undoes it too, and donated buffers, another `jit` or another process change nothing. The exchange has memory of
its own, which a codec works in. It holds what some state holds, and that state's `token` says which: a number that no
other state has. A step whose state has that token (each step but the first after a restore) reads no residual; any
other state's is copied into the memory first. So a step copies residuals once, out of the memory, and never trusts
memory that is of another moment. (After such a copy the last bit of an average may differ from what an uninterrupted
run has, as in PyTorch: a codec that puts off subtracting what it sent sums in another order. Ranks stay equal.)
"""

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from threading import Lock
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves, tree_unflatten
from numpy.typing import NDArray

from penstock.adaptor.buckets import Gradient
from penstock.adaptor.session import Session
from penstock.adaptor.world import World
from penstock.errors import PlanError
from penstock.exchange.compression import refuse_factors
from penstock.exchange.state import OWED
from penstock.jax.host_calls import HostCall, Views, copies_nothing

try:
    from optax import GradientTransformation
except ImportError:  # a step may as well call `init` and `update` by itself

    class GradientTransformation(NamedTuple):  # type: ignore[no-redef]
        """The pair of functions that optax calls a transformation, where optax is not installed."""

        init: Any
        update: Any


Tree = Any  # a pytree
Bring = Callable[[Sequence[int], Views, Views], None]  # of some parameters, by their numbers: arguments and results
_TOKEN = jax.ShapeDtypeStruct((2,), np.uint32)
_DONE = jax.ShapeDtypeStruct((), np.uint32)
_UNKNOWN = np.full(2, 0xFFFFFFFF, np.uint32)  # token of a state that no memory holds
_PORTION_NBYTES = 8 * 1024 * 1024  # of gradients that one call takes or gives at the end of a step


class AverageState(NamedTuple):
    """What this rank keeps from one step to the next; every rank has its own."""

    token: Any  # uint32[2]: which moment of which process this is; no two have the same
    owner: Any  # int32[2]: rank and number of ranks
    iterations: Any  # int32: that compressed something; warm-up counts them
    residual: Any  # float32, as the parameters are: what is still owed; () where nothing ever is
    velocity: Any  # the same of momentum that the exchange corrects


class GradientAverage(GradientTransformation):  # type: ignore[misc]  # optax has no types where it is not installed
    """What `average_gradients` returns: a transformation of optax, and what is to be known about it."""

    _averager: "_Averager"

    def __new__(cls, world: World, options: dict[str, Any]) -> "GradientAverage":
        """Make the transformation; ranks are compared by `init`, which knows the parameters."""
        averager = _Averager(world, options)
        made: GradientAverage = super().__new__(cls, averager.init, averager.update)
        made._averager = averager
        return made

    def watch(self, parameters: Tree, state: Tree = None) -> Tree:
        """Return the same parameters; their gradients are sent layer by layer while the backward pass goes on.

        `state` is the optimizer's, of which this transformation's is a part; what is owed is read from it. It may be
        left out where nothing ever is: without a codec and without momentum.
        """
        return self._averager.watch(parameters, state)

    @property
    def session(self) -> Session:
        """What averages: it has `explain`, `bytes_sent`, `measured_timeline` and more."""
        return self._averager.session

    def close(self) -> None:
        """End it, on all ranks together; programs that were compiled with it fail from then on."""
        made[:] = [each for each in made if each is not self]
        self._averager.close()


made: list[GradientAverage] = []  # by `average_gradients`, and not closed; the last one last


class _Averager:
    """Both sides of one transformation: what is traced, and what the traced program calls on the host."""

    def __init__(self, world: World, options: dict[str, Any]) -> None:
        self._world, self._options = world, options
        self._session: Session | None = None  # once the parameters are known
        self._tree: Any = None  # structure of the parameters
        self._gradients: list[Gradient] = []
        self._layers: list[_Layer] = []
        self._portions: list[_Portion] = []
        self._averages: list[NDArray[Any]] = []  # of the last step, in the buckets' memory
        calls = self._on_open, self._on_question, self._on_load, self._on_wait
        self._open, self._ask, self._load, self._wait = map(HostCall, calls)
        self._lock = Lock()  # of the memory: calls come from several threads
        self._process = np.frombuffer(os.urandom(4), np.uint32)[0] | np.uint32(1)
        self._steps = 0
        self._keeps: tuple[str, ...] = ()  # kinds of what is kept from one step to the next
        self._token = np.zeros(2, np.uint32)  # of the state that the exchange's memory holds
        self._sent: dict[int, bytes] = {}  # by parameter: an element or two of what the backward pass has brought
        self._is_watched = False  # the backward pass of this step has begun to bring gradients
        self._was_refused = False  # what this step has brought: the next one begins anew

    @property
    def session(self) -> Session:
        if self._session is None:
            raise PlanError("nothing is known of the parameters yet; call init(parameters) of the optimizer first")
        return self._session

    def close(self) -> None:
        layers = [each.call for each in self._layers]
        portions = [call for each in self._portions for call in (each.take, each.give)]
        for call in (self._open, self._ask, self._load, self._wait, *layers, *portions):
            call.close()
        if self._session is not None:
            self._session.close()

    # What is traced

    def init(self, parameters: Tree) -> AverageState:
        """Return the state before the first step: nothing is owed."""
        self._know(parameters)
        zeros = [jnp.zeros(each.shape, jnp.float32) for each in self._gradients]
        kept = {kind: tree_unflatten(self._tree, zeros) if kind in self._keeps else () for kind in OWED}
        owner = jnp.array([self._world.rank, self._world.size], jnp.int32)
        return AverageState(jnp.zeros(2, jnp.uint32), owner, jnp.int32(0), **kept)

    def update(self, updates: Tree, state: AverageState, parameters: Tree = None) -> tuple[Tree, AverageState]:
        """Return the average of the gradients `updates` over all ranks, and the next state.

        Gradients are taken, and averages given, some of them at a time. XLA maps the memory of a program anew for each
        execution unless it is small: with all gradients in it at once, their new pages took more time than the exchange
        of 12M parameters by onebit. So each portion's gradients are free after a call, and the optimizer applies its
        averages before the next ones are given. What is owed takes the memory of what was, if the state is donated.
        """
        del parameters
        leaves = self._leaves(updates, "update")
        kept, shape = jax.tree.flatten((state.residual, state.velocity))
        came = self._taken(state, leaves)
        before, shared = (kept, {len(came) + at: 2 + at for at in range(len(kept))}) if copies_nothing() else ([], {})
        results = [_DONE, _like(state.iterations), *map(_like, kept)]
        token, iterations, *owed = self._wait(results, [*came, *before], shared)
        averages = list(leaves)
        for portion in self._portions:
            results = [_TOKEN, *(_like(leaves[index]) for index in portion.indices)]
            token, *given = portion.give(results, [token])
            for index, average in zip(portion.indices, given, strict=True):
                averages[index] = average
        residual, velocity = tree_unflatten(shape, owed)
        owner = jnp.array([self._world.rank, self._world.size], jnp.int32)
        return tree_unflatten(self._tree, averages), AverageState(token, owner, iterations, residual, velocity)

    def watch(self, parameters: Tree, state: Tree) -> Tree:
        """Return the parameters with marks on their layers."""
        self._know(parameters)
        leaves = self._leaves(parameters, "watch")
        mine = [each for each in tree_leaves(state, is_leaf=_is_state) if _is_state(each)]
        if len(mine) != 1 and (state is not None or self._keeps):
            raise PlanError(
                f"watch() with a state that has {len(mine)} states of average_gradients; wanted watch(parameters, "
                "state) with the optimizer's state, which has one: what is owed is read from it"
            )
        leaves, begun = self._opened(leaves, mine[0] if mine else None)
        for layer in self._layers:
            marked = layer.mark([leaves[index] for index in layer.indices], begun)
            for index, leaf in zip(layer.indices, marked, strict=True):
                leaves[index] = leaf
        return tree_unflatten(self._tree, leaves)

    def _opened(self, leaves: list[Any], state: AverageState | None) -> tuple[list[Any], Any]:
        """Return the leaves, and what the layers' calls wait for; a forward pass alone sends and calls nothing."""

        def forward(leaves: list[Any], state: AverageState | None) -> tuple[tuple[list[Any], Any], None]:
            ended = [leaf.reshape(-1)[:1] for leaf in leaves] if state is None else [state.token]  # the step before
            (opened,) = self._open([_DONE], ended)
            return (leaves, opened if state is None else self._begun(state, opened)), None

        marked = jax.custom_vjp(lambda leaves, state: (leaves, jnp.uint32(0)))
        marked.defvjp(forward, lambda _, gradients: (gradients[0], None))
        found: tuple[list[Any], Any] = marked(leaves, state)
        return found

    def _begun(self, state: AverageState, after: Any) -> Any:
        """Return a value that exists once the exchange's memory holds what a state says.

        Where arguments are copied, what is owed is handed over only if the memory does not hold it.
        """
        arguments = [after, state.token, state.owner, state.iterations, *jax.tree.leaves(state[3:])]
        if copies_nothing():
            return self._load([_DONE], arguments)[0]
        known, _ = self._ask([_DONE, _DONE], arguments[:2])
        return jax.lax.cond(known > 0, lambda: known, lambda: self._load([_DONE], arguments)[0])

    def _taken(self, state: AverageState, leaves: list[Any]) -> list[Any]:
        """Return values that exist once the gradients of each portion have been sent.

        Where arguments are copied, those that the backward pass has sent are not handed over again.
        """
        mine = [[leaves[index] for index in portion.indices] for portion in self._portions]
        if copies_nothing():
            held = [state.token, state.owner, state.iterations, *jax.tree.leaves(state[3:])]
            return [each.take([_DONE], [*held, *own])[0] for each, own in zip(self._portions, mine, strict=True)]
        heads = [leaf.reshape(-1)[:1] for leaf in leaves]  # exist only after the layers' calls
        begun = self._begun(state, heads[0])
        _, watched = self._ask([_DONE, _DONE], [begun, state.token, *heads])

        def taken(portion: _Portion, gradients: list[Any]) -> Any:
            return jax.lax.cond(watched > 0, lambda: watched, lambda: portion.take([_DONE], [watched, *gradients])[0])

        return [taken(each, own) for each, own in zip(self._portions, mine, strict=True)]

    def _know(self, parameters: Tree) -> None:
        """Take note of the parameters, once; all ranks together compare theirs."""
        if self._session is not None:
            return
        named, self._tree = tree_flatten_with_path(parameters)
        self._gradients = [
            Gradient(keystr(path, simple=True, separator="/"), leaf.shape, leaf.dtype.name) for path, leaf in named
        ]
        parents = [path[:-1] for path, _ in named]
        groups = [list(group) for _, group in groupby(range(len(named)), key=parents.__getitem__)]
        self._layers = [_Layer(tuple(indices), self._on_layer) for indices in groups]
        self._portions = [_Portion(indices, self._on_take, self._on_give) for indices in _portions(self._gradients)]
        self._session = Session(self._world, self._gradients, framework="jax", **self._options)
        scheme, plan = self._session.memory.compression, self._session.settings.plan
        refuse_factors(scheme, plan, "JAX")
        compresses = scheme.codec is not None or (plan is not None and any(each.codec for each in plan.buckets))
        self._keeps = ("residual",) * compresses + ("velocity",) * (scheme.momentum.factor > 0)

    def _leaves(self, tree: Tree, what: str) -> list[Any]:
        """Return the leaves of what must look like the parameters."""
        leaves: list[Any]
        leaves, found = jax.tree.flatten(tree)
        if self._tree is None:
            raise PlanError(f"{what}() before init(parameters) of the optimizer; call that first")
        if found != self._tree:
            raise PlanError(
                f"{what}() with a tree of {len(leaves)} arrays, and init() had another of {len(self._gradients)}: "
                f"{found}; wanted {self._tree}. One average_gradients() is for one set of parameters"
            )
        for leaf, known in zip(leaves, self._gradients, strict=True):
            if (leaf.shape, leaf.dtype.name) != (known.shape, known.dtype):
                raise PlanError(
                    f"{what}(): {known.name!r} is {leaf.shape} of {leaf.dtype.name}, and was {known.shape} of "
                    f"{known.dtype} in init(); wanted the same"
                )
        return leaves

    # What the program calls, on threads of XLA's. No jax.numpy here: it would wait for the program that waits for it.

    def _on_open(self, arguments: Views, results: Views) -> None:
        """A forward pass begins whose backward pass will bring gradients."""
        with self._lock:
            if self._is_watched:
                self._drop()
        self.session.begin()
        self._is_watched = True
        results[0][...] = 1

    def _on_question(self, arguments: Views, results: Views) -> None:
        """Say whether the memory holds what the state with this token says, or did when this step began.

        Also, whether the backward pass has brought all gradients.
        """
        with self._lock:
            if self._was_refused:
                self._drop()
            results[0][...] = (arguments[1] == self._token).all()
            results[1][...] = len(self._sent) == len(self._gradients)

    def _on_load(self, arguments: Views, results: Views) -> None:
        """Have the exchange's memory hold what a state says."""
        self._hold_state(arguments[1:])
        results[0][...] = 1

    def _hold_state(self, state: Views) -> None:
        token, owner, iterations, *kept = state
        with self._lock:
            if self._was_refused:
                self._drop()
            if not (token == self._token).all():
                self._hold(token, owner, iterations, kept)

    def _on_layer(self, indices: Sequence[int], arguments: Views, results: Views) -> None:
        """The backward pass has the gradients of a layer; those among the results are in the arguments' memory."""
        for index, values in zip(indices, arguments[1:], strict=True):
            if index in self._sent:
                self._was_refused = True
                raise PlanError(
                    f"the gradient of {self._gradients[index].name!r} came twice in one step; leave watch() out where "
                    "gradients of several backward passes are added up"
                )
            self._sent[index] = _sample(values)
            self.session.put(index, values)
        results[0][...] = 1

    def _on_take(self, indices: Sequence[int], arguments: Views, results: Views) -> None:
        """Some gradients are there, behind the state where it may be read here: send those which were not yet sent."""
        count = len(arguments) - len(indices)
        if count > 1:
            self._hold_state(arguments[:count])
        for index, each in zip(indices, arguments[count:], strict=True):
            self._check_or_put(index, each)
        results[0][...] = 1

    def _on_wait(self, arguments: Views, results: Views) -> None:
        """All gradients are sent: wait for their averages, and write what is owed now."""
        self._token = self._new_token()  # of no state: this step may fail
        try:
            self._averages = self.session.wait()
        finally:
            self._is_watched, self._sent = False, {}
        self.session.memory.undo()
        self._write_kept(results[2:])
        results[0][...], results[1][...] = 1, self.session.memory.iterations

    def _on_give(self, indices: Sequence[int], arguments: Views, results: Views) -> None:
        """Write some averages; with the last of them, the memory holds what the state that comes of this step does."""
        for index, written in zip(indices, results[1:], strict=True):
            written[...] = self._averages[index].reshape(written.shape)
        self._token = results[0][...] = self._new_token()

    def _new_token(self) -> NDArray[np.uint32]:
        self._steps += 1
        return np.array([self._process, self._steps & 0xFFFFFFFF], np.uint32)

    def _check_or_put(self, index: int, values: NDArray[Any]) -> None:
        """Send a gradient that the backward pass has not brought; one that it has must be the same here."""
        if (sent := self._sent.get(index)) is None:
            self.session.put(index, values)
        elif sent != _sample(values):
            self._was_refused = True
            raise PlanError(
                f"the gradient of {self._gradients[index].name!r} that update() was given is not the one that the "
                "backward pass has sent; make average_gradients() the first of the chain, or leave watch() out"
            )

    def _drop(self) -> None:
        """Wait for what a step sent whose averages were not asked for; what it left in memory is of no state."""
        if 0 < len(self._sent) < len(self._gradients) and not self._was_refused:
            self._was_refused = True
            raise PlanError(
                f"a backward pass has brought {len(self._sent)} of {len(self._gradients)} gradients, and another one "
                "began; wanted watch() of the parameters that gradients are taken of, and update() after each pass"
            )
        self.session.abandon()
        self._sent, self._token, self._was_refused = {}, self._new_token(), False

    def _hold(self, token: Any, owner: Any, iterations: Any, kept: Views) -> None:
        """Copy what a state says into the exchange's memory."""
        if self._sent and self._keeps:
            raise PlanError("update() with another state than watch() of the same step; give both the same")
        memory, mine = self.session.memory, (self._world.rank, self._world.size)
        if tuple(owner) != mine:
            warnings.warn(
                f"a state of rank {owner[0]} of {owner[1]} on rank {mine[0]} of {mine[1]}: what that one owed is left "
                "out here. Save and load the state of every rank; for another number of ranks, see redistribute()",
                stacklevel=2,
            )
            kept = [np.zeros_like(each) for each in kept]
        for kind, values in self._by_kind(kept):
            memory.stores[kind].load({each.name: one for each, one in zip(self._gradients, values, strict=True)})
            memory.compresses = True
        if self._keeps:
            self.session.recover()
        memory.iterations = int(iterations)
        self._token = token.copy()

    def _by_kind(self, kept: Views) -> list[tuple[str, Views]]:
        """Return the arrays of each kind that is kept."""
        count = len(self._gradients)
        return [(kind, kept[at * count : (at + 1) * count]) for at, kind in enumerate(self._keeps)]

    def _write_kept(self, kept: Views) -> None:
        """Write what is owed after a step."""
        stores = self.session.memory.stores
        for kind, rooms in self._by_kind(kept):
            stores[kind].copy_to(
                {each.name: room.reshape(-1) for each, room in zip(self._gradients, rooms, strict=True)}
            )


class _Layer:
    """Parameters whose gradients are taken from the backward pass together, as soon as all are there."""

    def __init__(self, indices: tuple[int, ...], bring: Bring) -> None:
        self.indices, self.call = indices, HostCall(partial(bring, indices))
        self.mark = jax.custom_vjp(lambda leaves, begun: leaves)
        self.mark.defvjp(lambda leaves, begun: (leaves, begun), self._backward)

    def _backward(self, begun: Any, gradients: list[Any]) -> tuple[list[Any], None]:
        if not copies_nothing():
            (started,) = self.call([_DONE], [begun, *gradients])
            return [_after(started, each) for each in gradients], None
        results, shared = [_DONE, *map(_like, gradients)], {1 + index: 1 + index for index in range(len(gradients))}
        return self.call(results, [begun, *gradients], shared)[1:], None  # the same memory: they come after the call


class _Portion:
    """Parameters whose gradients are taken, and whose averages are given, by one call at the end of a step."""

    def __init__(self, indices: tuple[int, ...], take: Bring, give: Bring) -> None:
        self.indices = indices
        self.take, self.give = HostCall(partial(take, indices)), HostCall(partial(give, indices))


def _portions(gradients: Sequence[Gradient]) -> list[tuple[int, ...]]:
    """Return the numbers of gradients, those beside each other together until they have a moderate size."""
    portions, nbytes = list[list[int]](), _PORTION_NBYTES
    for index, each in enumerate(gradients):
        if nbytes >= _PORTION_NBYTES:
            portions.append([])
            nbytes = 0
        portions[-1].append(index)
        nbytes += each.nbytes
    return [tuple(each) for each in portions]


def _after(started: Any, gradient: Any) -> Any:
    """Return the gradient as a value that exists only after `started` does: XLA keeps no other order.

    One element is written anew, with what it was: XLA does that in place.
    """
    if not gradient.size:
        return gradient
    first = gradient[(slice(0, 1),) * gradient.ndim]
    return jax.lax.dynamic_update_slice(gradient, jnp.where(started > 0, first, jnp.nan), (0,) * gradient.ndim)


def _sample(values: NDArray[Any]) -> bytes:
    """Return some elements, by which another array of this shape would be told apart."""
    flat = values.reshape(-1)
    return flat[:: max(1, flat.size // 8)].tobytes()


def redistribute_states(states: Sequence[Tree], rank: int, size: int) -> Tree:
    """Return the optimizer's state of a rank, given those of all ranks that there were.

    Old rank r's residual belongs to new rank r mod `size`: new ranks start with nothing owed.
    """
    mine, inherited = states[rank % len(states)], states[rank::size]

    def dealt(first: Any, *others: Any) -> Any:
        if not _is_state(first):
            return first
        zeros = jax.tree.map(jnp.zeros_like, first[3:])
        residual, velocity = jax.tree.map(lambda *each: sum(each), zeros, *(other[3:] for other in others))
        owner = jnp.array([rank, size], jnp.int32)
        return AverageState(jnp.asarray(_UNKNOWN), owner, first.iterations, residual, velocity)

    return jax.tree.map(dealt, mine, *inherited, is_leaf=_is_state)


def _is_state(tree: Tree) -> bool:
    return isinstance(tree, AverageState)


def _like(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
