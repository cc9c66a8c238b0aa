"""Every example prints what its `.out` file says."""

import re
import subprocess
import sys
from difflib import ndiff
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {  # of the extra `examples`, or of a framework's
    "with_lightning": "lightning",
    "with_accelerate": "accelerate",
    "with_trainer": "transformers",
    "train_keras": "tensorflow",
    "train_keras_before": "tensorflow",
    "train_jax": "jax",
    "train_jax_before": "jax",
    "train_mxnet": "mxnet",
    "train_mxnet_before": "mxnet",
}


SLOW = pytest.mark.slow
# Tests of their own have most of them: tests/torch/test_elastic.py and test_fsdp.py, tests/test_migrating.py.
LONG = {*NEEDS, "train_elastic", "train_fsdp", "with_nanogpt", "train_ddp_before", "collectives"}
SCRIPTS = [
    pytest.param(path, id=path.name, marks=[SLOW] if path.stem in LONG else [])
    for path in sorted(EXAMPLES.glob("*.py"))
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_prints_what_its_out_file_says(script):
    if script.stem in NEEDS:
        spec = find_spec(NEEDS[script.stem])  # a folder of tests may have the same name, and no file of its own
        if spec is None or spec.origin is None:
            pytest.skip(f"{script.name} needs {NEEDS[script.stem]}")
    expected = script.with_suffix(".out")
    assert expected.exists(), f"{script.name} has no .out file beside it"
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == expected.read_text()


def test_moving_to_penstock_changes_one_import_and_nothing_else():
    before, after = ((EXAMPLES / f"train_ddp{end}.py").read_text() for end in ("_before", ""))
    code = [text.split('"""')[2].splitlines() for text in (before, after)]
    changed = [(old, new) for old, new in zip(*code, strict=True) if old != new]
    wrapper = "import DistributedDataParallel as DDP"
    assert changed == [(f"from torch.nn.parallel {wrapper}", f"from penstock.torch {wrapper}")]


@SLOW
def test_the_example_trains_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run([*command, EXAMPLES / "train_ddp.py"], capture_output=True, text=True, check=False)
    assert result.stdout == "learned the circle\n", result.stderr


@pytest.mark.parametrize(
    ("framework", "lines"),
    [
        ("keras", ["import penstock.tensorflow as pk", "pk.init", "random", "optimizer", "model.fit"]),
        (
            "jax",
            [
                "import penstock.jax as pk",
                "pk.init",
                "parameters",
                "optimizer",
                "layers",
                "for key in jax.random.split",
            ],
        ),
        (
            "mxnet",
            ["import penstock.mxnet as pk", "pk.init", "mx.random.seed", "pk.broadcast_parameters", "trainer"],
        ),
    ],
)
def test_a_script_becomes_parallel_by_a_few_lines(framework, lines):
    before, after = ((EXAMPLES / f"train_{framework}{end}.py").read_text() for end in ("_before", ""))
    old, new = (text.split('"""', 2)[2].splitlines() for text in (before, after))
    changed = [line[2:] for line in ndiff(old, new) if line.startswith("+ ") and line[2:].strip()]
    first = [re.split(r"\(| =|  #", line)[0].strip() for line in changed]
    assert first == [*lines, "if pk.rank", "print"]


@pytest.mark.slow
def test_the_keras_example_trains_under_torchrun():
    if find_spec("tensorflow") is None:
        pytest.skip("install penstock[tensorflow] to run its example")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run([*command, EXAMPLES / "train_keras.py"], capture_output=True, text=True, check=False)
    assert result.stdout == "learned the circle\n", result.stderr
