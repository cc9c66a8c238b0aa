"""Pages of the site that are made from the program itself, so that they cannot be out of date."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from penstock import __version__
from penstock.cli.main import app
from penstock.cli.reproduce import claims_of
from penstock.reproduce.claim import Kind, counts

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


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version in the footer."""
    config.copyright = f"penstock {__version__}, Apache-2.0"
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put tables of fields in their places; let links that leave docs/ in a checkout name the file instead."""
    markdown = re.sub(r"<!-- fields (\S+) -->", lambda found: "\n".join(fields_table(found[1])), markdown)
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


def fields_table(name: str) -> Iterator[str]:
    """Return the fields of a dataclass, each with the comment beside it, as a table."""
    kind = _object(name)
    lines = inspect.getsource(kind).splitlines()
    yield f"`{name}`: {_first_line(kind)}"
    yield ""
    yield "| field | type | default | meaning |\n| --- | --- | --- | --- |"
    for one in fields(kind):
        (line,) = [each for each in lines if re.match(rf"    {one.name}: ", each)]
        written = re.fullmatch(r"    \w+: (?P<type>.*?)(?: = (?P<default>.*?))?(?:  # (?P<meaning>.*))?", line)
        assert written is not None, line
        default = "" if written["default"] is None else f"`{written['default']}`"
        kind_of = written["type"].replace(" | ", " or ")  # a bar would end the cell
        yield _cells(f"`{one.name}`", f"`{kind_of}`", default, written["meaning"] or "")


def _object(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def _first_line(made: Any) -> str:
    return (inspect.getdoc(made) or "").split("\n\n")[0].replace("\n", " ")


def _cells(*cells: str) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def papers() -> Iterator[str]:
    """Return what `penstock reproduce all` prints, as Markdown."""
    yield "# The papers, reproduced"
    yield ""
    yield "What `penstock reproduce all` prints, by kinds of rows; [the papers](../papers.md) says what is wrong"
    yield "in them and what we do instead."
    for module, title in PAPERS.items():
        claims = claims_of(module)
        yield f"\n## {title}\n"
        yield counts(claims)
        for kind in Kind:
            yield f"\n### {title}: {kind.value}\n"
            yield "| what | printed, or the formula's | ours | how | tolerance | verdict |"
            yield "| --- | --- | --- | --- | --- | --- |"
            for claim in (each for each in claims if each.kind is kind):
                cells = (claim.what, claim.published, claim.ours, claim.how, claim.tolerance, claim.verdict)
                yield f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")
