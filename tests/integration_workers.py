"""What one rank does in tests of `penstock.integrations`: real frameworks, a small GPT, the same data for all."""

import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from penstock.plan import Bucket, Plan
from penstock.torch import DistributedDataParallel

Floats = np.ndarray[Any, np.dtype[np.float32]]
BLOCKS = "blocks(bits=4)"
WORDS, LENGTH = 32, 16


class Text(Dataset):  # type: ignore[type-arg]
    """Sequences that count upwards: the next word follows from the last."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(LENGTH + 1) * (1 + index % 3) + index) % WORDS
        return {"input_ids": words[:-1], "labels": words[1:]}


class Gpt(nn.Module):
    """Words, one layer of attention, words; returns loss and logits, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.words, self.places = nn.Embedding(WORDS, 32), nn.Embedding(LENGTH, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, WORDS)
        self.computed_in: set[torch.dtype] = set()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of predicting each next word."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.block(self.words(input_ids) + self.places.weight, src_mask=mask, is_causal=True)
        logits = self.head(hidden)
        self.computed_in.add(logits.dtype)
        return {"loss": nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), "logits": logits}


def planned(codec: str | None = None) -> dict[str, Any]:
    """Return options with a plan from the first iteration on: two buckets by our ring."""
    sizes = {name: 4 * each.numel() for name, each in reversed(list(Gpt().named_parameters()))}
    names = list(sizes)
    parts = tuple(names[: len(names) // 2]), tuple(names[len(names) // 2 :])
    buckets = tuple(Bucket(part, sum(sizes[name] for name in part), "ring", codec) for part in parts)
    return {"plan": Plan("gpt", dist.get_world_size(), "test", buckets)}


def as_launched(rank: int) -> None:
    """Set what torchrun would have set; the process group exists already."""
    world = str(dist.get_world_size())
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}


def weights(model: nn.Module) -> Floats:
    """Return all weights in a row."""
    return torch.cat([each.detach().flatten() for each in model.parameters()]).numpy().copy()


def residual(wrapper: DistributedDataParallel) -> Floats:
    """Return all that a wrapper has kept back of its gradients, in a row."""
    kept = wrapper.exchange_state_dict()["memories"]["residual"]
    return torch.cat([kept[name].flatten() for name in sorted(kept)]).numpy().copy()


# Accelerate


def accelerate_runs(rank: int, folder: Path) -> dict[str, Any]:
    """Train with stock and with ours, dense and coded; save in the middle, and go on from there."""
    as_launched(rank)
    from accelerate import Accelerator as Stock
    from accelerate.state import AcceleratorState

    from penstock.integrations.accelerate import Accelerator

    stock, _, _ = _accelerate(Stock(cpu=True), 8)
    dense, _, _ = _accelerate(Accelerator(cpu=True, wrapper_options=planned()), 8)
    whole, sent, _ = _accelerate(
        Accelerator(cpu=True, codec=BLOCKS, wrapper_options=planned(BLOCKS)), 8, folder, save_after=4
    )
    resumed, _, _ = _accelerate(
        Accelerator(cpu=True, codec=BLOCKS, wrapper_options=planned(BLOCKS)), 8, folder, resume_at=4
    )
    AcceleratorState._reset_state()  # the precision belongs to the process
    half, _, accelerator = _accelerate(Accelerator(cpu=True, mixed_precision="bf16", wrapper_options=planned()), 2)
    return {
        "dense": (weights(stock), weights(dense.module)),
        "coded": (weights(whole.module), weights(resumed.module)),
        "residuals": (residual(whole), residual(resumed)),
        "sent": (sent.sent_nbytes, sent.dense_nbytes),
        "computed in": {str(each) for each in half.module.computed_in},
        "unwrapped": type(accelerator.unwrap_model(half)).__name__,
        "files": sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()),
    }


