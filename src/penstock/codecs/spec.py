"""Codecs as text: a name, or a name with numbers, as `topk(density=0.01)`; plans and command lines write them so."""

import re
from collections.abc import Mapping

from penstock.errors import CodecError


def parse_spec(spec: str) -> tuple[str, dict[str, float]]:
    """Return the name and the parameters of a codec written as text.

    >>> parse_spec("topk(density=0.01)")
    ('topk', {'density': 0.01})
    """
    match = re.fullmatch(r"\s*([^()]+?)\s*(?:\(([^()]*)\))?\s*", spec)
    if not match:
        raise CodecError(f"codec {spec!r}; wanted a name such as onebit, or topk(density=0.01)")
    parameters: dict[str, float] = {}
    for part in filter(None, (piece.strip() for piece in (match[2] or "").split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            parameters[name] = int(value) if value.lstrip("-").isdigit() else float(value)
        except ValueError:
            raise CodecError(f"codec {spec!r}: {part!r} is not a parameter; write name=number") from None
    return match[1], parameters


def write_spec(name: str, parameters: Mapping[str, float]) -> str:
    """Return the text that `parse_spec` reads, with every digit of the numbers: densities are not rounded.

    >>> write_spec("sparse", {"density": 1 / 3, "value_bits": 16})
    'sparse(density=0.3333333333333333, value_bits=16)'
    """
    return f"{name}({', '.join(f'{key}={number_text(value)}' for key, value in parameters.items())})"


def number_text(value: float) -> str:
    """Return a number as short as possible, and never another one.

    >>> [number_text(value) for value in (1.0, 0.001, 2 / 3)]
    ['1', '0.001', '0.6666666666666666']
    """
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))
