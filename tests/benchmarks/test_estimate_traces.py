"""The estimate against the roofline by hand, the shipped files, and the K80 measurements of MG-WFBP's authors."""

import csv
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from architectures import ARCHITECTURES, Architecture, Layer, Parameter, Work
from estimate_traces import V100, Device, estimate_trace, kernel_seconds, write_estimates
from penstock.trace import Tensor, Trace, load_trace, save_trace
from penstock.traces import load_shipped, shipped

SIMPLE = Device("a simple device", 2e9, 0.5, 8e9, 0.5, 1e-3)  # 5e8 multiply-accumulates or 1e9 fp32 elements per second
MEASURED = next((p / "shared/data/traces" for p in Path(__file__).parents if (p / "shared/data/traces").is_dir()), None)
needs_measurements = pytest.mark.skipif(MEASURED is None, reason="needs shared/data/traces above the checkout")
works = st.builds(Work, *[st.integers(0, 10**9)] * 3, st.integers(1, 100))


def toy_layers():
    learns = Layer("a", (Work(macs=5 * 10**6),), (Work(macs=10**7),), (Parameter("a.weight", (3, 2)),))
    activates = Layer("relu", (Work(activations=10**6),), (Work(activations=2 * 10**6),))
    pair = (Parameter("b.bias", (4,)), Parameter("b.weight", (4, 3)))
    return learns, activates, Layer("b", (Work(weights=10**6),), (Work(weights=3 * 10**6),), pair)


def test_a_trace_by_hand():
    trace = estimate_trace(Architecture("toy", 2, "nothing", toy_layers), SIMPLE)
    assert trace.forward_seconds == pytest.approx(0.021 + 0.003 + 0.002)
    assert [(t.name, t.numel) for t in trace.tensors] == [("b.bias", 4), ("b.weight", 12), ("a.weight", 6)]
    # layer b alone; ready together with its bias; the activation's 5 ms and layer a's own 41 ms
    assert [t.backward_seconds for t in trace.tensors] == pytest.approx([0.004, 0, 0.005 + 0.041])
    assert trace.times == "estimated"


def test_half_as_wide_elements_halve_the_traffic_only():
    moving, computing = Work(activations=10**6), Work(macs=10**6)
    assert kernel_seconds(moving, 1, 2, SIMPLE) == pytest.approx(0.001 + 0.0005)
    assert kernel_seconds(computing, 1, 2, SIMPLE) == kernel_seconds(computing, 1, 4, SIMPLE)


@given(works, st.integers(1, 512))
def test_a_kernel_takes_at_least_its_launches_and_never_less_for_a_larger_batch(work, batch):
    seconds = kernel_seconds(work, batch, 4, V100)
    assert seconds >= work.launches * V100.launch_seconds
    assert kernel_seconds(work, batch + 1, 4, V100) >= seconds


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_backward_takes_between_one_and_a_half_and_twice_the_forward_pass(name):
    trace = estimate_trace(ARCHITECTURES[name])
    assert 1.5 < trace.backward_seconds / trace.forward_seconds < 2.1


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_time_is_below_the_arithmetic_at_peak(name):
    architecture = ARCHITECTURES[name]
    flops = 2 * sum(work.macs for layer in architecture.layers() for work in (*layer.forward, *layer.backward))
    trace = estimate_trace(architecture)
    assert trace.compute_seconds > architecture.batch * flops / V100.flops_per_second


def test_there_is_one_shipped_trace_per_architecture():
    assert shipped() == tuple(sorted(ARCHITECTURES))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_shipped_sizes_are_those_of_the_architecture(name):
    expected = {p.name: p.numel for layer in ARCHITECTURES[name].layers() for p in layer.parameters}
    assert {tensor.name: tensor.numel for tensor in load_shipped(name).tensors} == expected


@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - {"lstm_ptb"}))  # cuDNN has an order of its own
def test_shipped_tensors_stand_in_the_order_of_the_architecture(name):
    expected = [p.name for layer in reversed(ARCHITECTURES[name].layers()) for p in layer.parameters]
    assert [tensor.name for tensor in load_shipped(name).tensors] == expected


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_shipped_batches_are_those_of_the_architecture(name):
    trace = load_shipped(name)
    assert (trace.model, trace.batch) == (ARCHITECTURES[name].model, ARCHITECTURES[name].batch)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_shipped_estimates_are_what_the_estimate_gives_today(name):
    trace = load_shipped(name)
    if trace.times == "measured":
        pytest.skip(f"{name} is measured")
    assert trace == estimate_trace(ARCHITECTURES[name]), "run python benchmarks/estimate_traces.py src/penstock/traces"


def test_estimates_never_overwrite_measurements(tmp_path):
    measured = Trace("ResNet-50", "a real GPU", 32, "float32", 0.1, (Tensor("fc.bias", 1000, 0.2),))
    save_trace(measured, tmp_path / "resnet50.json")
    written = write_estimates(tmp_path)
    assert set(written) == ARCHITECTURES.keys() - {"resnet50"}
    assert load_trace(tmp_path / "resnet50.json") == measured
    assert write_estimates(tmp_path) == written  # estimates do give way to newer ones


def test_the_source_says_what_was_assumed():
    source = estimate_trace(ARCHITECTURES["bert_base"]).source
    assert "70% of 15.7 TFLOP/s or 80% of 900 GB/s" in source
    assert "5 us per kernel" in source
    assert "a sequence of 128 tokens" in source


def googlenet_layers():
    return [layer for layer in ARCHITECTURES["googlenet"].layers() if layer.parameters]


@needs_measurements
def test_googlenet_has_the_128_blobs_of_the_authors_logs_up_to_caffes_alignment():
    with (MEASURED / "googlenet_k80_params_raw.csv").open() as file:
        logged = [int(row["numel_aligned"]) for row in csv.DictReader(file) if row["source_log"] == "tmpcomm"]
    weights_first = [sorted(layer.parameters, key=lambda p: -len(p.shape)) for layer in googlenet_layers()]
    assert logged == [math.ceil(p.numel / 64) * 64 for pair in weights_first for p in pair]


@needs_measurements
def test_the_roofline_ranks_googlenets_layers_much_as_the_k80_did():
    with (MEASURED / "googlenet_k80_layers.csv").open() as file:
        measured = [float(row["backward_us_tmpcomm"]) for row in csv.DictReader(file)]
    k80 = Device("half a K80", 4.37e12, 0.7, 240e9, 0.8, 5e-6)
    estimated = [sum(kernel_seconds(work, 64, 4, k80) for work in layer.backward) for layer in googlenet_layers()]
    assert rank_correlation(measured, estimated) > 0.8
    assert 0.5 < sum(estimated) / (sum(measured) * 1e-6) < 2


def rank_correlation(a, b):
    """Return Spearman's coefficient (no ties)."""
    count = len(a)
    ranks = [[sorted(values).index(value) for value in values] for values in (a, b)]
    squares = sum((x - y) ** 2 for x, y in zip(*ranks, strict=True))
    return 1 - 6 * squares / (count * (count**2 - 1))
