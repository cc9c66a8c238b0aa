"""What an installation without extras can do, what it says about the rest, and what the package holds."""

import json
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
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
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


IMPORTS = {  # what a script imports: the package that is missing, and the extra that installs it
    "from penstock.torch import DistributedDataParallel": ("torch", "torch"),
    "from penstock.torch.optim import CompressedAdamW": ("torch", "torch"),
    "from penstock.integrations.metrics import TensorBoardCallback": ("torch", "torch"),
    "from penstock.integrations.accelerate import Accelerator": ("accelerate", "accelerate"),
    "from penstock.integrations.transformers import Trainer": ("transformers", "transformers"),
    "from penstock.integrations.lightning import Trainer": ("lightning", "lightning"),
    "import penstock.tensorflow": ("tensorflow", "tensorflow"),
    "import penstock.jax": ("jax", "jax"),
    "import penstock.mxnet": ("mxnet", "mxnet"),
}


def test_what_a_script_imports_says_which_extra_it_lacks():
    code = "import sys\n" + "".join(TRIED.format(package=package, line=line) for line, (package, _) in IMPORTS.items())
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    wanted = [
        f"{name} is not installed, and this needs it: pip install 'penstock[{extra}]'"
        for name, extra in IMPORTS.values()
    ]
    assert result.stdout.splitlines() == wanted, result.stderr


TRIED = """
here = sys.modules.get({package!r})
sys.modules[{package!r}] = None
try:
    {line}
except ImportError as error:
    print(error)
del sys.modules[{package!r}]
if here is not None:
    sys.modules[{package!r}] = here
"""


def test_replay_says_which_extra_it_lacks_where_workers_have_no_torch(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    result = without(EXTRA, "replay", "resnet50")
    assert result.returncode == 2
    assert result.stderr == "penstock: torch is not installed, and this needs it: pip install 'penstock[torch]'\n"


@pytest.mark.slow
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun on PATH (pip install penstock[mpi])")
def test_replay_over_mpi_runs_without_torch(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None\n")
    paths = [str(tmp_path), *(path for path in sys.path if path)]
    command = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-n", "2", "-x", "PYTHONPATH", sys.executable]
    command += ["-m", "penstock", "replay", "resnet50", "--iterations", "1", "--json"]
    environment = os.environ | {"PYTHONPATH": ":".join(paths)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)[0]["workers"] == 2


COMPLETED = {  # what is typed: what the shell is offered
    "check gp": ["gpt2", "gpt_small"],
    "plan resnet50 --network gt": ["gtop-k-1gbe"],
    "simulate gpt2 --planners wfbp,ex": ["wfbp,exact"],
    "train --codec blo": ["blocks"],
    "verify lin": ["linear_pipeline"],
    "reproduce hi": ["hipress"],
}


@pytest.mark.parametrize("typed", COMPLETED)
def test_the_shell_completes_names(typed):
    words = ["penstock", *typed.split()]
    asked = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    code = "from penstock.cli.main import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | asked
    )
    assert result.stdout.split() == COMPLETED[typed], result.stderr


def test_completed_tasks_are_all_that_there_are():
    from penstock.cli.options import complete_tasks
    from penstock.zoo.load import TASKS

    assert set(complete_tasks("")) == set(TASKS)


def test_planning_lists_the_names_that_it_takes():
    result = without(EXTRA, "plan", "--list")
    assert result.returncode == 0, result.stderr
    lines = dict(line.split(": ") for line in result.stdout.splitlines())
    assert {"gpt2", "resnet50"} <= set(lines["traces"].split(", "))
    assert "gtop-k-1gbe" in lines["networks"]
    assert {"exact", "joint"} <= set(lines["planners"].split(", "))
    assert {"blocks", "gtopk", "auto"} <= set(lines["codecs"].split(", "))


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
