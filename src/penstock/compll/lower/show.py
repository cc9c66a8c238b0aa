"""The IR as text, for people: `penstock compile` prints it."""

from penstock.compll.ir import (
    Apply,
    Expr,
    Filter,
    GroupReduce,
    Let,
    Map,
    Program,
    Read,
    Reduce,
    Statement,
    element_of,
)

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "mod": "%", "shl": "<<", "shr": ">>", "and": "&", "or": "|",
    "xor": "^", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "land": "&&", "lor": "||",
}  # fmt: skip


def show(expr: Expr) -> str:
    """Return an expression as text, for people."""
    arguments = [show(argument) for argument in expr.args]
    match expr.op:
        case "const":
            return str(expr.value)
        case "param" | "name":
            return str(expr.value)
        case "element":
            return f"{expr.value}[i]"
        case "at":
            return f"{expr.value}[{arguments[0]}]"
        case "index":
            return "i"
        case "size" | "field" | "operand":
            return f"{expr.op}({expr.value})"
        case "random":
            return f"random{expr.value}({', '.join(arguments)})"
        case "call":
            return f"{expr.value}({', '.join(arguments)})"
        case "cast":
            return f"cast<{expr.type.name}>({arguments[0]})"
        case "neg" | "not":
            return ("-" if expr.op == "neg" else "!") + arguments[0]
        case op if op in _INFIX:
            return f"({arguments[0]} {_INFIX[op]} {arguments[1]})"
    return f"{expr.op}({', '.join(arguments)})"


def _show_statement(statement: Statement) -> str:
    match statement:
        case Let():
            return f"{statement.name}: {statement.expr.type.name} = {show(statement.expr)}"
        case Reduce():
            over = f"over {statement.length} of {show(statement.expr)}"
            return f"{statement.name}: {statement.expr.type.name} = reduce {statement.reducer} {over}"
    head = f"{statement.name}[{statement.length}]: {element_of(statement).name} = "
    match statement:
        case Map():
            return head + show(statement.expr)
        case GroupReduce():
            return head + f"reduce {statement.reducer} of {show(statement.expr)} in groups of {statement.group}"
        case Filter():
            return head + f"{show(statement.value)} where {show(statement.keep)} over {statement.over}"
        case Apply():
            operands = [*statement.vectors, *(show(scalar) for scalar in statement.scalars)]
            return head + f"{statement.operator}({', '.join(operands)})"
        case Read():
            return head + f"read field {statement.field}"


def dump(program: Program) -> str:
    """Return the whole program as text, one definition a line."""
    lines = ["layout"]
    for number, field in enumerate(program.layout.fields):
        size = f" [{field.length}]" if field.length else ""
        lines.append(f"  {number} {field.name}: {field.type.name}{size}")
    lines.append("encode")
    lines += [f"  {_show_statement(statement)}" for statement in program.encode.statements]
    for number, source in enumerate(program.encode.fields):
        lines.append(f"  field {number} = {source if isinstance(source, str) else show(source)}")
    lines.append("decode")
    lines += [f"  {_show_statement(statement)}" for statement in program.decode.statements]
    lines += [f"  check field {number} == {show(expr)}" for number, expr in program.decode.checks]
    lines.append(f"  result {program.decode.result}")
    return "\n".join(lines) + "\n"
