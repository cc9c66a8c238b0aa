"""Gradients of JAX are averaged inside of compiled programs, and what is owed is a value of the optimizer's state."""

import time
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("jax.numpy") is None:  # tests/jax is no such thing
    pytest.skip("penstock.jax needs penstock[jax]", allow_module_level=True)

import jax
import jax.numpy as jnp
import optax

import penstock.jax as pk
from adaptor.worlds import Fabrics, run_worlds, world_outcomes
from penstock.errors import PlanError
from penstock.jax import host_calls
from penstock.jax.average import AverageState, GradientAverage, redistribute_states
from penstock.jax.host_calls import HostCall
from penstock.network import LinearCost, Network
from penstock.plan import Bucket, Plan

LAYERS, WIDTH = 3, 8


def parameters(dtype=jnp.float32):
    """Weights of a small network, the same on all ranks."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [{"bias": jnp.zeros(WIDTH, dtype), "kernel": jax.random.normal(key, (WIDTH, WIDTH), dtype)} for key in keys]


def batch(rank: int, step: int):
    generator = np.random.default_rng([rank, step])
    x = generator.standard_normal((16, WIDTH), np.float32)
    return x, np.tanh(x[:, ::-1])


def loss(layers, x, y, between=lambda x: x):
    for layer in layers:
        x = between(jnp.tanh(x @ layer["kernel"] + layer["bias"]))
    return ((x - y) ** 2).mean()


def layer_plan(codec=None, strategy="ring", workers=2) -> Plan:
    """One bucket for each layer, the last layer first."""
    buckets = [
        Bucket((f"{index}/bias", f"{index}/kernel"), 4 * WIDTH * (WIDTH + 1), strategy, codec)
        for index in reversed(range(LAYERS))
    ]
    return Plan("model", workers, "exact", tuple(buckets))


def options_of(codec, workers=2):
    return {"plan": layer_plan(codec, workers=workers)} | ({} if codec is None else {"codec": codec})


def make(world, *others, **options):
    average = GradientAverage(world, options)
    return average, optax.chain(average, *others)


def step_of(average, optimizer, watch=True, **jit):
    """Return a compiled training step."""

    def step(layers, state, x, y):
        def loss_of(layers):
            return loss(average.watch(layers, state) if watch else layers, x, y)

        value, gradient = jax.value_and_grad(loss_of)(layers)
        updates, state = optimizer.update(gradient, state, layers)
        return optax.apply_updates(layers, updates), state, value

    return jax.jit(step, **jit)


def train(world, steps=6, watch=True, codec="onebit", jit=None, layers=None):
    average, optimizer = make(world, optax.sgd(0.1, momentum=0.9), **options_of(codec, world.size))
    layers = parameters() if layers is None else layers
    state, step = optimizer.init(layers), step_of(average, optimizer, watch, **(jit or {}))
    losses = []
    for number in range(steps):
        layers, state, value = step(layers, state, *batch(world.rank, number))
        losses.append(float(value))
    return jax.tree.map(np.asarray, layers), jax.tree.map(np.asarray, state), losses, average


def nearly_the_same(one, other) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def same_bits(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.mark.parametrize("codec", [None, "onebit"])
def test_weights_of_all_ranks_stay_the_same_and_watching_changes_no_bit(codec):
    watched = run_worlds(2, lambda world: train(world, watch=True, codec=codec))
    plain = run_worlds(2, lambda world: train(world, watch=False, codec=codec))
    for layers, *_ in watched[1:] + plain:
        assert same_bits(layers, watched[0][0])
    assert watched[0][2] != watched[1][2]  # data differ


def test_losses_are_those_of_pmean_over_devices():
    steps, devices = 20, jax.devices()[:2]
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(layers, state, x, y):
        value, gradient = jax.value_and_grad(loss)(layers, x, y)
        updates, state = optimizer.update(jax.lax.pmean(gradient, "ranks"), state, layers)
        return optax.apply_updates(layers, updates), state, value

    spread = jax.pmap(step, axis_name="ranks", devices=devices)
    layers, state = jax.tree.map(lambda each: jnp.stack([each] * 2), (parameters(), optimizer.init(parameters())))
    wanted = []
    for number in range(steps):
        x, y = (np.stack(each) for each in zip(*(batch(rank, number) for rank in range(2)), strict=True))
        layers, state, values = spread(layers, state, x, y)
        wanted.append(np.asarray(values))
    found = run_worlds(2, lambda world: train(world, steps, codec=None))
    np.testing.assert_allclose(np.transpose([losses for *_, losses, _ in found]), wanted, rtol=1e-5)


def test_buckets_arrive_while_the_backward_pass_goes_on():
    """The gradient of the first layer is held back until the last layer's bucket has arrived."""

    def rank(world):
        average, optimizer = make(world, optax.sgd(0.1), **options_of("onebit"))

        def until_something_arrived(arguments, results):
            deadline = time.monotonic() + 30
            while not average.session.exchange.sent and time.monotonic() < deadline:
                time.sleep(0.001)
            came.append([each.name for each in average.session.exchange.sent])
            results[0][...] = arguments[0]

        came = []
        wait = HostCall(until_something_arrived)
        held = jax.custom_vjp(lambda x: x)
        held.defvjp(lambda x: (x, None), lambda _, gradient: tuple(wait([gradient_like(gradient)], [gradient])))

        @jax.jit
        def step(layers, state, x, y):
            def loss_of(layers):
                first, *others = average.watch(layers, state)
                x_after = held(jnp.tanh(x @ first["kernel"] + first["bias"]))
                return loss(others, x_after, y)

            updates, state = optimizer.update(jax.grad(loss_of)(layers), state, layers)
            return optax.apply_updates(layers, updates), state

        jax.block_until_ready(step(parameters(), optimizer.init(parameters()), *batch(world.rank, 0)))
        return came, average.session.measured_timeline()

    for came, timeline in run_worlds(2, rank):
        ((first, *others),) = came  # arrived while the first layer's gradient was held back, and its bucket with it
        assert {first, *others} <= {"1/bias .. 1/kernel", "2/bias .. 2/kernel"}
        began = {span.name: span.start_seconds for span in timeline.lane("network")}
        assert began["2/bias .. 2/kernel"] < timeline.compute_seconds


