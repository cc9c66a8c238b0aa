"""Programs that are made to be expensive: one clear error, in bounded time and memory."""

from dataclasses import replace

import pytest

from penstock.codecs.registry import make_codec
from penstock.compll.frontend.source import compile_source
from penstock.compll.ir import Expr, Map
from penstock.compll.lower.fuse import Levels, element, schedule_decode, schedule_encode
from penstock.compll.types import FLOAT
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


def mapped_in_turn(count, first):
    """Return statements that map a vector, and each result again."""
    return "".join(f"float* v{i} = map({f'v{i - 1}' if i else first}, f);" for i in range(count))


def reduced_in_turn(count):
    """Return a program whose reduces each wait for the one before."""
    known = "".join(f"float r{i};\nfloat f{i}(float x) {{ return x * r{i}; }}\n" for i in range(count))
    calls = [f"r{i} = reduce(map(gradient, f{i - 1}), greater);" for i in range(1, count)]
    return encode("r0 = reduce(gradient, greater);" + "".join(calls), known, f"map(gradient, f{count - 1})")


HALF = "float f(float x) { return x * 0.5 + 1; }\n"


def decoded_in_turn(count):
    """Return a program whose decode maps what it extracts, and each result again."""
    turns = mapped_in_turn(count, "codes")
    return (
        f"{HALF}void encode(float* gradient, uint8* compressed) {{ compressed = concat(gradient); }}\n"
        f"void decode(uint8* compressed, float* gradient) {{ float* codes = extract(compressed); {turns}"
        f" gradient = v{count - 1}; }}\n"
    )


DEEP, LONG = "nested too deep", "expressions once its functions are put in"
MANY = "operations on vectors .* can have 32"
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
    "a number of 400 digits": (mapped(f"return x * {'9' * 400}.5;"), "the number does not fit a float"),
    "a number beyond float32": (mapped("return x * 3.41e38;"), "the number does not fit a float"),
    "a parameter of 20 digits": (f"param P {{ uint8 A = {'9' * 20}; }}\n{encode('')}", "an integer that uint8 holds"),
    "a range of 20 digits": (
        f"param P {{ int32 A = {'9' * 20} in [0, {'9' * 20}]; }}\n{encode('')}",
        "an integer that int32 holds",
    ),
    "a parameter of 400 digits": (f"param P {{ float A = {'9' * 400}; }}\n{encode('')}", "as float32 holds"),
    "a parameter of 5000 digits": (f"param P {{ float A = {'9' * 5000}; }}\n{encode('')}", "the number is too long"),
    "200 maps in turn": (encode(mapped_in_turn(200, "gradient"), HALF, "v199"), f"encode has 200 {MANY}"),
    "400 maps in turn": (encode(mapped_in_turn(400, "gradient"), HALF, "v399"), f"encode has 400 {MANY}"),
    "100 reduces in turn": (reduced_in_turn(100), f"encode has 200 {MANY}"),
    "200 maps in decode": (decoded_in_turn(200), f"decode has 201 {MANY}"),
    "ten million letters": (encode(f"/*{'x' * 10**7}*/"), "characters; write it in at most"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_expensive_program_is_refused(name):
    text, message = PROGRAMS[name]
    with pytest.raises(CompileError, match=message) as raised:
        compile_source(text, "hostile.cll")
    assert str(raised.value).startswith("hostile.cll:")


def test_a_file_of_many_maps_is_one_error_for_users(tmp_path):
    (tmp_path / "many.cll").write_text(encode(mapped_in_turn(400, "gradient"), HALF, "v399"))
    with pytest.raises(CompileError, match=MANY):
        make_codec(str(tmp_path / "many.cll"))


@pytest.mark.parametrize("text", [encode(mapped_in_turn(32, "gradient"), HALF, "v31"), decoded_in_turn(31)])
def test_as_many_maps_as_allowed_are_fused_into_one_pass(text):
    program = compile_source(text, "mine.cll")
    schedules = schedule_encode(program), schedule_encode(program, feedback=True), schedule_decode(program)
    assert [each.passes() for each in schedules] == [1, 1, 1]


def test_levels_of_maps_that_read_two_earlier_ones_are_found_once_each():
    program = compile_source(encode("", HALF, "map(gradient, f)"), "mine.cll")
    (first, *_), length = program.encode.statements, program.encode.statements[0].length
    twice = [  # 2^200 paths lead back to the gradient
        Map(f"w{i}", length, Expr("add", FLOAT, (element(f"w{i - 2}"), element(f"w{i - 1}")))) for i in range(2, 200)
    ]
    levels = Levels()
    levels.add_all([replace(first, name="w0"), replace(first, name="w1"), *twice])
    assert levels.computed["w199"] == 0


def test_a_program_of_forty_levels_is_compiled():
    assert compile_source(mapped(f"return x{' + 1' * 40};"), "mine.cll").name == "mine"
