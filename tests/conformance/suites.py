"""All tests that are run with stock and with ours, by names such as `torch/test_ddp_create_graph`."""

from pathlib import Path
from typing import Any

from conformance.ranks import Outcome, Pool

STOCK, OURS = "stock", ("native", "ring")  # the wrappers (`wrappers.py`)
FOLDER = Path(__file__).parent
TORCH = tuple((FOLDER / "torch_tests.txt").read_text().split())  # those of torch that use DistributedDataParallel
ACCELERATE = (
    "test_sync", "test_script", "test_ops", "test_distributed_data_loop", "test_gradient_accumulation",
    "test_gradient_accumulation_with_opt_and_scheduler",
)  # fmt: skip
LIGHTNING = (
    "automatic", "accumulated", "manual", "unused", "static_graph", "bucket_view", "comm_hook", "resumed"
)  # fmt: skip
NAMES = tuple(
    f"{suite}/{name}"
    for suite, names in (("torch", TORCH), ("accelerate", ACCELERATE), ("lightning", LIGHTNING))
    for name in names
)


class Runs:
    """Runs tests, each with each wrapper at most once."""

    def __init__(self) -> None:
        self._pool = Pool()
        self._outcomes: dict[tuple[str, str], Outcome] = {}

    def outcome(self, name: str, flavour: str) -> Outcome:
        """Return how the test ends with this wrapper."""
        if (name, flavour) not in self._outcomes:
            self._outcomes[name, flavour] = self._run(name, flavour)
        return self._outcomes[name, flavour]

    def task(self, task: str, *arguments: Any) -> Outcome:
        """Run something else on the ranks (`ranks.Pool.run`)."""
        return self._pool.run(task, *arguments)

    def stop(self) -> None:
        """End the ranks."""
        self._pool.stop()

    @property
    def log(self) -> str:
        """What the ranks printed."""
        return Path(self._pool.log.name).read_text(errors="replace")

    def _run(self, name: str, flavour: str) -> Outcome:
        suite, _, test = name.partition("/")
        outcome = self._pool.run(f"conformance.{suite}_suite:run", test, flavour)
        if suite == "accelerate":  # it keeps its state, and has another class in the place of torch's
            self._pool.stop()
        return outcome
