"""Malformed programs and what the compiler says: the file, the line, a caret under the mistake, and what to do."""

import numpy as np
import pytest

from penstock.compll.frontend.parameters import bind_arguments
from penstock.compll.frontend.source import compile_source
from penstock.errors import CodecError, CompileError

GOOD = """\
float scale;
uint1 isUp(float x) { return x >= 0; }
float back(uint1 up) { return up ? scale : -scale; }
void encode(float* gradient, uint8* compressed) {
    scale = reduce(map(gradient, abs), sum) / greater(gradient.size, 1);
    uint1* bits = map(gradient, isUp);
    compressed = concat(scale, bits);
}
void decode(uint8* compressed, float* gradient) {
    scale = extract(compressed);
    uint1* bits = extract(compressed);
    gradient = map(bits, back);
}
"""

# name: (what is replaced in GOOD, by what, line, what the caret marks, message)
MALFORMED = {
    "missing semicolon": (
        "    compressed = concat(scale, bits);",
        "    compressed = concat(scale, bits)",
        7,
        "",
        "the line ends too early; write ';' here",
    ),
    "a loop": (
        "    compressed = concat(scale, bits);",
        "    for (int32 i = 0; i < 3; i) {}",
        7,
        "for",
        "the language has no loops; use map, filter or reduce over the vector",
    ),
    "stray character": (
        "    compressed = concat(scale, bits);",
        "    compressed = concat(scale, bits) @;",
        7,
        "@",
        "unexpected character '@'; remove it",
    ),
    "unclosed": (
        "    gradient = map(bits, back);\n}\n",
        "    gradient = map(bits, back);\n",
        12,
        "",
        "the program ends in the middle; close what is open with '}'",
    ),
    "unknown name": (
        "concat(scale, bits)",
        "concat(scale, bitz)",
        7,
        "bitz",
        "unknown name 'bitz'; did you mean 'bits'?",
    ),
    "unknown function": (
        "map(gradient, isUp)",
        "map(gradient, isUpp)",
        6,
        "isUpp",
        "unknown function 'isUpp'; did you mean 'isUp'?",
    ),
    "unknown operator": (
        "reduce(map(gradient, abs), sum)",
        "reduc(gradient, sum)",
        5,
        "reduc(gradient, sum)",
        "unknown function 'reduc'; did you mean 'reduce'?",
    ),
    "unknown variable assigned": (
        "    scale = reduce",
        "    scael = reduce",
        5,
        "scael",
        "unknown name 'scael'; did you mean 'scale'?",
    ),
    "unknown member": (
        "gradient.size",
        "gradient.length",
        5,
        "gradient.length",
        "float* has no member 'length'; vectors have .size, params their parameters",
    ),
    "function arity": (
        "map(gradient, isUp)",
        "map(gradient, greater)",
        6,
        "greater",
        "greater takes 2 arguments and is given 1; hand over as many as it declares",
    ),
    "scalar arity": (
        "greater(gradient.size, 1)",
        "greater(gradient.size)",
        5,
        "greater(gradient.size)",
        "greater takes 2 arguments and is given 1; hand over as many as it declares",
    ),
    "operator arity": (
        "map(gradient, isUp)",
        "map(gradient)",
        6,
        "map(gradient)",
        "map takes vectors and then the name of a function; write map(vector, function)",
    ),
    "topk arity": (
        "    compressed = concat(scale, bits);",
        "    int32* k = topk(gradient);\n    compressed = concat(scale, bits);",
        7,
        "topk(gradient)",
        "topk takes 2 arguments and is given 1; hand over 1 vectors, then 1 scalars",
    ),
    "random arity": (
        "return x >= 0;",
        "return random<float>(1) >= 0;",
        2,
        "random<float>(1)",
        "random takes 2 arguments and is given 1; write random<float>(0, 1)",
    ),
    "vector type": (
        "    uint1* bits = map(gradient, isUp);",
        "    uint2* bits = map(gradient, isUp);",
        6,
        "map(gradient, isUp)",
        "'bits' is uint2* and the value is uint1*; declare it uint1*, or map a function that returns the other",
    ),
    "scalar for vector": (
        "    uint1* bits = map",
        "    uint1 bits = map",
        6,
        "map(gradient, isUp)",
        "'bits' is uint1 and the value is uint1*; assign a value of its type",
    ),
    "vector for scalar": (
        "    scale = reduce(map(gradient, abs), sum) / greater(gradient.size, 1);",
        "    scale = gradient;",
        5,
        "gradient",
        "'scale' is float and the value is float*; assign a value of its type",
    ),
    "vector arithmetic": (
        "map(gradient, abs), sum)",
        "gradient + 1, sum)",
        5,
        "gradient",
        "float* is a vector, and a scalar is wanted; index it, reduce it, or map",
    ),
    "float condition": (
        "up ? scale : -scale",
        "scale ? 1 : 0",
        3,
        "scale ? 1 : 0",
        "a float is not a condition; compare it, as in x != 0",
    ),
    "float modulo": (
        "return x >= 0;",
        "return x % 2 >= 0;",
        2,
        "x % 2",
        "% works on integers, and an operand is a float; cast it: (int32) x",
    ),
    "float index": (
        "return x >= 0;",
        "return x >= 0;\n}\nfloat* values;\nfloat g(float x) { return values[x];",
        5,
        "x",
        "an index is an integer, and this is a float; cast it: (int32) x",
    ),
    "uint1 overflow": (
        "uint1 isUp(float x) { return x >= 0; }",
        "uint1 isUp(float x) { return x >= 0 ? 2 : 0; }",
        2,
        "x >= 0 ? 2 : 0",
        "the value can be 0 to 2, and uint1 holds 0 to 1; use % 2, or a wider type",
    ),
    "uint2 overflow": (
        "uint1 isUp(float x) { return x >= 0; }",
        "uint2 code(uint4 x) { return x; }\nuint1 isUp(float x) { return x >= 0; }",
        2,
        "x",
        "the value can be 0 to 15, and uint2 holds 0 to 3; use % 4, or a wider type",
    ),
    "uint8 overflow of a size": (
        "    uint1* bits",
        "    uint8 n = gradient.size;\n    uint1* bits",
        6,
        "gradient.size",
        "the value can be 0 to 1073741824, and uint8 holds 0 to 255; use % 256, or a wider type",
    ),
    "literal too large": (
        "greater(gradient.size, 1)",
        "greater(gradient.size, 4294967296)",
        5,
        "4294967296",
        "4294967296 does not fit int32; use at most 2147483647",
    ),
    "division by zero": (
        "greater(gradient.size, 1)",
        "(8 / gradient.size)",
        5,
        "8 / gradient.size",
        "the divisor can be 0; keep it above 0: greater(x, 1)",
    ),
    "shift too far": (
        "greater(gradient.size, 1)",
        "(1 << gradient.size)",
        5,
        "1 << gradient.size",
        "the shift can be 0 to 1073741824; shift by 0 to 31",
    ),
    "no decode": (
        GOOD[GOOD.index("void decode") :],
        "",
        8,
        "}",
        "the program has no decode; add void decode(uint8* compressed, float* gradient, Params params)",
    ),
    "no encode": (
        GOOD[GOOD.index("void encode") : GOOD.index("void decode")],
        "",
        8,
        "}",
        "the program has no encode; add void encode(float* gradient, uint8* compressed, Params params)",
    ),
    "no concat": (
        "    compressed = concat(scale, bits);\n",
        "",
        7,
        "}",
        "encode never calls concat; end it with compressed = concat(...)",
    ),
    "two concats": (
        "    compressed = concat(scale, bits);",
        "    compressed = concat(scale, bits);\n    compressed = concat(bits);",
        8,
        "concat(bits)",
        "encode calls concat twice; write all fields in one concat",
    ),
    "extract in encode": (
        "    uint1* bits = map",
        "    uint8 t = extract(compressed);\n    uint1* bits = map",
        6,
        "extract(compressed)",
        "extract reads compressed bytes, which only decode has; move it to decode",
    ),
    "concat in decode": (
        "    gradient = map(bits, back);",
        "    compressed = concat(scale);",
        12,
        "concat(scale)",
        "concat writes compressed bytes, which only encode does; move it to encode",
    ),
    "extract wrong type": (
        "    scale = extract(compressed);\n",
        "    int32 scale2 = extract(compressed);\n",
        10,
        "extract(compressed)",
        "extract reads int32 where concat wrote 'scale', a float; read what concat wrote, in its order",
    ),
    "extract wrong order": (
        "    scale = extract(compressed);\n    uint1* bits = extract(compressed);",
        "    uint1* bits = extract(compressed);\n    scale = extract(compressed);",
        10,
        "extract(compressed)",
        "extract reads uint1* where concat wrote 'scale', a float; read what concat wrote, in its order",
    ),
    "extract too few": (
        "    uint1* bits = extract(compressed);\n    gradient = map(bits, back);",
        "    gradient = map(range(gradient.size), toFloat);\n}\nfloat toFloat(int32 i) { return i;",
        12,
        "}",
        "decode does not read 'bits', which concat wrote; extract every field, in order",
    ),
    "extract too many": (
        "    gradient = map(bits, back);",
        "    float more = extract(compressed);\n    gradient = map(bits, back);",
        12,
        "extract(compressed)",
        "everything that concat wrote is read already; remove this extract, or concat more",
    ),
    "gradient not assigned": (
        "    gradient = map(bits, back);\n",
        "",
        12,
        "}",
        "decode never assigns 'gradient'; end it with gradient = ...",
    ),
    "gradient of another size": (
        "    gradient = map(bits, back);",
        "    gradient = filter(map(bits, back), isUp);",
        13,
        "}",
        "'gradient' gets a vector of another size (decoded); use map or scatter",
    ),
    "sizes differ": (
        "    uint1* bits = map(gradient, isUp);",
        "    uint1* bits = map(gradient, filter(gradient, isUp), lt);\n}\nuint1 lt(float a, float b) { return a < b;",
        6,
        "filter(gradient, isUp)",
        "the vectors have different sizes: gradient and filter; use vectors made from one another by map",
    ),
    "unassigned": (
        "    scale = reduce(map(gradient, abs), sum) / greater(gradient.size, 1);\n",
        "",
        6,
        "scale",
        "'scale' has no value yet; assign it before this line",
    ),
    "used before assigned": (
        "    scale = extract(compressed);\n",
        "    float s = scale;\n",
        10,
        "scale",
        "'scale' has no value yet; assign it before this line",
    ),
    "no return": (
        "{ return x >= 0; }",
        "{ float y = x; }",
        2,
        "}",
        "isUp can end without a return; return a value on every path",
    ),
    "return on one path": (
        "{ return x >= 0; }",
        "{ if (x >= 0) return 1; }",
        2,
        "}",
        "isUp can end without a return; return a value on every path",
    ),
    "recursion": (
        "{ return x >= 0; }",
        "{ return isUp(x); }",
        2,
        "isUp(x)",
        "isUp calls itself; there is no recursion; write it with operators",
    ),
    "global assigned in a function": (
        "{ return x >= 0; }",
        "{ scale = x; return 1; }",
        2,
        "scale",
        "'scale' is a global; assign globals in encode or decode only",
    ),
    "declared twice": (
        "float scale;",
        "float scale;\nfloat scale;",
        2,
        "scale",
        "'scale' is declared twice; rename one of them",
    ),
    "name of a built-in": (
        "uint1 isUp(float x) { return x >= 0; }",
        "float abs(float x) { return x; }\nuint1 isUp(float x) { return x >= 0; }",
        2,
        "abs",
        "'abs' is built in; give your function another name",
    ),
    "encode returns": (
        "void encode",
        "float encode",
        4,
        "float",
        "encode returns a value; declare it void encode(...)",
    ),
    "encode arguments": (
        "void encode(float* gradient, uint8* compressed)",
        "void encode(uint8* compressed, float* gradient)",
        4,
        "encode",
        "encode takes uint8*, float*; declare it encode(float*, uint8*, Params params)",
    ),
    "return in encode": (
        "    compressed = concat(scale, bits);",
        "    compressed = concat(scale, bits);\n    return scale;",
        8,
        "return scale;",
        "encode and decode return nothing; assign their result",
    ),
    "parameter without value": (
        "float scale;",
        "param P { uint8 n; }\nfloat scale;",
        1,
        "n",
        "parameter 'n' has no value; give it a default, or pass n",
    ),
    "default not allowed": (
        "float scale;",
        "param P { uint8 n = 3 in {1, 2}; }\nfloat scale;",
        1,
        "n",
        "the default of 'n' is 3; wanted one of 1, 2; change it",
    ),
    "unknown parameter": (
        "float scale;",
        "param P { float n = 1; }\nfloat other() { return P.m; }\nfloat scale;",
        2,
        "P.m",
        "unknown parameter of P: 'm'; declare it, or use one of n",
    ),
    "width of a type": (
        "    uint1* bits = map(gradient, isUp);",
        "    uint<3>* bits = map(gradient, isUp);",
        6,
        "3",
        "the width is 3; use 1, 2, 4, 8 or 16, or a uint8 parameter that is one",
    ),
    "operator inside if": (
        "    uint1* bits = map(gradient, isUp);",
        "    if (scale > 1) { scale = reduce(gradient, sum); }\n    uint1* bits = map(gradient, isUp);",
        6,
        "if (scale > 1) { scale = reduce(gradient, sum); }",
        "operators on vectors run always; move them out of the if, or use ?:",
    ),
    "group size": (
        "reduce(map(gradient, abs), sum)",
        "reduce(map(gradient, abs), sum, gradient.size)[0]",
        5,
        "gradient.size",
        "the size of a block is not a constant of 0 or more; write a number, or a uintN parameter",
    ),
    "a value by block for the whole tensor": (
        "reduce(map(gradient, abs), sum) / greater(gradient.size, 1)",
        "reduce(map(gradient, abs), sum, 4) / 4",
        5,
        "reduce(map(gradient, abs), sum, 4) / 4",
        "there is one value for each block here; assign it to a variable such as float[n]",
    ),
    "a value by block as the count of an operator": (
        "    uint1* bits = map(gradient, isUp);",
        "    uint1* bits = map(gradient, isUp);\n    int32* w = topk(gradient, reduce(bits, sum, 4) + 1);",
        7,
        "reduce(bits, sum, 4) + 1",
        "there is one value for each block here; assign it to a variable such as float[n]",
    ),
    "blocks of another size": (
        "    uint1* bits = map(gradient, isUp);",
        "    uint1* bits = map(gradient, isUp);\n    float[8] a = reduce(gradient, sum, 4);",
        7,
        "reduce(gradient, sum, 4)",
        "'a' is float[8] and the value is float*, one for gradient / 4 up; reduce by blocks of 8",
    ),
    "blocks of two sizes": (
        "    uint1* bits = map(gradient, isUp);",
        "    uint1* bits = map(gradient, isUp);\n    float[8] a = 2 * reduce(gradient, sum, 4);",
        7,
        "2 * reduce(gradient, sum, 4)",
        "'a' has one value for gradient / 8 up, and a part of this one for gradient / 4 up; use blocks of one size",
    ),
    "a type by blocks of unknown size": (
        "    uint1* bits = map(gradient, isUp);",
        "    uint1* bits = map(gradient, isUp);\n    float[-1] a = 0;",
        7,
        "-1",
        "the size of a block is not a constant of 0 or more; write a number, or a uintN parameter",
    ),
    "values by block beside another vector": (
        "void encode(float* gradient, uint8* compressed) {",
        "float[4] top;\nuint1 isTop(float x) { return x >= top; }\nvoid encode(float* gradient, uint8* compressed) {\n"
        "    top = reduce(gradient, greater, 4);\n    uint1* t = map(filter(gradient, isUp), isTop);",
        5,
        "top",
        "there is one value for gradient / 4 up here, and the vectors at hand are those of filter; "
        "map over the gradient, or over values of as many blocks",
    ),
    "scatter without size": (
        "    gradient = map(bits, back);",
        "    gradient = scatter(map(bits, one), map(bits, back), 5);\n}\nint32 one(uint1 b) { return b;",
        12,
        "5",
        "scatter needs a vector's size; write gradient.size",
    ),
}


