"""Drift: when a plan is made again, and when not."""

import torch_measuring as training
from penstock.planning.observed import WINDOW, Drift
from spawn import spawn


def watched(drift, seconds, iterations):
    """Let so many iterations pass; return at which of them a new plan was due and wanted."""
    due = []
    for _ in range(iterations):
        drift.note(seconds)
        if drift.is_due and drift.drifted:
            due.append(drift.iterations)
            drift.replanned("hash", drift.predicted_seconds)
    return due


def test_communication_as_predicted_leads_to_no_plan():
    assert watched(Drift(0.3, predicted_seconds=1.0), 1.29, 200) == []


def test_slower_and_faster_communication_both_lead_to_a_plan_after_a_window():
    assert watched(Drift(0.3, predicted_seconds=1.0), 1.31, WINDOW) == [WINDOW]
    assert watched(Drift(0.3, predicted_seconds=1.0), 0.69, WINDOW) == [WINDOW]


def test_planning_again_in_vain_gets_rarer():
    due = watched(Drift(0.3, predicted_seconds=1.0), 2.0, 16 * WINDOW)
    assert due == [WINDOW, 2 * WINDOW, 4 * WINDOW, 8 * WINDOW, 16 * WINDOW]


def test_ranks_that_measure_nothing_count_as_those_that_do():
    first, other = Drift(0.3, predicted_seconds=1.0), Drift(0.3, predicted_seconds=1.0)
    for _ in range(WINDOW):
        first.note(2.0)
        other.note(None)
    assert first.is_due
    assert other.is_due
    assert not other.drifted


def test_a_plan_for_a_network_that_is_long_gone_is_made_again_between_iterations():
    for before, after, explained, same in spawn(2, training.drift_away):
        assert before != after
        assert same
        assert "planning again when communication drifts by 50%: on, 1 times so far" in explained
        assert f"plan {after} since then" in explained