def gradient_like(gradient):
    return jax.ShapeDtypeStruct(gradient.shape, gradient.dtype)


@pytest.mark.parametrize("watch", [False, True])
def test_where_arguments_are_copied_as_on_a_gpu_the_bits_are_the_same(monkeypatch, watch):
    in_place = run_worlds(2, lambda world: train(world, 4, watch))
    for module in ("average", "host_calls"):
        monkeypatch.setattr(f"penstock.jax.{module}.copies_nothing", lambda: False)
    copied = run_worlds(2, lambda world: train(world, 4, watch))
    for one, other in zip(in_place, copied, strict=True):
        assert same_bits(one[0], other[0])
        assert same_bits(one[1][0].residual, other[1][0].residual)


def test_two_steps_in_one_program_come_one_after_the_other():
    def rank(world):
        average, optimizer = make(world, optax.sgd(0.1, momentum=0.9), **options_of("onebit"))
        step = step_of(average, optimizer)

        @jax.jit
        def both(layers, state):
            layers, state, _ = step(layers, state, *batch(world.rank, 0))
            return step(layers, state, *batch(world.rank, 1))

        return both(parameters(), optimizer.init(parameters()))[0]

    for found, (wanted, *_) in zip(run_worlds(2, rank), run_worlds(2, lambda world: train(world, 2)), strict=True):
        nearly_the_same(found, wanted)


# What is owed


def test_a_step_from_the_same_state_gives_the_same_again():
    """A step that is undone, by apply_if_finite or by hand, leaves nothing behind."""

    def rank(world):
        average, optimizer = make(world, **options_of("onebit"))
        first = optimizer.init(parameters())
        found = []
        for watch in (True, False):
            step = step_of(average, optimizer, watch)
            layers, second, _ = step(parameters(), first, *batch(world.rank, 0))
            once = step(layers, second, *batch(world.rank, 1))
            again = step(layers, second, *batch(world.rank, 1))
            found.append((once[0], again[0], once[1][0].residual, again[1][0].residual))
        return found

    for rank_found in run_worlds(2, rank):
        for once, again, owed, owed_again in rank_found:
            nearly_the_same(once, again)
            nearly_the_same(owed, owed_again)
            assert any(np.abs(each).max() > 0 for each in jax.tree.leaves(owed))


@pytest.mark.parametrize("watch", [False, True])
def test_a_state_from_a_checkpoint_goes_on_in_another_exchange_as_if_nothing_had_happened(watch):
    whole = run_worlds(2, lambda world: train(world, 6, watch))

    def resumed(world):
        layers, state, *_ = train(world, 3, watch)
        average, optimizer = make(world, optax.sgd(0.1, momentum=0.9), **options_of("onebit"))
        optimizer.init(layers)  # another exchange, whose memory is empty
        step, state = step_of(average, optimizer, watch), jax.tree.map(jnp.asarray, state)
        for number in range(3, 6):
            layers, state, _ = step(layers, state, *batch(world.rank, number))
        return layers

    found = run_worlds(2, resumed)
    assert same_bits(*found)
    nearly_the_same(found[0], whole[0][0])


