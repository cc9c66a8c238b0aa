"""A bucket's clock takes what was measured of its route, and in lanes no more of the cores than there are."""

from dataclasses import replace

import pytest

from penstock.cost.ways import way_for
from penstock.curves import CodecCurves, Curve
from penstock.network import LinearCost, Network, least_nbytes
from penstock.plan import Bucket, Plan, Route
from penstock.simulator.calibrate import clock_of
from penstock.simulator.composition import simulate_plan
from penstock.simulator.program import Translation, program_seconds
from penstock.trace import Tensor, Trace

CURVES = CodecCurves(1 / 32, Curve(1e-9, 1e-5), Curve(5e-10, 1e-5))
LINE = LinearCost(5e-3, 1e-9, 0.0, least_seconds=4e-3, least_core_seconds=1e-3, core_seconds_per_byte=2e-10)
ROUTE = Route("ring", "onebit")
LEAST_NBYTES = least_nbytes(4)
SHARED = Network(
    4, 3e-4, 8e-9, 1e-10, {str(ROUTE): LINE}, {"onebit": CURVES}, cores=2, ranks_per_machine=4
)  # four ranks on one machine of two cores
APART = replace(SHARED, ranks_per_machine=1)


def bucket(nbytes: int) -> Bucket:
    return Bucket(("t",), nbytes, ROUTE.strategy, ROUTE.codec)


def timed(network: Network, nbytes: int):
    return clock_of(network, 4, bucket(nbytes), [nbytes // 4], way_for(network, ROUTE))


@pytest.mark.parametrize("network", [SHARED, APART], ids=["one machine", "four machines"])
@pytest.mark.parametrize("nbytes", [1 << 21, 1 << 24, 1 << 27])
def test_a_bucket_alone_takes_what_its_line_says_wherever_ranks_are(network, nbytes):
    program, clock = timed(network, nbytes)
    alone = program_seconds(program, network, clock.itemsize, clock.codec, clock.overhead)
    assert clock.pace * alone == pytest.approx(LINE.seconds(nbytes))
    assert clock.pace == pytest.approx(1.0, abs=0.01)


def test_the_shortest_message_takes_what_was_measured_of_it_and_not_the_startup_of_the_line():
    program, clock = timed(SHARED, LEAST_NBYTES)
    alone = clock.pace * program_seconds(program, SHARED, clock.itemsize, clock.codec, clock.overhead)
    assert alone == pytest.approx(LINE.least_seconds, rel=0.01)


@pytest.mark.parametrize("nbytes", [LEAST_NBYTES, 1 << 21, 1 << 27])
def test_a_program_takes_of_the_cores_what_was_measured(nbytes):
    program, clock = timed(SHARED, nbytes)
    tasks, _ = Translation(program, SHARED, clock.itemsize, clock.codec, None, clock.overhead).tasks()
    used = sum(task.seconds for task in tasks if task.pool is not None) / 4
    assert used == pytest.approx(LINE.least_core_seconds + LINE.core_seconds_per_byte * nbytes, rel=0.01)


def plan_of(count: int, nbytes: int) -> tuple[Trace, Plan]:
    tensors = tuple(Tensor(f"t{i}", nbytes // 4, 0.0) for i in range(count))
    buckets = tuple(Bucket((each.name,), nbytes, ROUTE.strategy, ROUTE.codec) for each in tensors)
    return Trace("toy", "paper", 1, "float32", 0.0, tensors), Plan("toy", 4, "any", buckets)


def test_lanes_share_latencies_and_not_the_cores():
    """Eight shortest messages: 4 ms each, of which a rank has 1 ms of a core, so that 4 ranks on 2 cores have 2 ms."""
    trace, plan = plan_of(8, LEAST_NBYTES)
    ways = [way_for(SHARED, ROUTE)]
    one, four = (simulate_plan(plan, trace, ways, SHARED, lanes).iteration_seconds for lanes in (1, 4))
    assert one == pytest.approx(8 * 4e-3, rel=0.02)
    assert 8 * 2e-3 <= four <= 1.2 * 8 * 2e-3
    apart = simulate_plan(plan, trace, [way_for(APART, ROUTE)], APART, 4).iteration_seconds
    assert apart < four  # each rank has two cores


def test_long_messages_that_keep_the_cores_busy_gain_little_from_lanes():
    busy = replace(LINE, core_seconds_per_byte=4.5e-10)  # 0.9 ns of 1 ns a byte
    network = replace(SHARED, all_reduce={str(ROUTE): busy})
    trace, plan = plan_of(4, 1 << 25)
    ways = [way_for(network, ROUTE)]
    one, four = (simulate_plan(plan, trace, ways, network, lanes).iteration_seconds for lanes in (1, 4))
    assert 0.8 <= four / one <= 1.0
    idle = replace(network, all_reduce={str(ROUTE): replace(busy, core_seconds_per_byte=1e-10)})
    assert simulate_plan(plan, trace, [way_for(idle, ROUTE)], idle, 4).iteration_seconds < 0.6 * one


def test_cores_that_a_program_cannot_have_waited_for_are_taken_while_bytes_travel():
    """A core time of 0.45 ns a byte on the path of a message, and what the wire takes, would be 1.3 times its line."""
    busy = replace(LINE, core_seconds_per_byte=4.5e-10, b_seconds_per_byte=9.5e-10)
    network, nbytes = replace(SHARED, all_reduce={str(ROUTE): busy}), 1 << 25
    program, clock = timed(network, nbytes)
    assert clock.overhead is not None
    assert clock.overhead.moving_seconds > 0
    tasks, _ = Translation(program, network, clock.itemsize, clock.codec, None, clock.overhead).tasks()
    used = clock.pace * sum(task.seconds for task in tasks if task.pool is not None) / 4
    assert used == pytest.approx(1e-3 + 4.5e-10 * nbytes, rel=0.05)  # it was 0.76 of that


def test_a_tensor_that_is_not_cut_takes_what_its_few_instructions_take():
    program, clock = timed(SHARED, 1 << 12)  # one piece, that goes round once: 6 messages beside the 24 of 16 KB
    alone = clock.pace * program_seconds(program, SHARED, clock.itemsize, clock.codec, clock.overhead)
    tasks, _ = Translation(program, SHARED, clock.itemsize, clock.codec, None, clock.overhead).tasks()
    used = clock.pace * sum(task.seconds for task in tasks if task.pool is not None) / 4
    assert LINE.least_core_seconds is not None
    assert LINE.least_seconds is not None
    assert used < 0.5 * LINE.least_core_seconds
    assert alone < LINE.least_seconds
