import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import FormatError, PenstockError, TraceError
from penstock.trace import Tensor, Trace, load_trace, save_trace, trace_document, trace_from_csv

GOOD = {
    "format": "penstock-trace/1",
    "model": "toy",
    "device": "paper",
    "batch": 2,
    "dtype": "float32",
    "forward_seconds": 1.0,
    "tensors": [
        {"name": "b", "numel": 10, "backward_seconds": 0.5},
        {"name": "a", "numel": 0, "backward_seconds": 0.25},
    ],
}


def write(tmp_path, document):
    path = tmp_path / "t.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_a_trace_survives_the_round_trip(tmp_path):
    trace = load_trace(write(tmp_path, GOOD))
    save_trace(trace, tmp_path / "again.json")
    assert load_trace(tmp_path / "again.json") == trace
    assert trace.ready_seconds == (1.5, 1.75)
    assert trace.nbytes == (40, 0)
    assert trace.with_dtype("bfloat16").nbytes == (20, 0)
    assert (trace.compute_seconds, trace.backward_seconds) == (1.75, 0.75)
    assert trace.label == "toy"


def test_estimated_times_are_labelled(tmp_path):
    trace = load_trace(write(tmp_path, GOOD | {"times": "estimated"}))
    assert trace.label == "toy (estimated times)"
    assert trace_document(trace)["times"] == "estimated"


def tensor(**changes):
    return GOOD | {"tensors": [GOOD["tensors"][0] | changes]}


BROKEN = [
    (GOOD | {"format": "penstock-trace/2"}, "format: found 'penstock-trace/2'; wanted one of penstock-trace/1"),
    ({k: v for k, v in GOOD.items() if k != "format"}, "format: found nothing; wanted one of penstock-trace/1"),
    (GOOD | {"forward_seconds": -1}, "forward_seconds: found -1; wanted a finite number >= 0"),
    (GOOD | {"forward_seconds": float("nan")}, "forward_seconds: found nan; wanted a finite number >= 0"),
    (GOOD | {"forward_seconds": float("inf")}, "forward_seconds: found inf; wanted a finite number >= 0"),
    (GOOD | {"forward_seconds": "1"}, "forward_seconds: found '1'; wanted a finite number >= 0"),
    (GOOD | {"batch": 0}, "batch: found 0; wanted a whole number >= 1"),
    (GOOD | {"batch": True}, "batch: found True; wanted a whole number >= 1"),
    (GOOD | {"dtype": "int8"}, "dtype: found 'int8'; wanted one of float64, float32, bfloat16, float16"),
    (GOOD | {"tensors": []}, "tensors: found []; wanted at least one tensor"),
    (GOOD | {"tensors": {}}, "tensors: found {}; wanted a list of objects"),
    (GOOD | {"tensors": [3]}, "tensors[0]: found 3; wanted a JSON object"),
    (GOOD | {"model": ""}, "model: found ''; wanted a non-empty string"),
    (GOOD | {"colour": "red"}, "colour: found 'red'; wanted no such field; known: format, model"),
    (
        GOOD | {"tensors": GOOD["tensors"][:1] * 2},
        "tensors[1].name: found 'b'; wanted a name that no earlier tensor has",
    ),
    (tensor(numel=-1), "tensors[0].numel: found -1; wanted a whole number >= 0"),
    (tensor(numel=1.5), "tensors[0].numel: found 1.5; wanted a whole number >= 0"),
    (tensor(backward_seconds=-0.1), "tensors[0].backward_seconds: found -0.1; wanted a finite number >= 0"),
    (tensor(size=3), "tensors[0].size: found 3; wanted no such field; known: name, numel, backward_seconds"),
    ([1], "top level: found [1]; wanted a JSON object"),
    (json.dumps(GOOD)[:100], "JSON: found "),
    ("", "JSON: found 'Expecting value at line 1 column 1 of 1 lines'; wanted a whole penstock-trace/1 document"),
    ("[" * 100_000, "JSON: found 'nesting too deep'"),
]


