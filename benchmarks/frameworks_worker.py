"""One rank of `frameworks.py`: trains one model in one framework by one method and reports what iterations took.

Beside each of our methods, in the same process and in turns with it, the same work is done apart: the framework
computes gradients, the bare exchange averages as many bytes from memory of its own, and the framework applies its
gradients. What an adaptor adds (calls, copies) is the difference; what it hides by overlap counts for it. By hand, the
gradients themselves are averaged: they are copied into the flat memory that the exchange works in, and applied from
there. All ranks begin each step together: one that was a millisecond late in the step before would count in this one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import mean
from time import perf_counter, process_time
from typing import Any

import numpy as np

WIDTH, LAYERS, INPUTS, CLASSES, BATCH = 1600, 5, 1024, 10, 16
PROFILE, WARMUP = 3, 3  # iterations
Step = Callable[[], None]
servers: list["subprocess.Popen[bytes]"] = []  # of MXNet's, that this process has started


@dataclass(frozen=True, slots=True)
class FrameworkJob:
    """What the ranks are asked to measure."""

    framework: str
    method: str  # none, own, dense, onebit
    iterations: int  # that count


@dataclass(frozen=True, slots=True)
class Training:
    """A way of training, ready to go."""

    step: Step  # returns when weights are changed
    parameters: int
    session: Callable[[], Any] | None = None  # what averages, where we do
    compute: Callable[[], Any] | None = None  # returns this rank's gradients of the same model
    apply: Callable[[Any], None] | None = None  # changes its weights by gradients
    leaves: Callable[[Any], Sequence[Any]] = list  # of what `compute` returns, in the order of the session's
    whole: Callable[[Sequence[Any]], Any] = list  # what `apply` takes, of those


def batch(rank: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return a rank's data."""
    generator = np.random.default_rng(rank)
    return generator.standard_normal((BATCH, INPUTS)).astype(np.float32), generator.integers(0, CLASSES, BATCH)


def sizes() -> list[tuple[int, int]]:
    """Return the shapes of the layers' kernels: 12M parameters with the biases."""
    widths = [INPUTS, *([WIDTH] * LAYERS), CLASSES]
    return list(pairwise(widths))


def options_of(method: str) -> dict[str, Any]:
    """Return what our adaptors are told."""
    return {"codec": "onebit" if method == "onebit" else None, "profile_iterations": PROFILE, "measurements": False}


def tensorflow_training(method: str) -> Training:
    """Train a Keras model by a loop of our own inside of tf.function."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if method == "own":
        os.environ["TF_CONFIG"] = json.dumps(_tf_config(rank, world_size))
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)

    def model() -> Any:
        hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
        return keras.Sequential([keras.Input((INPUTS,)), *hidden, keras.layers.Dense(CLASSES)])

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    if method == "own":
        return _mirrored(tf, keras, model, loss, rank)
    inputs, labels = map(tf.constant, batch(rank))
    import penstock.tensorflow as pk

    pk.init()
    keras.utils.set_random_seed(0)
    network, plain, ours = model(), keras.optimizers.SGD(1e-4), keras.optimizers.SGD(1e-4)
    if method != "none":
        ours = pk.DistributedOptimizer(ours, **options_of(method))
    for each in (plain, ours):
        each.build(network.trainable_variables)

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            value = loss(labels, network(inputs))
        return tape.gradient(value, network.trainable_variables)

    step = tf.function(lambda: ours.apply(gradients(), network.trainable_variables))
    apply = tf.function(lambda given: plain.apply(given, network.trainable_variables))
    session = None if method == "none" else lambda: pk.sessions()[-1]
    return Training(step, network.count_params(), session, tf.function(gradients), apply)


def _tf_config(rank: int, world_size: int) -> dict[str, Any]:
    """Return what TensorFlow reads: emulated hosts have addresses one after the other, rank 0's first."""
    subnet = os.environ["MASTER_ADDR"].rsplit(".", 1)[0]
    workers = [f"{subnet}.{index + 1}:23456" for index in range(world_size)]
    return {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}


