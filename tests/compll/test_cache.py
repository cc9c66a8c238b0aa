"""Compiled programs on disk: found again, made anew when anything changed; a known one needs no parser."""

import subprocess
import sys
from pathlib import Path

import penstock.compll
from penstock.compll.cache import load_program
from penstock.compll.frontend import compile_file
from penstock.compll.show import dump

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
