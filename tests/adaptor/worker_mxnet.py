"""What a rank of MXNet does: `worker_mxnet.py CHECK ...`, for `tests/mxnet` (`frameworks.py`)."""

import hashlib
import os
import signal
import sys
import traceback
import warnings
from typing import Any

import numpy as np

import penstock.mxnet as pk  # before mxnet, for which it mends a name of numpy's
from adaptor.frameworks import CASES, SHAPES, STEPS, digest, gradients, plan_of, report
from penstock.network import LinearCost, Network
from penstock.plan import Bucket, Plan

# isort: split
import mxnet as mx
from mxnet import autograd, gluon, nd

STEPS_OF_TRAINING = 200
FEATURES, BATCH = 12, 30
DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8", "int8")
CODECS: dict[str, dict[str, Any]] = {
    "dense": {},
    "onebit": {"codec": "onebit"},
    "gtopk": {"codec": "gtopk", "density": 0.25},
}


def averaged(case: str) -> list[str]:
    """Return a digest of what each step averages to; the gradient of sum(weight * given) is what is given."""
    weights = {name: gluon.Parameter(name, shape=shape, init="zeros") for name, shape in SHAPES.items()}
    for each in weights.values():
        each.initialize()
    trainer = pk.DistributedTrainer(list(weights.values()), "sgd", plan=plan_of(case, pk.size()))
    found = []
    for step in range(STEPS):
        given = {name: nd.array(values) for name, values in gradients(pk.rank(), step).items()}
        with autograd.record():
            loss = sum((weights[name].data() * given[name]).sum() for name in SHAPES)
        loss.backward()
        trainer.allreduce_grads()
        found.append(digest({name: each.grad().asnumpy() for name, each in weights.items()}))
        if step == 0:
            trainer.exchange_state_dict()
        trainer.update(1)
    trainer.close()
    return found


def bits() -> dict[str, list[str]]:
    return {case: averaged(case) for case in CASES}


def learned(contexts: int = 0, **options: Any) -> tuple[list[float], str]:
    """Return losses over all data, and a digest of the weights, after training on this rank's part of it.

    contexts: devices of this process among which MXNet's own kvstore shares all data instead.
    """
    places = [mx.cpu(index) for index in range(contexts)] or [mx.cpu()]
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(16, activation="tanh", in_units=FEATURES), gluon.nn.Dense(1, in_units=16))
    net.initialize(ctx=places)
    generator = np.random.default_rng(0)
    for each in net.collect_params().values():
        each.set_data(nd.array(generator.standard_normal(each.shape) / 3))
    settings = "sgd", {"learning_rate": 0.05}
    if contexts:
        trainer = gluon.Trainer(net.collect_params(), *settings, kvstore="local")
    else:
        pk.broadcast_parameters(net.collect_params())
        trainer = pk.DistributedTrainer(net.collect_params(), *settings, measure_seconds=1.0, **options)
    losses = []
    for _ in range(STEPS_OF_TRAINING):
        x = generator.standard_normal((BATCH, FEATURES)).astype(np.float32)
        y = np.tanh(x[:, :2].sum(1, keepdims=True))
        parts = [(index, contexts) for index in range(contexts)] or [(pk.rank(), pk.size())]
        with autograd.record():
            for place, (index, count) in zip(places, parts, strict=True):
                given, wanted = (nd.array(each[index::count], ctx=place) for each in (x, y))
                ((net(given) - wanted) ** 2).sum().backward()
        trainer.step(BATCH if contexts else len(x[pk.rank() :: pk.size()]))
        given, wanted = (nd.array(each, ctx=places[0]) for each in (x, y))
        losses.append(float(((net(given) - wanted) ** 2).mean().asscalar()))
    weights = b"".join(each.data(places[0]).asnumpy().tobytes() for each in net.collect_params().values())
    return losses, hashlib.sha256(weights).hexdigest()[:16]


def training() -> dict[str, Any]:
    """Return what is learned with and without a codec, and by MXNet's own data parallelism on as many devices."""
    return {"kvstore": learned(pk.size())} | {name: learned(**options) for name, options in CODECS.items()}


# What Horovod has


def mine(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0, rank: int | None = None) -> np.ndarray:
    """Small whole numbers, so that sums are exact in every type."""
    generator = np.random.default_rng([pk.rank() if rank is None else rank, seed])
    return generator.integers(0, 5, shape).astype(dtype)