def _mirrored(tf: Any, keras: Any, model: Callable[[], Any], loss: Any, rank: int) -> Training:
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=ring)
    )
    inputs, labels = map(tf.constant, batch(rank))  # not before: the strategy must come first
    with strategy.scope():
        keras.utils.set_random_seed(0)
        network, optimizer = model(), keras.optimizers.SGD(1e-4)
        optimizer.build(network.trainable_variables)

    def on_replica() -> None:
        with tf.GradientTape() as tape:
            value = loss(labels, network(inputs))
        gradients = tape.gradient(value, network.trainable_variables)
        context = tf.distribute.get_replica_context()
        optimizer.apply(context.all_reduce(tf.distribute.ReduceOp.SUM, gradients), network.trainable_variables)

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        strategy.run(on_replica)

    return Training(step, network.count_params())


def jax_training(method: str) -> Training:
    """Train a plain JAX model inside of jit."""
    import jax
    import jax.numpy as jnp
    import optax

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if method == "own":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"{os.environ['MASTER_ADDR']}:23457"
        jax.distributed.initialize(address, num_processes=world_size, process_id=rank)
    keys = jax.random.split(jax.random.PRNGKey(0), len(sizes()))
    weights = [
        {"kernel": jax.random.normal(key, shape) / shape[0] ** 0.5, "bias": jnp.zeros(shape[1])}
        for key, shape in zip(keys, sizes(), strict=True)
    ]
    inputs, labels = batch(rank)

    def loss(weights: Any) -> Any:
        found = jnp.asarray(inputs)
        for index, layer in enumerate(weights):
            found = found @ layer["kernel"] + layer["bias"]
            found = jax.nn.relu(found) if index < len(weights) - 1 else found
        return optax.softmax_cross_entropy_with_integer_labels(found, jnp.asarray(labels)).sum()

    count = sum(each.size for each in jax.tree.leaves(weights))
    if method == "own":
        return _pmean(jax, optax, loss, weights, count)
    if method == "none":
        return _jitted(jax, optax, loss, optax.sgd(1e-4), weights, count, None)
    import penstock.jax as pk  # type: ignore[import-not-found, unused-ignore]

    pk.init()
    averaging = pk.average_gradients(**options_of(method))
    return _jitted(jax, optax, loss, optax.chain(averaging, optax.sgd(1e-4)), weights, count, averaging)


def _jitted(jax: Any, optax: Any, loss: Any, chain: Any, weights: Any, count: int, averaging: Any) -> Training:
    state = [weights, chain.init(weights)]

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(weights: Any, kept: Any) -> Any:
        watched = loss if averaging is None else lambda given: loss(averaging.watch(given, kept))
        changes, kept = chain.update(jax.grad(watched)(weights), kept, weights)
        return optax.apply_updates(weights, changes), kept

    def step() -> None:
        state[:] = update(*state)
        jax.block_until_ready(state)

    differentiate, plain = jax.jit(jax.grad(loss)), optax.sgd(1e-4)
    without = plain.init(weights)

    @partial(jax.jit, donate_argnums=(0, 1))
    def change(weights: Any, gradients: Any) -> Any:
        return optax.apply_updates(weights, plain.update(gradients, without, weights)[0])

    def compute() -> Any:
        return jax.block_until_ready(differentiate(state[0]))

    def apply(gradients: Any) -> None:
        state[0] = jax.block_until_ready(change(state[0], gradients))

    session, whole = None if averaging is None else lambda: averaging.session, jax.tree.structure(weights).unflatten
    return Training(step, count, session, compute, apply, jax.tree.leaves, whole)


