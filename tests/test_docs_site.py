"""The documentation builds as a site, without a broken link, and its generated pages hold what they should."""

import ast
import inspect
import os
import re
import subprocess
import sys
import tomllib
from html import unescape
from importlib import import_module
from pathlib import Path

import pytest

from penstock import __version__

pytest.importorskip("mkdocs", reason="the site needs the extra `docs`")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_every_verb_has_an_entry_in_the_command_line_page(site):
    page = (site / "reference" / "command-line" / "index.html").read_text()
    for verb in ("penstock plan", "penstock cluster run", "penstock bench collectives"):
        assert f">{verb}<" in page


def test_the_papers_page_has_every_paper_and_a_verdict(site):
    page = (site / "reference" / "papers" / "index.html").read_text()
    assert all(f">{paper}<" in page for paper in ("MG-WFBP", "gTop-k", "Linear pipeline", "HiPress"))
    assert "matches" in plain(page)


def test_the_python_page_comes_from_docstrings(site):
    page = (site / "reference" / "python" / "index.html").read_text()
    assert "torch's DistributedDataParallel with planned buckets" in page.replace("&#39;", "'")


QUESTIONS = {  # what a newcomer asks: words that the answer must have
    "8 GPUs": "hierarchical",
    "NCCL": "on the GPU",
    "FSDP": "DeepSpeed exchanges gradients by itself",
    "AdamW": "blocks(bits=4)",
    "pay": "penstock check",
    "turn it off": "import back",
    "dies": "TransportError",
    "log": "getLogger",
    "leaves my machine": "no telemetry",
    "cite": "SOSP 2021",
}


def test_ten_questions_are_answered_one_click_from_home(site):
    home = (site / "index.html").read_text()
    page = (site / "questions" / "index.html").read_text()
    anchors = re.findall(r'href="questions/#([\w-]+)"', home)
    assert len(set(anchors)) == 10
    answers = {anchor: page.split(f'id="{anchor}"')[1].split("<h2")[0] for anchor in anchors}
    for question, answer in QUESTIONS.items():
        assert any(question in unescape(text) and answer in plain(text) for text in answers.values()), question


def plain(text: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", text))


def test_the_site_shows_version_and_repository(site):
    home = (site / "index.html").read_text()
    assert f"penstock {__version__}" in home
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"] in home


def test_the_python_page_has_a_row_for_every_field_with_type_and_default(site):
    page = plain((site / "reference" / "python" / "index.html").read_text())
    assert re.search(r"measure_seconds\s+float\s+10\.0\s+that measuring may take, once", page)
    assert re.search(r"codec\s+str or Codec or None\s+None\s+of every bucket", page)


DESCRIBED = {  # what users call: where it is
    "DistributedDataParallel": "penstock.torch.ddp",
    "fully_shard_with": "penstock.torch.fsdp.sharding",
    "Checkpoints": "penstock.torch.checkpoint_folder",
    "comm_hook": "penstock.torch.hook",
    "CompressedAdamW": "penstock.torch.optim",
    "BulkSynchronous": "penstock.torch.overlap",
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_every_parameter_has_a_whole_description_on_the_python_page(site, name):
    called = getattr(import_module(DESCRIBED[name]), name)
    signature = inspect.signature(called.__init__ if inspect.isclass(called) else called)
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    wanted = {stars.get(each.kind, "") + each.name for each in signature.parameters.values()} - {"self"}
    text = inspect.getdoc(called).split("Args:\n")[1]
    said = dict(re.findall(r"^    (\S+): (.+(?:\n {8}.+)*)", text, flags=re.MULTILINE))
    assert set(said) == wanted
    page = (site / "reference" / "python" / "index.html").read_text()
    shown = plain(page.split(f'id="{DESCRIBED[name]}.{name}"')[1].split('class="doc doc-children"')[0])
    for one, meaning in said.items():
        row = rf"{re.escape(one)}\s+\S.*?{re.escape(squeezed(meaning.replace('`', '')))}"
        assert re.search(row, squeezed(shown)), f"{one}: {meaning}"


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_the_moving_timeline_is_what_the_simulator_gives_today(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs_site")
    from draw_timeline import OUT, draw, timelines

    drawn = draw(timelines())
    assert drawn == OUT.read_text(), "run `python docs_site/draw_timeline.py`"
    assert "animateTransform" in drawn


# Words of our own, or of no field, that pages and docstrings said instead of plain ones.
HOUSE_WORDS = re.compile(
    r"\b(?:owe[sd]?|debts?|anew|way in|nobody|somebody|whoever|lies|no word|bytes weigh|dealt out|what works here|"
    r"comes? (?:back|down|of|out|again)|as infinity, that is|of what was asked|measured by others)\b",
    re.IGNORECASE,
)
PUBLIC = (  # what the Python page shows, and the verbs
    *("torch/ddp.py", "torch/hook.py", "torch/optim.py", "torch/overlap.py", "torch/checkpoint_folder.py"),
    *("torch/profile.py", "torch/fsdp/sharding.py", "integrations/*.py", "exchange/exchange.py", "plan.py", "trace.py"),
    *("exchange/compression.py", "planning/planning.py", "planning/worth.py", "runtime/communicator.py", "network.py"),
    *("codecs/registry.py", "codecs/codec.py", "program/__init__.py", "errors.py", "cli/*.py"),
)


def test_pages_use_plain_words():
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if page.name != "glossary.md")]
    pages = [page for page in pages if page.parent.name != "decisions"]
    assert {page.name: found for page in pages if (found := HOUSE_WORDS.findall(page.read_text()))} == {}


def test_docstrings_that_users_read_use_plain_words():
    files = [path for pattern in PUBLIC for path in (ROOT / "src" / "penstock").glob(pattern)]
    assert len(files) > 40
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [
        (path, each) for path in files for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, kinds)
    ]
    shown = [(path, each) for path, each in nodes if not getattr(each, "name", "").startswith("_")]
    found = {(path.name, word) for path, each in shown for word in HOUSE_WORDS.findall(ast.get_docstring(each) or "")}
    assert found == set()
