"""From the text of a compressor to its IR: parameters chosen, functions checked, encode's fields compared to decode's.

`sort(v, greater)[k]` is how a program asks for a threshold. Where nothing else reads the sorted vector, and k is known
on the host, `select_ranks` replaces the sort by `nth`: a radix select over the bit patterns, three passes over `v`.
Floats only; the element found is the same, a zero always +0.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.compll.cache import read_source
from penstock.compll.frontend import syntax
from penstock.compll.frontend.evaluate import Evaluator, Unit
from penstock.compll.frontend.parameters import parameter_expr, specialise
from penstock.compll.frontend.parser import parse
from penstock.compll.frontend.scalar_ops import integer
from penstock.compll.frontend.scope import Compressed, ParamsRef, Scope, Slot, VectorRef
from penstock.compll.frontend.statements import elaborate, inline
from penstock.compll.functions import FUNCTIONS, Function
from penstock.compll.ir import (
    GRADIENT,
    LATEST,
    NUMEL,
    Apply,
    Decode,
    Encode,
    Expr,
    Layout,
    Length,
    Let,
    Program,
    Statement,
    expressions,
    is_static,
    levels,
    program_name,
    walk,
)
from penstock.compll.lower.host_known import is_host_known
from penstock.compll.operators import OPERATORS, Operator, lowerings
from penstock.compll.types import FLOAT, UINT8, ByBlock, Scalar, Vector

Parameters = Mapping[str, int | float]
MOST_LEVELS = 60  # of an expression: Python takes 200 parentheses inside each other
MOST_VECTORS = 32  # operations on vectors; the longest program shipped has 10, and numba takes minutes for 100 reduces


def compile_file(path: Path, params: Parameters | None = None) -> Program:
    """Return the IR of the compressor in a file."""
    return compile_source(read_source(path), str(path), params)


def compile_source(
    text: str,
    path: str = "<string>",
    params: Parameters | None = None,
    functions: Mapping[str, Function] = FUNCTIONS,
    operators: Mapping[str, Operator] = OPERATORS,
) -> Program:
    """Return the IR of a compressor, specialised for its `uintN` parameters.

    Parameters not in `params` take their default. What is wrong raises a `CompileError` that points at it.
    """
    try:
        return _compile(text, path, params or {}, functions, operators)
    except RecursionError:
        whole = syntax.Source(path, text)
        problem, advice = "expressions or statements are nested too deep", "assign parts of them to variables"
        raise whole.error(syntax.Position(1, 1, 2), problem, advice) from None


def _compile(
    text: str, path: str, params: Parameters, functions: Mapping[str, Function], operators: Mapping[str, Operator]
) -> Program:
    tree = parse(text, path)
    _check_names(tree, functions, operators)
    parameters = specialise(tree, params)
    blocks = {
        block.name: {field.name: parameter_expr(parameters[field.name]) for field in block.fields}
        for block in tree.params
    }
    own = {function.name: function for function in tree.functions if function.name not in ("encode", "decode")}
    unit = Unit(tree.source, own, functions, operators, blocks)
    for function in own.values():
        _check_alone(unit, tree, function)
    encode, layout = _encode(unit, tree)
    decode = _decode(unit, tree, encode, layout)
    program = Program(program_name(path), tuple(parameters.values()), layout, encode, decode)
    _check_levels(tree, program)
    _check_vectors(tree, program)
    made_from = f"{text}\n{lowerings(program, functions, operators)}"
    return replace(program, fingerprint=hashlib.sha256(made_from.encode()).hexdigest()[:16])


def _check_levels(tree: syntax.Tree, program: Program) -> None:
    """Refuse expressions that are nested deeper than Python compiles what is generated from them."""
    statements = (*program.encode.statements, *program.decode.statements)
    exprs = [expr for statement in statements for expr in expressions(statement)]
    exprs += [source for source in program.encode.fields if isinstance(source, Expr)]
    if (found := max(map(levels, exprs), default=0)) > MOST_LEVELS:
        problem = f"an expression has {found} levels; a kernel can have {MOST_LEVELS}"
        raise tree.source.error(syntax.Position(1, 1, 2), problem, "assign parts of it to variables")


def _check_vectors(tree: syntax.Tree, program: Program) -> None:
    """Refuse procedures that would take a back end minutes: its time grows with the cube of their length."""
    for procedure, statements in (("encode", program.encode.statements), ("decode", program.decode.statements)):
        if (found := sum(not isinstance(statement, Let) for statement in statements)) > MOST_VECTORS:
            (at,) = (function.at for function in tree.functions if function.name == procedure)
            problem = f"{procedure} has {found} operations on vectors (map, reduce, ...); it can have {MOST_VECTORS}"
            raise tree.source.error(at, problem, "write several maps as one function")


def _check_names(tree: syntax.Tree, functions: Mapping[str, Function], operators: Mapping[str, Operator]) -> None:
    """Refuse names declared twice, and functions that would hide the language's own."""
    seen: set[str] = set()
    nodes: list[syntax.ParamBlock | syntax.Declare | syntax.Function] = [*tree.params, *tree.globals, *tree.functions]
    for node in nodes:
        if node.name in seen:
            raise tree.source.error(node.at, f"{node.name!r} is declared twice", "rename one of them")
        seen.add(node.name)
        if isinstance(node, syntax.Function) and (node.name in functions or node.name in operators):
            raise tree.source.error(node.at, f"{node.name!r} is built in", "give your function another name")


def _globals(ev: Evaluator, tree: syntax.Tree, assigned: bool = False) -> Scope:
    """Return the globals of a program, without values or (to check a function alone) with stand-ins."""
    scope = Scope()
    for declared in tree.globals:
        kind = ev.type(declared.type)
        value: Expr | VectorRef | None = None
        if assigned and isinstance(kind, Scalar):
            value = Expr("name", kind, value=declared.name, low=kind.low, high=kind.high)
        elif assigned and isinstance(kind, Vector | ByBlock):
            length = Length(GRADIENT, kind.block) if isinstance(kind, ByBlock) else NUMEL
            low, high = kind.element.low, kind.element.high
            value = VectorRef(declared.name, kind.element, length, low, high, isinstance(kind, ByBlock))
        scope.slots[declared.name] = Slot(kind, value)
    return scope


def _check_alone(unit: Unit, tree: syntax.Tree, function: syntax.Function) -> None:
    """Elaborate a function on any arguments, so that one that is never called is checked too."""
    ev = Evaluator(unit, Scope(), over=NUMEL)
    ev.globals = _globals(ev, tree, assigned=True)
    arguments = []
    for declared in function.arguments:
        kind = FLOAT if isinstance(declared.type, str) else ev.type(declared.type)
        scalar = kind if isinstance(kind, Scalar) else kind.element
        arguments.append(Expr("param", scalar, value=declared.name, low=scalar.low, high=scalar.high))
    inline(ev, function, function, arguments)


def _procedure(
    unit: Unit, tree: syntax.Tree, name: str, kinds: tuple[Vector, ...]
) -> tuple[Evaluator, syntax.Function]:
    """Return an evaluator for `encode` or `decode` and its function, its signature checked."""
    function = next((item for item in tree.functions if item.name == name), None)
    if function is None:
        last = tree.source.text.rstrip().count("\n") + 1
        shape = "uint8* compressed, float* gradient" if name == "decode" else "float* gradient, uint8* compressed"
        at = syntax.Position(last, 1, 2)
        raise tree.source.error(at, f"the program has no {name}", f"add void {name}({shape}, Params params)")
    ev = Evaluator(unit, Scope())
    ev.globals = _globals(ev, tree)
    if function.result is not None:
        raise tree.source.error(function.result.at, f"{name} returns a value", f"declare it void {name}(...)")
    found = tuple(ev.type(item.type) for item in function.arguments if not isinstance(item.type, str))
    if found != kinds and not (name == "encode" and found == (kinds[0], *kinds)):
        wanted = ", ".join(kind.name for kind in kinds)
        text = ", ".join(kind.name for kind in found) or "nothing"
        raise tree.source.error(function.at, f"{name} takes {text}", f"declare it {name}({wanted}, Params params)")
    return ev, function


def _arguments(ev: Evaluator, function: syntax.Function, vectors: list[VectorRef]) -> tuple[Scope, str]:
    """Return the scope with the arguments of encode or decode, and the name of its compressed bytes."""
    scope, compressed, floats = Scope(), "", iter(vectors)
    for item in function.arguments:
        if isinstance(item.type, str):
            if item.type not in ev.unit.parameters:
                raise ev.unknown(item, item.type, list(ev.unit.parameters), "param block")
            scope.slots[item.name] = Slot(None, ParamsRef(item.type))
        elif ev.type(item.type) == Vector(UINT8):
            scope.slots[item.name], compressed = Slot(None, Compressed()), item.name
        else:
            scope.slots[item.name] = Slot(Vector(FLOAT), next(floats))
    return scope, compressed


