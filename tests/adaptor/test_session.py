"""Gradients come in any order, buckets go in one; averages, plans, debts and errors are those of all ranks."""

import threading
import time
import warnings
import weakref
from dataclasses import replace

import numpy as np
import pytest

from adaptor.worlds import Fabrics, run_worlds, world_outcomes
from penstock.adaptor.buckets import Gradient, aligned_zeros
from penstock.adaptor.session import Session
from penstock.errors import CodecError, NonFiniteError, PlanError, TransportError
from penstock.network import LinearCost, Network
from penstock.plan import Bucket, Plan
from penstock.planning.measure import HostGauge
from penstock.timeline import COMPUTE
from penstock.trace import Tensor, Trace

MODEL = [Gradient("a", (37,), "float32"), Gradient("b", (20, 30), "float32"), Gradient("c", (), "float32")]
NETWORK = Network(2, 1e-4, 1e-9, 1e-10, all_reduce={"native": LinearCost(1e-4, 1e-9), "ring": LinearCost(1e-4, 1e-9)})


def plan_of(*buckets: str, strategy="ring", codec=None, model=MODEL, workers=2) -> Plan:
    nbytes = {each.name: each.nbytes for each in model}
    made = (Bucket(tuple(names), sum(nbytes[name] for name in names), strategy, codec) for names in buckets)
    return Plan("model", workers, "exact", tuple(made))


def gradient(rank: int, step: int, index: int, model=MODEL) -> np.ndarray:
    """Dyadic values, so that sums of a few of them are exact."""
    generator = np.random.default_rng([rank, step, index])
    each = model[index]
    return np.asarray(generator.integers(-64, 65, each.shape).astype(np.float32) / 8).astype(each.dtype)


def train(world, steps=3, order=(2, 1, 0), model=MODEL, **options):
    session = Session(world, model, **options)
    found = []
    for step in range(steps):
        for index in order:
            session.put(index, gradient(world.rank, step, index, model))
        found.append([each.copy() for each in session.wait()])
    return found, session


def residuals_of(session):
    return session.state_dict()["memories"]["residual"]


def means(world_size: int, step: int, model=MODEL):
    return [sum(gradient(rank, step, i, model) for rank in range(world_size)) / world_size for i in range(len(model))]


def test_a_race_of_plans_is_refused_on_every_rank():
    outcomes = world_outcomes(2, lambda world: Session(world, MODEL, race=True))
    assert all(isinstance(each, PlanError) and "race=True" in str(each) for each in outcomes)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"plan": "of rings"}])
def test_averages_are_those_of_numpy(world_size, options):
    if options:
        options = {"plan": plan_of("cb", "a", workers=world_size)}
    for found, session in run_worlds(world_size, lambda world: train(world, **options)):
        for step, averages in enumerate(found):
            for each, want in zip(averages, means(world_size, step), strict=True):
                np.testing.assert_array_equal(each, want)
        session.close()


def test_ranks_may_bring_gradients_in_different_orders():
    orders = [(2, 1, 0), (0, 2, 1)]
    for found, _ in run_worlds(2, lambda world: train(world, order=orders[world.rank], plan=plan_of("c", "b", "a"))):
        np.testing.assert_array_equal(found[2][1], means(2, 2)[1])


def test_a_bucket_is_sent_while_others_are_still_computed():
    def rank(world):
        session = Session(world, MODEL, plan=plan_of("c", "ba"))
        session.put(2, gradient(world.rank, 0, 2))
        deadline = time.monotonic() + 30
        while not session.exchange.sent and time.monotonic() < deadline:
            time.sleep(0.001)
        arrived = [each.name for each in session.exchange.sent]
        session.put(1, gradient(world.rank, 0, 1))
        session.put(0, gradient(world.rank, 0, 0))
        session.wait()
        return arrived, session.measured_timeline()

    for arrived, timeline in run_worlds(2, rank):
        assert arrived == ["c"]
        (first, second) = timeline.lane("network")
        assert first.name == "c"
        assert second.name == "b .. a"
        assert first.end_seconds < timeline.compute_seconds
        assert [span.name for span in timeline.lane(COMPUTE)] == ["forward", "backward"]


