"""What a rank of MXNet averages and learns, for the checks of `tests/mxnet` (`frameworks.py`)."""

import hashlib
import sys
from typing import Any

import numpy as np

import penstock.mxnet as pk  # before mxnet, for which it mends a name of numpy\'s
from adaptor.frameworks import CASES, SHAPES, STEPS, digest, gradients, plan_of, report

# isort: split
from mxnet import autograd, gluon, nd

STEPS_OF_TRAINING = 200
FEATURES, BATCH = 12, 30


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


def learned(codec: str | None, ranks: int) -> tuple[list[float], str]:
    """Return losses over all data, and a digest of the weights, after training on this rank's part of it.

    ranks: 1 where this rank computes on all data by itself, as the large batch that the others are compared with.
    """
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(16, activation="tanh", in_units=FEATURES), gluon.nn.Dense(1, in_units=16))
    net.initialize()
    generator = np.random.default_rng(0)
    for each in net.collect_params().values():
        each.set_data(nd.array(generator.standard_normal(each.shape) / 3))
    settings = "sgd", {"learning_rate": 0.05}
    if ranks == 1:
        trainer = gluon.Trainer(net.collect_params(), *settings)
    else:
        pk.broadcast_parameters(net.collect_params())
        trainer = pk.DistributedTrainer(net.collect_params(), *settings, codec=codec, measure_seconds=1.0)
    losses = []
    for _ in range(STEPS_OF_TRAINING):
        x = generator.standard_normal((BATCH, FEATURES)).astype(np.float32)
        y = np.tanh(x[:, :2].sum(1, keepdims=True))
        mine = slice(None) if ranks == 1 else slice(pk.rank(), None, ranks)
        with autograd.record():
            loss = ((net(nd.array(x[mine])) - nd.array(y[mine])) ** 2).sum()
        loss.backward()
        trainer.step(len(x[mine]))
        losses.append(float(((net(nd.array(x)) - nd.array(y)) ** 2).mean().asscalar()))
    weights = b"".join(each.data().asnumpy().tobytes() for each in net.collect_params().values())
    return losses, hashlib.sha256(weights).hexdigest()[:16]


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
    """Shapes are not known before the first forward pass."""
    layer = gluon.nn.Dense(2, prefix="layer_")
    layer.initialize()
    pk.broadcast_parameters(layer.collect_params())


def at_once(layer: gluon.nn.Dense) -> dict[str, Any]:
    from penstock.plan import Bucket, Plan

    names = tuple(each.name for each in layer.collect_params().values())
    return {"plan": Plan("model", pk.size(), "exact", (Bucket(names, 32, "ring", "onebit"),))}


def step(trainer: Any, layer: gluon.nn.Dense, factor: float = 1.0) -> None:
    with autograd.record():
        loss = (layer(nd.ones((2, 3))) * factor).sum()
    loss.backward()
    trainer.step(2)


if __name__ == "__main__":
    pk.init()
    checks: dict[str, Any] = {}
    if "bits" in sys.argv:
        checks["bits"] = {case: averaged(case) for case in CASES}
    if "training" in sys.argv:
        checks["alone"] = learned(None, 1)
        checks["training"] = {str(codec): learned(codec, pk.size()) for codec in (None, "onebit")}
    if "errors" in sys.argv:
        wrong = (different_models, sparse, stale, without_values, nan)
        checks["errors"] = {each.__name__: told(each) for each in wrong}
    report(pk.rank(), **checks)
    pk.shutdown()
