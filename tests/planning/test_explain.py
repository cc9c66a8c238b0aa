from dataclasses import replace

import pytest

from penstock.cost.ways import Way
from penstock.exchange.traffic import Sent
from penstock.network import LinearCost
from penstock.planners import find_planner
from penstock.planning.explain import explain, of_queued
from penstock.planning.observed import Drift
from penstock.planning.planning import Decision
from penstock.simulator.iteration import predict
from penstock.timeline import COMPUTE, Span, Timeline
from penstock.trace import Tensor, Trace

TRACE = Trace("toy", "none", 1, "float32", 0.1, (Tensor("a", 10, 0.1), Tensor("b", 10, 0.1)))
PLAN = predict(TRACE, find_planner("single"), [Way("native", (LinearCost(0.2, 0.0),))], 2)


def told(last, decision=None):
    return explain(decision or Decision(PLAN, TRACE), "", 5, 5, [0.6], Drift(0.0), last)


def measured(computing, sending):
    spans = Span("backward", COMPUTE, 0.0, computing), Span("all", "network", computing, computing + sending)
    return Timeline(spans)


@pytest.mark.parametrize(
    ("computing", "sending", "words"),
    [(0.45, 0.2, "computation took 1.50 and communication 1.00 times"), (0.3, 0.3, "took 1.00 and communication 1.50")],
)
def test_what_takes_longer_than_predicted_is_named(computing, sending, words):
    assert words in told(measured(computing, sending))


def test_an_iteration_as_predicted_needs_no_words():
    assert "last iteration" not in told(measured(0.31, 0.21))
    assert "last iteration" not in told(None)


def test_a_plan_that_was_given_predicts_nothing_to_compare_with():
    assert "last iteration" not in told(measured(9.0, 9.0), Decision(PLAN))


def test_what_the_hosts_clock_cannot_time_is_said():
    assert of_queued([Sent("c", 0.0, 1.0)]) == ""
    sent = [Sent("a", 0.0, 1e-4, True), Sent("b", 0.0, 1e-4, True), Sent("c", 0.0, 1.0)]
    words = explain(Decision(PLAN, TRACE), "", 5, 5, [0.6], Drift(0.0), unmeasured=of_queued(sent)).splitlines()
    assert [line for line in words if "not measured" in line] == [
        "2 of 3 buckets were queued on the GPU: torch's events there time communication as a whole; "
        "single buckets and their instructions are not measured"
    ]


def test_messages_that_computing_slows_are_named():
    assert "messages take" not in told(None)
    words = told(None, Decision(PLAN, TRACE, slowdown=1.84))
    assert "this counts that messages take 1.84 times as long while gradients are computed" in words


def test_planners_are_compared_by_one_model_and_the_plans_own_time_in_it_is_said():
    decision = Decision(PLAN, TRACE, alternatives=(("single", 0.45), ("exact", 0.4)))
    assert "other planners would take: exact 400 ms" in told(None, decision)
    slowed = Decision(PLAN, TRACE, alternatives=(("single", 0.45), ("exact", 0.4)), slowdown=1.5)
    assert "planners compared without that: single 450 ms, exact 400 ms" in told(None, slowed)


def test_what_iterations_have_shown_is_said_behind_what_they_took():
    learnt = Decision(replace(PLAN, iteration_seconds=0.61), TRACE, slowdown=1.7)
    words = explain(Decision(PLAN, TRACE), "", 5, 5, [0.6], Drift(0.0), learnt=learnt).splitlines()
    assert words[3] == (
        "so messages take 1.70 times as long while gradients are computed: predicted iteration 610 ms with that, which "
        "a next plan counts"
    )
    assert "so messages" not in explain(Decision(PLAN, TRACE), "", 5, 5, [0.6], Drift(0.0), learnt=Decision(PLAN))
