"""torch's own tests of DistributedDataParallel, as tasks for a pool of ranks (`ranks.py`)."""

import functools
import os
import sys
import unittest
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from conformance import on_cpu
from conformance.ranks import RANKS
from conformance.wrappers import wrapper_class

GROUP_SECONDS = 60  # as in torch's own runs
# torch's PowerSGD hook begins collectives in callbacks; those of two buckets cross on gloo, with stock too.
ONE_BUCKET = ("test_ddp_hook_parity_powerSGD",)


def run(rank: int, folder: Path, name: str, flavour: str) -> None:
    """Run one of torch's tests with one of the wrappers."""
    module = _module()
    vars(module)[on_cpu.WRAPPER] = wrapper_class(flavour, 1 if name in ONE_BUCKET else 2)
    for each in ("barrier", "test_dir"):
        (folder / each).mkdir(exist_ok=True)
    os.environ |= {"TEMP_DIR": str(folder), "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)  # the test before may have left it
    dist.set_debug_level_from_env()
    module.Barrier.barrier_id = 0
    test: Any = _suite()(name)
    test.rank, test.file_name = rank, str(folder / "store")
    seconds = module.CUSTOM_PG_TIMEOUT.get(name, GROUP_SECONDS)
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=seconds), RANKS, rank)
    sys.modules["torch.testing._internal.common_utils"].set_rng_seed()
    try:
        getattr(test, name)()
        dist.barrier()
    except SystemExit as end:
        raise _skipped(end.code) from end
    finally:
        dist.destroy_process_group()


def list_tests(rank: int, folder: Path, wanted: tuple[str, ...]) -> None:
    """Raise unless `wanted` are torch's tests that use DistributedDataParallel, directly or through what they call."""
    suite, using = _suite(), on_cpu.methods_with_a_wrapper()
    found = {name for name in dir(suite) if name.startswith("test") and name in using}
    assert found == set(wanted), f"new in this torch: {found - set(wanted)}; gone: {set(wanted) - found}"


@functools.cache
def _module() -> ModuleType:
    return on_cpu.load(RANKS)


@functools.cache
def _suite() -> type[unittest.TestCase]:
    module = _module()
    return type("Suite", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})


def _skipped(code: Any) -> Exception:
    """Return the reason of a test that left by an exit code of torch's."""
    skips = sys.modules["torch.testing._internal.common_distributed"].TEST_SKIPS.values()
    reasons = [each.message for each in skips if each.exit_code == code]
    return unittest.SkipTest(reasons[0]) if reasons else RuntimeError(f"the test left with exit code {code}")