def of_all(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """What `mine` is on every rank."""
    return np.stack([mine(shape, dtype, seed, rank) for rank in range(pk.size())])


def array(values: np.ndarray) -> Any:
    return nd.array(values, dtype=values.dtype)


def same(found: Any, wanted: np.ndarray) -> None:
    assert isinstance(found, nd.NDArray)
    assert found.dtype == wanted.dtype, (found.dtype, wanted.dtype)
    np.testing.assert_array_equal(found.asnumpy(), wanted)


def sums_in_every_type() -> None:
    for dtype in DTYPES:
        for shape in ((1,), (17,), (3, 4), (3, 4, 5)):
            given = array(mine(shape, dtype))
            wanted = of_all(shape, dtype).sum(axis=0, dtype=dtype)
            same(pk.allreduce(given, op=pk.Sum), wanted)
            same(pk.allreduce(given, average=False, name="sum", priority=-1), wanted)
            same(given, mine(shape, dtype))  # as it was
            same(pk.allreduce(given * 1, op=pk.Sum), wanted)  # of an array that nothing refers to
            assert pk.allreduce_(given, op=pk.Sum) is given
            same(given, wanted)


def averages() -> None:
    wanted = of_all((4, 3)).mean(axis=0, dtype=np.float32)
    np.testing.assert_allclose(pk.allreduce(array(mine((4, 3)))).asnumpy(), wanted, rtol=1e-6)
    whole = of_all((4, 3), "int32").sum(axis=0, dtype="int32") // pk.size()  # as Horovod rounds
    same(pk.allreduce(array(mine((4, 3), "int32"))), whole.astype("int32"))


def other_ops() -> None:
    for op, oracle in ((pk.Min, np.min), (pk.Max, np.max), (pk.Product, np.prod)):
        for dtype in ("float32", "int64"):
            same(pk.allreduce(array(mine((4, 3), dtype)), op=op), oracle(of_all((4, 3), dtype), axis=0).astype(dtype))


def factors() -> None:
    total = of_all((4,)).sum(axis=0)
    same(pk.allreduce(array(mine((4,))), op=pk.Sum, prescale_factor=0.5), 0.5 * total)
    same(pk.allreduce(array(mine((4,))), op=pk.Sum, postscale_factor=3.0), 3.0 * total)


def groups() -> None:
    kinds = [((3,), "float32"), ((2, 2), "int32"), ((5,), "float32")]
    given = [array(mine(shape, dtype, seed)) for seed, (shape, dtype) in enumerate(kinds)]
    sums = [of_all(shape, dtype, seed).sum(axis=0, dtype=dtype) for seed, (shape, dtype) in enumerate(kinds)]
    for found, wanted in zip(pk.grouped_allreduce(given, op=pk.Sum), sums, strict=True):
        same(found, wanted)
    for found, wanted in zip(pk.grouped_allreduce(given), sums, strict=True):
        np.testing.assert_allclose(
            found.asnumpy(), wanted // pk.size() if wanted.dtype == "int32" else wanted / pk.size()
        )
    pk.grouped_allreduce_(given, op=pk.Sum)
    for found, wanted in zip(given, sums, strict=True):
        same(found, wanted)


def rows_of_all() -> None:
    for dtype in DTYPES:
        rows = [1 + rank % 2 for rank in range(pk.size())]
        wanted = np.concatenate([mine((count, 2), dtype, rank=rank) for rank, count in enumerate(rows)])
        given = array(mine((rows[pk.rank()], 2), dtype))
        for found in (pk.allgather(given), *pk.grouped_allgather([given, given])):
            same(found, wanted)


def broadcasts() -> None:
    for dtype in DTYPES:
        for root in range(pk.size()):
            given = array(mine((3, 2), dtype))
            same(pk.broadcast(given, root), mine((3, 2), dtype, rank=root))
            same(given, mine((3, 2), dtype))
            assert pk.broadcast_(given, root, name="b") is given
            same(given, mine((3, 2), dtype, rank=root))


def parameters_of_the_root() -> None:
    """Parameters and arrays, also those whose shapes are known only after the first forward pass."""
    mx.random.seed(pk.rank())
    arrays = {"a": array(mine((3,))), "b": array(mine((2, 2), "int32"))}
    pk.broadcast_parameters(arrays, 1, prefix="arrays")
    same(arrays["a"], mine((3,), rank=1))
    same(arrays["b"], mine((2, 2), "int32", rank=1))
    layer = gluon.nn.Conv2D(4, 2)
    layer.initialize(mx.init.Normal(1.0))
    pk.broadcast_parameters(layer.collect_params(), 1)
    layer(nd.ones((1, 3, 5, 5)))
    weights = layer.weight.data()
    assert np.abs(weights.asnumpy()).max() > 0
    same(weights, pk.broadcast(weights, 1).asnumpy())


def objects() -> None:
    assert pk.broadcast_object({"rank": pk.rank()}, 1) == {"rank": 1}
    assert pk.allgather_object({"rank": pk.rank()}) == [{"rank": rank} for rank in range(pk.size())]


def mismatches() -> list[str]:
    """What ranks are told that bring different things; the same on all of them."""
    rank = pk.rank()
    other = "int32" if rank else "float32"
    return [
        told(lambda: pk.allreduce(nd.ones(3 + rank))),
        told(lambda: pk.allreduce(nd.ones(3, dtype=other))),
        told(lambda: pk.allgather(nd.ones((2, 3 + rank)))),
        told(lambda: pk.allgather(nd.ones(2, dtype=other))),
        told(lambda: pk.broadcast(nd.ones(3 + rank), 0)),
        told(lambda: pk.broadcast(nd.ones(3, dtype=other), 0)),
        told(lambda: pk.broadcast(nd.ones(3), rank)),
    ]


def two_trainers() -> None:
    """Two models, each with a trainer of its own, in one program."""
    nets = [gluon.nn.Dense(width, in_units=4, prefix=f"net{width}_") for width in (2, 3)]
    trainers = []
    for net in nets:
        net.initialize(mx.init.Normal(1.0))
        pk.broadcast_parameters(net.collect_params(), prefix=net.prefix)
        trainers.append(pk.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, prefix=net.prefix))
    before = [net.weight.data().asnumpy() for net in nets]
    for _ in range(3):
        with autograd.record():
            losses = [net(nd.full((1, 4), 1.0 + pk.rank())).sum() for net in nets]
        autograd.backward(losses)
        for trainer in trainers:
            trainer.step(1)
    for net, was in zip(nets, before, strict=True):
        np.testing.assert_allclose(net.weight.data().asnumpy(), was - 1.5 * (1 + pk.size()) / 2, rtol=1e-5)


