"""Imports point one way (docs/architecture.md); every arrow that points another way is named here."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "penstock"
VALUES = {
    "errors",
    "fields",
    "trace",
    "network",
    "plan",
    "program",
    "timeline",
    "curves",
    "run_record",
    "machine",
    "log",
    "private_folder",
    "task_names",
}
# Each part of the package and the parts it may import, itself excepted; FREE parts may import anything.
ALLOWED = {
    **dict.fromkeys(VALUES, VALUES),
    "cost": VALUES | {"strategies"},
    "planners": VALUES | {"cost", "strategies"},
    "simulator": VALUES | {"cost", "planners", "strategies"},
    "strategies": VALUES,
    "verify": VALUES | {"strategies"},
    "traces": VALUES,
    "reproduce": VALUES | {"cost", "planners", "simulator", "strategies", "verify", "traces", "compll"},
    "compll": VALUES,
    "codecs": VALUES | {"compll"},
    "runtime": VALUES | {"strategies", "codecs", "cost"},
    "cluster": VALUES | {"runtime", "cost", "simulator", "exchange"},
    "exchange": VALUES | {"codecs", "runtime", "strategies"},
    "planning": VALUES | {"cost", "planners", "simulator", "runtime", "strategies", "codecs", "exchange"},
    "torch": VALUES
    | {"cost", "planners", "simulator", "runtime", "strategies", "codecs", "exchange", "planning", "adaptor"},
    "adaptor": VALUES | {"runtime", "strategies", "codecs", "exchange", "planning"},
    "tensorflow": VALUES | {"exchange", "planning", "adaptor"},
    "jax": VALUES | {"exchange", "planning", "adaptor"},
    "mxnet": VALUES | {"exchange", "planning", "adaptor"},
    "doctor": VALUES | {"cluster", "compll", "runtime"},
    "zoo": VALUES | {"traces", "torch"},
    "train": VALUES
    | {"zoo", "planners", "strategies", "codecs", "cluster", "runtime", "exchange", "planning", "torch"},
}
ALLOWED["integrations"] = ALLOWED["torch"] | {"torch"}
FREE = {"cli", "report", "bench", "__main__", "__init__"}
THIRD_PARTY = {  # top-level package -> the only files that may import it
    "torch": (
        "runtime/transport/c10d.py",
        "runtime/transport/meeting.py",
        "runtime/device/",
        "codecs/",
        "compll/backends/",
        "torch/",
        "cli/",
        "zoo/",
        "bench/",
        "train/",
        "integrations/",
    ),
    "accelerate": ("integrations/accelerate.py",),
    "lightning": ("integrations/lightning.py",),
    "transformers": ("integrations/transformers.py",),
    "triton": ("compll/backends/triton",),
    "tensorflow": ("tensorflow/",),
    "keras": ("tensorflow/",),
    "jax": ("jax/",),
    "mxnet": ("mxnet/",),
    "mpi4py": ("runtime/transport/mpi.py", "runtime/connect.py", "cli/"),
    "lark": ("compll/",),
    "matplotlib": ("report/",),
    "pyroute2": ("cluster/netlink.py",),
    "platformdirs": ("planning/measurement_cache.py",),
    "typer": ("cli/",),
    "rich": ("cli/", "report/", "train/view.py"),
}


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            found |= {
                f"{node.module}.{alias.name}" if node.module == "penstock" else str(node.module) for alias in node.names
            }
    return found


def _files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_imports_follow_the_layers():
    assert not [complaint for path in _files() for complaint in _wrong_arrows(path)]


def _wrong_arrows(path: Path) -> Iterator[str]:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part in FREE:
        return
    if part not in ALLOWED:
        yield f"{part} is not in the table of layers: say what it may import"
        return
    for name in sorted(_imports(path)):
        target = name.split(".")[1] if name.startswith("penstock.") else part
        if target != part and target not in ALLOWED[part]:
            yield f"{path.relative_to(PACKAGE)} imports {name}: {part} may not know {target}"


def test_heavy_packages_stay_where_they_belong():
    found = [(str(path.relative_to(PACKAGE)), name.split(".")[0]) for path in _files() for name in _imports(path)]
    assert not [
        f"{where} imports {name}; only {THIRD_PARTY[name]} may"
        for where, name in found
        if name in THIRD_PARTY and not where.startswith(THIRD_PARTY[name])
    ]


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_planning_runs_without_torch_installed():
    code = """
