"""Fusion: how many times each algorithm goes over the gradient, and what error feedback costs."""

from pathlib import Path

import penstock.compll
from penstock.compll.frontend import compile_file
from penstock.compll.fuse import schedule_decode, schedule_encode
from penstock.compll.ir import RESIDUAL, Program, Reduce
from penstock.compll.schedule import Keep, Pack, Pass

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
        passes = [step for step in schedule_encode(compile_file(path), feedback=True).steps if isinstance(step, Pass)]
        replaced = [
            any(isinstance(output, Keep) and output.to == RESIDUAL for output in step.outputs) for step in passes
        ]
        assert replaced[0]
        assert not any(RESIDUAL in step.inputs for step in passes[1:])


def test_decode_is_one_pass() -> None:
    assert schedule_decode(algorithm("onebit")).passes() == schedule_decode(algorithm("terngrad")).passes() == 1


def test_a_gradient_is_checked_for_nan_in_the_first_pass_only() -> None:
    for feedback, vector in ((False, "gradient"), (True, "total")):
        steps = schedule_encode(algorithm("terngrad"), feedback).steps
        assert [step.check for step in steps if isinstance(step, Pass)] == [vector, ""]
