"""Hugging Face's Trainer with our wrapper.

    from penstock.integrations.transformers import Trainer, TrainingArguments   # was: from transformers import ...

`TrainingArguments` has one field more, `codec`: scripts that read their arguments with `HfArgumentParser` take
`--codec 'blocks(bits=4)'` on the command line without another change. Checkpoints hold what the exchange keeps, and
`log` what the wrapper knows of itself, for TensorBoard, Weights & Biases and whatever else `report_to` names.
Trainers of other libraries: `class MyTrainer(PenstockTrainer, SFTTrainer)`.
"""

from dataclasses import dataclass, field
from typing import Any

from penstock.errors import naming_extra

with naming_extra():
    from transformers import Trainer as HuggingFaceTrainer
    from transformers import TrainingArguments as HuggingFaceArguments

from penstock.integrations.accelerate import use_penstock
from penstock.integrations.exchange_files import load_exchange, save_exchange, wrapper_in
from penstock.integrations.metrics import metrics


@dataclass
class TrainingArguments(HuggingFaceArguments):
    """Hugging Face's arguments, and a codec."""

    codec: str | None = field(
        default=None,
        metadata={
            "help": "penstock: how gradients are compressed, such as 'blocks(bits=4)' or 'auto'; none: not at all"
        },
    )


class PenstockTrainer:
    """What a Trainer of any kind needs to train through our wrapper; put it before the Trainer's class.

    Args:
        *arguments: The Trainer's own, by position.
        wrapper_options: Options of `penstock.torch.DistributedDataParallel`, beside a `codec` in the arguments.
        **options: The Trainer's own.
    """

    def __init__(self, *arguments: Any, wrapper_options: dict[str, Any] | None = None, **options: Any) -> None:
        self._wrapper_options = dict(wrapper_options or {})
        super().__init__(*arguments, **options)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator as always, and have it wrap models as we do."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        trainer: Any = self
        codec = trainer.args.codec if isinstance(trainer.args, TrainingArguments) else None
        use_penstock(trainer.accelerator, **({} if codec is None else {"codec": codec}) | self._wrapper_options)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save what differs between ranks: random states, and what the exchange keeps."""
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        if (wrapper := wrapper_in(self._wrapped())) is not None:
            save_exchange(wrapper, output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Go on from a checkpoint's optimizer, and from what the exchange kept."""
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None and (wrapper := wrapper_in(self._wrapped())) is not None:
            load_exchange(wrapper, checkpoint)

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Log what is given and what the wrapper knows of itself."""
        super().log(logs | metrics(self._wrapped()), *arguments, **options)  # type: ignore[misc]

    def _wrapped(self) -> Any:
        trainer: Any = self
        return trainer.model_wrapped


class Trainer(PenstockTrainer, HuggingFaceTrainer):
    """Hugging Face's Trainer, trained through our wrapper wherever it would take stock DDP."""
