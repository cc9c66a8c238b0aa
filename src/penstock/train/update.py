"""How a step turns batches into new weights: mixed precision, accumulation, clipping, momentum, learning rate.

Where a codec compresses gradients, momentum and clipping are the exchange's (`Compression`): what was not sent yet is
in residuals, and an optimizer would see it late. Without a codec they are the optimizer's and torch's own.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from penstock.errors import TrainError
from penstock.train.job import Job
from penstock.zoo.task import Task

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_scaler(job: Job, device: torch.device) -> torch.amp.GradScaler | None:
    """Return what keeps half-precision gradients from becoming zero; None where none is needed."""
    return torch.amp.GradScaler(device.type) if job.amp == "fp16" else None


class Update:
    """The update of one run."""

    def __init__(
        self, job: Job, optimizer: torch.optim.Optimizer, device: torch.device, scaler: torch.amp.GradScaler | None
    ) -> None:
        """Take the optimizer as the task made it: its learning rates are those after the warm-up."""
        self.optimizer, self.scaler = optimizer, scaler
        self._job, self._device = job, device
        self._rates = [group["lr"] for group in optimizer.param_groups]
        if job.momentum:
            self.set_momentum()

    def set_momentum(self) -> None:
        """Give the optimizer the job's momentum, or none where the exchange has it."""
        for group in self.optimizer.param_groups:
            if "momentum" not in group:
                name = type(self.optimizer).__name__
                raise TrainError(
                    f"--momentum {self._job.momentum:g} with {name}; wanted a task that has SGD, such as digits"
                )
            group["momentum"] = 0.0 if self._job.codec else self._job.momentum

    def loss(self, task: Task, model: TorchDDP, batch: Any) -> Tensor:
        """Return the loss of a batch, computed in mixed precision where the job says so."""
        with self._precision():
            return task.loss(model, batch)

    def _precision(self) -> AbstractContextManager[None]:
        if not self._job.amp:
            return nullcontext()
        return torch.autocast(self._device.type, DTYPES[self._job.amp])

    def gradients(self, task: Task, model: TorchDDP, batches: Sequence[Any]) -> Tensor:
        """Add up the gradients of all batches, exchange them with the last, and return the mean loss."""
        total = torch.zeros((), device=self._device)
        for number, batch in enumerate(batches, start=1):
            with nullcontext() if number == len(batches) else model.no_sync():
                loss = self.loss(task, model, batch)
                part = loss / len(batches) if len(batches) > 1 else loss
                (part if self.scaler is None else self.scaler.scale(part)).backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        return total / len(batches)

    def apply(self, step: int) -> None:
        """Update the weights in iteration `step`, counted from 1, and forget the gradients."""
        self._set_rates(step)
        if self._job.clip and not self._job.codec:
            self._clip()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _set_rates(self, step: int) -> None:
        """Let learning rates rise in equal parts for `lr_warmup` iterations (gTop-k's "smaller learning rates")."""
        if not self._job.lr_warmup:
            return
        part = min(1.0, step / self._job.lr_warmup)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = part * rate

    def _clip(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, self._job.clip)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict()}
        return state if self.scaler is None else state | {"scaler": self.scaler.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint kept."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
