"""Will it pay? Yes, no, unsure, and by merging alone, where a hand calculation says so."""

from dataclasses import replace

import pytest

from penstock.errors import PlanError
from penstock.exchange.compression import AUTO_CODECS
from penstock.network import LinearCost, Network
from penstock.plan import Route
from penstock.planning.worth import Sample, Worth, described_network, described_routes, with_gpus, worth
from penstock.trace import Tensor, Trace


def trace_of(tensors: int, numel: int, backward_seconds: float) -> Trace:
    parts = tuple(Tensor(f"layer{place}", numel, backward_seconds / tensors) for place in range(tensors))
    return Trace("toy", "NVIDIA H200", 8, "float32", 0.01, parts)


def asked(trace: Trace, gigabits: float | None, workers: int = 4, optimizer: str = "adamw", **more: float) -> Worth:
    rate = None if gigabits is None else gigabits * 1e9
    network = with_gpus(described_network(workers, rate, 50e-6))
    return worth(trace, network, described_routes(on_gpu=True), optimizer, **more)


LARGE = trace_of(10, 10_000_000, 0.02)  # 400 MB of gradients, 30 ms of computation


def test_a_slow_network_is_worth_four_bits_and_says_what_to_write():
    found = asked(LARGE, 1)  # 400 MB at 1 Gb/s: 2 * 3/4 * 400e6 * 8e-9 = 4.8 s
    assert found.stock_seconds == pytest.approx(4.8, rel=0.02)
    assert found.codec == "blocks(bits=4)"
    assert 5 < found.stock_seconds / found.advised_seconds < 8  # an eighth of the bytes at best
    assert found.code == 'DDP(model, codec="blocks(bits=4)")'
    assert len(lines := list(found.lines())) == 5
    assert lines[3].startswith("answer           yes")


def test_every_message_of_a_coded_plan_is_encoded_as_the_advised_line_does_it():
    plan = asked(LARGE, 1).coded["blocks(bits=4)"]
    assert {bucket.codec for bucket in plan.buckets} == {"blocks(bits=4)"}


def test_a_network_that_computation_hides_is_a_no():
    found = asked(trace_of(10, 1000, 0.02), 100)
    assert found.code == ""
    assert "no: computation hides the network already" in list(found.lines())[3]


@pytest.mark.parametrize("gigabits", [1600, None])
def test_the_fastest_networks_are_a_no_also_for_large_models(gigabits):
    found = asked(trace_of(10, 10_000_000, 0.2), gigabits)
    assert found.verdict == "no"
    assert found.code == ""


def test_sums_on_a_gpu_run_at_the_speed_of_its_memory():
    """At 100 Gb/s a byte takes 80 ps; sums of 100 ps a byte, as on a processor, would take longer than sending."""
    spans = asked(LARGE, 100).stock.timeline.lane("network")
    sent = 2 * 3 / 4 * 400e6 * 8e-11  # of a ring of 4; 3/4 of the bytes are summed, once
    assert sum(span.seconds for span in spans) < 1.1 * sent


def test_what_waits_is_what_computation_does_not_hide():
    found = asked(LARGE, 1)
    assert found.waiting_seconds == pytest.approx(found.stock_seconds - 0.03)


def test_the_optimizers_step_counts_in_every_iteration_and_waits_for_nothing():
    plain, with_step = asked(LARGE, 1), asked(LARGE, 1, step_seconds=0.5)
    assert with_step.stock_seconds == pytest.approx(plain.stock_seconds + 0.5)
    assert with_step.advised_seconds == pytest.approx(plain.advised_seconds + 0.5)
    assert with_step.waiting_seconds == pytest.approx(plain.waiting_seconds)


def test_an_optimizer_that_nothing_is_recorded_about_is_offered_rounding_only():
    assert list(asked(LARGE, 1).coded) == list(AUTO_CODECS)
    assert list(asked(LARGE, 1, optimizer="other").coded) == ["bf16"]


def measured_network(**lines: LinearCost) -> Network:
    return Network(4, 50e-6, 8e-9, 1e-10, all_reduce=lines)


def test_stock_is_the_engines_own_all_reduce_however_slow_it_is():
    slow, fast = LinearCost(0.0, 4e-9), LinearCost(0.0, 1e-9)  # 400 MB: 1.6 and 0.4 s
    network = measured_network(native=slow, ring=fast)
    found = worth(LARGE, network, [Route("native"), Route("ring")], "adamw")
    assert {bucket.strategy for bucket in found.stock.buckets} == {"native"}
    assert found.stock_seconds == pytest.approx(1.6, rel=0.05)
    assert {bucket.strategy for bucket in found.merged.buckets} == {"ring"}


