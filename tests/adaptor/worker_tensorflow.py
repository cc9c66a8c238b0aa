"""What a rank of TensorFlow does: `worker_tensorflow.py CHECK ...`, or all; prints what each found."""

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import penstock.tensorflow as pk
from adaptor.frameworks import CASES, SHAPES, STEPS, digest, gradients, plan_of, report
from penstock.errors import PenstockError

tf.config.threading.set_inter_op_parallelism_threads(2)
tf.config.threading.set_intra_op_parallelism_threads(1)
DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8", "int8", "bfloat16")


def told(call: Callable[[], Any]) -> str:
    """Return the kind and the text of what a call raises, in one line."""
    try:
        call()
    except (PenstockError, tf.errors.OpError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return "nothing was raised"


def mine(shape: tuple[int, ...], dtype: Any = "float32", seed: int = 0, rank: int | None = None) -> np.ndarray:
    """Small whole numbers, so that sums are exact in every type."""
    generator = np.random.default_rng([pk.rank() if rank is None else rank, seed])
    return np.asarray(generator.integers(0, 5, shape)).astype(tf.as_dtype(dtype).as_numpy_dtype)


def of_all(shape: tuple[int, ...], dtype: Any = "float32", seed: int = 0) -> np.ndarray:
    """What `mine` is on every rank."""
    return np.stack([mine(shape, dtype, seed, rank) for rank in range(pk.size())])


def in_both_modes(function: Callable[..., Any], *given: Any) -> tuple[Any, Any]:
    """Return what a function of tensors returns in eager mode and inside of tf.function."""
    tensors = [tf.constant(each) for each in given]
    return function(*tensors), tf.function(function)(*tensors)


# Equal bits


class Echo:
    """Variables whose gradients are what is given."""

    def __init__(self) -> None:
        self.variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()]

    def loss(self, *given: Any) -> Any:
        return tf.add_n([tf.reduce_sum(each * one) for each, one in zip(self.variables, given, strict=True)])


def averaged(case: str) -> list[str]:
    """Return a digest of what each step averages to, by a tape inside of tf.function."""
    model, plan, found = Echo(), plan_of(case, pk.size()), []

    @tf.function
    def step(*given: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(*given)
        return pk.DistributedGradientTape(tape, plan=plan).gradient(loss, model.variables)

    for number in range(STEPS):
        averages = step(*(tf.constant(each) for each in gradients(pk.rank(), number).values()))
        found.append(digest(dict(zip(SHAPES, (each.numpy() for each in averages), strict=True))))
        if number == 0:
            pk.sessions()[-1].state_dict()
    return found


def bits() -> dict[str, list[str]]:
    return {case: averaged(case) for case in CASES}


# Collectives


def places() -> list[int]:
    tensors = pk.rank_op(), pk.size_op(), pk.local_rank_op(), pk.local_size_op()
    assert [int(each) for each in tensors] == [pk.rank(), pk.size(), pk.local_rank(), pk.local_size()]
    return [pk.rank(), pk.size(), pk.local_rank(), pk.local_size()]


def sums_in_every_type() -> None:
    for dtype in DTYPES:
        for shape in ((), (17,), (3, 4, 5)):
            wanted = of_all(shape, dtype).sum(axis=0, dtype=of_all(shape, dtype).dtype)
            for found in in_both_modes(lambda given: pk.allreduce(given, op=pk.Sum), mine(shape, dtype)):
                assert found.dtype == dtype
                np.testing.assert_array_equal(found.numpy(), wanted)


def averages() -> None:
    wanted = of_all((4, 3)).mean(axis=0)
    for found in in_both_modes(pk.allreduce, mine((4, 3))):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6)
    for found in in_both_modes(lambda given: pk.allreduce(given, average=False), mine((4, 3))):
        np.testing.assert_allclose(found.numpy(), of_all((4, 3)).sum(axis=0), rtol=1e-6)


def other_ops() -> None:
    for op, oracle in ((pk.Min, np.min), (pk.Max, np.max), (pk.Product, np.prod)):
        for dtype in ("float32", "int64"):
            for found in in_both_modes(lambda given, op=op: pk.allreduce(given, op=op), mine((4, 3), dtype)):
                np.testing.assert_array_equal(found.numpy(), oracle(of_all((4, 3), dtype), axis=0))
            grouped = pk.grouped_allreduce([mine((2,), dtype, seed) for seed in (1, 2)], op=op)
            for seed, found in zip((1, 2), grouped, strict=True):
                np.testing.assert_array_equal(found.numpy(), oracle(of_all((2,), dtype, seed), axis=0))


def factors() -> None:
    for found in in_both_modes(lambda given: pk.allreduce(given, op=pk.Sum, prescale_factor=0.5), mine((4,))):
        np.testing.assert_allclose(found.numpy(), 0.5 * of_all((4,)).sum(axis=0))
    for found in in_both_modes(lambda given: pk.allreduce(given, op=pk.Sum, postscale_factor=3.0), mine((4,))):
        np.testing.assert_allclose(found.numpy(), 3.0 * of_all((4,)).sum(axis=0))


