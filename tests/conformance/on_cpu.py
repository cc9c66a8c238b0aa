"""torch's own distributed tests, read from torch's file and rewritten so that those written for GPUs run on CPUs.

Only the syntax tree of that one file is changed, by the rules of `OnCpu`; torch itself stays as it is.
"""

import ast
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "torch.testing._internal.distributed.distributed_test"
WRAPPER = "_wrapper_under_test"  # the global of the rewritten module that stands for DistributedDataParallel
DEVICE = "_device_on_cpu"  # the global that maps devices
CUDA = "_cuda_on_cpu"  # the global that stands for torch.cuda
_GATES = {"skip_if_no_gpu", "skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"}
_SMALLER = {"test_ddp_uneven_inputs"}  # convolutions of images of 1000 x 1000 pixels
_ELSEWHERE = {"device_ids", "output_device"}  # arguments of DistributedDataParallel: None on CPUs


class OnCpu(ast.NodeTransformer):
    """Takes away the gates for GPUs and lets what they guarded stay on the CPU."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """A test without its gates, and with smaller data where a CPU would take minutes."""
        for each in ast.walk(node) if node.name in _SMALLER else ():
            if isinstance(each, ast.Constant) and each.value == 1000:
                each.value = 32
        node.decorator_list = [each for each in node.decorator_list if _called(each) not in _GATES]
        return self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        """The wrapper is a global of ours."""
        if node.module == "torch.nn.parallel":
            return None
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """DistributedDataParallel, as it was imported."""
        return _named(WRAPPER, node) if node.id == "DistributedDataParallel" else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """torch.nn.parallel.DistributedDataParallel, and torch.cuda."""
        text = ast.unparse(node)
        if text in ("torch.nn.parallel.DistributedDataParallel", "nn.parallel.DistributedDataParallel"):
            return _named(WRAPPER, node)
        if text == "torch.cuda":
            return _named(CUDA, node)
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """A key such as backend_feature["cuda"] is no device."""
        node.value = self.visit(node.value)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """The names of devices."""
        if isinstance(node.value, str) and (node.value == "cuda" or node.value.startswith("cuda:")):
            return ast.copy_location(ast.Constant("cpu"), node)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """The names of numbered devices, such as f"cuda:{rank}"."""
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and first.value == "cuda:":
            return ast.copy_location(ast.Constant("cpu"), node)
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """The names of numbered devices, such as "cuda:" + str(rank)."""
        if isinstance(node.left, ast.Constant) and node.left.value == "cuda:":
            return ast.copy_location(ast.Constant("cpu"), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """What puts a tensor or a module on a device."""
        self.generic_visit(node)
        called = _called(node)
        if called == "cuda":
            assert isinstance(node.func, ast.Attribute)
            node.func.attr, node.args, node.keywords = "cpu", [], []
        if called in ("to", "device") and node.args:
            node.args[0] = _mapped(node.args[0])
        for keyword in node.keywords:
            if keyword.arg in _ELSEWHERE:
                keyword.value = ast.copy_location(ast.Constant(None), keyword.value)
            elif keyword.arg == "device":
                keyword.value = _mapped(keyword.value)
        return node


class CudaOnCpu(ModuleType):
    """What the tests ask of torch.cuda: nothing has to be waited for, and every rank has its device."""

    def __init__(self, cuda: ModuleType) -> None:
        super().__init__("cuda_on_cpu")
        self._cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cuda, name)

    def set_device(self, device: object) -> None:
        """Nothing."""

    def synchronize(self, device: object = None) -> None:
        """Nothing."""

    def manual_seed(self, seed: int) -> None:
        """Nothing: torch.manual_seed does."""

    def current_device(self) -> str:
        """The only one."""
        return "cpu"

    def device_count(self) -> int:
        """One device for each rank."""
        return int(os.environ["WORLD_SIZE"])


class NoEvent:
    """torch.Event where there is no queue of work: everything has happened."""

    def record(self, stream: object = None) -> None:
        """Nothing."""

    def wait(self, stream: object = None) -> None:
        """Nothing."""


def load(world_size: int) -> ModuleType:
    """Import the rewritten file under torch's own name, for gloo and as many ranks."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
    import torch

    # DDP's mixed precision and torch's hook for optimizers in the backward pass order work between streams.
    torch.Event = NoEvent  # type: ignore[assignment,misc]
    torch.accelerator.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
    spec, tree = _source()
    tree = OnCpu().visit(tree)
    module = importlib.util.module_from_spec(spec)
    vars(module)[WRAPPER] = torch.nn.parallel.DistributedDataParallel
    vars(module)[DEVICE] = lambda device: "cpu" if isinstance(device, int) else device
    vars(module)[CUDA] = CudaOnCpu(torch.cuda)
    sys.modules[NAME] = module
    exec(compile(ast.fix_missing_locations(tree), spec.origin, "exec"), vars(module))
    vars(module)["init_multigpu_helper"] = lambda ranks, backend: {rank: [rank] for rank in range(ranks)}
    return module


def methods_with_a_wrapper() -> set[str]:
    """Return the methods of the file that make a DistributedDataParallel, by themselves or through what they call."""
    _, tree = _source()
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    names = {
        name: {_last(each) for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute)}
        for name, node in functions.items()
    }
    using = {"DistributedDataParallel"}
    while more := {name for name, used in names.items() if name not in using and used & using}:
        using |= more
    return using


def _source() -> tuple[ModuleSpec, ast.Module]:
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        return spec, ast.parse(file.read(), spec.origin)


def _called(node: ast.AST) -> str:
    """The last name of what a decorator or a call calls."""
    return _last(node.func if isinstance(node, ast.Call) else node)


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _mapped(device: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Call(ast.Name(DEVICE, ast.Load()), [device], []), device)


def _named(name: str, node: ast.expr) -> ast.AST:
    return ast.copy_location(ast.Name(name, getattr(node, "ctx", ast.Load())), node)