def test_the_program_that_the_table_breaks_is_right():
    assert compile_source(GOOD).name == "_string_"


@pytest.mark.parametrize("name", MALFORMED)
def test_a_mistake_is_named_with_its_place_and_what_to_do(name):
    old, new, line, marked, message = MALFORMED[name]
    assert GOOD.count(old) >= 1
    source = GOOD.replace(old, new, 1)
    with pytest.raises(CompileError) as caught:
        compile_source(source, "bad.cll")
    head, text, caret = str(caught.value).split("\n")
    lines = source.splitlines()
    assert head == f"bad.cll:{line}:{caught.value.column}: {message}"
    assert text == "    " + lines[line - 1]
    assert text[caret.index("^") : caret.rindex("^") + 1] == marked


WRONG_RANGES = {
    "float n = 0.5 in [0, 1e39]": "'n' may be 1e+39; wanted 0, or a number of either sign from 1.4e-45",
    "float n = 0.5 in [0, 1e400]": "'n' may be inf; wanted 0, or",
    "float n = 1e39": "the default of 'n' is 1e+39; wanted 0, or",
    "float n = 1e-46": "the default of 'n' is 1e-46; wanted 0, or",
    "float n in {1, 1e39}": "'n' may be 1e+39; wanted 0, or",
    "float n in [1, 0]": "'n' may be from 1 to 0; wanted the smaller number first",
    "int32 n in [-1e400, 1e400]": "'n' may be -inf; wanted an integer that int32 holds",
    "int32 n in [0, 1e12]": "'n' may be 1000000000000.0; wanted an integer that int32 holds",
    "uint8 n in {3, 300}": "'n' may be 300; wanted an integer that uint8 holds",
}


@pytest.mark.parametrize("field", WRONG_RANGES)
def test_a_range_beyond_what_the_type_holds_is_refused_where_it_is_declared(field):
    with pytest.raises(CompileError) as raised:
        compile_source(f"param Params {{ {field}; }}\n{GOOD}", "bad.cll")
    assert f"bad.cll:1:{17 + field.index(' n')}: {WRONG_RANGES[field]}" in str(raised.value)


@pytest.mark.parametrize("value", [3.5e38, 1e39, float("inf"), float("-inf"), float("nan"), 1e-46, 10**400])
def test_a_value_that_float32_does_not_hold_is_refused(value):
    program = compile_source(f"param Params {{ float n; }}\n{GOOD}")
    with pytest.raises(CodecError, match="parameter n is"):
        bind_arguments(program, {"n": value})
    assert bind_arguments(program, {"n": -3.4028234e38}) == (np.float32(-3.4028234e38),)


def test_a_parameter_that_the_program_does_not_have_is_refused():
    with pytest.raises(CodecError, match="unknown parameter 'width'; its parameters: none"):
        compile_source(GOOD, params={"width": 3})
