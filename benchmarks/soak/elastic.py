"""Ranks that die and come back under torchrun's elastic launch: three, two, three again, and what became of training.

    python benchmarks/soak/elastic.py --rounds 5

Each round runs `examples/train_elastic.py`, unchanged, under three launchers, as on three hosts. After a checkpoint one
of them is killed together with its rank, at a random moment; once the two others have saved, it is started again; once
the three have, they train to the end. Ranks note what they load and save. Good is a round in which every start goes on
from the newest checkpoint, the sum over ranks of what they owe is after every load what it was before, for each
element, and the loss falls. The exit code is 1 where a round is not good.
"""

import argparse
import contextlib
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from penstock.bench.record import make_record, save_record
from penstock.cluster.processes import free_port

RECIPE = Path(__file__).parents[2] / "examples" / "train_elastic.py"
OUT = Path(__file__).parents[1] / "results" / "soak-elastic.json"
RANKS = 3
SAVE_EVERY = 10  # steps
LAST_STEPS = 150  # that ranks train for when they are three again; before, without end
PATIENCE_SECONDS = 400.0  # for a checkpoint, or for the end
CONF = "last_call_timeout=20,keep_alive_interval=2,keep_alive_max_attempt=10"  # a busy machine answers late
MOST_LOST = 1e-6  # of what is owed in all, by element: sums of float32 residuals are rounded
LEAST_FALL = 0.75  # of the loss, from the first checkpoint to the last
Note = dict[str, Any]


# One rank: the recipe, which notes what it loads and saves


def rank_main(folder: Path) -> None:
    """Patch what the recipe calls, so that it is noted, and run the recipe."""
    import torch
    import torch.distributed as dist

    from penstock.torch import Checkpoints

    losses, owed = list[float](), dict[str, Any]()
    load, save, loss = Checkpoints.load, Checkpoints.save, torch.nn.functional.binary_cross_entropy_with_logits

    def noted_loss(*operands: Any) -> torch.Tensor:
        found = loss(*operands)
        losses.append(found.item())
        return found

    def noted_load(self: Checkpoints, step: int | None = None) -> int:
        take = type(self._model).load_exchange_state_dict

        def noted_take(model: Any, states: list[Any]) -> None:
            owed["before"] = _residuals(states)
            take(model, states)

        type(self._model).load_exchange_state_dict = noted_take  # type: ignore[method-assign, assignment]
        found = load(self, step)
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, self._model.exchange_state_dict())
        after, before = _residuals(states), owed.get("before", {})
        lost = [float((after[name] - before[name]).abs().max()) for name in before]
        mass = sum(float(each.abs().sum()) for each in before.values())
        _note(folder, event="load", step=found, lost=max(lost, default=0.0), mass=mass)
        return found

    def noted_save(self: Checkpoints, step: int) -> Path:
        path = save(self, step)
        _note(folder, event="save", step=step, loss=sum(losses[-SAVE_EVERY:]) / SAVE_EVERY)
        return path

    Checkpoints.load, Checkpoints.save = noted_load, noted_save  # type: ignore[method-assign]
    torch.nn.functional.binary_cross_entropy_with_logits = noted_loss  # type: ignore[assignment]
    sys.argv = [str(RECIPE), f"--folder={folder}", f"--save-every={SAVE_EVERY}", f"--steps={_steps(folder)}"]
    runpy.run_path(str(RECIPE), run_name="__main__")


