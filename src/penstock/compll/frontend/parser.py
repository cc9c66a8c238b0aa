"""Parser of the compressor language: lark's trees become `syntax` trees, its errors a `CompileError` with a caret."""

from functools import cache
from importlib.resources import files
from typing import Any, NoReturn

from lark import Lark, Token, Transformer, v_args
from lark import Tree as LarkTree
from lark.exceptions import UnexpectedCharacters, UnexpectedEOF, UnexpectedInput, UnexpectedToken, VisitError
from lark.tree import Meta

from penstock.compll.frontend.syntax import (
    Argument,
    Assign,
    At,
    Branch,
    Call,
    Cast,
    Choose,
    Declare,
    Expression,
    Field,
    Function,
    Infix,
    Member,
    Name,
    Number,
    ParamBlock,
    Position,
    Prefix,
    Return,
    Source,
    Statement,
    Tree,
    TypeName,
)

LONGEST = 1 << 18  # characters of a program


def parse(text: str, path: str = "<string>") -> Tree:
    """Return the syntax tree of a program."""
    source = Source(path, text)
    if len(text) > LONGEST:
        advice = f"write it in at most {LONGEST}"
        raise source.error(Position(1, 1, 2), f"the program has {len(text)} characters", advice)
    try:
        items = build_items(_parser().parse(text))
    except UnexpectedInput as error:
        _raise_syntax(source, error)
    except VisitError as error:  # from building our tree
        if isinstance(error.orig_exc, RecursionError):
            raise error.orig_exc from None
        token = error.obj.children[-1] if isinstance(error.obj, LarkTree) else error.obj
        assert isinstance(token, Token)
        raise source.error(token_position(token), "the number is too long", "use at most 20 digits") from None
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


def build_items(tree: LarkTree[Token]) -> list[Any]:
    """Return the items of a program: parameter blocks, functions, and lists of globals."""
    items: list[Any] = _Builder().transform(tree)
    return items


@v_args(meta=True)
class _Builder(Transformer[Token, Any]):
    """Turns lark's trees into ours, bottom up."""

    def start(self, meta: Meta, items: list[Any]) -> list[Any]:
        return items

    def param_block(self, meta: Meta, items: list[Any]) -> ParamBlock:
        name, *fields = [item for item in items if item is not None]
        return ParamBlock(str(name), tuple(fields), at=token_position(name))

    def field(self, meta: Meta, items: list[Any]) -> Field:
        type_, name, default, allowed = items
        choices = tuple(allowed[1]) if allowed and allowed[0] == "choices" else ()
        interval = (allowed[1][0], allowed[1][1]) if allowed and allowed[0] == "interval" else None
        return Field(type_, str(name), default, choices, interval, at=token_position(name))

    def choices(self, meta: Meta, items: list[Any]) -> tuple[str, list[Any]]:
        return "choices", items

    def interval(self, meta: Meta, items: list[Any]) -> tuple[str, list[Any]]:
        return "interval", items

    def number(self, meta: Meta, items: list[Any]) -> int | float:
        sign, token = items
        return -_literal(token) if sign else _literal(token)

    def globals(self, meta: Meta, items: list[Any]) -> list[Declare]:
        type_, *names = items
        return [Declare(type_, str(name), None, at=token_position(name)) for name in names]

    def function(self, meta: Meta, items: list[Any]) -> Function:
        result, name, *arguments, body = [item for item in items if item is not None]
        void = isinstance(result, Token)
        end = Position(meta.end_line, meta.end_column - 1, meta.end_column)
        at = token_position(name)
        return Function(None if void else result, str(name), tuple(arguments), tuple(body), end, at=at)

    def argument(self, meta: Meta, items: list[Any]) -> Argument:
        type_, name = items
        return Argument(str(type_) if isinstance(type_, Token) else type_, str(name), at=_position(meta))

    def block(self, meta: Meta, items: list[Any]) -> list[Statement]:
        return [statement for item in items for statement in (item if isinstance(item, list) else [item])]

    def declare(self, meta: Meta, items: list[Any]) -> list[Statement]:
        type_, *declarators = items
        return [Declare(type_, str(name), value, at=token_position(name)) for name, value in declarators]

    def declarator(self, meta: Meta, items: list[Any]) -> tuple[Token, Expression | None]:
        return items[0], items[1]

    def assign(self, meta: Meta, items: list[Any]) -> Assign:
        return Assign(str(items[0]), items[1], at=token_position(items[0]))

    def branch(self, meta: Meta, items: list[Any]) -> Branch:
        condition, yes, no = items
        return Branch(condition, _as_block(yes), _as_block(no), at=_position(meta))

    def give(self, meta: Meta, items: list[Any]) -> Return:
        return Return(items[0], at=_position(meta))

    def type(self, meta: Meta, items: list[Any]) -> TypeName:
        (name, width), star = items
        return TypeName(name, width, star is not None, at=_position(meta))

    def type_by_block(self, meta: Meta, items: list[Any]) -> TypeName:
        (name, width), block = items
        return TypeName(name, width, False, block, at=_position(meta))

    def scalar(self, meta: Meta, items: list[Any]) -> tuple[str, Expression | None]:
        item = items[0]
        return (str(item), None) if isinstance(item, Token) else ("uint", item)

    def choose(self, meta: Meta, items: list[Any]) -> Choose:
        return Choose(items[0], items[1], items[2], at=_position(meta))

    def chain(self, meta: Meta, items: list[Any]) -> Expression:
        left: Expression = items[0]
        for operator, right in zip(items[1::2], items[2::2], strict=True):
            whole = Position(left.at.line, left.at.column, right.at.end_column)
            at = whole if left.at.line == right.at.line else token_position(operator)
            left = Infix(str(operator), left, right, at=at)
        return left

    def prefix(self, meta: Meta, items: list[Any]) -> Prefix:
        return Prefix(str(items[0]), items[1], at=_position(meta))

    def cast(self, meta: Meta, items: list[Any]) -> Cast:
        return Cast(items[0], items[1], at=_position(meta))

    def member(self, meta: Meta, items: list[Any]) -> Member:
        return Member(items[0], str(items[1]), at=_position(meta))

    def at(self, meta: Meta, items: list[Any]) -> At:
        return At(items[0], items[1], at=_position(meta))

    def integer(self, meta: Meta, items: list[Any]) -> Number:
        return Number(_literal(items[0]), at=_position(meta))

    def real(self, meta: Meta, items: list[Any]) -> Number:
        return Number(_literal(items[0]), at=_position(meta))

    def name(self, meta: Meta, items: list[Any]) -> Name:
        return Name(str(items[0]), at=_position(meta))

    def call(self, meta: Meta, items: list[Any]) -> Call:
        token, *arguments = items
        function, _, template = str(token).partition("<")
        values = tuple(argument for argument in arguments if argument is not None)
        return Call(function.strip(), template.rstrip("> ").strip(), values, at=_position(meta))


def token_position(token: Token) -> Position:
    """Return where a token stands."""
    assert token.line is not None
    assert token.column is not None
    return Position(token.line, token.column, token.column + len(token))


def _position(meta: Meta) -> Position:
    if meta.empty:
        return Position(1, 1, 2)
    end = meta.end_column if meta.end_line == meta.line else meta.column + 1
    return Position(meta.line, meta.column, end)


def _as_block(item: Any) -> tuple[Statement, ...]:
    if item is None:
        return ()
    return tuple(item) if isinstance(item, list) else (item,)


def _literal(token: Token) -> int | float:
    text = str(token)
    return int(text, 0) if token.type == "INTEGER" else float(text.rstrip("f"))
