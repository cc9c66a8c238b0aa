"""Other libraries' tests of DistributedDataParallel end with ours as with stock, but for what the table explains."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from conformance.differences import Difference, complaint, load
from conformance.ranks import Outcome, Pool
from conformance.suites import NAMES, OURS, STOCK, TORCH, Runs

QUICK = {
    "torch/test_DistributedDataParallelCPU",
    "torch/test_accumulate_gradients_no_sync",
    "torch/test_ddp_apply_optim_in_backward_ignored_params",
    "torch/test_ddp_broadcast_buffer",
    "torch/test_ddp_control_flow_different_across_ranks",
    "torch/test_ddp_create_graph",
    "torch/test_ddp_device_mesh_initialization",
    "torch/test_ddp_forward_backward_hook",
    "torch/test_ddp_grad_div_uneven_inputs",
    "torch/test_ddp_ignore_params_arg",
    "torch/test_ddp_join_model_equivalence",
    "torch/test_ddp_namedtuple",
    "torch/test_ddp_remove_autograd_hooks",
    "torch/test_ddp_sink_noclone",
    "torch/test_ddp_static_graph_nested_types",
    "torch/test_get_data_parallel_params",
    "torch/test_grads_same_across_ranks_with_no_sync",
    "torch/test_static_graph_api_cpu",
    "torch/test_stateless_api_with_ddp",
    "accelerate/test_sync",
}
LIBRARIES = {  # what a suite needs
    "torch": ("torch", "expecttest"),
    "accelerate": ("torch", "accelerate"),
    "lightning": ("torch", "lightning"),
}
CASES = [
    pytest.param(name, flavour, id=f"{name}-{flavour}", marks=[] if name in QUICK else [pytest.mark.slow])
    for name in NAMES
    for flavour in OURS
]


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    made = Runs()
    yield made
    made.stop()


@pytest.mark.parametrize(("name", "flavour"), CASES)
def test_a_test_of_theirs_ends_with_ours_as_with_stock(runs: Runs, name: str, flavour: str) -> None:
    needed = LIBRARIES[name.partition("/")[0]]
    if any(find_spec(each) is None for each in needed):
        pytest.skip(f"needs {' and '.join(needed)}")
    stock = runs.outcome(name, STOCK)
    if stock.kind != "pass":
        pytest.skip(f"not applicable: with stock, {stock.kind}: {stock.says.splitlines()[0]}")
    assert complaint(name, flavour, runs.outcome(name, flavour), load()) == ""


def test_every_row_of_the_table_names_a_test_and_a_reason() -> None:
    table = load()
    assert set(NAMES) >= QUICK
    assert {row.test for row in table} <= set(NAMES)
    assert all(row.reason and set(row.flavours) <= set(OURS) for row in table)
    pairs = [(row.test, flavour) for row in table for flavour in row.flavours]
    assert len(set(pairs)) == len(pairs)


@pytest.mark.slow
def test_the_list_has_every_test_of_torch_that_uses_the_wrapper(runs: Runs) -> None:
    outcome = runs.task("conformance.torch_suite:list_tests", TORCH)
    assert outcome.kind == "pass", outcome.says


ROW = Difference("torch/some", ("ring",), "fail", "no all_reduce", "a ring sends and receives")


@pytest.mark.parametrize(
    ("flavour", "outcome", "found"),
    [
        ("native", Outcome("pass"), ""),
        ("native", Outcome("fail", "no all_reduce"), "without a reason"),
        ("ring", Outcome("fail", "rank 0: no all_reduce"), ""),
        ("ring", Outcome("fail", "something else"), "another difference"),
        ("ring", Outcome("timeout", "no all_reduce"), "another difference"),
        ("ring", Outcome("pass"), "any more"),
    ],
)
def test_only_what_the_table_says_may_differ_and_must(flavour: str, outcome: Outcome, found: str) -> None:
    said = complaint("torch/some", flavour, outcome, (ROW,))
    assert found in said
    assert bool(said) == bool(found)


def test_however_a_task_ends_it_is_an_outcome_and_the_next_one_runs() -> None:
    pool = Pool()
    try:
        ends = ("timeout", "pass", "crash", "fail", "skip", "pass")
        outcomes = [pool.run("conformance.tasks:end", how, seconds=0.5 if how == "timeout" else 60.0) for how in ends]
    finally:
        pool.stop()
    assert [outcome.kind for outcome in outcomes] == list(ends)
    assert outcomes[3].says == "rank 1: ValueError: rank 1 only"