def test_after_profiling_the_plan_holds_every_gradient_in_the_order_in_which_they_come():
    options = {"network": NETWORK, "profile_iterations": 3, "planner": "wfbp", "strategy": "ring", "bulk": False}
    for found, session in run_worlds(2, lambda world: train(world, steps=5, order=(1, 2, 0), **options)):
        assert [bucket.tensors for bucket in session.plan.buckets] == [("b",), ("c",), ("a",)]
        assert [use.route for use in session.routes_used()] == ["ring"]
        np.testing.assert_array_equal(found[4][1], means(2, 4)[1])
        assert session.decision.trace.tensors[0].name == "b"
        text = session.explain(picture=True)
        assert text.startswith(f"plan {session.plan.hash} by wfbp: 3 messages by ring on 2 workers")
        assert "measured network" in text


def test_gradients_of_a_bulk_lie_side_by_side_and_travel_as_one_message():
    tensors = tuple(Tensor(each.name, each.numel, 1e-9) for each in MODEL)
    trace, slow = Trace("m", "cpu", 1, "float32", 1e-3, tensors), replace(NETWORK, alpha_seconds=1.0, all_reduce={})
    options = {"trace": trace, "network": slow, "planner": "wfbp", "strategy": "ring"}
    for found, session in run_worlds(2, lambda world: train(world, steps=2, **options)):
        assert [bucket.tensors for bucket in session.plan.buckets] == [("a",), ("b",), ("c",)]
        assert session.plan.bulks == (3,)
        assert [use.messages for use in session.routes_used()] == [1]
        for each, expected in zip(found[1], means(2, 1), strict=True):
            np.testing.assert_array_equal(each, expected)
        text = session.explain()
        assert " by wfbp: 1 messages, bulks of 3 buckets, by ring on 2 workers" in text
        assert "\n  0: 3 tensors in a bulk of 3 buckets, " in text


AUTO = {"codec": "auto", "candidates": ["onebit"], "strategy": "ring", "profile_iterations": 2}


@pytest.mark.parametrize(("seconds_per_byte", "codec"), [(1e-3, "onebit"), (1e-12, None)])
def test_auto_compresses_where_the_network_is_slow_and_leaves_it_where_it_is_fast(seconds_per_byte, codec):
    lines = {"ring": LinearCost(1e-6, seconds_per_byte), "ring+onebit": LinearCost(1e-6, seconds_per_byte / 30 + 1e-10)}
    network = Network(2, 1e-6, seconds_per_byte, 1e-10, all_reduce=lines)
    for found, session in run_worlds(2, lambda world: train(world, steps=4, network=network, **AUTO)):
        assert {bucket.codec for bucket in session.plan.buckets} == {codec}
        assert len(found) == 4
        assert (f"+{codec}" if codec else "by ring") in session.explain()


def test_a_measured_network_is_kept_and_found_again(tmp_path, monkeypatch):
    measured = []

    def links(self, seconds):
        measured.append(self.ranks.rank)
        return replace(NETWORK, all_reduce={})

    def with_line(self, network, route, seconds):
        return replace(network, all_reduce={**network.all_reduce, str(route): LinearCost(1e-4, 1e-9)})

    monkeypatch.setattr(HostGauge, "links", links)
    monkeypatch.setattr(HostGauge, "with_line", with_line)
    monkeypatch.setattr(HostGauge, "holds", lambda self, network: True)
    options = {"strategy": "ring", "profile_iterations": 2, "measurements": tmp_path}
    plans = [run_worlds(2, lambda world: train(world, **options)[1].plan) for _ in range(2)]
    assert sorted(measured) == [0, 1]  # once on each rank
    assert len(list(tmp_path.iterdir())) == 1
    assert {bucket.strategy for both in plans for plan in both for bucket in plan.buckets} == {"ring"}


def test_what_is_done_between_iterations_is_told_by_rank_0_alone(caplog):
    caplog.set_level("INFO", "penstock")
    options = {"network": NETWORK, "strategy": "ring", "profile_iterations": 2}
    run_worlds(2, lambda world: train(world, **options))
    told = [each.getMessage() for each in caplog.records]
    assert told[0] == "profiling 2 iterations, then planning"
    assert [text.split(",")[0] for text in told[1:]] == ["training goes on"]
    assert "by ring" in told[1]


def test_before_that_explain_counts_iterations():
    (_, session), _ = run_worlds(2, lambda world: train(world, steps=2, network=NETWORK, profile_iterations=4))
    assert session.plan is None
    assert "profiling: 2 of 4 iterations; until then buckets of about 25 MB are used" in session.explain()


