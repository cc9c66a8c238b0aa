"""Fusion: how many times each algorithm goes over the gradient, and what error feedback costs."""

from pathlib import Path

import pytest

import penstock.compll
from penstock.compll.frontend.source import compile_file, compile_source
from penstock.compll.ir import RESIDUAL, Program, Reduce
from penstock.compll.lower.fuse import schedule_decode, schedule_encode, schedule_later
from penstock.compll.lower.passes import Keep, Pack, Pass, Tiled

ALGORITHMS = Path(penstock.compll.__file__).parent / "algorithms"


def algorithm(name: str) -> Program:
    return compile_file(ALGORITHMS / f"{name}.cll")


def test_onebit_finds_bits_sums_and_count_in_one_pass() -> None:
    (first, *rest) = schedule_encode(algorithm("onebit")).steps
    assert isinstance(first, Pass)
    assert [type(output) for output in first.outputs] == [Reduce, Reduce, Reduce, Pack]
    assert not any(isinstance(step, Pass) for step in rest)


def test_terngrad_packs_only_after_it_knows_the_range() -> None:
    passes = [step for step in schedule_encode(algorithm("terngrad")).steps if isinstance(step, Pass)]
    assert [[type(output) for output in step.outputs] for step in passes] == [[Reduce, Reduce], [Pack]]


def test_error_feedback_rides_in_the_last_pass_when_the_scale_is_known_there() -> None:
    assert schedule_encode(algorithm("terngrad"), feedback=True).passes() == 2
    assert schedule_encode(algorithm("onebit"), feedback=True).passes() == 2  # the means come out of the first


def test_nothing_reads_the_old_residual_after_it_is_replaced() -> None:
    for path in ALGORITHMS.glob("*.cll"):
        passes = schedule_encode(compile_file(path), feedback=True).each_pass()
        replaced = [
            any(isinstance(output, Keep) and output.to == RESIDUAL for output in step.outputs) for step in passes
        ]
        first = replaced.index(True)
        assert not any(RESIDUAL in step.inputs for step in passes[first + 1 :])


def test_decode_is_one_pass() -> None:
    assert schedule_decode(algorithm("onebit")).passes() == schedule_decode(algorithm("terngrad")).passes() == 1


def test_a_gradient_is_checked_for_nan_in_the_first_pass_only() -> None:
    for feedback, vector in ((False, "gradient"), (True, "total")):
        steps = schedule_encode(algorithm("terngrad"), feedback).steps
        assert [step.check for step in steps if isinstance(step, Pass)] == [vector, ""]


def test_what_is_found_by_block_is_used_in_the_same_pass() -> None:
    for name in ("blocks", "qsgd"):
        program = algorithm(name)
        for schedule in (
            schedule_encode(program),
            schedule_encode(program, feedback=True),
            schedule_later(program),
        ):
            assert schedule is not None
            assert schedule.passes() == 1
            (step,) = schedule.steps
            assert isinstance(step, Tiled)
            assert step.local  # no vector by block is longer than a stretch


@pytest.mark.parametrize(
    "use",
    [
        "tops[i / 50]",  # not its own block's
        "tops[i / 100] + tops[0]",  # another block's
        "tops[i / 100] / greater(most, 1)",  # the whole gradient's
    ],
)
def test_a_pass_that_needs_more_than_its_own_blocks_waits_for_them(use: str) -> None:
    source = f"""
float* tops;
float most;
uint8 level(float x, int32 i) {{ return x / ({use}); }}
float back(uint8 code) {{ return code; }}
void encode(float* gradient, uint8* compressed) {{
    tops = reduce(gradient, greater, 100);
    most = reduce(gradient, greater);
    compressed = concat(tops, map(gradient, range(gradient.size), level));
}}
void decode(uint8* compressed, float* gradient) {{
    tops = extract(compressed);
    uint8* codes = extract(compressed);
    gradient = map(codes, back);
}}
"""
    schedule = schedule_encode(compile_source(source))
    assert schedule.passes() == 2
    assert not any(isinstance(step, Tiled) for step in schedule.steps)
