"""An optimizer's step that is put off, with the settings of the moment it was asked for.

A scheduler changes learning rates after `step()`, which in plain training has been taken by then.
"""

from typing import Any

import torch

Settings = list[dict[str, Any]]  # of each group of parameters: learning rate, momentum and the like


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """Return an optimizer's settings as they are now."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def step_with(optimizer: torch.optim.Optimizer, settings: Settings) -> None:
    """Take a step with settings of before; those that were changed since hold again afterwards."""
    groups = optimizer.param_groups
    changed = [
        {name: group[name] for name, value in before.items() if group[name] is not value}
        for group, before in zip(groups, settings, strict=True)
    ]
    for group, before in zip(groups, settings, strict=True):
        group.update(before)
    optimizer.step()
    for group, since in zip(groups, changed, strict=True):
        group.update(since)