def test_a_trace_that_is_given_is_planned_for_at_once():
    trace = Trace("m", "cpu", 1, "float32", 1e-3, tuple(Tensor(each.name, each.numel, 1e-3) for each in MODEL))
    options = {"trace": trace, "network": NETWORK, "planner": "single", "strategy": "ring"}
    for _, session in run_worlds(2, lambda world: train(world, steps=1, **options)):
        assert [bucket.tensors for bucket in session.plan.buckets] == [("a", "b", "c")]


@pytest.mark.parametrize("codec", ["onebit", "gtopk"])
def test_what_is_not_sent_is_owed_and_goes_into_checkpoints(codec):
    strategy = "ring" if codec == "onebit" else "gtopk_doubling"
    spec = codec if codec == "onebit" else "sparse(density=0.1)"
    density = {} if codec == "onebit" else {"density": 0.1}
    options = {"plan": plan_of("cb", "a", strategy=strategy, codec=spec), "codec": codec, **density}
    ranks = run_worlds(2, lambda world: train(world, steps=4, **options))
    for index, each in enumerate(MODEL):
        applied = sum(averages[index].astype(np.float64) for averages in ranks[0][0])
        owed = sum(residuals_of(session)[each.name].astype(np.float64) for _, session in ranks)
        np.testing.assert_allclose(applied + owed, sum(means(2, step)[index] for step in range(4)), atol=1e-4)
    states = [session.state_dict() for _, session in ranks]
    whole = run_worlds(2, lambda world: train(world, steps=6, **options))

    def resumed(world):
        session = Session(world, MODEL, **options)
        session.load_state_dict(states)
        for step in (4, 5):
            for index in range(3):
                session.put(index, gradient(world.rank, step, index))
            found = [each.copy() for each in session.wait()]
        return found

    for found in run_worlds(2, resumed):
        for each, want in zip(found, whole[0][0][5], strict=True):  # feedback that is put off sums in another order
            np.testing.assert_allclose(each, want, rtol=1e-6)


def test_low_rank_factors_average_alike_on_all_ranks_and_what_they_leave_is_owed():
    options = {"plan": plan_of("cb", "a", codec="lowrank"), "codec": "lowrank"}
    ranks = run_worlds(2, lambda world: train(world, steps=4, **options))
    for one, other in zip(ranks[0][0], ranks[1][0], strict=True):
        assert all(mine.tobytes() == theirs.tobytes() for mine, theirs in zip(one, other, strict=True))
    applied = sum(averages[1].astype(np.float64) for averages in ranks[0][0])
    owed = sum(residuals_of(session)["b"].astype(np.float64) for _, session in ranks)
    np.testing.assert_allclose(applied + owed, sum(means(2, step)[1] for step in range(4)), atol=1e-3)
    assert set(ranks[0][1].state_dict()["memories"]["factor"]) == {"b"}  # the only matrix


def test_bytes_sent_count_gradients_and_no_measurement():
    options = {"plan": plan_of("cba"), "strategy": "ring"}
    for _, session in run_worlds(2, lambda world: train(world, steps=3, **options)):
        dense = 3 * sum(each.nbytes for each in MODEL)
        assert session.bytes_sent().dense_nbytes == dense
        assert 0 <= session.bytes_sent().sent_nbytes - dense <= 4096  # programs are compared once


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_gradients_of_several_types_travel_in_buckets_of_their_own(dtype):
    model = [MODEL[0], Gradient("b", (20, 30), dtype), MODEL[2]]
    ranks = run_worlds(2, lambda world: train(world, model=model, plan=plan_of("cba", model=model)))
    for found, _ in ranks:
        assert found[1][1].dtype == dtype
        for each, want in zip(found[1], means(2, 1, model), strict=True):
            np.testing.assert_array_equal(each, want)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float32", {}), ("float64", {}), ("float16", {})]
    + [("float32", options) for options in ({"momentum": 0.9}, {"clip": 0.1}, {"codec": "onebit"})],
    ids=str,
)
def test_gradients_that_are_divided_as_they_are_copied_have_the_same_averages_to_the_bit(options, dtype, monkeypatch):
    model = [Gradient(each.name, each.shape, dtype) for each in MODEL]
    plan = plan_of("cb", "a", codec=options.get("codec"), model=model, workers=3)  # thirds round
    ours = run_worlds(3, lambda world: train(world, model=model, plan=plan, **options)[0])
    monkeypatch.setattr(Session, "_divides", lambda self, bucket: False)
    for steps, others in zip(
        ours, run_worlds(3, lambda world: train(world, model=model, plan=plan, **options)[0]), strict=True
    ):
        for averages in zip(steps, others, strict=True):
            assert all(one.tobytes() == other.tobytes() for one, other in zip(*averages, strict=True))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("codec", ["onebit", "topk(density=0.1)", None])