def models_averaged_now_and_then() -> None:
    """Ranks train alone and average their weights in place."""
    net = dense()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, update_on_kvstore=False)
    for _ in range(2):
        with autograd.record():
            loss = net(nd.full((2, 3), 1.0 + pk.rank())).sum()
        loss.backward()
        trainer.step(2)
    own = pk.allgather_object(net.weight.data().asnumpy())
    pk.allreduce_(net.weight.data())
    np.testing.assert_allclose(net.weight.data().asnumpy(), np.mean(own, axis=0), rtol=1e-6)


def half_on_the_wire() -> None:
    """Compression.fp16 leaves types as they were; averages are those of dense, rounded."""
    net = dense(prefix="half_")
    plan = Plan("model", pk.size(), "exact", (Bucket(tuple(net.collect_params()), 32, "ring", "fp16"),))
    trainer = pk.DistributedTrainer(net.collect_params(), "sgd", compression=pk.Compression.fp16, plan=plan)
    with autograd.record():
        loss = net(nd.full((2, 3), 1.0 + pk.rank())).sum()
    loss.backward()
    trainer.allreduce_grads()
    assert net.weight.grad().dtype == np.float32
    np.testing.assert_allclose(net.weight.grad().asnumpy(), np.full((2, 3), 1.0 + pk.size()), rtol=1e-3)
    assert [each.route for each in trainer.session.routes_used()] == ["ring+fp16"]


def horovods_arguments() -> list[str]:
    parameters = dense().collect_params()
    pk.DistributedTrainer(parameters, "sgd", gradient_predivide_factor=2.0, prefix="p")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pk.DistributedTrainer(parameters, "sgd", num_groups=2)
    return [
        *(str(each.message) for each in caught if "has no effect" in str(each.message)),
        told(lambda: pk.DistributedTrainer(parameters, "sgd", op=pk.Sum)),
        told(lambda: pk.DistributedTrainer(parameters, "sgd", process_set="some")),
        told(lambda: pk.allreduce(nd.ones(2), names="x")),
        told(lambda: pk.DistributedOptimizer),
        told(lambda: pk.reducescatter),
    ]


# What a plan can say


