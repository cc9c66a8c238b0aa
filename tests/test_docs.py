"""Every `penstock` command in the docs that needs no other machine runs as written."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from penstock.cli.main import app

ROOT = Path(__file__).parents[1]
GENERATED = ("papers.md", "command-line.md")  # docs_site/hooks.py makes them
PLANNING = ROOT / "docs" / "planning.md"


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("penstock ")]


@pytest.mark.parametrize("command", commands(PLANNING))
def test_a_command_of_the_planning_page_runs(command, tmp_path):
    arguments = [sys.executable, "-m", *shlex.split(command)]
    result = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_python_of_the_planning_page_runs():
    code = re.findall(r"^```python\n(.*?)^```", PLANNING.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(code) == 1
    assert subprocess.run([sys.executable, "-c", code[0]], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.name
)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")) and Path(target).name not in GENERATED:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def anchors(page: Path) -> set[str]:
    """Return what links to a page may name as GitHub makes it of titles, which differs from the site's for `&`."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles} | set(
        re.findall(r'id="([^"]+)"', text)
    )


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.name
)
def test_links_to_a_part_of_a_page_lead_to_a_title_on_github_too(page):
    here = page.read_text().replace("https://github.com/penstock/penstock/blob/main/", f"{ROOT}/")
    for target, anchor in re.findall(r"\]\(([^)#:]*\.md|)#([^)]+)\)", here):
        there = page.parent / target if target else page
        if there.name not in GENERATED:
            assert anchor in anchors(there), f"{page.name} links to {target}#{anchor}"


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILES = [path for folder in ("src", "tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.*")]
NAMED_ONLY = ("Missing ", "Option ")  # a verb or an option that is only named, without what it needs


def written(page: Path) -> list[str]:
    """Return the `penstock` commands of a page: in blocks, also behind a launcher, and between backticks."""
    text = page.read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    shell = [line for language, block in blocks if language in ("", "bash") for line in block.splitlines()]
    lines = [*shell, *re.findall(r"`([^`\n]+)`", prose)]
    found = (re.search(r"(?:^|-m |-- |run .*)(penstock [a-z].*?)(?: +#.*)?$", line) for line in lines)
    return [match[1] for match in found if match]


def parsed(words: list[str]) -> None:
    """Let typer read a command as far as it can without running it; raise where it takes no such words."""
    command, name = typer.main.get_command(app), "penstock"
    while commands := getattr(command, "commands", None):
        if not words:
            return
        if words[0] == "NAME":
            return
        assert words[0] in commands, f"no verb {words[0]!r} in {name}"
        name, command, words = f"{name} {words[0]}", commands[words[0]], words[1:]
    command.make_context(name, list(words))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_on_a_page_is_one_that_the_command_line_takes(page):
    complaints = {text: complaint_about(text) for text in written(page)}
    assert {text: complaint for text, complaint in complaints.items() if complaint} == {}


def complaint_about(text: str) -> str:
    """Return what the command line says against a command, "" where it takes it."""
    try:
        parsed(shlex.split(text.replace(" ...", ""))[1:])
    except typer.Exit:
        return ""  # --help
    except typer.BadParameter.__bases__[0] as error:
        complaint: str = error.format_message()
        return "" if complaint.startswith(NAMED_ONLY) else complaint
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_torchrun_on_several_hosts_names_a_rendezvous(page):
    """Without a backend each host takes itself for the first: it waits for ever, or finds the port in use."""
    commands = re.findall(r"torchrun (?:\\\n|[^`\n])*--nnodes(?:\\\n|[^`\n])*", page.read_text())
    assert [each for each in commands if "--rdzv-backend c10d" not in each] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_script_that_a_page_runs_is_there(page):
    for script in re.findall(r"python (benchmarks/[\w/]+\.py)", page.read_text()):
        assert (ROOT / script).exists(), f"{page.name} runs {script}"


def test_pages_have_commands_to_look_at():
    assert sum(len(written(page)) for page in PAGES) > 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_on_a_page_is_python(page):
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        assert ast.parse(code).body, f"{page.name}: a block without a statement"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page):
    """A path is one from the root, from the package or from the tests; a bare name is that of some file."""
    for name in re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|cll|lark|js))`", page.read_text()):
        if not name.startswith(("mymodels", "train.py", "FILE", "benchmarks/NAME")):
            assert any(str(path).endswith(f"/{name}") for path in FILES), f"{page.name} names {name}"