def half_on_the_wire() -> None:
    found = pk.allreduce(tf.constant(mine((9,))), compression=pk.Compression.fp16)
    assert found.dtype == tf.float32
    np.testing.assert_allclose(found.numpy(), of_all((9,)).mean(axis=0), rtol=1e-3)
    whole = pk.allreduce(tf.constant(mine((9,), "int32")), op=pk.Sum, compression=pk.Compression.fp16)
    np.testing.assert_array_equal(whole.numpy(), of_all((9,), "int32").sum(axis=0))
    assert "wanted Compression.none or Compression.fp16" in told(
        lambda: pk.allreduce(tf.constant([1.0]), compression=pk.Compression("onebit"))
    )


def groups() -> None:
    kinds = [((3,), "float32"), ((2, 2), "int32"), ((), "float64"), ((5,), "float32")]
    given = [mine(shape, dtype, seed) for seed, (shape, dtype) in enumerate(kinds)]
    for found in in_both_modes(lambda *tensors: pk.grouped_allreduce(tensors, op=pk.Sum), *given):
        for seed, ((shape, dtype), each) in enumerate(zip(kinds, found, strict=True)):
            np.testing.assert_array_equal(each.numpy(), of_all(shape, dtype, seed).sum(axis=0))


def slices(rows: int, seed: int = 0) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(mine((rows, 2), seed=seed)), tf.range(rows), tf.constant([5, 2]))


def sparse_sums() -> None:
    def dense(given: tf.IndexedSlices) -> np.ndarray:
        return tf.convert_to_tensor(given).numpy()

    rows = 1 + pk.rank()
    wanted = sum(
        np.pad(mine((1 + rank, 2), rank=rank), ((0, 4 - rank), (0, 0))).astype(np.float32) for rank in range(pk.size())
    )
    np.testing.assert_allclose(dense(pk.allreduce(slices(rows), op=pk.Sum)), wanted)
    np.testing.assert_allclose(dense(pk.allreduce(slices(rows))), wanted / pk.size(), rtol=1e-6)
    first, second = pk.grouped_allreduce([slices(rows), tf.constant(mine((3,)))])
    np.testing.assert_allclose(dense(first), wanted / pk.size(), rtol=1e-6)
    np.testing.assert_allclose(second.numpy(), of_all((3,)).mean(axis=0), rtol=1e-6)
    inside = tf.function(lambda: tf.convert_to_tensor(pk.allreduce(slices(rows))))()
    np.testing.assert_allclose(inside.numpy(), wanted / pk.size(), rtol=1e-6)
    assert "wanted Average or Sum" in told(lambda: pk.allreduce(slices(rows), op=pk.Max))
    assert "wanted Average or Sum" in told(lambda: pk.grouped_allreduce([slices(rows), tf.ones(3)], op=pk.Max))
    assert "prescale_factor" in told(lambda: pk.allreduce(slices(rows), op=pk.Sum, prescale_factor=0.5))


def gradients_of_collectives() -> None:
    weights = tf.constant(mine((4,), seed=9))

    def gradient(function: Callable[[Any], Any], shape: tuple[int, ...] = (4,)) -> np.ndarray:
        variable = tf.Variable(tf.constant(mine(shape)))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(variable))
        return tape.gradient(loss, variable).numpy()

    of_weights = of_all((4,), seed=9)
    np.testing.assert_allclose(
        gradient(lambda v: weights * pk.allreduce(v, op=pk.Sum)), of_weights.sum(axis=0), rtol=1e-6
    )
    np.testing.assert_allclose(gradient(lambda v: weights * pk.allreduce(v)), of_weights.mean(axis=0), rtol=1e-6)
    first, second = (gradient(lambda v, i=i: weights * pk.grouped_allreduce([v, 2 * v])[i]) for i in (0, 1))
    np.testing.assert_allclose(2 * first, second, rtol=1e-6)
    rows = 1 + pk.rank()
    np.testing.assert_allclose(
        gradient(lambda v: (1.0 + pk.rank()) * pk.allgather(v), (rows, 2)),
        np.full((rows, 2), pk.size() * (pk.size() + 1) / 2),
    )
    found = gradient(lambda v: weights * pk.broadcast(v, 1))
    np.testing.assert_allclose(found, of_weights.sum(axis=0) * (pk.rank() == 1), rtol=1e-6)
    assert "wanted Average or Sum" in told(lambda: gradient(lambda v: pk.allreduce(v, op=pk.Max)))


def rows_of_all() -> None:
    for dtype in (*DTYPES, "bool"):
        rows = [(1 + rank) % 3 for rank in range(pk.size())]
        wanted = np.concatenate([mine((count, 2), dtype, rank=rank) for rank, count in enumerate(rows)])
        for found in in_both_modes(pk.allgather, mine((rows[pk.rank()], 2), dtype)):
            np.testing.assert_array_equal(found.numpy(), wanted)
    for found in pk.grouped_allgather([mine((rows[pk.rank()], 2), "bool")] * 2):
        np.testing.assert_array_equal(found.numpy(), wanted)


def broadcasts() -> None:
    for dtype in (*DTYPES, "bool"):
        for root in range(pk.size()):
            for found in in_both_modes(lambda given, root=root: pk.broadcast(given, root), mine((3, 2), dtype)):
                np.testing.assert_array_equal(found.numpy(), mine((3, 2), dtype, rank=root))


