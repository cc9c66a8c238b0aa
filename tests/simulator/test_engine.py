from random import Random

import pytest

from penstock.simulator.engine import DeadlockError, Ran, Task, run_tasks


def test_a_resource_serves_one_task_at_a_time_in_list_order():
    ran = run_tasks([Task(2.0, ("link",)), Task(1.0, ("link",)), Task(1.0, ("cpu",), after=(0,))])
    assert ran == [Ran(0.0, 2.0), Ran(2.0, 3.0), Ran(2.0, 3.0)]


def test_a_task_waits_for_all_its_resources_without_blocking_others():
    ran = run_tasks([Task(3.0, ("a",)), Task(1.0, ("a", "b")), Task(1.0, ("b",))])
    assert [r.start_seconds for r in ran] == [0.0, 3.0, 0.0]


def test_zero_length_tasks_release_their_followers_at_once():
    assert run_tasks([Task(0.0), Task(0.0, after=(0,)), Task(1.0, after=(1,))])[2] == Ran(0.0, 1.0)


def test_a_dependency_named_twice_counts_once():
    assert run_tasks([Task(1.0), Task(1.0, after=(0, 0))])[1] == Ran(1.0, 2.0)


def test_no_tasks_take_no_time():
    assert run_tasks([]) == []


def test_a_cycle_is_our_mistake_and_is_named():
    with pytest.raises(DeadlockError, match=r"tasks \[0, 1\] never become ready"):
        run_tasks([Task(1.0, after=(1,)), Task(1.0, after=(0,))])


def test_tasks_on_a_pool_share_its_cores_evenly():
    """The module's own picture, drawn by hand."""
    tasks = [Task(2.0, pool="host"), Task(2.0, pool="host"), Task(1.0), Task(2.0, after=(2,), pool="host")]
    ran = run_tasks(tasks, {"host": 2})
    assert [(each.start_seconds, each.end_seconds) for each in ran] == [
        (0.0, pytest.approx(2.5)),
        (0.0, pytest.approx(2.5)),
        (0.0, 1.0),
        (1.0, pytest.approx(3.5)),
    ]


def test_a_pool_with_a_core_for_each_task_changes_nothing():
    tasks = [Task(2.0, ("lock",), pool="host"), Task(1.0, ("lock",), pool="host"), Task(4.0, pool="host")]
    alone = run_tasks(tasks)
    assert run_tasks(tasks, {"host": 2}) == alone == [Ran(0.0, 2.0), Ran(2.0, 3.0), Ran(0.0, 4.0)]


@pytest.mark.parametrize("seed", range(20))
def test_no_core_of_a_pool_rests_while_tasks_wait_for_one(seed):
    """Against small steps of time: in each, every task on the pool gets the same share of the cores."""
    random = Random(seed)
    cores, step = random.randint(1, 3), 1e-3
    tasks = [
        Task(random.uniform(0.1, 2.0), pool="host", after=tuple(random.sample(range(i), min(i, random.randint(0, 2)))))
        for i in range(8)
    ]
    left, ends, now = [task.seconds for task in tasks], [0.0] * 8, 0.0
    while any(each > 0 for each in left):
        going = [i for i in range(8) if left[i] > 0 and all(left[j] <= 0 for j in tasks[i].after)]
        now += step
        for i in going:
            left[i] -= step * min(1.0, cores / len(going))
            ends[i] = now
    assert [each.end_seconds for each in run_tasks(tasks, {"host": cores})] == pytest.approx(ends, abs=20 * step)