def _residuals(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sum over ranks of what they owe, by parameter, element by element."""
    total: dict[str, Any] = {}
    for state in states:
        for name, value in state["memories"].get("residual", {}).items():
            total[name] = total.get(name, 0.0) + value.double()
    return total


def _note(folder: Path, **values: Any) -> None:
    """Append a line to the notes; one process writes at a time, rank 0."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        with open(folder / "notes.jsonl", "a") as file:
            file.write(json.dumps({"ranks": dist.get_world_size(), **values}) + "\n")


def _steps(folder: Path) -> int:
    """Return how many steps there are in all: few more once there are as many ranks again."""
    from penstock.torch.saved_folder import complete_checkpoints

    if not (found := complete_checkpoints(folder)):
        return 1_000_000
    head = json.loads((found[-1] / "checkpoint.json").read_text())
    grown = head["world_size"] < int(os.environ["WORLD_SIZE"]) == RANKS
    return int(head["step"]) + LAST_STEPS if grown else 1_000_000


# The launchers


class Launchers:
    """torchrun's launchers of one job, a host each, as far as torchrun knows."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port, self.running = folder, free_port(), dict[int, subprocess.Popen[bytes]]()

    def start(self, number: int) -> None:
        """Start one; number 0 keeps the meeting point."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"2:{RANKS}", "--nproc-per-node", "1"]
        command += ["--max-restarts", "100", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}"]
        command += ["--rdzv-id", "elastic", "--rdzv-conf", f"{CONF},is_host={int(number == 0)}"]
        with open(self._folder / f"launcher-{number}.log", "ab") as log:
            self.running[number] = subprocess.Popen(
                [*command, __file__, "--rank", str(self._folder)],
                stdout=log,
                stderr=log,
                env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},  # as docs/elastic.md says
            )

    def kill(self, number: int) -> None:
        """End a launcher and its rank at once, as a host that loses its power."""
        launcher = self.running.pop(number)
        if launcher.poll() is None:
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
            for pid in (launcher.pid, *map(int, children)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        launcher.wait()

    def notes(self) -> list[Note]:
        """Return what ranks have noted so far."""
        path = self._folder / "notes.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_save(self, ranks: int, after: int) -> float:
        """Return after how many seconds so many ranks have saved a checkpoint, beyond the first `after` notes."""
        began = monotonic()
        while monotonic() - began < PATIENCE_SECONDS:
            if any(each["event"] == "save" and each["ranks"] == ranks for each in self.notes()[after:]):
                return monotonic() - began
            if any(launcher.poll() is not None for launcher in self.running.values()):
                raise RuntimeError(f"a launcher ended: {self.said()}")
            sleep(0.2)
        raise RuntimeError(f"no checkpoint of {ranks} ranks in {PATIENCE_SECONDS:g} s: {self.said()}")

    def said(self) -> str:
        """Return the last that launchers and ranks have said."""
        return "\n".join(path.read_text()[-2000:] for path in sorted(self._folder.glob("launcher-*.log")))


@contextlib.contextmanager
def launchers() -> Iterator[Launchers]:
    """Give launchers with a folder of their own, which end with the block."""
    with tempfile.TemporaryDirectory(prefix="penstock-elastic-") as folder:
        made = Launchers(Path(folder))
        try:
            yield made
        finally:
            for number in list(made.running):
                made.kill(number)


def run_round(seed: int) -> dict[str, Any]:
    """Return the row of one round: three ranks, two, three again."""
    chance = random.Random(seed)
    victim = chance.randrange(1, RANKS)  # number 0 keeps the meeting point, and must stay
    with launchers() as made:
        for number in range(RANKS):
            made.start(number)
        made.wait_for_save(RANKS, 0)
        sleep(3 * chance.random())
        seen = len(made.notes())
        made.kill(victim)
        fewer_seconds = made.wait_for_save(RANKS - 1, seen)
        seen = len(made.notes())
        made.start(victim)
        more_seconds = made.wait_for_save(RANKS, seen)
        codes = [launcher.wait(PATIENCE_SECONDS) for launcher in made.running.values()]
        notes = made.notes()
    seconds = {"until_fewer_save_seconds": round(fewer_seconds, 1), "until_all_save_seconds": round(more_seconds, 1)}
    return {"seed": seed, "victim": victim, **judge(notes, codes), **seconds}


def judge(notes: Sequence[Note], codes: Sequence[int]) -> dict[str, Any]:
    """Return what became of training, by what ranks noted."""
    loads, saves = ([each for each in notes if each["event"] == event] for event in ("load", "save"))
    mass, lost = max(each["mass"] for each in loads), max(each["lost"] for each in loads)
    fall = saves[-1]["loss"] / saves[0]["loss"]
    ranks = [size for size, _ in groupby(each["ranks"] for each in saves)]
    found = {
        "ranks": ranks,
        "starts": len(loads),
        "checkpoints": len(saves),
        "last_step": saves[-1]["step"],
        "unsent": mass,  # the most at any load, summed over elements and ranks
        "lost": lost,  # the most of any element at any load
        "loss": fall,  # the last checkpoint's by the first's
    }
    good = ranks == [RANKS, RANKS - 1, RANKS] and not any(codes) and _goes_on(notes) and fall < LEAST_FALL
    return found | {"good": good and loads[-1]["mass"] > 0 and all(e["lost"] <= MOST_LOST * e["mass"] for e in loads)}


def _goes_on(notes: Sequence[Note]) -> bool:
    """Say whether every start goes on from the newest checkpoint; rank 0 may have ended before it noted one."""
    saved = 0
    for each in notes:
        if each["step"] - saved not in ((0, SAVE_EVERY) if each["event"] == "load" else (SAVE_EVERY,)):
            return False
        saved = each["step"]
    return True


def main() -> int:
    """Run the rounds and keep the record; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--out", type=Path, default=OUT, help="keep the record here")
    given = parser.parse_args()
    rows = []
    for seed in range(given.seed, given.seed + given.rounds):
        try:
            rows.append(run_round(seed))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            rows.append({"seed": seed, "good": False, "said": str(error)[-3000:]})
        print(rows[-1], flush=True)
        good = sum(row["good"] for row in rows)
        save_record(make_record("soak-elastic", rows, rounds=len(rows), good=good, save_every=SAVE_EVERY), given.out)
    return 0 if all(row["good"] for row in rows) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(Path(sys.argv[2]))
    else:
        sys.exit(main())