def _pmean(jax: Any, optax: Any, loss: Any, weights: Any, count: int) -> Training:
    chain = optax.sgd(1e-4)

    def update(weights: Any, kept: Any) -> Any:
        means = jax.lax.pmean(jax.grad(loss)(weights), "ranks")
        changes, kept = chain.update(means, kept, weights)
        return optax.apply_updates(weights, changes), kept

    together = jax.pmap(update, axis_name="ranks", donate_argnums=(0, 1))
    state = [jax.tree.map(lambda each: each[None], given) for given in (weights, chain.init(weights))]

    def step() -> None:
        state[:] = together(*state)
        jax.block_until_ready(state)

    return Training(step, count)


def mxnet_training(method: str) -> Training:
    """Train a Gluon model; `own` is MXNet's parameter server, with a server on every host."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if method == "own":
        _start_servers(rank, world_size)
    import penstock.mxnet as pk

    # isort: split
    from mxnet import autograd, gluon, init, nd, random

    random.seed(0)
    net = gluon.nn.HybridSequential()
    for rows, width in sizes():
        net.add(gluon.nn.Dense(width, activation="relu" if width == WIDTH else None, in_units=rows))
    net.initialize(init.Xavier())
    net.hybridize(static_alloc=True)
    inputs, labels = (nd.array(each) for each in batch(rank))
    loss, settings = gluon.loss.SoftmaxCrossEntropyLoss(), ("sgd", {"learning_rate": 1e-4})
    plain = gluon.Trainer(net.collect_params(), *settings, kvstore="dist_sync" if method == "own" else None)
    trainer = plain
    if method not in ("none", "own"):
        pk.init()
        trainer = pk.DistributedTrainer(net.collect_params(), *settings, **options_of(method))

    def compute() -> Any:
        with autograd.record():
            value = loss(net(inputs), labels)
        value.backward()
        nd.waitall()

    def step() -> None:
        compute()
        trainer.step(BATCH)
        nd.waitall()

    def apply(_: Any) -> None:
        plain.step(BATCH)
        nd.waitall()

    count = sum(rows * width + width for rows, width in sizes())
    return Training(step, count, None if trainer is plain else lambda: trainer.session, compute, apply)


def _start_servers(rank: int, world_size: int) -> None:
    """Start a server of MXNet's on this host, and on the first one what all of them meet at."""
    common = {
        "DMLC_PS_ROOT_URI": os.environ["MASTER_ADDR"],
        "DMLC_PS_ROOT_PORT": "23458",
        "DMLC_NUM_WORKER": str(world_size),
        "DMLC_NUM_SERVER": str(world_size),
        "DMLC_NODE_HOST": f"{os.environ['MASTER_ADDR'].rsplit('.', 1)[0]}.{rank + 1}",
    }
    for role in ("server", *(("scheduler",) if rank == 0 else ())):
        code = "import numpy; numpy.bool = bool; import mxnet"  # which serves until the workers end
        servers.append(subprocess.Popen([sys.executable, "-c", code], env=os.environ | common | {"DMLC_ROLE": role}))
    os.environ.update(common | {"DMLC_ROLE": "worker"})


TRAININGS: dict[str, Callable[[str], Training]] = {
    "tensorflow": tensorflow_training,
    "jax": jax_training,
    "mxnet": mxnet_training,
}


def measure(job: FrameworkJob) -> list[dict[str, Any]]:
    """Return what iterations took on this rank; where we average, also what the same work takes apart, in turns."""
    training = TRAININGS[job.framework](job.method)
    for _ in range(PROFILE + WARMUP):
        training.step()
    if training.session is None:
        return _rows(_timed({job.method: training.step}, job.iterations), training.parameters)
    session, compute, apply = training.session(), training.compute, training.apply
    assert compute is not None
    assert apply is not None
    bare, places = _bare(session)

    def apart() -> None:
        gradients = compute()
        bare()
        apply(gradients)

    def by_hand() -> None:
        for place, gradient in zip(places, training.leaves(compute()), strict=True):
            np.copyto(place, np.asarray(gradient))
        bare()
        apply(training.whole(places))

    ways = {"": training.step, "apart-": apart, "hand-": by_hand, "bare-": bare}
    if job.framework == "mxnet":  # whose trainer applies what it has computed
        del ways["hand-"]
    for _ in range(WARMUP):
        for way in list(ways.values())[1:]:
            way()
    before = session.bytes_sent().sent_nbytes
    taken = _timed({f"{name}{job.method}": way for name, way in ways.items()}, job.iterations, session.world.barrier)
    sent = (session.bytes_sent().sent_nbytes - before) // job.iterations
    return _rows(taken, training.parameters, sent, [each.route for each in session.routes_used()])


