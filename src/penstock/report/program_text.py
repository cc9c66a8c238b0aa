"""Draws a program in the terminal: steps down, ranks across, in each cell what the rank sends and to whom."""

from penstock.program import Program
from penstock.report.block_labels import BlockLabels
from penstock.verify import Proof

_EMPTY = "."


def draw_text(program: Program, proof: Proof, max_steps: int = 40, width: int = 120) -> str:
    """Return the drawing; steps beyond `max_steps` and ranks beyond `width` characters are counted, not drawn.

    step  rank 0  rank 1  rank 2
       1  a > 1   b > 2   c > 0
       2  c > 1   a > 2   b > 0
    """
    cells = _cells(program, proof)
    size = max([len(f"rank {program.world_size - 1}"), *(len(cell) for cell in cells.values())])
    ranks = range(min(program.world_size, max((width - 6) // (size + 2), 1)))
    lines = ["step  " + "  ".join(f"rank {rank}".ljust(size) for rank in ranks)]
    for step in range(1, min(proof.steps, max_steps) + 1):
        lines.append(f"{step:4}  " + "  ".join(cells.get((step, rank), _EMPTY).ljust(size) for rank in ranks))
    hidden = [(proof.steps - max_steps, "steps"), (program.world_size - len(ranks), "ranks")]
    rest = [f"{count} more {what}" for count, what in hidden if count > 0]
    return "\n".join(line.rstrip() for line in [*lines, *([f"... {', '.join(rest)}"] if rest else [])])


def _cells(program: Program, proof: Proof) -> dict[tuple[int, int], str]:
    labels = BlockLabels(program, proof.carried)
    return {(one.step, one.source): f"{labels.label(one)} > {one.target}" for one in proof.carried}
