"""docs/migrating.md: its diffs are the real ones, as short as it says, and both sides train to the same loss."""

import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from integration_workers import script_runs
from spawn import spawn

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "migrating.md").read_text()
MOST = {"nanogpt": 2, "trainer": 1, "accelerate": 2, "lightning": 1}  # lines changed
NEEDS = {"trainer": "transformers", "accelerate": "accelerate", "lightning": "lightning"}


def scripts(name: str) -> tuple[str, str]:
    return (ROOT / "tests/migration" / f"{name}.py").read_text(), (ROOT / "examples" / f"with_{name}.py").read_text()


def changed(name: str) -> list[tuple[str, str]]:
    stock, ours = (text.splitlines() for text in scripts(name))
    return [(old, new) for old, new in zip(stock, ours, strict=True) if old != new]


@pytest.mark.parametrize("name", MOST)
def test_the_diff_on_the_page_is_that_of_the_scripts(name):
    (block,) = re.findall(rf"^```diff {name}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert block == "".join(f"-{old}\n+{new}\n" for old, new in changed(name))


@pytest.mark.parametrize("name", MOST)
def test_no_more_lines_change_than_promised(name):
    assert 1 <= len(changed(name)) <= MOST[name]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def nanogpt(*runs: tuple[str, dict[str, str]]) -> list[dict[str, Any]]:
    """Run nanoGPT's script on two ranks as often as asked; what it ends with on the first."""
    stock, ours = scripts("nanogpt")
    texts = {
        "stock": stock,
        "dense": ours.replace('codec="blocks(bits=4)"', "measure_seconds=0.2"),
        "coded": ours.replace('codec="blocks(bits=4)"', 'codec="blocks(bits=4)", measure_seconds=0.2'),
    }
    ports = free_ports(len(runs))
    jobs = [(texts[name], environment, port) for (name, environment), port in zip(runs, ports, strict=True)]
    return spawn(2, script_runs, jobs)[0]


def test_nanogpts_script_trains_as_stock_where_dense_and_sends_an_eighth_where_coded():
    short = {"MAX_ITERS": "10"}
    stock, dense, coded = nanogpt(("stock", short), ("dense", short), ("coded", short))
    np.testing.assert_allclose(dense["weights"], stock["weights"], rtol=1e-3, atol=1e-5)
    assert dense["loss"] == pytest.approx(stock["loss"], rel=1e-3)
    routes, nbytes, sent = zip(*coded["used"], strict=True)
    assert all("blocks(bits=4)" in route for route in routes)
    assert 1 / 9 < sum(sent) / sum(nbytes) < 1 / 5  # two ranks: a ring sends as many bytes as the gradient has


@pytest.mark.slow
def test_nanogpts_checkpoint_is_resumed_by_either_wrapper(tmp_path):
    kept, longer = {"OUT_DIR": str(tmp_path), "MAX_ITERS": "20"}, {"OUT_DIR": str(tmp_path), "INIT_FROM": "resume"}
    whole, _, resumed, by_stock, coded = nanogpt(
        ("stock", {"MAX_ITERS": "40"}),
        ("dense", kept),
        ("dense", longer | {"MAX_ITERS": "40"}),
        ("stock", longer | {"MAX_ITERS": "41"}),  # goes on from a checkpoint that ours wrote
        ("coded", longer | {"MAX_ITERS": "80"}),
    )
    assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-2)
    np.testing.assert_allclose(resumed["weights"], whole["weights"], rtol=1e-2, atol=1e-3)
    assert by_stock["loss"] < 2 * whole["loss"]
    assert coded["loss"] < whole["loss"]


def final_loss(script: str, folder: Path) -> float:
    path = folder / "train.py"
    path.write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    return float(re.search(r"final loss (\S+)", result.stderr)[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST)
def test_dense_training_ends_with_stocks_loss(name, tmp_path):
    pytest.importorskip(NEEDS.get(name, "torch"))
    stock, ours = scripts(name)
    dense = ours.replace(', codec="blocks(bits=4)"', "")
    assert final_loss(dense, tmp_path) == pytest.approx(final_loss(stock, tmp_path), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nanogpt", "accelerate"])
def test_four_bits_end_near_stocks_loss(name, tmp_path):
    pytest.importorskip(NEEDS.get(name, "torch"))
    stock, ours = scripts(name)
    assert abs(final_loss(ours, tmp_path) - final_loss(stock, tmp_path)) < 0.1