def test_donated_buffers_and_loops_inside_of_jit_change_no_bit():
    plain = run_worlds(2, lambda world: train(world, 4))
    donated = run_worlds(2, lambda world: train(world, 4, jit={"donate_argnums": (0, 1)}))

    def looped(world):
        average, optimizer = make(world, optax.sgd(0.1, momentum=0.9), **options_of("onebit"))
        step = step_of(average, optimizer)
        xs, ys = (np.stack(each) for each in zip(*(batch(world.rank, number) for number in range(4)), strict=True))

        @jax.jit
        def run(layers, state):
            return jax.lax.scan(lambda carry, data: (step(*carry, *data)[:2], None), (layers, state), (xs, ys))[0]

        return run(parameters(), optimizer.init(parameters()))[0]

    for one, other, third in zip(plain, donated, run_worlds(2, looped), strict=True):
        assert same_bits(one[0], other[0])
        assert same_bits(one[0], third)


def test_a_program_needs_memory_for_some_gradients_at_a_time_not_for_all(monkeypatch):
    width, count = 128, 12
    nbytes = 4 * width * (width + 1)
    monkeypatch.setattr("penstock.jax.average._PORTION_NBYTES", nbytes)
    layers = [{"bias": jnp.zeros(width), "kernel": jnp.eye(width)} for _ in range(count)]

    def rank(world):
        average, optimizer = make(world, optax.sgd(0.1))
        step, state, x = (
            step_of(average, optimizer, donate_argnums=(0, 1)),
            optimizer.init(layers),
            jnp.ones((1, width)),
        )
        return step.lower(layers, state, x, x).compile().memory_analysis().temp_size_in_bytes

    assert run_worlds(1, rank)[0] < count * nbytes / 2


def test_what_is_applied_and_owed_is_what_was_given():
    def rank(world):
        _, optimizer = make(world, **options_of("onebit", 3))
        state, applied = optimizer.init(parameters()), 0.0
        for number in range(5):
            given = jax.tree.map(lambda each, number=number: each + world.rank + number, parameters())
            averages, state = jax.jit(optimizer.update)(given, state)
            applied += np.asarray(averages[1]["kernel"], np.float64)
        return applied, np.asarray(state[0].residual[1]["kernel"], np.float64)

    ranks = run_worlds(3, rank)
    given = sum(np.asarray(parameters()[1]["kernel"], np.float64) + 1 + number for number in range(5))
    np.testing.assert_allclose(ranks[0][0] + sum(owed for _, owed in ranks), given, atol=1e-4)


def test_without_a_codec_nothing_is_kept():
    for _, state, *_ in run_worlds(1, lambda world: train(world, 1, codec=None)):
        assert state[0].residual == state[0].velocity == ()


def test_momentum_of_the_exchange_is_in_the_state_too():
    def rank(world):
        options = options_of("onebit") | {"momentum": 0.9}
        average, optimizer = make(world, **options)
        step, state = step_of(average, optimizer), optimizer.init(parameters())
        return step(parameters(), state, *batch(world.rank, 0))[1][0]

    for state in run_worlds(2, rank):
        assert max(float(jnp.abs(each).max()) for each in jax.tree.leaves(state.velocity)) > 0


def test_debts_are_dealt_out_to_another_number_of_ranks():
    def state(rank, size):
        owed = {"a": jnp.full(3, 2.0**rank)}
        return {"mine": AverageState(jnp.zeros(2, jnp.uint32), jnp.array([rank, size]), jnp.int32(7), owed, ()), "b": 1}

    states = [state(rank, 4) for rank in range(4)]
    three = [redistribute_states(states, rank, 3)["mine"] for rank in range(3)]
    assert [float(each.residual["a"][0]) for each in three] == [1 + 8, 2, 4]
    six = [redistribute_states(states, rank, 6)["mine"] for rank in range(6)]
    assert [float(each.residual["a"][0]) for each in six] == [1, 2, 4, 8, 0, 0]
    assert all(tuple(map(int, each.owner)) == (rank, 6) for rank, each in enumerate(six))


def test_the_state_of_another_rank_is_not_taken_for_ones_own():
    def rank(world):
        average, optimizer = make(world, **options_of("onebit"))
        step, state = step_of(average, optimizer), optimizer.init(parameters())
        layers, state, _ = step(parameters(), state, *batch(world.rank, 0))
        shared = world.gather_objects(jax.tree.map(np.asarray, state))[0]  # rank 0's, as from one checkpoint for all
        return jax.block_until_ready(step(layers, jax.tree.map(jnp.asarray, shared), *batch(world.rank, 1)))[0]

    with pytest.warns(UserWarning, match="a state of rank 0 of 2 on rank 1 of 2"):
        one, other = run_worlds(2, rank)
    assert same_bits(one, other)


