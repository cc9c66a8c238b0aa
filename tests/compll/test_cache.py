"""Compiled programs on disk: found again, made anew when anything changed; a known one needs no parser."""

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import penstock.compll
from penstock.compll.backends.numba.backend import NumbaKernels, kernel_files, support_files
from penstock.compll.cache import load_program, program_files
from penstock.compll.frontend.source import compile_file, compile_source
from penstock.compll.functions import FUNCTIONS
from penstock.compll.lower.passes import dump
from penstock.compll.operators import OPERATORS, Operator

TERNGRAD = Path(penstock.compll.__file__).parent / "algorithms" / "terngrad.cll"


def test_a_program_from_the_cache_is_the_compiled_one(tmp_path):
    for bitwidth in (2, 4, 2, 4):
        found = load_program(TERNGRAD, {"bitwidth": bitwidth}, tmp_path)
        assert dump(found) == dump(compile_file(TERNGRAD, {"bitwidth": bitwidth}))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_file_is_made_anew(tmp_path):
    load_program(TERNGRAD, {}, tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(b"garbage")
    assert dump(load_program(TERNGRAD, {}, tmp_path)) == dump(compile_file(TERNGRAD))
    assert kept.read_bytes() != b"garbage"


def test_a_changed_source_is_compiled_again(tmp_path):
    path = tmp_path / "mine.cll"
    path.write_text(TERNGRAD.read_text())
    load_program(path, {}, tmp_path / "cache")
    path.write_text(TERNGRAD.read_text().replace("floor(r + random<float>(0, 1))", "round(r)"))
    assert "round(" in dump(load_program(path, {}, tmp_path / "cache"))


def test_a_known_program_needs_no_parser(tmp_path):
    code = (
        "import sys; from pathlib import Path; from penstock.compll.cache import load_program; "
        f"load_program(Path({str(TERNGRAD)!r}), {{}}, Path({str(tmp_path)!r})); print('lark' in sys.modules)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(2)]
    assert [text.strip() for text in runs] == ["True", "False"]


TWICE = """
void encode(float* gradient, uint8* compressed) { compressed = concat(twice(gradient)); }
void decode(uint8* compressed, float* gradient) { float* sent = extract(compressed); gradient = twice(sent); }
"""


def times(factor):
    """An operator called `twice` that multiplies by any factor."""
    body = f"def twice(values):\n    return values * np.float32({factor})\n"
    return Operator("twice", 1, 0, numpy=lambda values: values * np.float32(factor), numba=body, triton=body)


def test_a_process_loads_a_kernel_once_however_many_codecs_use_it(tmp_path):
    first, second = (NumbaKernels(load_program(TERNGRAD, {}, tmp_path), cache_dir=tmp_path) for _ in range(2))
    assert first.kernel("encode") is second.kernel("encode")


def test_a_registered_operator_with_another_body_gives_another_kernel(tmp_path, monkeypatch):
    path = tmp_path / "mine.cll"
    path.write_text(TWICE)
    sent, prints = [], set()
    for factor in (2, 3, 2):
        monkeypatch.setitem(OPERATORS, "twice", times(factor))
        program = load_program(path, {}, tmp_path / "cache")
        kernels = NumbaKernels(program, cache_dir=tmp_path / "cache")
        sent.append(kernels.encode(np.ones(3, np.float32), {}).view(np.float32).tolist())
        prints.add(program.fingerprint)
    assert sent == [[2.0] * 3, [3.0] * 3, [2.0] * 3]
    assert len(prints) == 2


def test_a_program_made_before_its_operator_changed_is_not_run_with_the_kernel_of_before(tmp_path, monkeypatch):
    path = tmp_path / "mine.cll"
    path.write_text(TWICE)
    monkeypatch.setitem(OPERATORS, "twice", times(2))
    program = load_program(path, {}, tmp_path)
    for factor in (2, 3):
        monkeypatch.setitem(OPERATORS, "twice", times(factor))
        kernels = NumbaKernels(program, cache_dir=tmp_path)
        assert kernels.encode(np.ones(1, np.float32), {}).view(np.float32).tolist() == [factor]


CHANGED = {
    "the text": {"text": TWICE.replace("sent", "received")},
    "an operator's lowering": {"operators": OPERATORS | {"twice": times(3)}},
    "an operator's random numbers": {"operators": OPERATORS | {"twice": replace(times(2), draws=True)}},
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_fingerprint_changes_with_all_that_is_sent_depends_on(change):
    given = {"text": TWICE, "operators": OPERATORS | {"twice": times(2)}}
    before = compile_source(path="mine.cll", **given).fingerprint
    assert before == compile_source(path="/elsewhere/mine.cll", **given).fingerprint
    assert compile_source(path="mine.cll", **given | CHANGED[change]).fingerprint != before


def test_a_fingerprint_changes_with_a_function_it_calls_and_with_no_other():
    def fingerprint(name):
        other = replace(FUNCTIONS[name], numba="def f(x):\n    return x\n")
        return compile_source(TERNGRAD.read_text(), functions=FUNCTIONS | {name: other}).fingerprint

    assert fingerprint("floor") != fingerprint("sqrt") == compile_source(TERNGRAD.read_text()).fingerprint


COMPLL = Path(penstock.compll.__file__).parent


def test_every_file_of_the_compiler_is_part_of_a_key_on_disk():
    """Triton keeps its machine code under a key of its own: the text of the kernel."""
    covered = {*program_files(), *kernel_files()}
    triton = set((COMPLL / "backends" / "triton").glob("*.py"))
    assert covered == {*COMPLL.rglob("*.py"), COMPLL / "grammar.lark"} - triton
    assert not triton & covered


def test_kernels_call_no_file_that_their_key_leaves_out():
    def imported(path):
        found = [node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        return {f"{name.replace('.', '/')}.py" for name in found if name and name.startswith("penstock.compll.")}

    files = {str(path.relative_to(COMPLL.parents[1])) for path in support_files()}
    assert {name for path in support_files() for name in imported(path)} < files
