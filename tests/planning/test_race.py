"""A race of plans: who is the fastest, against times made up for it."""

from collections.abc import Callable
from dataclasses import replace

import torch_measuring as training
from penstock.plan import Bucket, Plan
from penstock.planning.observed import COUNTED, SKIPPED, TURNS, Race
from spawn import spawn

PLANS = tuple(
    Plan("toy", 2, "joint", (Bucket((f"t{size}",), size, "ring"),), iteration_seconds=0.1) for size in (4, 8, 12)
)


def raced(seconds: Callable[[Plan, int], float]) -> Race:
    race = Race(PLANS)
    while not race.is_over:
        race.note(seconds(race.current, race.iterations))
    return race


def test_each_plan_has_its_turns_and_the_fastest_is_kept() -> None:
    order = []

    def seconds(plan: Plan, _: int) -> float:
        order.append(plan)
        return 0.2 - plan.buckets[0].nbytes / 100

    race = raced(seconds)
    turn = SKIPPED + COUNTED
    assert order == [plan for _ in range(TURNS) for plan in PLANS for _ in range(turn)]
    assert PLANS[race.fastest] == PLANS[2]
    assert race.said() == (
        f"raced 3 plans for {3 * TURNS * turn} iterations: {PLANS[0].hash} (1 messages, predicted 100 ms) 160 ms; "
        f"{PLANS[1].hash} (1 messages, predicted 100 ms) 120 ms; {PLANS[2].hash} (1 messages, predicted 100 ms) 80 ms; "
        "the fastest is kept"
    )


def test_the_first_iteration_of_a_turn_and_a_busy_turn_do_not_count() -> None:
    """A new plan builds its programs in its first iteration; and the last plan's first turn is disturbed."""

    def seconds(plan: Plan, iteration: int) -> float:
        first = iteration % (SKIPPED + COUNTED) < SKIPPED
        disturbed = plan == PLANS[2] and iteration < 3 * (SKIPPED + COUNTED)
        return 9.0 if first or disturbed else 0.2 - plan.buckets[0].nbytes / 100

    assert PLANS[raced(seconds).fastest] == PLANS[2]


def test_of_plans_that_take_the_same_the_predicted_one_stays() -> None:
    race = Race(PLANS)
    race.note(0.1)
    assert race.said() == "racing 3 plans: 1 of 30 iterations"
    assert raced(lambda plan, iteration: 0.1).fastest == 0
    assert replace(PLANS[0], planner="other").hash == PLANS[0].hash  # what a race tells apart is what is sent


def test_plans_take_turns_in_training_and_all_ranks_keep_the_same_one() -> None:
    """Two iterations are profiled; the plan is in force from the third on, and the race begins with it."""
    turn = SKIPPED + COUNTED
    race = 2 * TURNS * turn
    (found, said, alike), (other, _, _) = spawn(2, training.raced, 2 + race + 3)
    assert found == other
    assert alike
    first, rival = found[2], found[2 + turn]
    assert found[:2] == ["", ""]
    assert found[2 : 2 + race] == ([first] * turn + [rival] * turn) * TURNS
    assert first != rival
    assert set(found[2 + race :]) <= {first, rival}
    assert len(set(found[2 + race :])) == 1
    assert f"raced 2 plans for {race} iterations: {first} (" in said
