import subprocess
import sys

import pytest

from penstock.errors import FormatError, TraceError
from penstock.trace import load_trace, save_trace
from penstock.traces import find_trace, load_shipped, shipped

TEN = "bert_base, bert_large, densenet201, googlenet, gpt2, lstm_ptb, resnet152, resnet50, vgg16, vgg19"


def test_ten_traces_are_shipped():
    assert ", ".join(shipped()) == TEN


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_trace_is_labelled_by_where_its_times_come_from(name):
    trace = load_shipped(name)
    assert trace.source
    assert trace.backward_seconds > 0
    assert (trace.times == "estimated") == ("estimated" in trace.label)


@pytest.mark.parametrize("spelling", ["bert_base", "bert-base", "BERT-base", "BERT_BASE"])
def test_hyphens_underscores_and_case_do_not_matter(spelling):
    assert load_shipped(spelling).model == "BERT-base"
    assert find_trace(spelling).model == "BERT-base"


def test_the_name_people_write_is_found():
    for name in shipped():
        assert find_trace(load_shipped(name).model) == load_shipped(name)


def test_a_path_is_read_as_a_file(tmp_path):
    path = tmp_path / "mine.json"
    save_trace(load_shipped("vgg16"), path)
    assert find_trace(path) == find_trace(str(path)) == load_trace(path)


def test_a_csv_file_is_read_too(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("name,numel,backward_ms\na,10,1\nb,20,2\n")
    assert [tensor.name for tensor in find_trace(path).tensors] == ["a", "b"]


def test_a_shipped_name_wins_over_a_file_unless_the_file_is_named_by_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_trace(load_shipped("vgg16"), "resnet50")
    assert find_trace("resnet50").model == "ResNet-50"
    assert find_trace("./resnet50").model == "VGG-16"


@pytest.mark.parametrize(
    ("name", "hint"), [("resnet51", " (did you mean 'resnet50'?)"), ("missing.json", ""), ("", "")]
)
def test_an_unknown_name_is_one_line_that_lists_the_shipped_ones(name, hint):
    with pytest.raises(TraceError) as caught:
        find_trace(name)
    assert str(caught.value) == f"{name!r} is neither a file nor a shipped trace; shipped are {TEN}{hint}"


def test_load_shipped_reads_no_files():
    with pytest.raises(TraceError, match=r"no shipped trace is called './x.json'; wanted one of bert_base, "):
        load_shipped("./x.json")


def test_a_folder_is_refused_as_a_file_would_be(tmp_path):
    with pytest.raises(FormatError, match="Is a directory"):
        find_trace(tmp_path)


def test_finding_a_trace_imports_neither_torch_nor_numpy():
    code = "import sys, penstock.traces; penstock.traces.find_trace('gpt2'); print({'torch', 'numpy'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
