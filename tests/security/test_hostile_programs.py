"""Programs that are made to be expensive: one clear error, in bounded time and memory."""

import pytest

from penstock.compll.frontend.source import compile_source
from penstock.errors import CompileError

DECODE = "void decode(uint8* compressed, float* gradient) { gradient = extract(compressed); }\n"


def encode(body, before="", result="gradient"):
    """Return a program with that body of encode."""
    return (
        f"{before}void encode(float* gradient, uint8* compressed) {{ {body} compressed = concat({result}); }}\n{DECODE}"
    )


def mapped(body):
    """Return a program that maps a function with that body over the gradient."""
    return encode("", f"float f(float x) {{ {body} }}\n", "map(gradient, f)")


def doubling(argument):
    """Return thirty functions, each of which calls the one before twice."""
    calls = "".join(f"float f{i}(float x) {{ return f{i - 1}(x) + f{i - 1}({argument}); }}\n" for i in range(1, 30))
    return "float f0(float x) { return x * 2 + 1; }\n" + calls


DEEP, LONG = "nested too deep", "expressions once its functions are put in"
PROGRAMS = {
    "5000 parentheses": (encode(f"float x = {'(' * 5000}1{')' * 5000};"), DEEP),
    "5000 signs": (encode(f"float x = {'-' * 5000}1;"), DEEP),
    "5000 terms": (encode(f"float x = {'+'.join(['1.5'] * 5000)};"), DEEP),
    "5000 blocks": (encode("{" * 5000 + "}" * 5000), DEEP),
    "1000 ifs": (encode("if (1 < 2) " * 1000 + "{}"), DEEP),
    "1000 choices": (encode(f"float x = {'1 < 2 ? 1 : ' * 1000}1;"), DEEP),
    "220 terms in a kernel": (mapped(f"return x{' + 1' * 220};"), "levels; a kernel can have 60"),
    "functions that double": (encode("float x = f29(1);", doubling("x")), LONG),
    "functions that double, unlike": (encode("float x = f29(1);", doubling("x + 1")), LONG),
    "branches that double": (
        mapped(f"float y = x; {'if (y > 1) { y = y + 1; } else { if (y > 2) return 1; } ' * 30} return y;"),
        LONG,
    ),
    "2000 statements": (
        encode("float x0 = gradient.size;" + "".join(f"float x{i} = x{i - 1} + 1;" for i in range(1, 2000))),
        LONG,
    ),
    "a number of 5000 digits": (encode(f"int32 x = {'9' * 5000};"), "the number is too long"),
    "a parameter of 20 digits": (f"param P {{ uint8 A = {'9' * 20}; }}\n{encode('')}", "an integer that uint8 holds"),
    "a range of 20 digits": (
        f"param P {{ int32 A = {'9' * 20} in [0, {'9' * 20}]; }}\n{encode('')}",
        "an integer that int32 holds",
    ),
    "a parameter of 400 digits": (f"param P {{ float A = {'9' * 400}; }}\n{encode('')}", "a finite number"),
    "a parameter of 5000 digits": (f"param P {{ float A = {'9' * 5000}; }}\n{encode('')}", "the number is too long"),
    "ten million letters": (encode(f"/*{'x' * 10**7}*/"), "characters; write it in at most"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_expensive_program_is_refused(name):
    text, message = PROGRAMS[name]
    with pytest.raises(CompileError, match=message) as raised:
        compile_source(text, "hostile.cll")
    assert str(raised.value).startswith("hostile.cll:")


def test_a_program_of_forty_levels_is_compiled():
    assert compile_source(mapped(f"return x{' + 1' * 40};"), "mine.cll").name == "mine"