def test_gradients_that_stay_give_the_bits_of_those_that_are_copied_and_are_let_go(codec, world_size):
    def rank(world, stays):
        session, found = (
            Session(world, MODEL, plan=plan_of("cb", "a", codec=codec, workers=world_size), codec=codec),
            [],
        )
        for step in range(4):
            given = [gradient(world.rank, step, index) for index in range(len(MODEL))]
            for index in (2, 1, 0):
                session.put(index, given[index], stays=stays)
            found.append([each.tobytes() for each in session.wait()])
            assert [each.tobytes() for each in given] == [
                gradient(world.rank, step, index).tobytes() for index in range(len(MODEL))
            ]
            kept = [weakref.ref(each) for each in given]
            del given
            assert [each() for each in kept] == [None] * len(MODEL)
        return found

    assert run_worlds(world_size, lambda world: rank(world, True)) == run_worlds(
        world_size, lambda world: rank(world, False)
    )


@pytest.mark.parametrize("how", ["lend", "copy"])
def test_averages_that_are_given_away_stay_as_they_are_while_something_refers_to_them(how):
    def rank(world):
        session, kept, places = Session(world, MODEL, plan=plan_of("cba")), [], []
        for step in range(5):
            for index in range(3):
                session.put(index, gradient(world.rank, step, index))
            averages = session.wait(**{how: True})
            places.append(averages[1].__array_interface__["data"][0])
            if step == 1:
                kept = averages
            del averages
        return kept, places

    for kept, places in run_worlds(2, rank):
        for each, want in zip(kept, means(2, 1), strict=True):
            np.testing.assert_array_equal(each, want)
        assert places[0] == places[1]  # nothing referred to the first, so its memory was used again
        assert places[2] == places[3] == places[4] != places[1]


@pytest.mark.parametrize(
    ("sizes", "aligned"), [([10, 16000, 1600], [1, 2]), ([16000, 10, 1600], [0, 1]), ([3, 5, 7], [2]), ([], [])]
)
def test_as_many_bytes_as_possible_begin_where_frameworks_take_arrays_over(sizes, aligned):
    memory = aligned_zeros(sizes, "float32")
    first = memory.__array_interface__["data"][0]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    assert [index for index, start in enumerate(starts) if (first + 4 * start) % 64 == 0] == aligned
    assert memory.size == sum(sizes)
    assert not memory.any()


# What goes wrong


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"model": [*MODEL[:2], Gradient("d", (), "float32")]}, "parameter 2 is 'c', () of float32 on rank 0 and 'd'"),
        (
            {"model": [*MODEL[:2], Gradient("c", (1,), "float32")]},
            "parameter 2 is 'c', () of float32 on rank 0 and 'c'",
        ),
        ({"model": MODEL[:2]}, "parameter 2 is 'c', () of float32 on rank 0 and none on rank 1"),
        ({"codec": "onebit"}, "codec is None on rank 0 and 'onebit' on rank 1"),
        ({"on_nonfinite": "skip"}, "on_nonfinite is 'raise' on rank 0 and 'skip' on rank 1"),
        ({"plan": plan_of("cba")}, "rank 0 nothing, rank 1 plan"),
    ],
)
def test_ranks_with_different_models_or_options_all_hear_it(changed, complaint):
    def rank(world):
        options = {"model": MODEL} | (changed if world.rank else {})
        return Session(world, options.pop("model"), **options)

    for found in world_outcomes(2, rank):
        assert isinstance(found, PlanError)
        assert complaint in str(found)


def test_nan_is_raised_on_all_ranks_and_names_the_gradient():
    def rank(world):
        session = Session(world, MODEL, plan=plan_of("cb", "a", codec="onebit"), codec="onebit")
        for index in range(3):
            values = gradient(world.rank, 0, index)
            session.put(index, values * (np.nan if (index, world.rank) == (1, 1) else 1.0))
        session.wait()

    for found in world_outcomes(2, rank):
        assert isinstance(found, NonFiniteError)
        assert "the gradient of 'b' holds NaN or infinity on some rank" in str(found)


