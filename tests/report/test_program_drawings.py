from xml.etree import ElementTree

import pytest

from penstock.errors import FormatError, StrategyError
from penstock.program import Collective
from penstock.program.builder import ProgramBuilder
from penstock.report.program_picture import draw_program
from penstock.report.program_text import BlockLabels, draw_text
from penstock.strategies import Options, build
from penstock.verify import verify


def text(operation: str, name: str, world_size: int, numel: int, block: int | None = None, **limits: int) -> list[str]:
    program = build(operation, name, world_size, numel, Options(block_numel=block))
    return draw_text(program, verify(program), **limits).splitlines()


def test_wangs_figure_2c_in_the_terminal():
    assert text("all_reduce", "linear_pipeline", 3, 4, 1) == [
        "step  rank 0  rank 1  rank 2",
        "   1  a > 1   .       .",
        "   2  b > 1   a > 2   .",
        "   3  c > 1   b > 2   A > 0",
        "   4  d > 1   c > 2   B > 0",
        "   5  A > 1   d > 2   C > 0",
        "   6  B > 1   A > 2   D > 0",
        "   7  C > 1   B > 2   .",
        "   8  D > 1   C > 2   .",
        "   9  .       D > 2   .",
    ]


def test_several_blocks_in_one_message_are_named_together():
    assert text("all_reduce", "halving_doubling", 4, 4)[1] == "   1  cd > 2  cd > 3  ab > 0  ab > 1"


def test_a_broadcast_has_no_capitals_since_nothing_is_summed():
    assert text("broadcast", "linear_pipeline", 3, 2, 1)[1:] == [
        "   1  a > 1   .       .",
        "   2  b > 1   a > 2   .",
        "   3  .       b > 2   .",
    ]


def test_more_blocks_than_letters_are_numbered_and_starred():
    lines = text("all_reduce", "linear_pipeline", 2, 30, 1)
    assert lines[1] == "   1  0 > 1    ."
    assert lines[-1].endswith("29* > 0")


def test_what_does_not_fit_is_counted():
    assert text("all_reduce", "ring", 40, 40, max_steps=2, width=40)[-1] == "... 76 more steps, 37 more ranks"


def test_nothing_is_drawn_of_a_program_without_messages():
    assert text("all_reduce", "ring", 2, 0) == ["step  rank 0  rank 1"]


def test_labels_tell_blocks_apart():
    program = build("all_reduce", "ring", 4, 8)
    proof = verify(program)
    labels = BlockLabels(program, proof.carried)
    assert labels.count == 4
    assert {labels.label(one).lower() for one in proof.carried} == set("abcd")


@pytest.mark.parametrize("name", ["ring", "double_tree", "native"])
def test_a_picture_shows_every_message_by_its_label(name, tmp_path):
    program = build("all_reduce", name, 5, 40)
    proof = verify(program)
    draw_program(program, proof, tmp_path / "p.svg")
    svg = (tmp_path / "p.svg").read_text()
    ElementTree.fromstring(svg)
    assert svg.count('id="text_') >= len(proof.carried)
    draw_program(program, proof, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_an_empty_program_is_a_frame(tmp_path):
    program = ProgramBuilder("nothing", Collective.REDUCE, 1, 4).build()
    draw_program(program, verify(program), tmp_path / "p.png")
    assert (tmp_path / "p.png").exists()


def test_a_file_of_another_kind_is_refused(tmp_path):
    program = build("all_reduce", "ring", 2, 4)
    with pytest.raises(FormatError, match=r"a path ending in \.png, \.svg or \.pdf"):
        draw_program(program, verify(program), tmp_path / "p.docx")


def test_too_many_messages_for_a_picture_are_refused(tmp_path):
    program = build("all_reduce", "ring", 48, 48)
    with pytest.raises(StrategyError, match="4512 messages are too many for a picture; wanted at most 4000"):
        draw_program(program, verify(program), tmp_path / "p.png")