@pytest.mark.parametrize(("document", "message"), BROKEN)
def test_a_broken_file_is_one_line_that_names_file_field_found_and_wanted(tmp_path, document, message):
    path = write(tmp_path, document)
    with pytest.raises(FormatError) as caught:
        load_trace(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FormatError, match=r"nowhere\.json: file: found 'No such file or directory'"):
        load_trace(tmp_path / "nowhere.json")


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "t.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="wanted a readable penstock-trace/1 file"):
        load_trace(tmp_path / "t.json")


@given(st.integers(0, len(json.dumps(GOOD)) - 1))
def test_a_file_cut_anywhere_is_refused(tmp_path_factory, length):
    path = tmp_path_factory.mktemp("cut") / "t.json"
    path.write_text(json.dumps(GOOD)[:length])
    with pytest.raises(FormatError):
        load_trace(path)


def test_traces_built_in_python_are_checked_too():
    with pytest.raises(TraceError, match="has no tensors; wanted at least one"):
        Trace("m", "d", 1, "float32", 0.0, ())
    with pytest.raises(TraceError, match="tensor 'x' appears twice"):
        Trace("m", "d", 1, "float32", 0.0, (Tensor("x", 1, 0.0), Tensor("x", 1, 0.0)))
    with pytest.raises(TraceError, match="backward_seconds is nan"):
        Trace("m", "d", 1, "float32", 0.0, (Tensor("x", 1, float("nan")),))
    with pytest.raises(TraceError, match="dtype 'int8'; wanted one of"):
        Trace("m", "d", 1, "int8", 0.0, (Tensor("x", 1, 0.0),))


def test_csv_in_ready_order(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("name,numel,backward_ms\nfc,10,2\nconv,20,4\n")
    trace = load_trace(path)
    assert [(t.name, t.numel) for t in trace.tensors] == [("fc", 10), ("conv", 20)]
    assert [t.backward_seconds for t in trace.tensors] == pytest.approx([0.002, 0.004])
    assert trace.forward_seconds == pytest.approx(0.003)  # half the backward time where none is given


def test_csv_in_forward_order_is_reversed_and_a_column_is_chosen(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("layer_forward_index,numel_aligned,backward_us_run1,backward_us_run12\n1,10,1,100\n2,20,2,200\n")
    trace = trace_from_csv(path, time_column="run1", forward_seconds=7.0)
    assert [t.numel for t in trace.tensors] == [20, 10]
    assert [t.backward_seconds for t in trace.tensors] == pytest.approx([2e-6, 1e-6])
    assert trace.forward_seconds == 7.0
    assert trace.source.endswith("column backward_us_run1")
    assert trace_from_csv(path, time_column="run12").tensors[0].backward_seconds == pytest.approx(200e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,numel\na,1\n", "wanted a column whose name begins with 'backward_'"),
        ("name,numel,backward_hours\na,1,2\n", "wanted a unit after backward_: us, ms, s, seconds"),
        ("name,numel,backward_ms\na,1,x\n", "row 2, backward_ms: found 'x'; wanted a finite number >= 0"),
        ("name,numel,backward_ms\na,1.5,2\n", "row 2, numel: found '1.5'; wanted a whole number >= 0"),
        ("name,numel,backward_ms\na,-1,2\n", "row 2, numel: found '-1'"),
        ("name,numel,backward_ms\na,1\n", "row 2: found ['a', '1', None]; wanted 3 columns"),
        ("name,numel,backward_ms\na,1,2\na,1,2\n", "appears twice"),
        ("name,numel,backward_ms\n", "has no tensors"),
        ("", "wanted a column whose name begins with 'numel'"),
    ],
)
def test_broken_csv_is_one_clear_line(tmp_path, text, message):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(PenstockError) as caught:
        load_trace(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
