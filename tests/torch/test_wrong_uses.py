"""Wrong uses of the wrappers that a newcomer makes: one line with what was found, what was wanted, what to do."""

import re

import pytest

pytest.importorskip("torch", reason="the wrappers need torch")

import torch

from penstock.errors import PlanError
from penstock.torch import BulkSynchronous, Checkpoints, DistributedDataParallel, ParameterServers, comm_hook
from penstock.torch.optim import CompressedAdamW

NET = torch.nn.Linear(2, 2)
TO_START = "no process group; call torch.distributed.init_process_group first"
NO_WRAPPER = "model is of type Linear; wanted the wrapper, such as penstock.torch's DistributedDataParallel"
NO_FUNCTION = "make_optimizer is of type SGD; wanted a function of parameters, such as lambda parameters: torch.optim."


@pytest.mark.parametrize(
    "use",
    [
        lambda: DistributedDataParallel(NET),
        lambda: DistributedDataParallel(NET, codec="onebit"),
        lambda: ParameterServers(1),
        lambda: BulkSynchronous(NET, lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    ],
)
def test_without_a_process_group_all_say_what_to_call(use):
    with pytest.raises(PlanError, match=f"^{TO_START}$"):
        use()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: DistributedDataParallel("net"), "module is 'net'; wanted a torch.nn.Module"),
        (lambda: comm_hook("ring", module="net"), "module is 'net'; wanted a torch.nn.Module, or None"),
        (
            lambda: DistributedDataParallel(NET, servers=2),
            "servers is 2; wanted a ParameterServers, such as ParameterServers(1)",
        ),
        (lambda: Checkpoints("runs", NET), NO_WRAPPER),
        (lambda: BulkSynchronous(NET, torch.optim.SGD(NET.parameters(), lr=0.1)), NO_FUNCTION),
        (
            lambda: CompressedAdamW(NET.parameters(), ddp=NET, warmup_steps=2),
            "ddp is of type Linear; wanted the model that penstock.torch's DistributedDataParallel or fully_shard_with",
        ),
    ],
)
def test_a_value_of_another_type_is_named_with_what_was_wanted(use, message):
    with pytest.raises(TypeError, match="^" + re.escape(message)):
        use()
