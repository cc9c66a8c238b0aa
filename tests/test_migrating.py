"""docs/migrating.md: its diffs are the real ones, as short as it says, and both sides train to the same loss."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
