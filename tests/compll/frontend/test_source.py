"""The front end: Figure 5 of HiPress compiles, parameters specialise, encode and decode agree on the layout."""

from pathlib import Path

import pytest

from penstock.compll.frontend.source import compile_source
from penstock.compll.ir import NUMEL
from penstock.compll.lower.passes import dump
from penstock.compll.types import FLOAT, SCALARS, UINT8, Vector

# The paper's Figure 5 to the letter, except `tail` (erratum 8: the values that only fill the last byte), and the
# decode that the paper leaves out.
FIGURE_5 = r"""
param EncodeParams{
    uint8 bitwidth; // assume bitwidth = 2 for clarity
}
float min, max, gap;
uint2 floatToUint(float elem) {
    float r = (elem - min) / gap;
    return floor(r + random<float>(0, 1));
}
void encode(float* gradient, uint8* compressed, \
    EncodeParams params) {
    min = reduce(gradient, smaller);
    max = reduce(gradient, greater);
    gap = (max - min) / ((1 << params.bitwidth) - 1);
    uint8 tail = (4 - gradient.size % 4) % 4;
    uint2* Q = map(gradient, floatToUint);
    compressed = concat(params.bitwidth, tail, \
        min, max, Q);
}
float uintToFloat(uint2 level) { return min + level * gap; }
void decode(uint8* compressed, float* gradient, EncodeParams params) {
    uint8 bitwidth = extract(compressed);
    uint8 tail = extract(compressed);
    min = extract(compressed);
    max = extract(compressed);
    uint2* Q = extract(compressed);
    gap = (max - min) / ((1 << bitwidth) - 1);
    gradient = map(Q, uintToFloat);
}
"""


def test_figure_5_of_the_paper_compiles_as_printed() -> None:
    program = compile_source(FIGURE_5, "figure5.cll", {"bitwidth": 2})
    kinds = [(field.name, field.type) for field in program.layout.fields]
    assert kinds == [
        ("bitwidth", UINT8),
        ("tail", UINT8),
        ("min", FLOAT),
        ("max", FLOAT),
        ("Q", Vector(SCALARS["uint2"])),
    ]
    assert program.layout.fields[4].length == NUMEL


def test_the_decoder_knows_the_fields_that_follow_from_size_and_parameters() -> None:
    program = compile_source(FIGURE_5, "figure5.cll", {"bitwidth": 2})
    assert [number for number, _ in program.decode.checks] == [0, 1]  # bitwidth and tail


def test_the_example_in_the_ir_docstring_is_what_dump_prints() -> None:
    import penstock.compll.ir as ir

    assert ir.__doc__ is not None
    text = "\n".join(line[4:] for line in ir.__doc__.splitlines())
    source = text[text.index("float scale;") : text.index("mes (written")]
    shown = text[text.index("layout\n  0 scale") : text.index("  result decoded") + len("  result decoded\n")]
    assert dump(compile_source(source)) == shown


@pytest.mark.parametrize("bitwidth", [1, 2, 4, 8])
def test_a_type_can_depend_on_a_parameter(bitwidth: int) -> None:
    import penstock.compll

    path = Path(penstock.compll.__file__).parent / "algorithms" / "terngrad.cll"
    program = compile_source(path.read_text(), str(path), {"bitwidth": bitwidth})
    assert program.layout.fields[4].type == Vector(SCALARS[f"uint{bitwidth}"])