def variables_of_the_root() -> None:
    for root in range(pk.size()):
        kinds = [((3, 2), "float32"), ((), "int64"), ((4,), "bool")]
        made = [tf.Variable(mine(shape, dtype, seed)) for seed, (shape, dtype) in enumerate(kinds)]
        made.append(keras.Variable(mine((2,), seed=7)))
        pk.broadcast_variables(made, root)
        for seed, ((shape, dtype), each) in enumerate(zip(kinds, made, strict=False)):
            np.testing.assert_array_equal(each.numpy(), mine(shape, dtype, seed, root))
        np.testing.assert_array_equal(np.asarray(made[-1]), mine((2,), seed=7, rank=root))
        inside = tf.Variable(mine((3,), seed=root))
        tf.function(lambda each, root=root: pk.broadcast_variables([each], root))(inside)
        np.testing.assert_array_equal(inside.numpy(), mine((3,), seed=root, rank=root))
    pk.broadcast_variables([], 0)


def objects() -> None:
    assert pk.broadcast_object({"rank": pk.rank()}, 1) == {"rank": 1}
    assert pk.allgather_object({"rank": pk.rank()}) == [{"rank": rank} for rank in range(pk.size())]


def mismatches() -> list[str]:
    """What ranks are told that bring different things; the same on all of them."""
    rank = pk.rank()
    return [
        told(lambda: pk.allreduce(tf.ones(3 + rank))),
        told(lambda: pk.allreduce(tf.ones(3, [tf.float32, tf.int32][rank % 2]))),
        told(lambda: pk.grouped_allreduce([tf.ones(3)] * (1 + rank))),
        told(lambda: pk.allgather(tf.ones((2, 3 + rank)))),
        told(lambda: pk.allgather(tf.ones(2, [tf.float32, tf.int32][rank % 2]))),
        told(lambda: pk.broadcast(tf.ones(3 + rank), 0)),
        told(lambda: pk.broadcast(tf.ones(3, [tf.float32, tf.int32][rank % 2]), 0)),
        told(lambda: pk.broadcast(tf.ones(3), rank)),
        told(lambda: pk.broadcast(tf.ones(3), 99)),
        told(lambda: pk.allreduce(tf.ones(3), average=True, op=pk.Sum)),
    ]


# Tapes


def small_model() -> keras.Model:
    keras.utils.set_random_seed(1 + pk.rank())
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])


def batch(step: int, rank: int | None = None, rows: int = 6) -> tuple[Any, Any]:
    generator = np.random.default_rng([100, step, pk.rank() if rank is None else rank])
    return tf.constant(generator.standard_normal((rows, 8)), tf.float32), tf.constant(generator.integers(0, 3, rows))


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def tape_gradients() -> None:
    """The averaged gradients are those of the whole batch, in eager mode and in a graph; structures are kept."""
    model = small_model()
    pk.broadcast_variables(model.weights, 0)
    parts = [batch(0, rank) for rank in range(pk.size())]
    whole = tf.concat([each for each, _ in parts], 0), tf.concat([each for _, each in parts], 0)

    def gradient(inputs: Any, labels: Any, wrap: Callable[[Any], Any], sources: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            loss = LOSS(labels, model(inputs))
        return wrap(tape).gradient(loss, sources)

    variables = model.trainable_variables
    wanted = gradient(*whole, lambda tape: tape, variables)
    ours = pk.DistributedGradientTape
    for found in in_both_modes(lambda inputs, labels: gradient(inputs, labels, ours, variables), *batch(0)):
        for mean, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(mean.numpy(), want.numpy(), rtol=1e-4, atol=1e-6)
    named = gradient(*batch(0), ours, {"a": variables[0], "b": [variables[1]]})
    np.testing.assert_allclose(named["b"][0].numpy(), wanted[1].numpy(), rtol=1e-4, atol=1e-6)
    alone = gradient(*batch(0), ours, variables[3])
    np.testing.assert_allclose(alone.numpy(), wanted[3].numpy(), rtol=1e-4, atol=1e-6)
    with ours(tf.GradientTape()) as tape:
        loss = LOSS(batch(0)[1], model(batch(0)[0]))
    assert isinstance(tape, tf.GradientTape)
    np.testing.assert_allclose(tape.gradient(loss, variables)[2].numpy(), wanted[2].numpy(), rtol=1e-4, atol=1e-6)


def tapes_without_gradients() -> list[str]:
    """None stays None; one that has a gradient on some ranks only is told of on all."""
    used, unused = tf.Variable([1.0, 2.0], name="used"), tf.Variable([3.0], name="unused")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((1.0 + pk.rank()) * used)
    first, second = pk.DistributedGradientTape(tape).gradient(loss, [used, unused])
    np.testing.assert_allclose(first.numpy(), np.full(2, (1 + pk.size()) / 2))
    assert second is None

    def later(both: bool) -> None:  # in another iteration it has one, on this rank alone
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(used) + (tf.reduce_sum(unused) if both else 0.0)
        pk.DistributedGradientTape(tape).gradient(loss, [used, unused])

    def sparse_later() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(used, [0]) if pk.rank() == 1 else used)
        pk.DistributedGradientTape(tape).gradient(loss, [used, unused])

    in_graph = tf.function(later)
    in_graph(False)
    refused = [told(lambda step=step: step(pk.rank() == 1)) for step in (later, in_graph)]  # traced anew there
    refused = [each[each.index("rank 1: ") :].split(" Traceback")[0] for each in (*refused, told(sparse_later))]

    def on_some_ranks() -> None:
        a, b = tf.Variable([1.0], name="a"), tf.Variable([1.0], name="b")
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(a + b) if pk.rank() else tf.reduce_sum(a)
        pk.DistributedGradientTape(tape).gradient(loss, [a, b])

    def on_no_variable() -> None:  # of this rank: it would make no session, and others would wait for it
        a = tf.Variable([1.0], name="a")
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(a) if pk.rank() else tf.constant(1.0)
        pk.DistributedGradientTape(tape).gradient(loss, [a])

    def slices_on_some_ranks() -> None:
        a, table = tf.Variable([1.0], name="a"), tf.Variable([[1.0]], name="table")
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(a) + (tf.reduce_sum(tf.gather(table, [0])) if pk.rank() else 0.0)
        pk.DistributedGradientTape(tape).gradient(loss, [a, table])

    return [*refused, *(told(call) for call in (on_some_ranks, on_no_variable, slices_on_some_ranks))]