def test_one_that_is_closed_is_forgotten_and_its_programs_say_so(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    pk.init()
    try:
        first, second = pk.average_gradients(), pk.average_gradients()
        kept, states = len(host_calls._functions), [each.init(parameters()) for each in (first, second)]
        step = jax.jit(second.update)
        jax.block_until_ready(step(parameters(), states[1]))
        assert "profiling: 1 of 5" in pk.explain()  # of the last one
        second.close()
        assert "profiling: 0 of 5" in pk.explain()
        with pytest.raises(jax.errors.JaxRuntimeError, match="was closed; make another one"):
            jax.block_until_ready(step(parameters(), states[1]))
        first.close()
        assert len(host_calls._functions) < kept
        with pytest.raises(PlanError, match="no transformation yet"):
            pk.explain()
    finally:
        pk.shutdown()


def test_auto_plans_inside_of_compiled_programs_and_residuals_follow():
    lines = {"ring": LinearCost(1e-4, 1e-3), "ring+onebit": LinearCost(1e-4, 1e-5)}
    network = Network(2, 1e-4, 1e-3, 1e-10, all_reduce=lines)  # so slow that nothing hides a message
    options = {"codec": "auto", "candidates": ["onebit"], "strategy": "ring", "network": network}

    def rank(world):
        average, optimizer = make(world, optax.sgd(0.1), profile_iterations=2, **options)
        layers, step = parameters(), step_of(average, optimizer)
        state = optimizer.init(layers)
        for number in range(4):
            layers, state, _ = jax.block_until_ready(step(layers, state, *batch(world.rank, number)))
        assert "by ring+onebit on 2 workers" in average.session.explain()
        assert [each.route for each in average.session.routes_used()] == ["ring+onebit"]
        assert any(np.abs(each).max() > 0 for each in jax.tree.leaves(state[0].residual))
        assert average.session.bytes_sent().dense_nbytes == 4 * 4 * LAYERS * WIDTH * (WIDTH + 1)
        return layers

    assert same_bits(*run_worlds(2, rank))


# What goes wrong


def test_ranks_with_different_models_all_hear_it():
    def rank(world):
        _, optimizer = make(world)
        optimizer.init(parameters()[: LAYERS - world.rank])

    for found in world_outcomes(2, rank):
        assert isinstance(found, PlanError)
        assert "parameter 4 is '2/bias', (8,) of float32 on rank 0 and none on rank 1" in str(found)


def test_without_a_codec_nan_reaches_all_ranks_as_with_pmean():
    def rank(world):
        average, optimizer = make(world, optax.sgd(0.1), **options_of(None))
        x, y = batch(world.rank, 0)
        step = step_of(average, optimizer)
        return step(parameters(), optimizer.init(parameters()), x * (np.nan if world.rank else 1.0), y)[0]

    for layers in run_worlds(2, rank):
        assert all(np.isnan(each).all() for each in jax.tree.leaves(layers[0]))


def test_nan_is_one_error_on_all_ranks_and_a_step_from_the_state_before_it_goes_on():
    def rank(world):
        average, optimizer = make(world, optax.sgd(0.1, momentum=0.9), **options_of("onebit"))
        layers, step = parameters(), step_of(average, optimizer)
        layers, state, _ = step(layers, optimizer.init(layers), *batch(world.rank, 0))
        x, y = batch(world.rank, 1)
        wanted = jax.tree.map(np.asarray, step(layers, state, x, y))
        with pytest.raises(jax.errors.JaxRuntimeError) as told:
            jax.block_until_ready(step(layers, state, x * (np.nan if world.rank else 1.0), y))
        return str(told.value), jax.tree.map(np.asarray, step(layers, state, x, y)), wanted

    for told, found, wanted in run_worlds(2, rank):
        assert "NonFiniteError: the gradient of '2/bias'" in told
        assert "holds NaN or infinity on some rank" in told
        nearly_the_same((found[0], found[1][0].residual), (wanted[0], wanted[1][0].residual))


def test_a_rank_that_dies_is_named_by_the_others():
    fabrics = Fabrics(3)

    def rank(world):
        average, optimizer = make(world, **options_of("onebit", 3))
        state = optimizer.init(parameters())
        if world.rank == 1:
            fabrics.kill(1)
            return None
        return jax.block_until_ready(step_of(average, optimizer)(parameters(), state, *batch(world.rank, 0)))

    found = world_outcomes(3, rank, timeout_seconds=20, fabrics=fabrics)
    for each in (found[0], found[2]):
        assert isinstance(each, jax.errors.JaxRuntimeError)
        assert "TransportError" in str(each)
        assert "rank 1" in str(each)


@pytest.mark.parametrize(
    ("use", "complaint"),
    [
        (lambda average, layers, state: average.update(layers[:2], state), "update() with a tree of 4 arrays"),
        (
            lambda average, layers, state: average.watch(layers),
            "0 states of average_gradients; wanted watch(parameters, ",
        ),
        (lambda average, layers, state: average.watch(layers, (state, state)), "has 2 states of average_gradients"),
        (
            lambda average, layers, state: average.update(
                jax.tree.map(lambda each: each.astype(jnp.bfloat16), layers), state
            ),
            "'0/bias' is (8,) of bfloat16, and was (8,) of float32 in init()",
        ),
    ],
)
def test_wrong_calls_are_refused_while_tracing(use, complaint):
    def rank(world):
        average, _ = make(world, **options_of("onebit", 1))
        state = average.init(parameters())
        with pytest.raises(PlanError) as error:
            use(average, parameters(), state)
        return str(error.value)

    assert complaint in run_worlds(1, rank)[0]


def test_another_state_than_that_of_watch_is_refused():
    def rank(world):
        average, optimizer = make(world, **options_of("onebit", 1))
        first = optimizer.init(parameters())
        _, second, _ = step_of(average, optimizer)(parameters(), first, *batch(0, 0))

        @jax.jit
        def mixed(layers, watched, updated):
            gradient = jax.grad(lambda layers: loss(average.watch(layers, watched), *batch(0, 1)))(layers)
            return optimizer.update(gradient, updated)

        jax.block_until_ready(mixed(parameters(), second, first))

    (found,) = world_outcomes(1, rank)
    assert "update() with another state than watch() of the same step; give both the same" in str(found)


def test_gradients_that_were_changed_after_they_were_sent_are_refused():
    def rank(world):
        average = GradientAverage(world, options_of("onebit", 1))
        optimizer = optax.chain(optax.scale(2.0), average)
        jax.block_until_ready(step_of(average, optimizer)(parameters(), optimizer.init(parameters()), *batch(0, 0)))

    (found,) = world_outcomes(1, rank)
    assert "is not the one that the backward pass has sent; make average_gradients() the first of the chain" in str(
        found
    )


def test_several_backward_passes_in_one_step_are_refused_with_watch():
    def rank(world):
        average, optimizer = make(world, optax.sgd(0.1), **options_of("onebit", 1))

        def twice(layers, state):
            marked = jax.grad(lambda layers: sum(loss(average.watch(layers, state), *batch(0, n)) for n in range(2)))
            return optimizer.update(marked(layers), state)

        state, wrong, found = optimizer.init(parameters()), jax.jit(twice), []
        for watch in (True, False):
            with pytest.raises(Exception, match=r"came twice in one step|and another one began"):
                jax.block_until_ready(wrong(parameters(), state))
            found.append(step_of(average, optimizer, watch)(parameters(), state, *batch(0, 0))[0])  # the next goes on
        return jax.tree.map(np.asarray, found)

    (found,) = run_worlds(1, rank)
    ((wanted, *_),) = run_worlds(1, lambda world: train(world, steps=1))
    for each in found:
        nearly_the_same(each, wanted)


def test_a_forward_pass_alone_sends_nothing():
    def rank(world):
        average, optimizer = make(world, **options_of("onebit", 1))
        state = optimizer.init(parameters())
        value = jax.jit(lambda layers: loss(average.watch(layers, state), *batch(0, 0)))(parameters())
        return float(value), average.session.bytes_sent().dense_nbytes, average.session.exchange.sent

    ((value, dense, sent),) = run_worlds(1, rank)
    assert value == pytest.approx(float(loss(parameters(), *batch(0, 0))))
    assert (dense, sent) == (0, [])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_16_bits_are_averaged_in_their_type(dtype):
    def rank(world):
        average = GradientAverage(world, {})
        given = {"a": jnp.full((5,), 1.0 + world.rank, dtype), "b": jnp.full((2, 2), 3.0, jnp.float32)}
        averages, _ = jax.jit(average.update)(given, average.init(given))
        return averages

    for averages in run_worlds(2, rank):
        assert averages["a"].dtype == dtype
        np.testing.assert_array_equal(np.asarray(averages["a"], np.float32), 1.5)
        np.testing.assert_array_equal(averages["b"], 3.0)
