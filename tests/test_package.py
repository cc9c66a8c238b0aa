"""What an installation without extras can do, what it says about the rest, and what the package holds."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BLOCKED = """
import sys
sys.modules |= dict.fromkeys({packages!r})  # importing them fails
sys.argv = {argv!r}
from penstock.cli.main import main
main()
"""


def without(packages: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    code = BLOCKED.format(packages=packages, argv=["penstock", *arguments])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


EXTRA = ("torch", "numba", "llvmlite", "matplotlib", "mpi4py", "triton", "sklearn")


@pytest.mark.parametrize(
    "command",
    ["plan resnet50 --network gtop-k-1gbe --workers 16", "verify ring --workers 3", "reproduce gtop-k --json"],
)
def test_planning_and_proving_need_no_extra(command):
    result = without(EXTRA, *command.split())
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("verify ring --workers 3 --picture x.png", "plot"),
        ("compile onebit --backend numba", "codecs"),
        ("train", "torch"),
    ],
)
def test_what_needs_an_extra_says_which(command, extra, tmp_path):
    result = without(EXTRA, *command.split())
    assert result.returncode == 2
    assert f"pip install 'penstock[{extra}]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_importing_the_wrapper_without_torch_says_which_extra():
    code = "import sys; sys.modules['torch'] = None; from penstock.torch import DistributedDataParallel"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "torch is not installed, and this needs it: pip install 'penstock[torch]'" in result.stderr


def test_every_extra_that_a_message_names_exists():
    from penstock.errors import EXTRAS

    assert set(EXTRAS.values()) <= set(PROJECT["optional-dependencies"])


def test_constraints_pin_every_package_that_pyproject_names():
    named = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    pinned = {
        line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split("\n")
    }
    wanted = {re.split(r"[\[<>=; ]", one)[0].lower() for one in named} - {"atheris"}
    assert wanted - pinned - {"tensorflow", "keras", "jax", "optax", "mxnet"} == set()


def checked(tool: str, script: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(tool, path=Path(sys.executable).parent) is None:
        pytest.skip(f"{tool} is not installed")
    options = ["--strict", "--no-incremental"] if tool == "mypy" else ["--pythonpath", sys.executable]
    command = [Path(sys.executable).parent / tool, *options, ROOT / "tests" / "typed" / script]
    environment = os.environ | {"MYPYPATH": str(ROOT / "src")}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT / "tests/typed"
    )


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["mypy", "pyright"])
def test_type_checkers_take_a_users_script_and_refuse_each_mistake(tool):
    good, bad = checked(tool, "user_script.py"), checked(tool, "refused.py")
    if "nodeenv" in good.stderr or "node" in good.stderr.lower():
        pytest.skip("pyright needs Node, which is not here")
    assert good.returncode == 0, good.stdout + good.stderr
    lines = {int(found) for found in re.findall(r"refused\.py:(\d+)", bad.stdout)}
    written = (ROOT / "tests" / "typed" / "refused.py").read_text().splitlines()
    assert lines == set(range(7, len(written) + 1)), bad.stdout


@pytest.mark.slow
def test_the_package_builds_and_twine_accepts_it(tmp_path):
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT]
    made = subprocess.run(build, capture_output=True, text=True, check=False)
    if "hatchling" in made.stdout + made.stderr and made.returncode:
        made = subprocess.run(
            [each for each in build if each != "--no-isolation"], capture_output=True, text=True, check=False
        )
    assert made.returncode == 0, made.stdout + made.stderr
    found = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *tmp_path.iterdir()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout
