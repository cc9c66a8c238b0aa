"""`penstock compile`: shows generated code, and a mistake with its line and a caret."""

import json
from functools import partial

from command import penstock

run = partial(penstock, "compile")


def test_a_shipped_algorithm_is_shown_by_name():
    result = run("onebit")
    assert result.returncode == 0
    assert "encode: 1 passes over the gradient" in result.stdout


def test_numba_code_is_written_to_a_file(tmp_path):
    path = tmp_path / "terngrad.py"
    assert run("terngrad", "--backend", "numba", "--param", "bitwidth=4", "--out", str(path)).returncode == 0
    assert "pack4(" in path.read_text()


def test_json_tells_the_wire_format_and_the_passes():
    document = json.loads(run("terngrad", "--json").stdout)
    assert [field["name"] for field in document["fields"]] == ["bitwidth", "tail", "min", "gap", "Q"]
    assert document["passes"] == {"encode": 2, "encode_feedback": 2, "decode": 1}


def test_a_mistake_is_shown_with_a_caret_and_exit_code_2(tmp_path):
    path = tmp_path / "bad.cll"
    path.write_text("void encode(float* gradient, uint8* compressed) {\n    float a = gradinet.size;\n}\n")
    result = run(str(path))
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"penstock: {path}:2:15: unknown name 'gradinet'; did you mean 'gradient'?",
        "        float a = gradinet.size;",
        "                  ^^^^^^^^",
    ]


def test_bad_input_is_one_clear_line():
    assert "unknown back end 'cuda'; use reference, numba, triton" in run("onebit", "--backend", "cuda").stderr
    assert "wanted NAME=VALUE with a number" in run("onebit", "--param", "x").stderr
    assert "bitwidth is 3; wanted one of 1, 2, 4, 8" in run("terngrad", "--param", "bitwidth=3").stderr
    assert "no file 'nothing.cll'" in run("nothing.cll").stderr