def test_nan_that_is_known_before_all_gradients_came_is_raised_once_nothing_is_under_way():
    """Another iteration, or a state that is loaded, would meet what is still sent and written."""
    is_waiting = threading.Event()

    def rank(world):
        session = Session(world, MODEL, plan=plan_of("b", "ca", codec="onebit"), codec="onebit")
        session.put(1, np.full(MODEL[1].shape, np.nan, np.float32))
        deadline = time.monotonic() + 30
        while session.exchange.failure is None and time.monotonic() < deadline:
            time.sleep(0.001)
        if world.rank == 1:
            is_waiting.wait(30)
            time.sleep(0.2)  # in which rank 0 would have raised
        for index in (2, 0):
            session.put(index, gradient(world.rank, 0, index))
        started = list(session.exchange._iteration.futures)
        is_waiting.set()
        with pytest.raises(NonFiniteError):
            session.wait()
        return [each.done() for each in started]

    assert run_worlds(2, rank) == [[True, True]] * 2


def test_in_halves_too_a_state_that_is_loaded_ends_nan():
    def rank(world):
        session = Session(world, MODEL, plan=plan_of("cb", "a", codec="onebit"), codec="onebit", halves=True)
        before = session.state_dict()
        for index in range(3):
            session.put(index, np.full(MODEL[index].shape, np.nan, np.float32))

        def leave_and_arrive():
            session.leave()
            session.arrive(0)

        with pytest.raises(NonFiniteError):
            leave_and_arrive()
        session.land()  # nothing more comes of that iteration
        session.load_state_dict([{**before, "rank": each} for each in range(2)])
        for index in range(3):
            session.put(index, np.ones(MODEL[index].shape, np.float32))
        session.leave()
        return session.arrive(0)

    for average in run_worlds(2, rank):
        np.testing.assert_array_equal(average, np.ones(37))


def test_residuals_that_are_read_after_a_skipped_step_are_those_before_it():
    def rank(world):
        session = Session(world, MODEL, plan=plan_of("cb", "a", codec="onebit"), codec="onebit", on_nonfinite="skip")
        found = []
        for value in (1.0, np.nan):
            for index in range(3):
                session.put(index, gradient(world.rank, 0, index) * np.float32(value if index == 1 else 1))
            session.wait()
            found.append(residuals_of(session))
        return found

    for before, skipped in run_worlds(2, rank):
        assert before["a"].any()
        for name in before:
            np.testing.assert_array_equal(skipped[name], before[name])


@pytest.mark.parametrize("codec", [None, "onebit", "sparse(density=0.1)"])
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_what_one_rank_refuses_is_raised_on_all_ranks(codec, on_nonfinite):
    """The others have put all their gradients, and wait for this one's."""
    strategy = "gtopk_doubling" if codec and "sparse" in codec else "ring"

    def rank(world):
        session = Session(
            world, MODEL, plan=plan_of("cb", "a", strategy=strategy, codec=codec), on_nonfinite=on_nonfinite
        )
        if world.rank == 1:
            session.refuse("'b' is stale; give it a gradient")
        for index in range(3):
            session.put(index, gradient(world.rank, 0, index))
        session.wait()

    for found in world_outcomes(2, rank):
        assert isinstance(found, PlanError)
        assert str(found) == "rank 1: 'b' is stale; give it a gradient"


def test_after_a_refusal_without_a_codec_training_goes_on():
    def rank(world):
        session = Session(world, MODEL, plan=plan_of("cba"))
        with pytest.raises(PlanError):
            session.refuse("no")
        for index in range(3):
            session.put(index, gradient(world.rank, 1, index))
        return [each.copy() for each in session.wait()]

    for averages in run_worlds(2, rank):
        for average, wanted in zip(averages, means(2, 1), strict=True):
            np.testing.assert_array_equal(average, wanted)


def test_dense_nan_reaches_all_ranks_as_with_any_all_reduce():
    def rank(world):
        session = Session(world, MODEL, plan=plan_of("cba"))
        for index in range(3):
            session.put(index, np.full(MODEL[index].shape, np.nan if world.rank else 1.0, np.float32))
        return session.wait()[0]

    assert all(np.isnan(found).all() for found in run_worlds(2, rank))


def test_a_rank_that_dies_is_named_on_all_others():
    fabrics = Fabrics(3)

    def rank(world):
        session = Session(world, MODEL, plan=plan_of("cba", workers=3))
        if world.rank == 1:
            fabrics.kill(1)
            return None
        for index in range(3):
            session.put(index, gradient(world.rank, 0, index))
        return session.wait()

    found = world_outcomes(3, rank, timeout_seconds=20, fabrics=fabrics)
    for each in (found[0], found[2]):
        assert isinstance(each, TransportError)
        assert "rank 1" in str(each)


