"""Measuring on a borrowed machine and installing the result, and the overhead's bookkeeping."""

import subprocess
import sys
from pathlib import Path

import pytest

import measure_traces
from measure_traces import install, measure, to_nanosecond
from penstock.bench.record import save_record
from penstock.trace import Tensor, Trace, load_trace

pytest.importorskip("torch", reason="measuring needs torch")


def test_what_was_measured_can_be_installed(tmp_path):
    (record,) = measure(["gpt_small"], "cpu", iterations=1, warmup=0, rounds=1)
    save_record(record, tmp_path / "record.json")
    assert install(tmp_path / "record.json", tmp_path) == ("gpt_small",)
    trace = load_trace(tmp_path / "gpt_small.json")
    assert (trace.model, trace.times, len(trace.tensors)) == ("small GPT", "measured", 52)
    (row,) = record["rows"]
    assert row["tensors"] == 52
    assert row["iteration_seconds"] > 0
    assert row["overhead"] == pytest.approx(row["profiled_iteration_seconds"] / row["iteration_seconds"] - 1)


def test_times_are_rounded_to_the_nanosecond():
    trace = to_nanosecond(Trace("m", "d", 1, "float32", 0.12345678949, (Tensor("a", 1, 1e-10),)))
    assert (trace.forward_seconds, trace.tensors[0].backward_seconds) == (0.123456789, 0)


def test_it_runs_where_only_torch_is_installed():
    code = """
import sys
for absent in ("rich", "typer", "numba", "matplotlib", "lark"):
    sys.modules[absent] = None
import measure_traces
"""
    folder = Path(measure_traces.__file__).parent
    result = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