def plans() -> dict[str, Any]:
    """Let "auto" choose on a slow network; return what the trainer says of it."""
    lines = {"ring": LinearCost(1e-4, 1e-3), "ring+onebit": LinearCost(1e-4, 1e-5)}
    network = Network(pk.size(), 1e-4, 1e-3, 1e-10, all_reduce=lines)
    net = gluon.nn.Dense(40, in_units=100, prefix="planned_")
    net.initialize()
    options = {"codec": "auto", "candidates": ["onebit"], "strategy": "ring", "network": network}
    trainer = pk.DistributedTrainer(net.collect_params(), "sgd", profile_iterations=2, **options)
    for _ in range(4):
        with autograd.record():
            loss = net(nd.ones((2, 100))).sum()
        loss.backward()
        trainer.step(2)
    sent = trainer.bytes_sent()
    lanes = sorted({span.lane for span in trainer.measured_timeline().spans})
    return {
        "explained": trainer.explain().splitlines()[0],
        "drawn": "measured" in trainer.explain(picture=True),
        "routes": [each.route for each in trainer.session.routes_used()],
        "saved": 0 < sent.sent_nbytes < sent.dense_nbytes,
        "lanes": lanes,
    }


def dense_nan() -> bool:
    """NaN on one rank reaches all of them, as in any all-reduce."""
    layer = dense(prefix="nan_")
    trainer = pk.DistributedTrainer(layer.collect_params(), "sgd")
    with autograd.record():
        loss = (layer(nd.ones((2, 3))) * (np.nan if pk.rank() == 1 else 1.0)).sum()
    loss.backward()
    trainer.allreduce_grads()
    return bool(np.isnan(layer.weight.grad().asnumpy()).all())


# What goes wrong


def told(call: Any) -> str:
    """Return what a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def dense(**options: Any) -> gluon.nn.Dense:
    layer = gluon.nn.Dense(2, in_units=3, **options)
    layer.initialize()
    return layer


def different_models() -> None:
    """Rank 1 has no bias."""
    layer = dense(use_bias=pk.rank() != 1, prefix="layer_")
    step(pk.DistributedTrainer(layer.collect_params(), "sgd"), layer)


def sparse() -> None:
    """Rank 1 alone has an embedding with row_sparse gradients."""
    layer = gluon.nn.Embedding(5, 2, sparse_grad=pk.rank() == 1, prefix="embedding_")
    layer.initialize()
    pk.DistributedTrainer(layer.collect_params(), "sgd")


def nan() -> None:
    """Rank 1 computes NaN."""
    layer = dense(prefix="layer_")
    trainer = pk.DistributedTrainer(layer.collect_params(), "sgd", codec="onebit", strategy="ring", **at_once(layer))
    step(trainer, layer, np.nan if pk.rank() == 1 else 1.0)


def stale() -> None:
    """Rank 1 alone does not use a layer, and others wait for its gradients."""
    used, unused = dense(prefix="used_"), dense(prefix="unused_")
    parameters = used.collect_params()
    parameters.update(unused.collect_params())
    trainer = pk.DistributedTrainer(parameters, "sgd")
    with autograd.record():
        loss = sum(layer(nd.ones((2, 3))).sum() for layer in ((used,) if pk.rank() == 1 else (used, unused)))
    loss.backward()
    trainer.step(2)


def without_values() -> None:
    """Nothing was initialised."""
    pk.broadcast_parameters(gluon.nn.Dense(2, prefix="layer_").collect_params())


def at_once(layer: gluon.nn.Dense) -> dict[str, Any]:
    names = tuple(each.name for each in layer.collect_params().values())
    return {"plan": Plan("model", pk.size(), "exact", (Bucket(names, 32, "ring", "onebit"),))}


def step(trainer: Any, layer: gluon.nn.Dense, factor: float = 1.0) -> None:
    with autograd.record():
        loss = (layer(nd.ones((2, 3))) * factor).sum()
    loss.backward()
    trainer.step(2)


def errors() -> dict[str, str]:
    return {each.__name__: told(each) for each in (different_models, sparse, stale, without_values, nan)}


def dies() -> str:
    """Rank 1 dies in its third step; return what the others are told."""
    layer = dense(prefix="layer_")
    trainer = pk.DistributedTrainer(layer.collect_params(), "sgd", codec="onebit", **at_once(layer))
    for number in range(6):
        if (pk.rank(), number) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        if (found := told(lambda: step(trainer, layer))) != "no error":
            return found
    return "nothing was raised"


CHECKS = [
    bits, training, errors, sums_in_every_type, averages, other_ops, factors, groups, rows_of_all, broadcasts,
    parameters_of_the_root, objects, mismatches, two_trainers, models_averaged_now_and_then, half_on_the_wire,
    horovods_arguments, plans, dense_nan,
]  # fmt: skip

if __name__ == "__main__":
    pk.init()
    found: dict[str, Any] = {}
    for check in [dies] if "dies" in sys.argv else CHECKS:
        try:
            found[check.__name__] = check()
        except Exception as error:
            found[check.__name__] = {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    report(pk.rank(), **found)
    if "dies" in sys.argv:
        os._exit(0)  # with a rank gone MPI would wait
    pk.shutdown()