def test_calls_in_the_wrong_way_are_refused():
    def rank(world):
        session = Session(world, MODEL)
        told = []
        session.put(0, gradient(0, 0, 0))
        for call in (
            lambda: session.put(0, gradient(0, 0, 0)),
            lambda: session.put(1, np.zeros((30, 20), np.float32)),
            lambda: session.put(1, np.zeros((20, 30), np.float64)),
            session.wait,
            lambda: Session(world, [MODEL[0], MODEL[0]]),
            lambda: Session(world, []),
            lambda: Session(world, [Gradient("a", (3,), "int32")]),
        ):
            with pytest.raises(PlanError) as error:
                call()
            told.append(str(error.value))
        return told

    (told,) = run_worlds(1, rank)
    assert "came twice in one iteration" in told[0]
    assert "has shape (30, 20); wanted (20, 30)" in told[1]
    assert "is of float64; wanted float32" in told[2]
    assert "'c' and 1 more have not come" in told[3] or "'b' and 1 more have not come" in told[3]
    assert "two gradients are called 'a'" in told[4]
    assert "no gradients" in told[5]
    assert "'a', (3,) of int32; wanted one of float64" in told[6]
    with pytest.raises(TypeError, match="unexpected keyword argument 'codecs'"):
        run_worlds(1, lambda world: Session(world, MODEL, codecs="onebit"))
    with pytest.raises(CodecError):
        run_worlds(1, lambda world: Session(world, MODEL, codec="no such"))


def test_an_adaptive_optimizer_with_a_coarse_codec_is_warned_of_once():
    def rank(world):
        session = Session(world, MODEL, codec="onebit")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for name, adaptive in (("SGD", False), ("Adam", True), ("Adam", True)):
                session.watch_optimizer(name, adaptive=adaptive)
        return [str(each.message)[:25] for each in caught]

    assert run_worlds(1, rank) == [["codec 'onebit' with Adam: "[:25]]]


def test_sparse_rows_of_all_ranks_are_gathered_and_divided():
    def rank(world):
        session = Session(world, MODEL)
        rows = np.full((1 + world.rank, 2), 1.0 + world.rank, np.float32)
        indices = np.arange(1 + world.rank)
        return session.gather_sparse("embedding", indices, rows, 200), session.bytes_sent()

    for (indices, rows), sent in run_worlds(2, rank):
        np.testing.assert_array_equal(indices, [0, 0, 1])
        np.testing.assert_array_equal(rows, [[0.5, 0.5], [1.0, 1.0], [1.0, 1.0]])
        assert sent.dense_nbytes == 800


def test_a_plan_whose_buckets_are_sent_after_the_backward_pass_works_too():
    plan = replace(plan_of("c", "ba"), overlap=False)
    for found, _ in run_worlds(2, lambda world: train(world, plan=plan)):
        np.testing.assert_array_equal(found[2][1], means(2, 2)[1])


def test_after_an_error_in_planning_the_next_iteration_goes_on(monkeypatch):
    def rank(world):
        session = Session(world, MODEL, profile_iterations=4)
        monkeypatch.setattr(session, "_go_on_planning", lambda: 1 / 0)
        for index in (2, 1, 0):
            session.put(index, gradient(0, 0, index))
        with pytest.raises(ZeroDivisionError):
            session.wait()
        monkeypatch.undo()
        for index in (2, 1, 0):
            session.put(index, gradient(0, 1, index))
        return [each.copy() for each in session.wait()]

    for average, wanted in zip(run_worlds(1, rank)[0], means(1, 1), strict=True):
        np.testing.assert_array_equal(average, wanted)


def test_an_iteration_that_is_abandoned_leaves_nothing_to_the_next():
    def rank(world):
        session = Session(world, MODEL, plan=plan_of("c", "ba"))
        session.abandon()  # nothing has come
        session.put(2 - world.rank, gradient(world.rank, 0, 2 - world.rank))  # another one on each rank
        session.abandon()
        for index in (2, 1, 0):
            session.put(index, gradient(world.rank, 1, index))
        return [each.copy() for each in session.wait()]

    for averages in run_worlds(2, rank):
        for average, wanted in zip(averages, means(2, 1), strict=True):
            np.testing.assert_array_equal(average, wanted)