def gradients_missing_later() -> list[list[float]]:
    """What is None after the first iteration counts as zeros there, and all ranks apply the same average."""
    weights, share = [], 2 * (pk.size() - 1) / pk.size()
    for missing in ("b", "abt"):  # a dense one, and all of them with the slices
        for graph in (False, True):
            weights.append(_without_some_later(missing, graph))
            wanted = [-share if name in missing else -2.0 for name in "abb"] + [1.0, -share if "t" in missing else -2.0]
            np.testing.assert_allclose(weights[-1], wanted, rtol=1e-6)
    return weights


def _without_some_later(missing: str, graph: bool) -> list[float]:
    shapes = {"a": (1,), "b": (2,), "t": (2, 1)}
    variables = [keras.Variable(np.ones(shape, np.float32), name=name) for name, shape in shapes.items()]
    optimizer = pk.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(variables)

    def step(one: Any, absent: str) -> None:
        given = [
            one * tf.ones(1),
            one * tf.ones(2),
            tf.IndexedSlices(tf.reshape(one, (1, 1)), tf.constant([1]), tf.constant([2, 1])),
        ]
        optimizer.apply([None if name in absent else each for name, each in zip("abt", given, strict=True)], variables)

    taken = tf.function(step) if graph else step
    taken(tf.constant(1.0), "")
    for _ in range(2):  # of one graph, which a call of constants alone would be optimised out of
        taken(tf.constant(1.0), missing if pk.rank() == 0 else "")
    return [float(each) for one in variables for each in np.ravel(one)]


def sparse_gradients() -> None:
    """Slices of all ranks are gathered, or made dense; both are the average."""
    for dense in (False, True):
        table = tf.Variable(tf.ones((6, 2)))
        other = tf.Variable(tf.ones(3))
        rows = [[0, 1 + rank] for rank in range(pk.size())]

        def step(table: Any = table, other: Any = other, dense: bool = dense, rows: Any = rows) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, rows[pk.rank()])) + tf.reduce_sum(other)
            return pk.DistributedGradientTape(tape, sparse_as_dense=dense).gradient(loss, [table, other])

        for function in (step, tf.function(step)):
            found, _ = function()
            assert isinstance(found, tf.IndexedSlices) is not dense
            wanted = np.zeros((6, 2))
            for each in rows:
                wanted[each] += 1.0 / pk.size()
            np.testing.assert_allclose(tf.convert_to_tensor(found).numpy(), wanted, rtol=1e-6)


def half_gradients() -> None:
    for dtype in ("float16", "bfloat16", "float64"):
        variable = tf.Variable(tf.cast(tf.ones(5), dtype))

        def step(variable: Any = variable, dtype: str = dtype) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * tf.cast(1 + pk.rank(), dtype))
            return pk.DistributedGradientTape(tape, strategy="ring").gradient(loss, [variable])

        for function in (step, tf.function(step)):
            (found,) = function()
            assert found.dtype == dtype
            rounding = 2.0**-7 if pk.size() == 3 else 0  # of a third, as bfloat16 has it
            wanted = np.full(5, (1 + pk.size()) / 2, np.float32)
            np.testing.assert_allclose(found.numpy().astype(np.float32), wanted, rtol=0, atol=rounding)


def local_gradients() -> None:
    model = small_model()
    pk.broadcast_variables(model.weights, 0)
    inputs, labels = batch(0)
    with tf.GradientTape(persistent=True) as tape:
        loss = LOSS(labels, model(inputs))
    plain = tape.gradient(loss, model.trainable_variables)
    ours = pk.PartialDistributedGradientTape(tape, local_layers=model.layers[0])
    found = ours.gradient(loss, model.trainable_variables)
    np.testing.assert_allclose(found[0].numpy(), plain[0].numpy() / pk.size(), rtol=1e-6)
    means = pk.allreduce(plain[2])
    np.testing.assert_allclose(found[2].numpy(), means.numpy(), rtol=1e-5, atol=1e-7)