def _encode(unit: Unit, tree: syntax.Tree) -> tuple[Encode, Layout]:
    ev, function = _procedure(unit, tree, "encode", (Vector(FLOAT), Vector(UINT8)))
    inputs = [VectorRef(GRADIENT, FLOAT, NUMEL), VectorRef(LATEST, FLOAT, NUMEL)]
    ev.writer.used = {GRADIENT, LATEST, "residual", "out", "payload", "seed", "numel", "factor"}
    scope, compressed = _arguments(ev, function, inputs)
    elaborate(ev, function.body, scope)
    if ev.packed is None:
        raise tree.source.error(function.end, "encode never calls concat", f"end it with {compressed} = concat(...)")
    fields, sources = ev.packed
    return Encode(select_ranks(ev.writer.statements, sources), sources), Layout(fields)


def _decode(unit: Unit, tree: syntax.Tree, encode: Encode, layout: Layout) -> Decode:
    ev, function = _procedure(unit, tree, "decode", (Vector(UINT8), Vector(FLOAT)))
    ev.layout = layout
    ev.expected = {
        number: source
        for number, source in enumerate(encode.fields)
        if isinstance(source, Expr) and not layout.fields[number].counts and is_static(source)
    }
    ev.writer.used = {"out", "payload", "seed", "numel", "factor"}
    ev.writer.aliases = {GRADIENT: "decoded"}
    empty = VectorRef(GRADIENT, FLOAT, NUMEL)
    scope, _ = _arguments(ev, function, [empty])
    elaborate(ev, function.body, scope)
    gradient = next(name for name, slot in scope.slots.items() if slot.type == Vector(FLOAT))
    result = scope.slots[gradient].value
    assert isinstance(result, VectorRef)
    if result is empty:
        raise tree.source.error(function.end, f"decode never assigns {gradient!r}", f"end it with {gradient} = ...")
    if result.length != NUMEL:
        problem = f"{gradient!r} gets a vector of another size ({result.length})"
        raise tree.source.error(function.end, problem, "use map or scatter")
    unread = [field.name for field in layout.fields[ev.read :] if not field.counts]
    if unread:
        problem = f"decode does not read {unread[0]!r}, which concat wrote"
        raise tree.source.error(function.end, problem, "extract every field, in order")
    return Decode(tuple(ev.writer.statements), result.name, tuple(ev.expected.items()))


SORT, NTH = "sort", "nth"


def select_ranks(statements: Sequence[Statement], fields: Sequence[Expr | str]) -> tuple[Statement, ...]:
    """Return the statements with each float sort of which one element is read replaced by a selection (`nth`)."""
    made = list(statements)
    for place, statement in enumerate(made):
        if isinstance(statement, Apply) and statement.operator == SORT and statement.element.is_float:
            question = _only_question(statement.name, made, fields)
            if question is not None:
                made[place] = _selection(statement, question)
                made[place + 1 :] = [_answered(item, question) for item in made[place + 1 :]]
    return tuple(made)


def _only_question(name: str, statements: Sequence[Statement], fields: Sequence[Expr | str]) -> Expr | None:
    """Return the only read of a vector, `name[k]` in a scalar with k known on the host; None if there are others."""
    if name in fields or any(isinstance(item, Apply) and name in item.vectors for item in statements):
        return None
    inside: dict[int, tuple[Expr, Statement | None]] = {
        id(node): (node, item) for item in statements for expr in expressions(item) for node in walk(expr)
    }
    inside |= {id(node): (node, None) for expr in fields if isinstance(expr, Expr) for node in walk(expr)}
    reads = [(node, item) for node, item in inside.values() if node.op in ("element", "at") and node.value == name]
    if len(reads) != 1 or not isinstance(reads[0][1], Let) or reads[0][0].op != "at":
        return None
    question = reads[0][0]
    return question if is_host_known(question.args[0], {item.name: item for item in statements}) else None


def _selection(sort: Apply, question: Expr) -> Apply:
    descending = sort.scalars[-1]
    length = Length(sort.name)
    return replace(sort, operator=NTH, length=length, scalars=(question.args[0], descending), bound=integer(1))


def _answered(statement: Statement, question: Expr) -> Statement:
    """Return the statement with its read of the sorted vector replaced by one of the selected element."""
    if not isinstance(statement, Let):
        return statement
    memo = {id(question): replace(question, args=(integer(0),))}
    return replace(statement, expr=_put(statement.expr, memo))


def _put(expr: Expr, memo: dict[int, Expr]) -> Expr:
    if id(expr) not in memo:
        args = tuple(_put(argument, memo) for argument in expr.args)
        same = all(a is b for a, b in zip(args, expr.args, strict=True))
        memo[id(expr)] = expr if same else replace(expr, args=args)
    return memo[id(expr)]
