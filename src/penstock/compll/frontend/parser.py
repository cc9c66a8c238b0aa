"""The parser of the compressor language: lark's, with its complaints made into errors that help."""

from functools import cache
from importlib.resources import files
from typing import Any, NoReturn

from lark import Lark, Token
from lark.exceptions import UnexpectedCharacters, UnexpectedEOF, UnexpectedInput, UnexpectedToken

from penstock.compll.frontend.syntax import Function, ParamBlock, Position, Source, Tree
from penstock.compll.frontend.tree_builder import build_items, token_position


def parse(text: str, path: str = "<string>") -> Tree:
    """Return the syntax tree of a program."""
    source = Source(path, text)
    try:
        items = build_items(_parser().parse(text))
    except UnexpectedInput as error:
        _raise_syntax(source, error)
    declares = [item for item in items if isinstance(item, list)]
    return Tree(
        source,
        tuple(item for item in items if isinstance(item, ParamBlock)),
        tuple(declare for group in declares for declare in group),
        tuple(item for item in items if isinstance(item, Function)),
    )


@cache
def _parser() -> Lark:
    grammar = files("penstock.compll").joinpath("grammar.lark").read_text()
    return Lark(grammar, parser="lalr", propagate_positions=True, maybe_placeholders=True)


_WORDS = {
    "SEMICOLON": "';'",
    "RPAR": "')'",
    "LPAR": "'('",
    "RBRACE": "'}'",
    "LBRACE": "'{'",
    "RSQB": "']'",
    "COMMA": "','",
    "EQUAL": "'='",
    "COLON": "':'",
    "NAME": "a name",
    "SCALAR": "a type",
    "$END": "the end of the file",
}
_LOOPS = {"for", "while", "do"}


def _raise_syntax(source: Source, error: UnexpectedInput) -> NoReturn:
    line, column = max(1, error.line), max(1, error.column)
    if isinstance(error, UnexpectedCharacters):
        at = Position(line, column, column + 1)
        raise source.error(at, f"unexpected character {error.char!r}", "remove it") from None
    assert isinstance(error, UnexpectedToken | UnexpectedEOF)
    token = error.token if isinstance(error, UnexpectedToken) else Token("$END", "")
    before = (getattr(error, "token_history", None) or [None])[-1]
    if token.type == "$END":
        last = source.text.count("\n") + (not source.text.endswith("\n"))
        width = len((source.text.splitlines() or [""])[-1])
        at = Position(max(1, last), width + 1, width + 2)
        raise source.error(at, "the program ends in the middle", "close what is open with '}'") from None
    if before is not None and str(before) in _LOOPS:
        at = token_position(before)
        raise source.error(at, "the language has no loops", "use map, filter or reduce over the vector") from None
    if before is not None and before.end_line < line:  # what is missing belongs at the end of the line before
        at = Position(before.end_line, before.end_column, before.end_column + 1)
        raise source.error(at, "the line ends too early", _advice(error)) from None
    at = Position(line, column, column + len(str(token)))
    raise source.error(at, f"unexpected {str(token)!r}", _advice(error)) from None


def _advice(error: Any) -> str:
    expected = sorted(getattr(error, "accepts", None) or error.expected)
    words = [_WORDS[name] for name in expected if name in _WORDS]
    return f"write {' or '.join(words[:4])} here" if words else "write an expression here"