def _accelerate(
    accelerator: Any, steps: int, folder: Path | None = None, save_after: int = 0, resume_at: int = 0
) -> tuple[Any, Any, Any]:
    """Accelerate's nlp_example in small: prepare, backward, step; with a checkpoint on the way."""
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = DataLoader(Text(), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    if resume_at:
        accelerator.load_state(str(folder))
    for step, batch in enumerate(data):
        if step < resume_at or step >= steps:
            continue
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == save_after:
            accelerator.save_state(str(folder))
    sent = model.bytes_sent() if isinstance(model, DistributedDataParallel) else None
    accelerator.free_memory()
    return model, sent, accelerator


# Hugging Face's Trainer


def trainer_runs(rank: int, folder: Path) -> dict[str, Any]:
    """Train with stock and with ours, dense and coded; resume from the checkpoint in the middle."""
    as_launched(rank)
    from transformers import Trainer as Stock
    from transformers import TrainingArguments as StockArguments

    from penstock.integrations.transformers import Trainer, TrainingArguments

    stock = _trainer(Stock, StockArguments, folder / "stock")
    stock.train()
    dense = _trainer(Trainer, TrainingArguments, folder / "dense", wrapper_options=planned())
    dense.train()
    coded = _trainer(Trainer, TrainingArguments, folder / "coded", wrapper_options=planned(BLOCKS), codec=BLOCKS)
    coded.train()
    again = _trainer(Trainer, TrainingArguments, folder / "again", wrapper_options=planned(BLOCKS), codec=BLOCKS)
    again.train(resume_from_checkpoint=str(folder / "coded" / "checkpoint-4"))
    sent = coded.model_wrapped.bytes_sent()
    return {
        "dense": (weights(stock.model), weights(dense.model)),
        "losses": (_losses(stock), _losses(dense)),
        "coded": (weights(coded.model), weights(again.model)),
        "residuals": (residual(coded.model_wrapped), residual(again.model_wrapped)),
        "sent": (sent.sent_nbytes, sent.dense_nbytes),
        "logged": sorted({name for each in coded.state.log_history for name in each}),
        "files": sorted(each.name for each in (folder / "coded" / "checkpoint-4").iterdir()),
    }


def half_trainer_runs(rank: int, folder: Path) -> dict[str, Any]:
    """Train under autocast by stock and by ours, and say what was computed in."""
    as_launched(rank)
    from transformers import Trainer as Stock
    from transformers import TrainingArguments as StockArguments

    from penstock.integrations.transformers import Trainer, TrainingArguments

    stock = _trainer(Stock, StockArguments, folder / "stock", bf16=True)
    ours = _trainer(Trainer, TrainingArguments, folder / "ours", bf16=True, wrapper_options=planned())
    for each in (stock, ours):
        each.train()
    return {
        "computed in": [{str(each) for each in trainer.model.computed_in} for trainer in (stock, ours)],
        "losses": (_losses(stock), _losses(ours)),
        "wrapped": isinstance(ours.model_wrapped, DistributedDataParallel),
    }


def _losses(trainer: Any) -> list[float]:
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def _trainer(kind: Any, arguments: Any, folder: Path, **options: Any) -> Any:
    own = {name: options.pop(name) for name in ("codec", "bf16") if name in options}
    asked = arguments(
        str(folder),
        max_steps=8,
        save_steps=4,
        logging_steps=1,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **own,
    )
    return kind(Gpt(), asked, train_dataset=Text(), **options)


# nanoGPT's train.py


def script_runs(rank: int, runs: list[tuple[str, dict[str, str], int]]) -> list[dict[str, Any]]:
    """Run scripts one after the other, each as torchrun would start it; return what each ended with."""
    return [_script(rank, *run) for run in runs]


def _script(rank: int, text: str, environment: dict[str, str], port: int) -> dict[str, Any]:
    if dist.is_initialized():
        dist.destroy_process_group()
    launched = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= launched | {"OUT_DIR": "", "INIT_FROM": "scratch"} | environment
    names: dict[str, Any] = {"__name__": "__main__"}
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        exec(compile(text, "train.py", "exec"), names)
    model = names["model"]
    found: dict[str, Any] = {"loss": names["last"], "weights": weights(names["raw_model"])}
    if isinstance(model, DistributedDataParallel):
        found["used"] = [(each.route, each.nbytes, each.sent_nbytes) for each in model.routes_used()]
    return found


# Lightning


def lightning_runs(rank: int, folder: Path) -> dict[str, Any]:
    """Train with stock DDP and with ours, by name and by our Trainer; resume from the checkpoint in the middle."""
    as_launched(rank)
    import lightning.pytorch as lightning

    from penstock.integrations.lightning import MetricsCallback, PenstockStrategy, Trainer

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = Gpt()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.gpt(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    class AtEnd(lightning.Callback):  # Lightning takes the wrapper off when it has fitted
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            wrapper = trainer.strategy.model
            if isinstance(wrapper, DistributedDataParallel) and name_of(trainer) in ("coded", "again"):
                at_end[name_of(trainer)] = residual(wrapper), wrapper.bytes_sent()

    at_end: dict[str, Any] = {}

    def name_of(trainer: Any) -> str:
        return Path(trainer.checkpoint_callback.dirpath).name

    def fit(kind: Any, name: str, steps: int, resume: str | None = None, **options: Any) -> Any:
        kept = lightning.callbacks.ModelCheckpoint(folder / name, "{step}", every_n_train_steps=4, save_top_k=-1)
        module = Module()
        trainer = kind(
            accelerator="cpu",
            devices=2,
            max_steps=steps,
            callbacks=[kept, AtEnd(), *options.pop("callbacks", ())],
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"logger": False} | options,
        )
        trainer.fit(module, DataLoader(Text(), batch_size=8), ckpt_path=resume)  # an epoch of four steps
        return trainer, module

    def gpt_plan(codec: str | None = None) -> dict[str, Any]:
        plan = planned(codec)["plan"]
        buckets = [replace(each, tensors=tuple(f"gpt.{name}" for name in each.tensors)) for each in plan.buckets]
        return {"plan": replace(plan, buckets=tuple(buckets))}

    _, stock = fit(lightning.Trainer, "stock", 8, strategy="ddp")
    _, dense = fit(Trainer, "dense", 8, wrapper_options=gpt_plan())
    logger = lightning.loggers.CSVLogger(folder / "logs")
    options = {"codec": BLOCKS, "wrapper_options": gpt_plan(BLOCKS)}
    coded, whole = fit(Trainer, "coded", 8, logger=logger, callbacks=[MetricsCallback(every=2)], **options)
    files = sorted(str(each.relative_to(folder / "coded")) for each in (folder / "coded").rglob("*") if each.is_file())
    _, again = fit(Trainer, "again", 8, resume=str(folder / "coded" / "step=4.ckpt"), **options)
    half, _ = fit(lightning.Trainer, "half", 1, strategy="penstock_4bit", precision="bf16-mixed")
    sent = at_end["coded"][1]
    coded.strategy.remove_checkpoint(folder / "coded" / "step=4.ckpt")
    return {
        "dense": (weights(stock), weights(dense)),
        "coded": (weights(whole), weights(again)),
        "residuals": (at_end["coded"][0], at_end["again"][0]),
        "sent": (sent.sent_nbytes, sent.dense_nbytes),
        "files": files,
        "left": sorted(each.name for each in (folder / "coded").iterdir()) if rank == 0 else [],
        "named": isinstance(half.strategy, PenstockStrategy),
        "computed in": {str(each) for each in half.lightning_module.gpt.computed_in},
        "logged": (Path(logger.log_dir) / "metrics.csv").read_text() if rank == 0 else "",
    }


# The communication hook


def hook_before_group(rank: int, codec: str | None) -> dict[str, Any]:
    """Make a hook before the process group, and another after it; train with both on stock DDP."""
    from penstock.torch import comm_hook
    from penstock.torch.hook import LateSender

    world_size = dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    early, hook = comm_hook("ring", codec)
    kind, before = type(early), early.bytes_sent()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world_size)
    late, other = comm_hook("ring", codec)
    found = [_with_hook(rank, each) for each in ((early, hook), (late, other))]
    return {
        "late": kind is LateSender and before.sent_nbytes == 0,
        "weights": found,
        "sent": (early.bytes_sent().sent_nbytes, late.bytes_sent().sent_nbytes),
        "residuals": [bool(each.exchange_state_dict()["memories"].get("residual")) for each in (early, late)],
    }


