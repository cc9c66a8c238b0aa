"""What a `.cll` file is called and says reaches generated source only as names and numbers that were checked."""

import ast
import os

import numpy as np
import pytest

from penstock.codecs.registry import make_codec
from penstock.compll.backends.numba.backend import NumbaKernels
from penstock.compll.cache import load_program
from penstock.compll.frontend.source import compile_source
from penstock.compll.ir import Program
from penstock.errors import PenstockError

TEXT = """
param P { float SCALE = 1 in [0, 10]; }
void encode(float* gradient, uint8* compressed, P p) { compressed = concat(gradient); }
void decode(uint8* compressed, float* gradient, P p) { gradient = extract(compressed); }
"""
NAMES = [
    'x"""\nopen("ran", "w")\n"""',
    'x"""+str(open("ran", "w"))+"""',
    "x'''+str(open('ran', 'w'))+'''",
    'x\\"""\ropen("ran", "w")\n',
    "{name.__class__}",
    "x\u2028y \udcff",
    "..",
]


def generated(program):
    """Return the sources that the numba and the Triton back ends make of a program."""
    from penstock.cli.compile import GENERATORS

    return [GENERATORS[backend](program) for backend in ("numba", "triton")]


@pytest.mark.parametrize("name", NAMES)
def test_a_files_name_runs_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = compile_source(TEXT, f"{name}.cll")
    for source in generated(program):
        called = {node.func.id for node in ast.walk(ast.parse(source)) if _is_call_by_name(node)}
        assert "open" not in called
    kernels = NumbaKernels(program, cache_dir=tmp_path)
    assert kernels.encode(np.ones(3, np.float32), {"SCALE": 1.0}).view(np.float32).tolist() == [1.0] * 3
    assert not (tmp_path / "ran").exists()


def _is_call_by_name(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def test_a_long_name_is_cut_so_that_its_kernels_can_be_kept(tmp_path):
    path = tmp_path / f"{'x' * 240}.cll"
    path.write_text(TEXT)
    program = load_program(path, {}, tmp_path / "cache")
    NumbaKernels(program, cache_dir=tmp_path / "cache").encode(np.ones(3, np.float32), {"SCALE": 1.0})
    assert len(list((tmp_path / "cache").glob("*.py"))) == 1


def test_a_codec_of_a_file_with_quotes_in_its_name_works(tmp_path):
    path = tmp_path / 'q"""q.cll'
    path.write_text(TEXT)
    assert make_codec(os.fspath(path)).program.name == "q___q"


@pytest.mark.parametrize("name", ["", "a b", 'a"', "a/b", "a\n", "x" * 101])
def test_a_program_has_no_name_that_could_be_more_than_one(name):
    made = compile_source(TEXT, "fine.cll")
    with pytest.raises(ValueError, match="program's name"):
        Program(name, made.parameters, made.layout, made.encode, made.decode)


@pytest.mark.parametrize("name", ["na\u00efve", "\uff53cale", "x\u00b2", "a\u00b7b"])
def test_names_outside_ascii_are_refused(name):
    text = TEXT.replace("compressed = concat", f"float {name} = 1; compressed = concat")
    with pytest.raises(PenstockError, match="unexpected"):
        compile_source(text, "mine.cll")