def different_models() -> list[str]:
    def step(model_rows: int, **options: Any) -> None:
        variable = tf.Variable(tf.ones(model_rows), name="weights")
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
        pk.DistributedGradientTape(tape, **options).gradient(loss, [variable])

    rank = pk.rank()
    return [told(lambda: step(3 + rank)), told(lambda: step(3, codec="onebit" if rank else None))]


def not_finite() -> list[str]:
    """NaN on one rank: told on all with a codec, in every rank's average without one."""

    def step(variable: Any, **options: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * (np.nan if pk.rank() == 1 else 1.0))
        return pk.DistributedGradientTape(tape, **options).gradient(loss, [variable])

    dense = tf.Variable(tf.ones(40), name="dense")
    assert np.isnan(step(dense)[0].numpy()).all()
    coded = tf.Variable(tf.ones(40), name="coded")
    options = {"codec": "onebit", "plan": _single_plan("coded", 160, "onebit")}
    inside = tf.Variable(tf.ones(40), name="coded")
    return [told(lambda: step(coded, **options)), told(tf.function(lambda: step(inside, **options)))]


def _single_plan(name: str, nbytes: int, codec: str | None, strategy: str = "ring") -> Any:
    from penstock.plan import Bucket, Plan

    return Plan("model", pk.size(), "single", (Bucket((name,), nbytes, strategy, codec),))


# Optimizers and fit