def hook_by_default(rank: int) -> dict[str, Any]:
    """Train with a hook that was told nothing, and with none."""
    from penstock.torch import comm_hook

    sender, hook = comm_hook()
    found = [_with_hook(rank, (sender, hook)), _with_hook(rank, None)]
    return {"weights": found, "routes": [each.route for each in sender.exchange.routes_used()]}


def _with_hook(rank: int, hook: Any) -> Floats:
    model = nn.parallel.DistributedDataParallel(Gpt())
    if hook is not None:
        model.register_comm_hook(*hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in list(DataLoader(Text(), batch_size=4))[rank::2][:4]:
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    return weights(model)


# Loggers


def logged_run(rank: int, folder: Path) -> dict[str, Any]:
    """Train a few steps and write to TensorBoard and to Weights & Biases, where it is installed."""
    from penstock.integrations.metrics import TensorBoardCallback, metrics

    model = DistributedDataParallel(Gpt(), codec=BLOCKS, **planned(BLOCKS))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    callbacks: list[Any] = []
    if rank == 0:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"))
        callbacks = [TensorBoardCallback(writer, every=2)]
    for step, batch in enumerate(list(DataLoader(Text(), batch_size=4))[:8]):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
        for each in callbacks:
            each(model, step)
    if rank == 0:
        writer.close()
    return {"metrics": metrics(model), "stock": metrics(Gpt())}