def test_codecs_that_were_not_measured_are_listed_with_what_they_take_at_least():
    network = measured_network(native=LinearCost(0.0, 4e-9))
    found = worth(LARGE, network, [Route("native")], "adamw", {"blocks(bits=4)": 0.25})
    assert "not measured: blocks(bits=4) at least 250 ms" in list(found.lines())[2]


def measured(stock: Sample, advised: Sample | None = None) -> Worth:
    return replace(asked(LARGE, 1, step_seconds=0.1), stock_sample=stock, advised_sample=advised)


def test_what_stock_takes_longer_than_predicted_is_saved_by_no_plan():
    predicted, found = asked(LARGE, 1, step_seconds=0.1), measured(Sample(6.0, 0.01))
    longer = 6.0 - predicted.stock_seconds
    assert longer > 1
    assert found.stock_seconds == 6.0
    assert found.advised_seconds == pytest.approx(predicted.advised_seconds + longer)


def test_where_stock_takes_less_than_predicted_all_predictions_are_scaled():
    predicted, found = asked(LARGE, 1, step_seconds=0.1), measured(Sample(2.0, 0.01))
    assert found.stock_seconds == pytest.approx(2.0)
    assert found.advised_seconds / 2.0 == pytest.approx(predicted.advised_seconds / predicted.stock_seconds)


@pytest.mark.parametrize("seconds", [2.0, 6.0])
def test_the_picture_ends_where_the_measured_iteration_does(seconds):
    picture = measured(Sample(seconds, 0.01), Sample(0.4 * seconds, 0.01)).picture()
    ends = {line.split(" |")[0].strip(): line.rsplit("| ", 1)[1] for line in picture}
    assert ends["stock compute"] == f"{1e3 * seconds:.4g} ms"  # the optimizer's step is the last
    assert ends["advised compute"] == f"{400 * seconds:.4g} ms"


@pytest.mark.parametrize(
    ("stock", "advised", "verdict"),
    [
        (Sample(5.0, 0.02), Sample(1.0, 0.03), "yes"),
        (Sample(5.0, 0.30), Sample(1.0, 0.03), "yes"),  # 80% saved: more than they differ by
        (Sample(5.0, 0.30), Sample(4.0, 0.03), "unsure"),
        (Sample(5.0, 0.02), Sample(4.9, 0.03), "no"),
        (Sample(5.0, 0.02), Sample(7.0, 0.03), "no"),
        (Sample(5.0, 0.20), Sample(5.5, 0.03), "unsure"),
    ],
)
def test_a_measured_answer_is_as_sure_as_the_spread_allows(stock, advised, verdict):
    found = measured(stock, advised)
    assert found.verdict == verdict
    answer = list(found.lines())[3]
    assert answer.startswith(f"answer           {verdict}: ")
    if verdict == "unsure":
        assert f"spread {stock.spread:.0%}" in answer


def test_even_a_no_is_unsure_where_iterations_differ_by_much():
    found = replace(asked(trace_of(10, 1000, 0.02), 100), stock_sample=Sample(0.04, 0.4))
    assert found.verdict == "unsure"


def test_a_predicted_gain_within_the_error_of_predictions_is_unsure():
    found = asked(trace_of(10, 10_000_000, 0.05), 100)
    assert 0.05 < found.saved < 0.13
    assert found.verdict == "unsure"
    assert "measure it" in list(found.lines())[4]


def test_a_gain_by_merging_and_codec_together_is_compared_with_stock():
    """DenseNet's many small tensors: what is advised saves 5% of stock's iteration, or nothing listed does."""
    found = asked(trace_of(200, 40_000, 0.002), 10, workers=16)
    seconds = [found.seconds_of(plan) for plan in (found.merged, *found.coded.values())]
    assert (found.advised is found.stock) == (min(seconds) > 0.95 * found.stock_seconds)


def test_the_picture_shows_stock_above_what_is_advised():
    picture = asked(trace_of(4, 10_000_000, 0.02), 1).picture()
    assert [line.split(" |")[0].strip() for line in picture] == [
        "stock compute", "stock network", "advised compute", "advised network"
    ]  # fmt: skip


def test_an_unknown_optimizer_is_refused_with_the_nearest_name():
    with pytest.raises(PlanError, match=r"found 'sgdd'; wanted one of adamw, adam, sgd, other \(did you mean 'sgd'"):
        asked(trace_of(2, 10, 0.01), 1, optimizer="sgdd")
