"""Which compression does AdamW survive, and why: workers simulated in one process, on one GPU.

usage: simulated.py --data WIKITEXT_FOLDER --out RESULTS.jsonl [--budget SECONDS] [--jobs 3] [--only NAME ...]

A byte-level GPT whose parameters carry a leading dimension, the worker, so that one backward pass gives each worker's
gradient. Exchanges are torch functions of two stages with feedback at both, as the product's: every worker encodes, the
owner of a slice averages and encodes again. It shows what an idea does; `run.py` shows what the product does.
Finished runs (lines of the file) are skipped, so a study can be continued.
"""

import argparse
import json
import lzma
import math
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional

BETA1, BETA2, EPS, DECAY = 0.9, 0.95, 1e-8, 0.01


@dataclass(frozen=True)
class Model:
    """The GPT of the study; vocabulary: bytes."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    context: int = 256


@dataclass(frozen=True)
class Setting:
    """One run. Bits of 0: 32-bit floats, nothing encoded."""

    name: str
    workers: int = 4
    seed: int = 0
    bits: int = 0  # of gradients; while warming up where momentum follows
    momentum_bits: int = -1  # -1: gradients throughout; 0: momentum, uncompressed
    warmup: float = 0.1  # of all steps, before the second moment is frozen
    scale: str = "max"  # of a block of gradients: by its largest value, or by its mean size ("mean")
    block: int = 256  # 0: one scale per tensor
    preconditioned: bool = False  # encode in units of sqrt(v): errors count by what they do to weights
    exempt: tuple[str, ...] = ()  # parameters by a part of their name that travel as 32-bit floats
    clip: str = "average"  # "average", "local", "none"; of momentum: "implied", "local", "none", "momentum"
    clip_norm: float = 1.0
    refresh: int = 0  # every so many steps of the momentum phase a gradient step that updates v
    floor: float = 0.0  # frozen v is at least this part of its block's mean
    average_v: bool = False  # freeze the mean square over the second half of the warm-up, not v's last value
    feedback: bool = True
    switch_reset: bool = False  # forget residuals of gradients when momentum begins
    lr: float = 1e-3
    lr_warmup: int = 0
    steps: int = 1500
    batch: int = 64  # of all workers


def suite() -> list[Setting]:
    """Return all runs, the most telling first."""
    base = Setting("dense")
    g = replace(base, bits=4, preconditioned=True)
    m = replace(base, bits=4, momentum_bits=1, preconditioned=True, clip="local", average_v=True, floor=0.01)
    outer = ("emb", "pos", "norm")
    return [
        base,
        replace(base, name="g4", bits=4),
        replace(m, name="m1 w10 pre"),
        replace(m, name="m1 w20 pre", warmup=0.2),
        replace(m, name="m32 w10 pre", momentum_bits=0),
        replace(base, name="g2 mean", bits=2, scale="mean"),
        replace(m, name="m2 w5 pre", momentum_bits=2, warmup=0.05),
        replace(m, name="m1 w10", preconditioned=False),
        replace(m, name="m1 w10 pre noclip", clip="none"),
        replace(m, name="m1 w10 pre implied", clip="implied"),
        replace(m, name="m1 w10 pre refresh16", refresh=16),
        replace(base, name="dense seed1", seed=1),
        replace(g, name="g2 mean pre", bits=2, scale="mean"),
        replace(g, name="g4 pre"),
        replace(m, name="m1 w30 pre", warmup=0.3),
        replace(m, name="m1 w10 exempt", preconditioned=False, exempt=outer),
        replace(m, name="m1 w10 pre exempt", exempt=outer),
        replace(m, name="m1 w10 pre 8workers", workers=8),
        replace(base, name="g4 8workers", bits=4, workers=8),
        replace(m, name="m1 w10 pre block64", block=64),
        replace(m, name="m1 w5 pre", warmup=0.05),
        replace(m, name="m2 w10 pre", momentum_bits=2),
        replace(m, name="m2 w10", momentum_bits=2, preconditioned=False),
        replace(base, name="g8", bits=8),
        replace(base, name="g4 mean", bits=4, scale="mean"),
        replace(m, name="m1 w10 pre g8", bits=8),
        replace(m, name="m1 w10 pre momclip", clip="momentum"),
        replace(m, name="m1 w10 floor10", preconditioned=False, floor=0.1),
        replace(m, name="m1 w10 pre lastv", average_v=False),
        replace(m, name="m1 w10 pre nofloor", floor=0.0),
        replace(g, name="g3 mean pre", bits=3, scale="mean"),
        replace(g, name="g1 mean pre", bits=1, scale="mean"),
        replace(base, name="g1 mean", bits=1, scale="mean"),
        replace(base, name="g1 tensor", bits=1, scale="mean", block=0),
        replace(base, name="g2", bits=2),
        replace(m, name="m1 w10 pre tensor", block=0),
        replace(m, name="m1 w20 pre refresh16", warmup=0.2, refresh=16),
        replace(base, name="g4 nofeedback", bits=4, feedback=False),
    ]


# ---------------------------------------------------------------------------------------------------- quantisers

STEPS = {1: 2.0, 2: 1.4, 3: 0.9, 4: 0.55}  # step of a mid-rise quantiser over a block's mean size, by bits


def quantised(values: torch.Tensor, bits: int, scale: str) -> torch.Tensor:
    """Return what blocks (the last dimension) decode to; 0 bits: the values themselves."""
    if bits == 0:
        return values
    if scale == "max" and bits > 1:
        top = 2 ** (bits - 1) - 1
        step = values.abs().amax(-1, keepdim=True).clamp_min(1e-38) / top
        return (values / step).round_().mul_(step)
    step = values.abs().mean(-1, keepdim=True).clamp_min(1e-38) * STEPS[bits]
    half = 2 ** (bits - 1)
    return (values / step).floor_().clamp_(-half, half - 1).add_(0.5).mul_(step)


def bits_per_value(bits: int, block: int) -> float:
    """Return what a value costs on the wire, its part of the block's 32-bit scale included."""
    return 32.0 if bits == 0 else bits + (32 / block if block else 0)


