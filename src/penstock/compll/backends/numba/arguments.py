"""What each numba kernel takes, and as what types: all that loading a compiled one needs to know."""

from penstock.compll.backends.numba.many import ARGUMENTS as MANY
from penstock.compll.ir import Program

ARGUMENTS = {
    "encode": ["gradient", "out", "seed_low", "seed_high"],
    "encode_feedback": ["gradient", "residual", "out", "seed_low", "seed_high"],
    "encode_later": ["gradient", "factor", "residual", "last", "out", "seed_low", "seed_high"],
    "decode": ["payload", "out"],
    "decode_add": ["payload", "out", "factor"],
    **MANY,
}
TYPES = {
    "gradient": "Array(float32, 1, 'C', readonly=True)",
    "residual": "float32[::1]",
    "payload": "Array(uint8, 1, 'C', readonly=True)",
    "last": "Array(uint8, 1, 'C', readonly=True)",
    "seed_low": "uint32",
    "seed_high": "uint32",
    "factor": "float32",
    "boundaries": "int64[::1]",
    "sizes": "int64[::1]",
    "calls": "uint32[::1]",
}


def signature(program: Program, kind: str) -> str:
    """Return the type of a kernel as numba writes it; the program's own parameters come last."""
    out = "uint8[::1]" if kind.startswith("encode") else "float32[::1]"
    types = [out if name == "out" else TYPES[name] for name in ARGUMENTS[kind]]
    types += ["float32" if parameter.type.is_float else "int32" for parameter in program.arguments]
    return f"int64({', '.join(types)})"
