"""docs/codecs: a page for every algorithm, and the passes and fields it states are those of the compiler."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock.compll
from penstock.compll.frontend.source import compile_file
from penstock.compll.lower.fuse import schedule_decode, schedule_encode

ALGORITHMS = sorted((Path(penstock.compll.__file__).parent / "algorithms").glob("*.cll"))
DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.stem)
def test_the_page_states_the_passes_and_the_fields_of_the_compiler(path):
    program = compile_file(path)
    page = (DOCS / "codecs" / f"{path.stem}.md").read_text()
    plans = schedule_encode(program), schedule_encode(program, feedback=True), schedule_decode(program)
    found = re.search(
        r"encode ([\d.]+), encode with error feedback ([\d.]+), decode ([\d.]+)\.", " ".join(page.split())
    )
    assert found is not None
    assert [float(number) for number in found.groups()] == [plan.passes() for plan in plans]
    fields = page[page.index("## Wire format") : page.index("Ratio to float32")]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+\*?)`", fields, flags=re.MULTILINE)
    assert rows == [("count" if field.counts else field.name, field.type.name) for field in program.layout.fields]


def test_the_overview_lists_every_algorithm():
    overview = (DOCS / "codecs" / "README.md").read_text()
    assert re.findall(r"^\| \[(\w+)\]\((\w+)\.md\)", overview, flags=re.MULTILINE)
    assert {name for name, _ in re.findall(r"^\| \[(\w+)\]\((\w+)\.md\)", overview, flags=re.MULTILINE)} == {
        path.stem for path in ALGORITHMS
    }


def test_the_python_of_the_language_page_runs():
    code = re.findall(r"^```python\n(.*?)^```", (DOCS / "language.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(code) == 2
    for each in code:
        done = subprocess.run([sys.executable, "-c", each], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_program_of_the_language_page_compiles():
    from penstock.compll.frontend.source import compile_source

    code = re.findall(r"^```c\n(.*?)^```", (DOCS / "language.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert compile_source(code[0]).layout.fields[0].name == "scale"
