"""Pages of the site that are made from the program itself, so that they cannot be out of date."""

import re
from collections.abc import Iterator
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from penstock.cli.main import app
from penstock.cli.reproduce import claims_of

PAPERS = {
    "mg-wfbp": "MG-WFBP",
    "gtop-k": "gTop-k",
    "linear-pipeline": "Linear pipeline",
    "hipress": "HiPress",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name, lines in (("command-line", command_line()), ("papers", papers())):
        files.append(File.generated(config, f"reference/{name}.md", content="\n".join(lines) + "\n"))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links that leave docs/ in a checkout (examples, results, sources) name the file instead."""
    return re.sub(r"\[([^\]]+)\]\(\.\./(?!codecs/|decisions/|pictures/)[^)]*\)", r"`\1`", markdown)


def command_line() -> Iterator[str]:
    """Return every verb with what `--help` says, as Markdown."""
    yield "# Command line"
    yield ""
    yield "Made from the commands themselves. Every verb takes `--json` and prints a table otherwise;"
    yield "bad input ends with one clear line and exit status 2."
    yield from _command(typer.main.get_command(app), "penstock")


def _command(command: Any, name: str) -> Iterator[str]:
    for verb in sorted(getattr(command, "commands", {})):
        yield from _command(command.commands[verb], f"{name} {verb}")
    if getattr(command, "commands", None):
        return
    yield f"\n## {name}\n"
    yield f"{command.help or ''}\n"
    options = [one for one in command.params if one.name != "help"]
    if options:
        yield "| | | default |\n| --- | --- | --- |"
        yield from (_option(one) for one in options)


def _option(option: Any) -> str:
    written = f"`{', '.join(option.opts)}`" if option.param_type_name == "option" else f"`{option.name.upper()}`"
    default = "" if option.default is None or callable(option.default) else f"`{option.default}`"
    return f"| {written} | {_cell(getattr(option, 'help', None) or '')} | {default} |"


def papers() -> Iterator[str]:
    """Return what `penstock reproduce all` prints, as Markdown."""
    yield "# The papers, reproduced"
    yield ""
    yield "Published numbers beside ours, as `penstock reproduce all` prints them: computed from formulas, simulated,"
    yield "emulated or replayed. Where ours differ, the verdict says why."
    for module, title in PAPERS.items():
        yield f"\n## {title}\n"
        yield "| what | published | ours | how | verdict |\n| --- | --- | --- | --- | --- |"
        for claim in claims_of(module):
            cells = (claim.what, claim.published, claim.ours, claim.how, claim.verdict)
            yield f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")
