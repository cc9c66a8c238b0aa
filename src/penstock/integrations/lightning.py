"""Lightning with our wrapper: a strategy that is called `penstock`, and a Trainer that takes it by itself.

    from penstock.integrations.lightning import Trainer        # was: from lightning.pytorch import Trainer
    Trainer(devices=4)                                         # or Trainer(devices=4, codec="blocks(bits=4)")

    import penstock.integrations.lightning                     # registers the names
    lightning.Trainer(devices=4, strategy="penstock")          # or "penstock_auto", "penstock_4bit"

Checkpoints are Lightning's; what ranks keep beside them is in `NAME.ckpt.exchange/`, and goes when the checkpoint does.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from penstock.errors import PlanError, naming_extra

with naming_extra():
    import torch
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch import Trainer as LightningTrainer
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from torch import nn

from penstock.integrations.exchange_files import take_over, wrapper_in
from penstock.integrations.metrics import metrics
from penstock.torch.ddp import DistributedDataParallel

NAMES: dict[str, dict[str, Any]] = {
    "penstock": {},
    "penstock_auto": {"codec": "auto"},
    "penstock_4bit": {"codec": "blocks(bits=4)"},
}
WORLD_SIZE = "penstock_world_size"  # in a checkpoint: how many ranks have a file beside it
REPLACED = ("auto", "ddp")  # strategies of Lightning that our Trainer replaces


class PenstockStrategy(DDPStrategy):
    """Lightning's DDP with our wrapper; options of either may be given: PenstockStrategy(codec="onebit")."""

    strategy_name = "penstock"
    _resumes_from: str | None = None

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        device_ids = self.determine_ddp_device_ids()
        scaler = getattr(self.precision_plugin, "scaler", None)  # of Lightning's 16-bit plugin alone
        options = (
            {"grad_scaler": scaler} if scaler is not None and {"codec", "compression"} & set(self._ddp_kwargs) else {}
        )
        beside = torch.cuda.stream(torch.cuda.Stream()) if device_ids is not None else nullcontext()  # type: ignore[no-untyped-call]
        with beside:  # as Lightning does, for CUDA graphs
            return DistributedDataParallel(model, device_ids=device_ids, **options, **self._ddp_kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write Lightning's checkpoint, and this rank's own file beside it unless only weights are saved."""
        if (wrapper := wrapper_in(self.model)) is not None and "optimizer_states" in checkpoint:
            checkpoint[WORLD_SIZE] = self.world_size
            own = _beside(filepath, self.global_rank, self.world_size)
            self.checkpoint_io.save_checkpoint(wrapper.exchange_state_dict(), own)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Read Lightning's checkpoint; what the exchange kept is read once the model is wrapped."""
        self._resumes_from = str(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *arguments, **options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's optimizers, and from what the exchange kept."""
        super().load_optimizer_state_dict(checkpoint)
        ranks, wrapper = checkpoint.get(WORLD_SIZE, 0), wrapper_in(self.model)
        if ranks and wrapper is not None and self._resumes_from is not None:
            files = [_beside(self._resumes_from, rank, ranks) for rank in range(ranks)]
            take_over(wrapper, [self.checkpoint_io.load_checkpoint(each) for each in files])

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint with the files beside it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(f"{filepath}.exchange")


def _beside(checkpoint: object, rank: int, world_size: int) -> str:
    return f"{checkpoint}.exchange/rank-{rank}-of-{world_size}.pt"


class Trainer(LightningTrainer):
    """Lightning's Trainer, with our strategy where it would take DDP.

    Args:
        *arguments: Lightning's own, by position.
        strategy: Lightning's; `auto` and `ddp` are replaced by `penstock`.
        codec: Short for `wrapper_options={"codec": ...}`.
        wrapper_options: Options of `penstock.torch.DistributedDataParallel`.
        **options: Lightning's own.
    """

    def __init__(
        self,
        *arguments: Any,
        strategy: Any = "auto",
        codec: Any = None,
        wrapper_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        wanted = ({} if codec is None else {"codec": codec}) | (wrapper_options or {})
        if strategy in REPLACED:
            strategy = PenstockStrategy(**wanted)
        elif wanted:
            raise PlanError(
                f"strategy is {strategy!r} and {next(iter(wanted))} is given; wanted strategy 'ddp' or 'auto', which "
                "penstock's takes the place of, or PenstockStrategy with all its options"
            )
        super().__init__(*arguments, strategy=strategy, **options)


class MetricsCallback(Callback):
    """Logs what the wrapper knows of itself to the trainer's loggers, TensorBoard and Weights & Biases among them."""

    def __init__(self, every: int = 10) -> None:
        self._every = every

    def on_train_batch_end(
        self, trainer: LightningTrainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log every few steps."""
        if trainer.is_global_zero and trainer.global_step % self._every == 0:
            found = metrics(trainer.strategy.model)
            for logger in trainer.loggers if found else ():
                logger.log_metrics(found, step=trainer.global_step)


for _name, _options in NAMES.items():
    if _name not in StrategyRegistry:
        StrategyRegistry.register(_name, PenstockStrategy, "stock DDP with penstock's messages", **_options)