import sys
sys.modules["torch"] = None  # any import of torch now fails
from penstock.cost.clusters import CLUSTERS
from penstock.planners import PLANNERS
from penstock.simulator.scaling import scaling_study
from penstock.traces import load_shipped
rows = scaling_study(load_shipped("resnet50"), CLUSTERS["gtop-k-1gbe"], [4], list(PLANNERS.values()), "ring")
print(len(rows))
"""
    result = _run(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "8"


@pytest.mark.parametrize("code", ["import penstock", "from penstock.cli.main import app"])
def test_importing_penstock_brings_in_no_heavy_package(code):
    heavy = "torch triton matplotlib numba lark mpi4py scipy"
    result = _run(f"{code}\nimport sys\nprint([m for m in {heavy.split()!r} if m in sys.modules])")
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


HELP = """
import runpy, sys
sys.argv[1:] = ["--help"]
try:
    runpy.run_module("penstock", run_name="__main__")
except SystemExit as end:
    print("exit code", end.code)
modules = {name for name in sys.modules if name not in sys.stdlib_module_names}
print(len(sys.modules), *sorted(name for name in modules if not name.startswith("penstock.cli") and "." not in name))
print(*sorted(name for name in modules if name.startswith("penstock.") and not name.startswith("penstock.cli")))
"""


def test_help_is_shown_with_no_more_of_us_than_the_verbs_and_few_modules_in_all():
    """What takes long in a help text is to import; modules can be counted on a busy machine, and seconds cannot."""
    result = _run(HELP)
    *shown, ended, every, ours = result.stdout.splitlines()
    assert any("Usage: penstock" in line for line in shown)
    assert ended == "exit code 0", result.stderr
    assert ours.split() == ["penstock.errors", "penstock.fields"]
    assert int(every.split()[0]) <= 400, every
    assert {"numpy", "torch", "pydantic", "jinja2", "networkx", "sympy"}.isdisjoint(every.split())


DENSE = """
import os, sys, tempfile
sys.modules["numba"] = sys.modules["llvmlite"] = sys.modules["lark"] = None  # any import of them now fails
import torch, torch.distributed as dist
from penstock.errors import FitError
from penstock.network import Network
from penstock.runtime.measure_network import measure_network
from penstock.runtime.transport.c10d import C10dTransport
from penstock.torch import DistributedDataParallel
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
store = "file://" + tempfile.mktemp()
child = os.fork()
rank = 0 if child else 1
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
try:
    measure_network(C10dTransport(), seconds=0.1, strategies=("native", "ring"))
except FitError:
    pass  # a busy machine; what it imports is imported by then
model = DistributedDataParallel(
    torch.nn.Linear(8, 8), strategy="ring", network=Network(2, 1e-5, 1e-9, 1e-10), profile_iterations=2
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.full((2, 8), 1.0 + rank)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
assert {bucket.strategy for bucket in model.plan.buckets} == {"ring"}
sums = [None] * 2
dist.all_gather_object(sums, [float(parameter.double().sum()) for parameter in model.parameters()])
assert sums[0] == sums[1], sums
if child:
    print("trained", os.waitpid(child, 0)[1])
os._exit(0) if not child else dist.destroy_process_group()
"""


def test_dense_training_needs_no_compiler():
    """numba and LLVM take a hundred megabytes of each rank, a fifth of what training VGG-16 takes without them."""
    result = _run(DENSE)
    assert result.stdout.split() == ["trained", "0"], result.stdout + result.stderr


def test_training_imports_at_most_110_modules():
    """Planners, the simulator, compilers and what a GPU needs are imported where they are used."""
    result = _run(
        "from penstock.torch import DistributedDataParallel, comm_hook\nimport sys\n"
        "print(*(name for name in sys.modules if name.split('.')[0] == 'penstock'))"
    )
    assert "penstock.torch.ddp" in result.stdout.split(), result.stderr
    assert len(result.stdout.split()) <= 110, sorted(result.stdout.split())


def _module(path: Path) -> str:
    return ".".join(("penstock", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def _imported(path: Path) -> set[str]:
    """Return all that a file names in imports, wherever they stand; `from a import b` may mean the module a.b."""
    found = _imports(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found - {_module(path)}


def test_the_package_stays_small_enough_to_find_things_in():
    files = _files()
    importers = Counter(name for path in files for name in _imported(path))
    with_one = [_module(path) for path in files if importers[_module(path)] == 1]
    names = Counter(path.name for path in files if path.name != "__init__.py")
    repeated = sorted(name for name, count in names.items() if count > 1)
    assert len(files) <= 340
    assert len(with_one) <= 0.34 * len(files), with_one
    assert len(repeated) <= 12, repeated


def test_no_person_stands_for_a_rank_or_a_process():
    words = re.compile(r"\b(nobody|somebody|whoever|everybody)\b", re.IGNORECASE)
    found = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix in {".py", ".cll", ".js", ".html"}]
    assert not [f"{path}: {word[0]}" for path in found for word in words.finditer(path.read_text())]
