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