def fit(codec: str | None = None, steps: int = 12, slower: float = 1.0, **options: Any) -> dict[str, Any]:
    """Train by model.fit; return digests of the weights, the same on all ranks, and what the session says."""
    model = small_model()
    optimizer = pk.DistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9),
        codec=codec,
        network=_network(slower),
        profile_iterations=3,
        measure_seconds=0.5,
        **options,
    )
    model.compile(optimizer=optimizer, loss=LOSS, metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices(batch(0)).repeat(steps).batch(6)
    callbacks = [pk.BroadcastGlobalVariablesCallback(0), pk.MetricAverageCallback()]
    history = model.fit(data, epochs=1, verbose=0, callbacks=callbacks)
    session = optimizer.session
    return {
        "weights": _digest(model),
        "loss": history.history["loss"],
        "plan": None if session.plan is None else session.plan.hash,
        "routes": [each.route for each in session.routes_used()],
        "explained": session.explain().splitlines()[0],
        "names": [each.name for each in session.gradients],
    }


def _network(slower: float = 1.0) -> Any:
    from penstock.network import LinearCost, Network

    dense, coded = LinearCost(1e-4, slower * 1e-9), LinearCost(1e-4, slower * 1e-10)
    lines = {"native": dense, "ring": dense, "ring+onebit": coded}
    return Network(pk.size(), 1e-4, slower * 1e-9, 1e-10, all_reduce=lines)


def _digest(model: keras.Model) -> str:
    import hashlib

    return hashlib.sha256(b"".join(each.tobytes() for each in model.get_weights())).hexdigest()[:16]


def fits() -> dict[str, Any]:
    auto = fit("auto", slower=1e6, candidates=["onebit"], strategy="ring")
    return {"dense": fit(), "onebit": fit("onebit", strategy="ring"), "auto": auto}


def saved_models() -> None:
    """A model is saved and loaded, with and without us; state of the optimizer and what is owed go on."""
    model = small_model()
    optimizer = pk.DistributedOptimizer(keras.optimizers.Adam(0.01), strategy="ring")
    model.compile(optimizer=optimizer, loss=LOSS)
    pk.broadcast_variables(model.weights, 0)
    model.fit(*batch(0), epochs=2, batch_size=6, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        plain = keras.models.load_model(path)
        own = small_model()
        own.compile(optimizer=pk.DistributedOptimizer(Twice(0.1)), loss=LOSS)
        own.save(Path(folder) / "own.keras")
        assert isinstance(pk.load_model(Path(folder) / "own.keras").optimizer, Twice)
        ours = pk.load_model(path, strategy="ring")
    assert type(plain.optimizer) is keras.optimizers.Adam
    assert type(ours.optimizer).__name__ == "Adam"
    assert int(ours.optimizer.iterations) == 2
    for one, other in zip(ours.optimizer.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    for each in (model, ours):
        each.fit(*batch(1), epochs=1, batch_size=6, verbose=0)
    assert _digest(model) == _digest(ours)
    assert len(set(pk.allgather_object(_digest(ours)))) == 1
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.learning_rate == optimizer.learning_rate
    variable = keras.Variable(np.ones(3, np.float32))
    again.apply([tf.constant([1.0, 2.0, 3.0]) * (1 + pk.rank())], [variable])
    assert len({tuple(each) for each in pk.allgather_object(np.asarray(variable).tolist())}) == 1


def states_of_optimizers() -> None:
    """What is owed is saved and loaded, also before the first step."""

    def trained(steps: range, states: Any = None) -> tuple[Any, np.ndarray]:
        variable = keras.Variable(np.ones(64, np.float32), name="weights")
        optimizer = pk.DistributedOptimizer(
            keras.optimizers.SGD(1.0), codec="onebit", plan=_single_plan("weights", 256, "onebit")
        )
        if states is not None:
            optimizer.load_exchange_state_dict(states)
        for step in steps:
            optimizer.apply([tf.constant(mine((64,), seed=step))], [variable])
        return optimizer, np.asarray(variable)

    _, whole = trained(range(4))
    first, half = trained(range(2))
    states = pk.allgather_object(first.exchange_state_dict())
    assert states[0]["memories"]["residual"]["weights"].any()
    second, rest = trained(range(2, 4), states)
    assert second.averager._loaded is None  # states of all ranks, each as large as the model
    np.testing.assert_allclose(whole, half + rest - 1, rtol=1e-5)


def aggregated_passes() -> None:
    """Every second call applies the sum, or the mean, of two calls' averages; in a graph too."""
    for mean in (False, True):
        for graph in (False, True):
            seen = _passes(mean, graph)
            sums = [of_all((3,), seed=number).mean(axis=0) for number in range(4)]
            np.testing.assert_array_equal(seen[0], np.zeros(3))
            np.testing.assert_allclose(seen[1], -(sums[0] + sums[1]) / (1 + mean), rtol=1e-6)
            np.testing.assert_allclose(seen[3], -sum(sums) / (1 + mean), rtol=1e-6)


def _passes(mean: bool, graph: bool) -> list[np.ndarray]:
    variable = keras.Variable(np.zeros(3, np.float32))
    optimizer = pk.DistributedOptimizer(
        keras.optimizers.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=mean
    )

    def step(values: Any) -> None:
        optimizer.apply([values], [variable])

    function, seen = tf.function(step) if graph else step, []
    for number in range(4):
        function(tf.constant(mine((3,), seed=number)))
        seen.append(np.asarray(variable).copy())
    return seen


@keras.saving.register_keras_serializable("tests")
class Twice(keras.optimizers.SGD):
    """An optimizer of a user's, whose steps are twice as long."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(2 * gradient, variable, learning_rate)


def optimizers_of_users() -> None:
    """Schedules, optimizers of a user's, local variables and slices: each step is what numpy says."""
    size, rank = pk.size(), pk.rank()
    schedule = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
    for make, factors in ((keras.optimizers.SGD, (1.0, 0.5)), (Twice, (2.0, 1.0))):
        optimizer, variable = pk.DistributedOptimizer(make(schedule)), keras.Variable(np.zeros(3, np.float32))
        for step in range(2):
            optimizer.apply([tf.constant(mine((3,), seed=step))], [variable])
        wanted = -sum(factor * of_all((3,), seed=step).mean(axis=0) for step, factor in enumerate(factors))
        np.testing.assert_allclose(np.asarray(variable), wanted, rtol=1e-6)
    own, shared = (keras.Variable(np.zeros(2, np.float32)) for _ in range(2))
    optimizer = pk.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.register_local_var(own)
    optimizer.apply([tf.fill([2], 1.0 + rank), tf.fill([2], 1.0 + rank)], [own, shared])
    np.testing.assert_allclose(np.asarray(own), np.full(2, -(1.0 + rank) / size))
    np.testing.assert_allclose(np.asarray(shared), np.full(2, -(1.0 + size) / 2))
    for passes, dense in ((1, False), (1, True), (2, True)):
        table = keras.Variable(np.zeros((6, 2), np.float32))
        optimizer = pk.DistributedOptimizer(
            keras.optimizers.SGD(1.0), sparse_as_dense=dense, backward_passes_per_step=passes
        )
        for _ in range(passes):
            rows = tf.IndexedSlices(tf.ones((2, 2)), tf.constant([0, 1 + rank]), tf.constant([6, 2]))
            optimizer.apply([rows], [table])
        wanted = np.zeros((6, 2))
        for each in range(size):
            wanted[[0, 1 + each]] -= passes / size
        np.testing.assert_allclose(np.asarray(table), wanted, rtol=1e-6)


def scaled_losses() -> list[str]:
    """Wrapped around us, Keras's loss scaling is refused; inside, steps are skipped on all ranks alike."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = small_model()
        model.compile(optimizer=pk.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss=LOSS)
        outside = told(lambda: model.fit(*batch(0), verbose=0))
        model = small_model()
        scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
        model.compile(optimizer=pk.DistributedOptimizer(scaling, strategy="ring"), loss=LOSS)
        pk.broadcast_variables(model.weights, 0)
        before = _digest(model)
        inputs, labels = batch(0)
        bad = inputs * (1e30 if pk.rank() == 1 else 1.0)
        model.fit(bad, labels, verbose=0, batch_size=6)
        assert _digest(model) == before  # no rank took the step
        assert float(scaling.dynamic_scale) == 4.0
        model.fit(inputs, labels, verbose=0, batch_size=6)
        return [outside, _digest(model)]
    finally:
        keras.mixed_precision.set_global_policy("float32")


def bad_arguments() -> list[str]:
    optimizer = pk.DistributedOptimizer(keras.optimizers.SGD())
    return [
        told(lambda: pk.DistributedOptimizer("sgd")),
        told(lambda: pk.DistributedOptimizer(optimizer)),
        told(lambda: pk.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0)),
        told(lambda: optimizer.exchange_state_dict()),
    ]


def jit_is_refused() -> str:
    model = small_model()
    model.compile(optimizer=pk.DistributedOptimizer(keras.optimizers.SGD()), loss=LOSS, jit_compile=True)
    return told(lambda: model.fit(*batch(0), verbose=0, callbacks=[pk.BroadcastGlobalVariablesCallback()]))


def horovods_arguments() -> list[str]:
    """What Horovod's scripts hand over has its meaning there, or an answer."""
    variable, table = tf.Variable(tf.ones(3)), tf.Variable(tf.ones((4, 2)))

    def step(**options: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * mine((3,))) + tf.reduce_sum(tf.gather(table, [pk.rank()]))
        return pk.DistributedGradientTape(tape, **options).gradient(loss, [variable, table])

    rows = np.pad(np.ones((pk.size(), 2)), ((0, 4 - pk.size()), (0, 0)))
    for run in (step, tf.function(step)):
        sums, slices = run(op=pk.Sum)
        np.testing.assert_allclose(sums.numpy(), of_all((3,)).sum(axis=0), rtol=1e-6)
        np.testing.assert_allclose(tf.convert_to_tensor(slices).numpy(), rows, rtol=1e-6)
        means, _ = run(gradient_predivide_factor=2.0, device_dense="/cpu:0", device_sparse="", num_groups=0)
        np.testing.assert_allclose(means.numpy(), of_all((3,)).mean(axis=0), rtol=1e-6)
    weights = keras.Variable(np.zeros(3, np.float32))
    optimizer = pk.DistributedOptimizer(keras.optimizers.SGD(1.0), op=pk.Sum, compression=pk.Compression.none)
    optimizer.apply([tf.constant(mine((3,)))], [weights])
    np.testing.assert_allclose(np.asarray(weights), -of_all((3,)).sum(axis=0), rtol=1e-6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(groups=[[variable]])
        step(num_groups=2, device_dense="/gpu:0")
    sgd = keras.optimizers.SGD
    return [
        *(str(each.message) for each in caught if "has no effect" in str(each.message)),
        told(lambda: step(op=pk.Max)),
        told(lambda: step(op=pk.Sum, gradient_predivide_factor=2.0)),
        told(lambda: pk.DistributedOptimizer(sgd(), groups=0)),
        told(lambda: pk.DistributedOptimizer(sgd(), process_set="some")),
        told(lambda: pk.allreduce(tf.ones(3), process_set="some")),
        told(lambda: pk.allgather(tf.ones(3), names="x")),
        told(lambda: pk.alltoall),
        told(lambda: pk.nothing_of_the_kind),
    ]


def local_variables_of_callbacks() -> None:
    """Every variable gets the root's value, but those that are named."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile(optimizer=pk.DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse")
    for each in model.weights:
        each.assign(np.full(each.shape, pk.rank(), np.float32))
    first = model.layers[0]
    callback = pk.callbacks.BroadcastGlobalVariablesCallback(pk.size() - 1, local_variables=[first.kernel])
    callback.register_local_var(first.bias)
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=[callback])
    for each in model.weights:
        wanted = pk.rank() if each is first.kernel or each is first.bias else pk.size() - 1
        np.testing.assert_array_equal(np.asarray(each), np.full(each.shape, wanted, np.float32))


def learning_rates() -> None:
    """Rates grow over the first epochs, then follow the schedule; velocities are corrected, as numpy says."""
    size, steps, momentum = pk.size(), 3, 0.9
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(optimizer=keras.optimizers.SGD(1.0, momentum=momentum), loss=lambda _, found: found)  # gradient: 1
    rates: list[float] = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    callbacks = [
        pk.LearningRateWarmupCallback(0.8, warmup_epochs=2),
        pk.LearningRateScheduleCallback(0.8, 0.5, start_epoch=2),
        note,
    ]
    logs = model.fit(np.ones((steps, 1)), np.ones((steps, 1)), batch_size=1, epochs=4, verbose=0, callbacks=callbacks)
    grown = [0.8 / size * (1 + (size - 1) * (batch + 1) / (2 * steps)) for batch in range(2 * steps)]
    wanted = [*grown, *[0.8] * steps, *[0.4] * steps]
    np.testing.assert_allclose(rates, wanted, rtol=1e-6)
    np.testing.assert_allclose(logs.history["lr"], wanted[steps - 1 :: steps], rtol=1e-6)
    weight, velocity, before = 0.0, 0.0, 1.0
    for rate in wanted:
        velocity = momentum * velocity * rate / before - rate
        weight, before = weight + velocity, rate
    np.testing.assert_allclose(np.asarray(model.weights[0]), [[weight]], rtol=1e-5)


def metrics_of_all() -> None:
    logs = {"loss": 1.0 + pk.rank(), "accuracy": 0.5}
    pk.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": (1 + pk.size()) / 2, "accuracy": 0.5}


def sends_during_backward() -> dict[str, bool]:
    """Whether in some iteration a bucket had arrived before the last gradient was computed, and whether buckets stay.

    Each bucket is of one gradient: TensorFlow may be slow to give up the averages of one of them, and not of all.
    """
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(600, activation="relu") for _ in range(6)]
    model = keras.Sequential([keras.Input((600,)), *layers])
    names = [
        f"sequential/dense{f'_{number}' if number else ''}/{kind}" for number in range(6) for kind in ("kernel", "bias")
    ]
    from penstock.plan import Bucket, Plan

    sizes = {name: 4 * (600 * 600 if "kernel" in name else 600) for name in names}
    plan = Plan("m", pk.size(), "wfbp", tuple(Bucket((name,), sizes[name], "ring") for name in reversed(names)))
    optimizer = pk.DistributedOptimizer(keras.optimizers.SGD(0.01), plan=plan)

    @tf.function
    def step(inputs: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(inputs) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    early, places, inputs = [], [], tf.ones((256, 600))  # a tensor that goes between steps would let go of averages
    for _ in range(8):
        step(inputs)
        session = optimizer.session
        timeline = session.measured_timeline()
        early.append(min(span.end_seconds for span in timeline.lane("network")) < timeline.compute_seconds)
        places.append([session.place(index).__array_interface__["data"][0] for index in range(len(names))])
    stays = [any(one == other for one, other in pairwise(each)) for each in zip(*places, strict=True)]
    return {"early": any(early), "stay": all(stays)}


def task(step: int, rank: int, rows: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch of a task that can be learnt: which of three directions a point lies in."""
    generator = np.random.default_rng([7, step, rank])
    directions = np.random.default_rng(0).standard_normal((8, 3))
    inputs = generator.standard_normal((rows, 8)).astype(np.float32)
    return inputs, (inputs @ directions).argmax(axis=1)


STEPS_OF_TRAINING = 200


def _gtopk_plan() -> Any:
    """Return a plan of one bucket for the model of `training`."""
    from penstock.plan import Bucket, Plan

    layers = {"sequential/dense": (8, 64), "sequential/dense_1": (64, 3)}
    names = tuple(f"{layer}/{kind}" for layer in reversed(layers) for kind in ("bias", "kernel"))
    nbytes = 4 * sum(rows * width + width for rows, width in layers.values())
    return Plan("m", pk.size(), "single", (Bucket(names, nbytes, "gtopk_doubling", "sparse(density=0.1)"),))


def training() -> dict[str, Any]:
    """Train for 200 steps by model.fit, dense, by onebit and by gtopk; ranks must be alike to the bit."""
    found = {}
    for codec, options in {
        None: {"network": _network()},
        "onebit": {"network": _network()},
        "gtopk": {"density": 0.1, "plan": _gtopk_plan()},
    }.items():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(3)])
        optimizer = pk.DistributedOptimizer(
            keras.optimizers.SGD(0.1), codec=codec, profile_iterations=3, measure_seconds=0.5, **options
        )
        model.compile(optimizer=optimizer, loss=LOSS)
        batches = [task(step, pk.rank()) for step in range(STEPS_OF_TRAINING)]
        inputs, labels = (np.concatenate(each) for each in zip(*batches, strict=True))
        model.fit(inputs, labels, batch_size=16, shuffle=False, verbose=0)
        together = [np.concatenate(each) for each in zip(*(task(900, rank, 500) for rank in range(2)), strict=True)]
        loss = float(model.evaluate(*together, verbose=0, batch_size=1000))
        found[str(codec)] = {
            "weights": _digest(model),
            "loss": loss,
            "sent": optimizer.session.bytes_sent().sent_nbytes,
        }
    return found


CHECKS = [
    places, sums_in_every_type, averages, other_ops, factors, half_on_the_wire, groups, sparse_sums,
    gradients_of_collectives, rows_of_all, broadcasts, variables_of_the_root, objects, mismatches, tape_gradients,
    tapes_without_gradients, gradients_missing_later, sparse_gradients, half_gradients, local_gradients,
    different_models, not_finite, fits,
    saved_models, states_of_optimizers, aggregated_passes, optimizers_of_users, scaled_losses, bad_arguments,
    jit_is_refused, metrics_of_all, horovods_arguments, local_variables_of_callbacks, learning_rates,
    sends_during_backward, bits, training,
]  # fmt: skip


def main(wanted: list[str]) -> None:
    """Do the checks that are named, or all; print what they return, or what went wrong in them."""
    import traceback

    pk.init()
    found: dict[str, Any] = {}
    for check in CHECKS:
        if wanted and check.__name__ not in wanted:
            continue
        try:
            found[check.__name__] = check()
        except Exception as error:
            found[check.__name__] = {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    report(pk.rank(), **found)
    pk.shutdown()


def dies() -> None:
    """Train by model.fit until the last rank ends in the middle of it; print what the others are told."""
    pk.init()
    model = small_model()

    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3 and pk.rank() == pk.size() - 1:
                os._exit(7)

    model.compile(optimizer=pk.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy="ring"), loss=LOSS)
    inputs, labels = batch(0, rows=60)
    found = told(lambda: model.fit(inputs, labels, batch_size=6, verbose=0, callbacks=[Ends()]))
    report(pk.rank(), told=found)
    os._exit(0)


if __name__ == "__main__":
    dies() if sys.argv[1:] == ["dies"] else main(sys.argv[1:])
