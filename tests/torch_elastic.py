"""Runs `examples/train_elastic.py`, unchanged, as one rank of an elastic launch, and notes what it loads and saves.

    torchrun ... tests/torch_elastic.py FOLDER

It trains without end until ranks that were fewer are three again, and then for `LAST_STEPS` more steps.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.torch import Checkpoints
from penstock.torch.saved_folder import complete_checkpoints

RECIPE = Path(__file__).parents[1] / "examples" / "train_elastic.py"
SAVE_EVERY, LAST_STEPS, RANKS = 10, 150, 3


def residuals(states: list[Any]) -> dict[str, torch.Tensor]:
    """Return the sum over ranks of what they owe, by parameter, element by element."""
    total: dict[str, torch.Tensor] = {}
    for state in states:
        for name, value in state["memories"].get("residual", {}).items():
            total[name] = total.get(name, torch.zeros(value.shape, dtype=torch.float64)) + value.double()
    return total


def note(folder: Path, **values: Any) -> None:
    """Append a line to the notes; one process writes at a time, rank 0."""
    if dist.get_rank() == 0:
        with open(folder / "notes.jsonl", "a") as file:
            file.write(json.dumps({"world_size": dist.get_world_size(), **values}) + "\n")


def main() -> None:
    """Patch what the recipe calls, so that it is noted, and run the recipe."""
    folder, losses = Path(sys.argv[1]), list[float]()
    load, save, loss = Checkpoints.load, Checkpoints.save, torch.nn.functional.binary_cross_entropy_with_logits
    owed: dict[str, Any] = {}

    def noted_loss(*operands: Any) -> torch.Tensor:
        found = loss(*operands)
        losses.append(found.item())
        return found

    def noted_load(self: Checkpoints) -> int:
        take = type(self._model).load_exchange_state_dict

        def noted_take(model: Any, states: list[Any]) -> None:
            owed["before"] = residuals(states)
            take(model, states)

        type(self._model).load_exchange_state_dict = noted_take
        step = load(self)
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, self._model.exchange_state_dict())
        after, before = residuals(states), owed.get("before", {})
        lost = [float((after[name] - before[name]).abs().max()) for name in before]
        mass = sum(float(each.abs().sum()) for each in before.values())
        note(folder, event="load", step=step, lost=max(lost, default=0.0), mass=mass, names=sorted(after))
        return step

    def noted_save(self: Checkpoints, step: int) -> Path:
        path = save(self, step)
        note(folder, event="save", step=step, losses=losses[-SAVE_EVERY:])
        return path

    Checkpoints.load, Checkpoints.save = noted_load, noted_save  # type: ignore[method-assign]
    torch.nn.functional.binary_cross_entropy_with_logits = noted_loss
    sys.argv = [str(RECIPE), f"--folder={folder}", f"--save-every={SAVE_EVERY}", f"--steps={steps(folder)}"]
    runpy.run_path(str(RECIPE), run_name="__main__")


def steps(folder: Path) -> int:
    """Return how many steps there are in all: few more once there are as many ranks again."""
    if not (found := complete_checkpoints(folder)):
        return 1_000_000
    head = json.loads((found[-1] / "checkpoint.json").read_text())
    grown = head["world_size"] < int(os.environ["WORLD_SIZE"]) == RANKS
    return int(head["step"]) + LAST_STEPS if grown else 1_000_000


if __name__ == "__main__":
    main()