# ---------------------------------------------------------------------------------------------------- the model


class Layout:
    """Where each parameter lies in flat memory; each begins at a block's boundary."""

    def __init__(self, model: Model, align: int) -> None:
        d, self.model = model.width, model
        shapes: dict[str, tuple[int, ...]] = {"emb": (256, d), "pos": (model.context, d)}
        for layer in range(model.layers):
            shapes |= {f"{layer}.norm1": (1, d), f"{layer}.qkv": (d, 3 * d), f"{layer}.out": (d, d)}
            shapes |= {f"{layer}.norm2": (1, d), f"{layer}.up": (d, 4 * d), f"{layer}.down": (4 * d, d)}
        self.shapes = shapes | {"norm": (1, d)}
        self.bounds: dict[str, tuple[int, int]] = {}
        at = 0
        for name, shape in self.shapes.items():
            self.bounds[name] = at, at + math.prod(shape)
            at += -(-math.prod(shape) // align) * align
        self.numel = at
        self.parameters = sum(math.prod(shape) for shape in self.shapes.values())

    def initial(self, seed: int) -> torch.Tensor:
        """Return weights as GPT-2 begins with."""
        generator = torch.Generator().manual_seed(seed)
        flat = torch.zeros(self.numel)
        for name, (start, stop) in self.bounds.items():
            shape = self.shapes[name]
            if "norm" in name:
                flat[start:stop] = 1.0
                continue
            std = 0.02 / math.sqrt(2 * self.model.layers) if name.endswith(("out", "down")) else 0.02
            flat[start:stop] = torch.randn(math.prod(shape), generator=generator) * std
        return flat

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each parameter's part of flat memory, or of one row of it for every worker."""
        return {
            name: flat[..., start:stop].unflatten(-1, self.shapes[name]) for name, (start, stop) in self.bounds.items()
        }


def forward(p: dict[str, torch.Tensor], tokens: torch.Tensor, model: Model, low: torch.dtype) -> torch.Tensor:
    """Return logits of tokens (workers, batch, context) by parameters (workers, ...), in autocast's element types."""
    workers, batch, length = tokens.shape
    d, heads = model.width, model.heads
    flat = (workers, batch * length)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return (functional.layer_norm(x, (d,)) * p[name].float()).to(low)

    hot = (tokens.reshape(*flat, 1) == torch.arange(256, device=tokens.device)).to(low)
    x = torch.bmm(hot, p["emb"]).float().view(workers, batch, length, d) + p["pos"].float()[:, None]
    x = x.view(*flat, d)
    for layer in range(model.layers):
        qkv = torch.bmm(norm(x, f"{layer}.norm1"), p[f"{layer}.qkv"])
        q, k, v = qkv.view(workers * batch, length, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(*flat, d)
        x = x + torch.bmm(mixed, p[f"{layer}.out"])
        inner = functional.gelu(torch.bmm(norm(x, f"{layer}.norm2"), p[f"{layer}.up"]))
        x = x + torch.bmm(inner, p[f"{layer}.down"])
    return torch.bmm(norm(x, "norm"), p["emb"].transpose(1, 2)).float().view(workers, batch, length, 256)


# ---------------------------------------------------------------------------------------------------- one run


class Run:
    """One training run; its steps touch only memory made here, so that they can be replayed as CUDA graphs."""

    def __init__(self, setting: Setting, model: Model, train: torch.Tensor, device: torch.device) -> None:
        self.setting, self.model, self.train, self.device = setting, model, train, device
        s = setting
        self.layout = Layout(model, 256)
        self.low = torch.bfloat16 if device.type == "cuda" else torch.float32
        n, size = s.workers, self.layout.numel
        generator = torch.Generator().manual_seed(1000 + s.seed)
        starts = torch.randint(len(train) - model.context - 1, (s.steps, n, s.batch // n), generator=generator)
        self.starts = starts.to(device)
        self.lr = torch.tensor([self.rate(i) for i in range(s.steps)], device=device)
        zeros = lambda *shape: torch.zeros(*shape, device=device)  # noqa: E731
        self.weights = self.layout.initial(s.seed).to(device)
        self.m, self.v, self.gradients = zeros(size), zeros(size), zeros(n, size)
        self.residuals, self.residual = zeros(n, size), zeros(size)
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.v_steps, self.squares = zeros(1), zeros(size)
        self.history = zeros(s.steps, 6)
        self.exempt = torch.zeros(size, dtype=torch.bool, device=device)
        for name, view in self.layout.views(self.exempt).items():
            view.fill_(any(part in name for part in s.exempt))
        self.any_exempt = bool(self.exempt.any())
        self.half_warm = max(1, round(s.warmup * s.steps) // 2)

    def rate(self, index: int) -> float:
        """Return a step's learning rate: a cosine to zero."""
        s = self.setting
        warm = min(1.0, (index + 1) / s.lr_warmup) if s.lr_warmup else 1.0
        return s.lr * warm * 0.5 * (1 + math.cos(math.pi * index / s.steps))

    # ------------------------------------------------------------------ pieces of a step

    def backward(self) -> torch.Tensor:
        """Fill each worker's gradient; return the workers' mean loss."""
        views = self.layout.views(self.weights.to(self.low))
        leaves = {k: w.expand(self.setting.workers, *w.shape).detach().requires_grad_() for k, w in views.items()}
        starts = self.starts[self.step][0]
        text = self.train[starts[..., None] + torch.arange(self.model.context + 1, device=self.device)].long()
        logits = forward(leaves, text[..., :-1], self.model, self.low)
        losses = functional.cross_entropy(logits.reshape(-1, 256), text[..., 1:].reshape(-1), reduction="none")
        mean = losses.view(self.setting.workers, -1).mean(1)
        found = torch.autograd.grad(mean.sum(), list(leaves.values()))
        for into, part in zip(self.layout.views(self.gradients).values(), found, strict=True):
            into.copy_(part)
        return mean.detach().mean()

    def by_block(self, values: torch.Tensor, bits: int, scale: str) -> torch.Tensor:
        """Return what flat values decode to."""
        block = self.setting.block
        if block:
            return quantised(values.unflatten(-1, (-1, block)), bits, scale).flatten(-2)
        out = values.clone()
        for into, part in zip(self.layout.views(out).values(), self.layout.views(values).values(), strict=True):
            lead = part.shape[: part.dim() - 2]
            into.copy_(quantised(part.reshape(*lead, -1), bits, scale).view_as(part))
        return out

    def exchanged(self, values: torch.Tensor, bits: int, scale: str) -> torch.Tensor:
        """Return the average of workers' values (workers, size) by two encoded stages; keep what was not sent."""
        if bits == 0:
            return values.mean(0)
        unit = self.unit() if self.setting.preconditioned else None
        owed = values + self.residuals
        sent = owed / unit if unit is not None else owed
        sent = self.by_block(sent, bits, scale)
        sent = sent * unit if unit is not None else sent
        if self.any_exempt:
            sent = torch.where(self.exempt, owed, sent)
        if self.setting.feedback:
            torch.sub(owed, sent, out=self.residuals)
        total = sent.mean(0) + self.residual
        final = self.by_block(total / unit if unit is not None else total, bits, scale)
        final = final * unit if unit is not None else final
        if self.any_exempt:
            final = torch.where(self.exempt, total, final)
        if self.setting.feedback:
            torch.sub(total, final, out=self.residual)
        return final

    def unit(self) -> torch.Tensor:
        """Return what a weight's gradient is measured in: sqrt(v), at least a thousandth of its mean."""
        root = (self.v / (1 - BETA2**self.v_steps).clamp_min(1e-6)).sqrt()
        return (root + 1e-3 * root.mean()).clamp_min(1e-20) * (self.v_steps > 0) + (self.v_steps == 0)

    def clipped(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return vectors (the last dimension) with a norm of at most the limit, and the norms they had."""
        norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        return gradient * (self.setting.clip_norm / (norm + 1e-6)).clamp_max(1.0), norm.mean()

    def apply(self, momentum: torch.Tensor) -> None:
        """Take AdamW's step."""
        rate, step = self.lr[self.step], (self.step + 1).float()
        root = (self.v / (1 - BETA2**self.v_steps)).sqrt().add_(EPS)
        self.weights.mul_(1 - rate * DECAY)
        self.weights.sub_(rate * (momentum / (1 - BETA1**step)) / root)

    def note(self, *values: torch.Tensor) -> None:
        """Keep what this step saw, and count it."""
        row = torch.stack([value.reshape(()).float() for value in values])
        row = torch.cat([row, torch.zeros(6 - len(row), device=self.device)])
        self.history.index_copy_(0, self.step, row[None])
        self.step.add_(1)

    # ------------------------------------------------------------------ steps

    def gradient_step(self) -> None:
        """One step in which gradients are exchanged and both moments follow."""
        loss = self.backward()
        local = torch.linalg.vector_norm(self.gradients, dim=-1).mean()
        gradient = self.exchanged(self.gradients, self.setting.bits, self.setting.scale)
        norm = torch.linalg.vector_norm(gradient)
        if self.setting.clip != "none":
            gradient, norm = self.clipped(gradient)
        self.m.mul_(BETA1).add_(gradient, alpha=1 - BETA1)
        self.v.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        self.v_steps.add_(1)
        if self.setting.average_v:
            late = (self.step >= self.half_warm) & (self.step < 2 * self.half_warm)
            self.squares.add_(gradient.square() * late / self.half_warm)
        self.apply(self.m)
        self.note(loss, norm, local, torch.linalg.vector_norm(self.m), self.residuals.square().mean().sqrt())

    def momentum_step(self) -> None:
        """One step in which momentum is exchanged, in units of the frozen second moment or not."""
        s = self.setting
        loss = self.backward()
        gradients = self.gradients
        local = torch.linalg.vector_norm(gradients, dim=-1).mean()
        if s.clip == "local":
            gradients, _ = self.clipped(gradients)
        values = gradients.mul(1 - BETA1).add_(self.m, alpha=BETA1)
        m = self.exchanged(values, s.momentum_bits, "mean" if s.momentum_bits < 4 else "max")
        implied = (m - BETA1 * self.m) / (1 - BETA1)
        norm = torch.linalg.vector_norm(implied)
        if s.clip == "implied":
            m = BETA1 * self.m + (1 - BETA1) * self.clipped(implied)[0]
        if s.clip == "momentum":
            m = self.clipped(m)[0]
        self.m.copy_(m)
        self.apply(self.m)
        self.note(loss, norm, local, torch.linalg.vector_norm(m), self.residuals.square().mean().sqrt())

    def change_to_momentum(self) -> None:
        """Freeze v; have residuals in units of momentum from now on."""
        if self.setting.average_v:  # no longer an average that begins at zero
            self.v.copy_(self.squares)
            self.v_steps.fill_(1e6)
        mean = self.v.unflatten(-1, (-1, 256)).mean(-1, keepdim=True).expand(-1, 256).flatten()
        self.v.copy_(torch.maximum(self.v, self.setting.floor * mean))
        for residual in (self.residuals, self.residual):
            residual.mul_(0.0 if self.setting.switch_reset else 1 - BETA1)

    # ------------------------------------------------------------------ the whole

    def state(self) -> list[torch.Tensor]:
        """Return all memory that a step changes."""
        return [
            self.weights,
            self.m,
            self.v,
            self.residuals,
            self.residual,
            self.step,
            self.v_steps,
            self.history,
            self.squares,
        ]

    def replayed(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return the step as a CUDA graph; state is as before."""
        if self.device.type != "cuda":
            return step
        before = [each.clone() for each in self.state()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        for into, kept in zip(self.state(), before, strict=True):
            into.copy_(kept)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                step()
        except RuntimeError as error:  # slower, and right all the same
            print(f"no CUDA graph of {self.setting.name}: {error}", flush=True)
            return step
        for into, kept in zip(self.state(), before, strict=True):
            into.copy_(kept)
        return graph.replay

    def train_all(self) -> float:
        """Run all steps; return the bytes sent over dense's."""
        s = self.setting
        frozen_from = s.steps if s.momentum_bits < 0 else round(s.warmup * s.steps)
        gradient_step = self.replayed(self.gradient_step)
        momentum_step = None
        sent = 0.0
        for index in range(s.steps):
            if index == frozen_from:
                self.change_to_momentum()
                momentum_step = self.replayed(self.momentum_step)
            refreshes = s.refresh and (index - frozen_from) % s.refresh == s.refresh - 1
            if momentum_step is None or refreshes:
                if refreshes:  # residuals are those of momentum: gradients owe ten times as much
                    self.residuals.div_(1 - BETA1)
                    self.residual.div_(1 - BETA1)
                gradient_step()
                if refreshes:
                    self.residuals.mul_(1 - BETA1)
                    self.residual.mul_(1 - BETA1)
                sent += self.cost(s.bits)
            else:
                momentum_step()
                sent += self.cost(s.momentum_bits)
        return sent / s.steps

    def cost(self, bits: int) -> float:
        """Return a step's bytes over dense's."""
        dense = sum(b - a for n, (a, b) in self.layout.bounds.items() if any(part in n for part in self.setting.exempt))
        share = dense / self.layout.parameters if bits else 0.0
        return share + (1 - share) * bits_per_value(bits, self.setting.block) / 32

    @torch.no_grad()
    def bits_per_byte(self, text: torch.Tensor) -> float:
        """Return the held-out loss over all whole windows."""
        length = self.model.context
        windows = text[: (len(text) - 1) // length * length + 1]
        inputs, targets = windows[:-1].view(-1, length).long(), windows[1:].view(-1, length).long()
        views = {k: w[None] for k, w in self.layout.views(self.weights.to(self.low)).items()}
        total = 0.0
        for x, y in zip(inputs.split(256), targets.split(256), strict=True):
            logits = forward(views, x[None], self.model, self.low)
            total += float(functional.cross_entropy(logits.reshape(-1, 256), y.reshape(-1), reduction="sum"))
        return total / inputs.numel() / math.log(2)


def record(setting: Setting, model: Model, texts: dict[str, torch.Tensor], device: torch.device) -> dict[str, object]:
    """Train once; return what came of it."""
    begun = time.perf_counter()
    run = Run(setting, model, texts["train"].to(device), device)
    ratio = run.train_all()
    held_out = run.bits_per_byte(texts["valid"].to(device))
    history = run.history.cpu()
    tenths = [[round(float(v), 5) for v in part.mean(0)] for part in history.chunk(10)]
    over = history[:, 1] > setting.clip_norm
    return {
        "name": setting.name,
        "bits_per_byte": round(held_out, 5),
        "train_bits_per_byte": round(float(history[-100:, 0].mean()) / math.log(2), 5),
        "bytes_over_dense": round(ratio, 5),
        "clipped_steps": round(float(over.float().mean()), 4),
        "seconds": round(time.perf_counter() - begun, 2),
        "parameters": run.layout.parameters,
        "by_tenth": tenths,  # loss, norm of the average, mean of local norms, norm of momentum, rms of residuals
        "root_v": {k: round(float(v.mean().sqrt()), 8) for k, v in run.layout.views(run.v).items() if k[0] in "ep03n"},
        "setting": asdict(setting),
        "model": asdict(model),
    }


# ---------------------------------------------------------------------------------------------------- the study


def read_texts(folder: Path) -> dict[str, torch.Tensor]:
    texts = {name: lzma.decompress((folder / f"{name}.txt.xz").read_bytes()) for name in ("train", "valid")}
    return {name: torch.frombuffer(bytearray(text), dtype=torch.uint8) for name, text in texts.items()}


def work(todo: "multiprocessing.Queue[Setting | None]", model: Model, folder: Path, out: Path, ends: float) -> None:
    """Run what is handed out until time is over; one line for each run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    texts = read_texts(folder)
    if model.layers < 4:
        texts["valid"] = texts["valid"][:20_001]
    longest = 0.0
    while (setting := todo.get()) is not None:
        if time.time() + 1.1 * longest > ends:
            break
        begun = time.time()
        try:
            line = record(setting, model, texts, device)
        except RuntimeError as error:
            print(f"{setting.name}: {error}", flush=True)
            continue
        longest = max(longest, time.time() - begun)
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = {k: line[k] for k in ("name", "bits_per_byte", "bytes_over_dense", "clipped_steps", "seconds")}
        print(json.dumps(shown), flush=True)


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which no run begins")
    parser.add_argument("--jobs", type=int, default=3, help="processes at a time; start CUDA MPS for more than one")
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--tiny", action="store_true", help="a small model and few steps, to try the script")
    options = parser.parse_args()
    ends = time.time() + options.budget
    done = {json.loads(line)["name"] for line in options.out.read_text().splitlines()} if options.out.exists() else ()
    runs = [each for each in suite() if each.name not in done and (not options.only or each.name in options.only)]
    model = Model()
    if options.tiny:
        model = Model(2, 128, 4, 64)
        runs = [replace(each, steps=60, batch=16) for each in runs]
    context = multiprocessing.get_context("spawn")
    todo: multiprocessing.Queue[Setting | None] = context.Queue()
    for each in [*runs, *[None] * options.jobs]:
        todo.put(each)
    arguments = (todo, model, options.data, options.out, ends)
    workers = [context.Process(target=work, args=arguments) for _ in range(options.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