def _rows(
    taken: Mapping[str, Sequence[tuple[float, float]]], parameters: int, sent: int = 0, routes: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    return [
        {
            "method": method,
            "parameters": parameters,
            "seconds": [seconds for seconds, _ in each],
            "cpu_seconds": [cpu for _, cpu in each],
            "sent_nbytes": sent,
            "routes": list(routes),
        }
        for method, each in taken.items()
    ]


def _bare(session: Any) -> tuple[Step, list[np.ndarray[Any, Any]]]:
    """Return what exchanges the buckets of a session, by the same routes, and the memory of each gradient in it."""
    from penstock.adaptor.buckets import aligned_zeros
    from penstock.exchange.exchange import Exchange
    from penstock.exchange.parameter_state import Memory
    from penstock.runtime.communicator import Communicator

    known, plan = {each.name: each for each in session.gradients}, session.plan.merged
    exchange = Exchange(Communicator(session.world.new_transport()), memory=Memory(session.memory.compression))
    exchange.follow(plan, session.decision.network)
    generator = np.random.default_rng(session.world.rank)
    made, places = [], {}
    for bucket in plan.buckets:
        each = [known[name].numel for name in bucket.tensors]
        made.append((exchange.bucket(bucket.tensors, each), aligned_zeros(each, "float32")))
        made[-1][1][:] = generator.standard_normal(sum(each))
        for name, part in zip(bucket.tensors, np.split(made[-1][1], np.cumsum(each)[:-1]), strict=True):
            places[name] = part.reshape(known[name].shape)

    def step() -> None:
        exchange.begin()
        for handle in [exchange.start(bucket, values) for bucket, values in made]:
            exchange.wait(handle)

    return step, [places[each.name] for each in session.gradients]


def _timed(
    steps: Mapping[str, Step], iterations: int, meet: Step = lambda: None
) -> dict[str, list[tuple[float, float]]]:
    """Return what each step took, and what it took of cores on this rank; steps take turns, and ranks meet before."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(iterations):
        for name, step in steps.items():
            meet()
            start, cpu = perf_counter(), process_time()
            step()
            found[name].append((perf_counter() - start, process_time() - cpu))
    return found


def of_all_ranks(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each row with the clocks of all ranks: of each iteration the slowest rank's, and cores on average."""
    from penstock.adaptor import current

    current.init()
    held = current.world().gather([(row["seconds"], row["cpu_seconds"]) for row in rows])
    found = []
    for row, *clocks in zip(rows, *held, strict=True):
        seconds, cores = ([list(each) for each in zip(*kind, strict=True)] for kind in zip(*clocks, strict=True))
        found.append({**row, "seconds": [max(each) for each in seconds], "cpu_seconds": [mean(each) for each in cores]})
    return found


def main() -> None:
    """Measure the job given as JSON at the end of the command line."""
    from penstock.bench.jobs import report

    job = FrameworkJob(**json.loads(sys.argv[-1]))
    for found in of_all_ranks(measure(job)):
        report(int(os.environ["RANK"]), found)
    sys.stdout.flush()
    _leave()


def _leave() -> None:
    """End together with the other ranks; what a framework has started need not be taken down."""
    from penstock.adaptor import current

    current.world().barrier()
    for each in servers:
        each.kill()
    if current.world().engine == "mpi":
        from penstock.runtime.transport.mpi import shut_down

        shut_down()
    os._exit(0)


if __name__ == "__main__":
    main()
