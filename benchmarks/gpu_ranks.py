r"""What do exchanges cost on GPU ranks: bits over gloo and NCCL, milliseconds per iteration beside peers, memory.

    penstock cluster run --hosts 4 --rate 10gbit --gpus shared --rank0 -- \
        python benchmarks/gpu_ranks.py OUT.json resnet gpt --rate 10gbit

Every rank runs this; rank 0 prints and writes OUT.json. `--rate` and `--ranks-per-host` repeat what the hosts were made
with, for the record, because a rank cannot read it. `--methods` names rows of METHODS, `--bits` and `--kernels` try
those too. Rows of penstock's wrapper are timed once its plan is in force; `start` says when that was, in seconds since
the wrapper was made, how much of it training was held up, and whether a job before had left measurements and kernels on
disk. `--rounds 0` looks at starts alone: once for cold ones, once more for warm ones. `held_mb` is what a method keeps
on the device between iterations: weights, buckets, what is owed, messages, the optimizer's state; `outside_mb` what it
adds for a rank beside torch's allocator, as NCCL's buffers, which the first method that connects pays for. It needs
root, one NVIDIA GPU and Triton.
"""

import argparse
import gc
import hashlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from penstock.bench.record import make_record, save_record
from penstock.codecs.graphs import urgent_stream
from penstock.codecs.registry import make_codec
from penstock.errors import PenstockError
from penstock.planning.measurement_cache import measurement_folder
from penstock.runtime import Communicator
from penstock.runtime.device import messages
from penstock.runtime.transport.c10d import C10dTransport
from penstock.strategies.batches import make_batches, one_batch
from penstock.torch import DistributedDataParallel, comm_hook
from penstock.torch.optim import CompressedAdamW
from penstock.zoo.image_models import ResNet, vgg16_cifar
from penstock.zoo.language_models import GPT

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]

DEVICE = torch.device("cuda", 0)
ROUNDS = 3
STRATEGIES = ("parameter_server", "ring", "all_gather", "hierarchical(ranks_per_node=2)")
CASES = (
    *((codec, strategy) for codec in ("onebit", "terngrad", "blocks(bits=4)") for strategy in STRATEGIES),
    ("onebit(block=256)", "parameter_server"),
    ("onebit(block=256)", "ring"),
    ("blocks(bits=2)", "all_gather"),
    ("blocks(bits=8)", "parameter_server"),
    ("fp8", "parameter_server"),
    ("bf16", "ring"),
    ("tbq", "all_gather"),
    ("sparse(density=0.001)", "gtopk"),
    ("sparse(density=0.001)", "gtopk_doubling"),
    ("sparse(density=0.01, value_bits=16)", "gtopk_doubling"),
    ("sparse(density=0.01, value_bits=16)", "topk_allgather"),
    ("sparse(density=0.001)", "hierarchical(ranks_per_node=2, outer=gtopk)"),
)
PARTS = (0, 700, 700, 300_000, 3_000_017, 3_000_117)  # bounds of the tensors in the bucket whose bits are compared
# Tensors of the bucket whose kernels are timed, as ResNet-50 has them.
SIZES = (64, 64, 36864, 16384, 256, 1024, 262144, 589824, 1048576, 2359296, 2048, 2048000, 1000)


@dataclass(frozen=True)
class Workload:
    """A model that is trained, and for how long."""

    label: str
    iterations: int  # of each method in a round; uncompressed DDP does a quarter of them
    limit_seconds: float  # no further round begins after that


WORKLOADS = {
    "resnet": Workload("ResNet-50, batch 64 at 128 px", 16, 150),
    "gpt": Workload("GPT-2 124M, 8 x 256 tokens", 6, 150),
    "vgg": Workload("VGG-16 for CIFAR-10, batch 256", 30, 60),
}


@dataclass
class Results:
    """What was found so far; all ranks fill it, rank 0 prints and writes it."""

    path: Path
    rate: str  # of the links
    per_host: int  # ranks
    gpus: str  # how the ranks have them
    rounds: int  # of all methods
    caches: str  # cold or warm
    started: float = field(default_factory=time.time)
    bits_equal: dict[str, bool] = field(default_factory=dict)  # by codec and strategy
    weights_equal: dict[str, bool] = field(default_factory=dict)  # by model and method
    ms: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # per iteration, by model and method
    host_ms: dict[str, dict[str, float]] = field(default_factory=dict)  # of them, rank 0's host in the hook
    held_mb: dict[str, dict[str, float]] = field(default_factory=dict)  # by torch's allocator between iterations
    outside_mb: dict[str, dict[str, float]] = field(default_factory=dict)  # beside the allocator
    starts: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # of wrappers, by model and method
    said: dict[str, str] = field(default_factory=dict)  # what the wrapper decided, by model and method

    def say(self, *words: Any) -> None:
        """Print a line on rank 0, after the seconds since the start."""
        if dist.get_rank() == 0:
            print(f"[{time.time() - self.started:6.1f}]", *words, flush=True)

    def save(self) -> None:
        """Write the record on rank 0; called after each part, so that a later failure loses none."""
        if dist.get_rank() == 0:
            bits = {"bits_equal_between_gloo_and_nccl_and_between_ranks": self.bits_equal}
            record = make_record("gpu-ranks", self._rows(), notes=self._notes(), decided=self.said, **bits)
            record["machine"]["gpus"] = self.gpus
            record["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
            save_record(record, self.path)

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "model": WORKLOADS[name].label,
                "method": method,
                "rate": self.rate,
                "hosts": dist.get_world_size() // self.per_host,
                "ranks_per_host": self.per_host,
                "ms_per_iteration": ms,
                "held_mb": self.held_mb[name][method],
                "outside_mb": self.outside_mb[name][method],
                **({"start": self.starts[name][method]} if method in self.starts.get(name, {}) else {}),
                **({"host_ms_in_hook": self.host_ms[name][method]} if method in self.host_ms.get(name, {}) else {}),
            }
            for name, methods in self.ms.items()
            for method, ms in methods.items()
        ]

    def _notes(self) -> str:
        how = f"up to {self.rounds} rounds, methods interleaved, SGD unless a row says AdamW"
        if not self.weights_equal:
            return how
        different = [where for where, equal in self.weights_equal.items() if not equal]
        return f"{how}; weights " + (f"DIFFER: {', '.join(different)}" if different else "equal on all ranks")


def digest(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's bits."""
    return hashlib.sha256(tensor.detach().cpu().numpy().tobytes()).hexdigest()[:16]


def gathered(value: Any) -> list[Any]:
    """Return every rank's value."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def weights_equal(model: nn.Module) -> bool:
    """Return whether the weights are the same to the bit on all ranks."""
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return len(set(gathered(digest(weights)))) == 1


# Bits: the route through the host, over gloo, against the one queued on the device, over NCCL.


def check_bits(results: Results) -> None:
    """Compare sums and residuals of both routes, and of all ranks, for each codec and strategy."""
    gloo = dist.new_group(backend="gloo")
    between_devices = messages.device_messages(dist.group.WORLD, 120.0)
    if between_devices is None:
        raise RuntimeError("found no NCCL for CUDA tensors, which this benchmark measures; use a torch built with it")

    def connect() -> Communicator:
        return Communicator(C10dTransport(gloo), timeout_seconds=60, messages=between_devices)

    for spec, strategy in CASES:
        everyone = gathered([digests(connect(), spec, strategy, by_host) for by_host in (True, False)])
        same_routes = all(host == queued for host, queued in everyone)
        same_ranks = all(queued[0] == everyone[0][1][0] for _, queued in everyone)
        results.bits_equal[f"{spec} {strategy}"] = same_routes and same_ranks
        routes, ranks = ("equal" if same else "DIFFER" for same in (same_routes, same_ranks))
        results.say("bits", spec, strategy, "routes", routes, "ranks", ranks)
    results.say("nan", gathered(check_nan(connect())))


def digests(communicator: Communicator, spec: str, strategy: str, by_host: bool) -> tuple[list[str], str]:
    """Return the digests of three all-reduces' sums and of the residual after them."""
    rank, codec, found = dist.get_rank(), make_codec(spec, dist.get_rank(), defers_nonfinite_check=True), []
    data, residual = torch.empty(PARTS[-1], device=DEVICE), torch.zeros(PARTS[-1], device=DEVICE)
    for step in range(3):
        data.copy_(torch.randn(PARTS[-1], generator=torch.Generator().manual_seed(100 * step + rank)))
        communicator.all_reduce(
            data, strategy=strategy, codec=codec, residual=residual, parts=PARTS, scale=0.25, by_host=by_host
        )
        found.append(digest(data))
    return found, digest(residual)


def check_nan(communicator: Communicator) -> tuple[bool, bool, str]:
    """Return whether rank 2's NaN arrives, whether other tensors stay finite, and the error of the next call."""
    codec, data, error_found = (
        make_codec("onebit", dist.get_rank(), defers_nonfinite_check=True),
        torch.ones(PARTS[-1], device=DEVICE),
        "none",
    )
    if dist.get_rank() == 2:
        data[500_000] = float("nan")
    communicator.all_reduce(data, strategy="parameter_server", codec=codec, parts=PARTS)
    arrives, others_finite = bool(data[500_000].isnan()), bool(data[:300_000].isfinite().all())
    data.fill_(1.0)
    try:
        communicator.all_reduce(data, strategy="parameter_server", codec=codec, parts=PARTS)
    except PenstockError as error:
        error_found = f"{type(error).__name__}: {error}"
    return arrives, others_finite, error_found


# Kernels, on rank 0 alone.


def time_kernels(results: Results) -> None:
    """Print microseconds of device and host that each codec's kernels take for a bucket of 6.4M values."""
    if dist.get_rank() == 0:
        for spec in ("onebit", "terngrad", "fp8", "blocks(bits=4)", "onebit(block=256)", "sparse(density=0.001)"):
            results.say("kernels, us on the device and on the host", spec, kernel_times(spec))
        spec = "sparse(density=0.001)"
        results.say("kernels for GPT-2's table of words", spec, kernel_times(spec, (50257 * 768,)))
    dist.barrier()


def kernel_times(spec: str, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Return the bucket's size, and microseconds of encode, decode, three added decodes, and a plain multiply; where
    payloads are merged, of that too. All as in training: captured, on a stream of their own."""
    codec = make_codec(spec)
    form, merges = codec.on_device(DEVICE), codec.capabilities.merging
    bounds = [0, *accumulate(sizes)]
    batches = one_batch(bounds) if merges else make_batches(bounds, 4, None, 1 << 30)
    pieces = sorted(piece for batch in batches.pieces for piece in batch)
    ends = list(accumulate(-(-form.max_nbytes(stop - start) // 16) * 16 for start, stop in pieces))
    places = [0, *ends[:-1]]
    memory = torch.zeros(2 * ends[-1], dtype=torch.uint8, device=DEVICE)
    bucket, residual = torch.randn(bounds[-1], device=DEVICE), torch.zeros(bounds[-1], device=DEVICE)
    encode = form.queued_encoder(bucket, residual, memory, pieces, places, range(len(pieces)))
    work = {
        "encode": lambda: encode(0),
        "decode": form.queued_decoder(bucket, memory, pieces, [places], False),
        "add 3": form.queued_decoder(bucket, memory, pieces, [places] * 3, True),
        "mul": lambda: bucket.mul_(0.999),
    }
    if merges:
        others = [ends[-1] + place for place in places]
        form.queued_encoder(bucket, None, memory, pieces, others, range(len(pieces)))(0)
        work["merge"] = form.queued_merger(residual, memory, pieces, places, others)
    stream = urgent_stream(DEVICE)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        times = {label: device_and_host_us(form.replayed(queue)) for label, queue in work.items()}
    return {"elements": bounds[-1], "pieces": len(pieces), **times}


def device_and_host_us(queue: Callable[[], Any], repeats: int = 50) -> tuple[float, float]:
    """Return microseconds per call: on the device, and of the host that queues it."""
    for _ in range(3):
        queue()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start = time.perf_counter()
    begin.record()
    for _ in range(repeats):
        queue()
    end.record()
    host = (time.perf_counter() - start) / repeats
    torch.cuda.synchronize()
    return round(begin.elapsed_time(end) / repeats * 1e3, 1), round(host * 1e6, 1)


# A peer: the least that an on-device hook with the same bits per value does.
#
# A bucket is cut into one shard per rank, a shard into chunks. A row carries a shard: the signs of all its chunks, then
# the sum of magnitudes of each chunk as float32. Nothing is checked, and a bucket's last chunk is scaled as a full one.

CHUNK = 1 << 16  # values with one scale
BLOCK = 2048  # values of a kernel's program


@triton.jit
def magnitude_place(number, shard, row_nbytes, chunk: tl.constexpr):
    """Return where the sum of magnitudes of a bucket's chunk is, counted in float32."""
    return ((number // shard) * row_nbytes + shard * (chunk // 8)) // 4 + number % shard


@triton.jit
def encode_signs(
    values, residual, rows, magnitudes, numel, scale, shard, row_nbytes, chunk: tl.constexpr, block: tl.constexpr
):
    """Add scaled values to the residual, write the signs of that, add its magnitudes to those of the chunk."""
    first = tl.program_id(0) * block
    at = first + tl.arange(0, block // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = at < numel
    value = tl.load(values + at, mask=inside, other=0.0) * scale + tl.load(residual + at, mask=inside, other=0.0)
    tl.store(residual + at, value, mask=inside)
    signs = tl.sum((value >= 0).to(tl.int32) << tl.arange(0, 8)[None, :], axis=1)
    number = first // chunk
    place = (number // shard) * row_nbytes + (number % shard) * (chunk // 8) + (first % chunk) // 8
    tl.store(rows + place + tl.arange(0, block // 8), signs.to(tl.uint8))
    tl.atomic_add(magnitudes + magnitude_place(number, shard, row_nbytes, chunk), tl.sum(tl.abs(value)))


@triton.jit
def keep_error(residual, magnitudes, numel, shard, row_nbytes, chunk: tl.constexpr, block: tl.constexpr):
    """Subtract from the residual what its signs will be decoded to."""
    first = tl.program_id(0) * block
    at = first + tl.arange(0, block)
    mean = tl.load(magnitudes + magnitude_place(first // chunk, shard, row_nbytes, chunk)) / chunk
    value = tl.load(residual + at, mask=at < numel, other=0.0)
    tl.store(residual + at, value - tl.where(value >= 0, mean, -mean), mask=at < numel)


@triton.jit
def decode_signs(rows, magnitudes, out, numel, sources, shard, row_nbytes, chunk: tl.constexpr, block: tl.constexpr):
    """Write the sum over `sources` consecutive rows, of which the first is the row that carries the chunk."""
    first = tl.program_id(0) * block
    at = first + tl.arange(0, block)
    number = first // chunk
    signs = rows + (number // shard) * row_nbytes + (number % shard) * (chunk // 8) + (at % chunk) // 8
    means = magnitudes + magnitude_place(number, shard, row_nbytes, chunk)
    total = tl.zeros((block,), tl.float32)
    for source in range(sources):
        byte = tl.load(signs + source * row_nbytes).to(tl.int32)
        mean = tl.load(means + source * (row_nbytes // 4)) / chunk
        total += tl.where(((byte >> (at % 8)) & 1) != 0, mean, -mean)
    tl.store(out + at, total, mask=at < numel)


class PlainBucket:
    """A bucket's residuals and the memory that its messages lie in."""

    def __init__(self, numel: int, world_size: int, device: torch.device) -> None:
        self.numel, self.world_size = numel, world_size
        self.shard = -(-numel // (CHUNK * world_size))  # chunks
        self.row_nbytes = self.shard * (CHUNK // 8 + 4)
        own, rows = self.shard * CHUNK, (world_size, self.row_nbytes)
        self.residual, self.own_residual, self.own_sum = (torch.zeros(n, device=device) for n in (numel, own, own))
        self.sent, self.received, self.own_row, self.result = (
            torch.zeros(shape, dtype=torch.uint8, device=device) for shape in (rows, rows, (1, self.row_nbytes), rows)
        )

    def encode(self, values: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, scale: float) -> None:
        """Encode values and their residual into rows."""
        numel, magnitudes, layout = values.numel(), rows.view(-1).view(torch.float32), (self.shard, self.row_nbytes)
        rows[:, self.shard * (CHUNK // 8) :].zero_()
        programs = (len(rows) * self.shard * CHUNK // BLOCK,)
        encode_signs[programs](values, residual, rows, magnitudes, numel, scale, *layout, chunk=CHUNK, block=BLOCK)
        keep_error[(-(-numel // BLOCK),)](residual, magnitudes, numel, *layout, chunk=CHUNK, block=BLOCK)

    def decode(self, rows: torch.Tensor, out: torch.Tensor, sources: int) -> None:
        """Decode rows into values, summing `sources` rows for each."""
        numel, magnitudes, layout = out.numel(), rows.view(-1).view(torch.float32), (self.shard, self.row_nbytes)
        programs = (-(-numel // BLOCK),)
        decode_signs[programs](rows, magnitudes, out, numel, sources, *layout, chunk=CHUNK, block=BLOCK)


class PlainState:
    """What the plain hook keeps between iterations: a process group of its own, and each bucket's memory."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="nccl")
        self._buckets: dict[int, PlainBucket] = {}

    def bucket(self, index: int, values: torch.Tensor) -> PlainBucket:
        """Return a bucket's memory, made anew where DDP has cut its buckets anew."""
        found = self._buckets.get(index)
        if found is None or found.numel != values.numel():
            found = self._buckets[index] = PlainBucket(values.numel(), dist.get_world_size(), values.device)
        return found


def plain_hook(state: PlainState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket by onebit with feedback: all-to-all, sum of the own shard, all-gather."""
    values, group = bucket.buffer(), state.group
    memory = state.bucket(bucket.index(), values)
    memory.encode(values, memory.residual, memory.sent, 1 / memory.world_size)
    work = dist.all_to_all_single(memory.received.view(-1), memory.sent.view(-1), group=group, async_op=True)

    def pass_on(_: Any) -> Any:
        memory.decode(memory.received, memory.own_sum, memory.world_size)
        memory.encode(memory.own_sum, memory.own_residual, memory.own_row, 1.0)
        result, row = memory.result.view(-1), memory.own_row.view(-1)
        return dist.all_gather_into_tensor(result, row, group=group, async_op=True).get_future().wait()

    def finish(_: Any) -> torch.Tensor:
        memory.decode(memory.result, values, 1)
        return values

    return work.get_future().then(pass_on).then(finish)


# Training: what is timed, and beside what.


@dataclass(frozen=True)
class Method:
    """How a model is wrapped, and what steps it."""

    wrap: Callable[[nn.Module], nn.Module]
    optimizer: Callable[[nn.Module, nn.Module], torch.optim.Optimizer] = lambda model, wrapped: torch.optim.SGD(
        model.parameters(), lr=1e-4
    )


class TimedHook:
    """A hook, and how many seconds the host has been in it."""

    def __init__(self, hook: Hook) -> None:
        self.inner, self.seconds = hook, 0.0

    def hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Call the hook and add its time."""
        start = time.perf_counter()
        future = self.inner(state, bucket)
        self.seconds += time.perf_counter() - start
        return future


def send_nothing(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the bucket as it is."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[DEVICE])
    future.set_result(bucket.buffer())
    return future


def power_hook() -> tuple[Any, Hook]:
    """Return torch's PowerSGD of rank 4, which compresses from the third iteration on."""
    return powersgd.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2), powersgd.powerSGD_hook


def host_hook(strategy: str, codec: str) -> tuple[Any, Hook]:
    """Return penstock's hook without messages between devices, so that all goes through the host."""
    sender, hook = comm_hook(strategy, codec=codec)
    sender.exchange.communicator.messages = None
    return sender, hook


def stock(make_hook: Callable[[], tuple[Any, Hook]] | None = None, **options: Any) -> Method:
    """Return torch's wrapper, with a hook or with its own all-reduce."""

    def wrap(model: nn.Module) -> nn.Module:
        wrapped = TorchDDP(model, device_ids=[0], **options)
        if make_hook is not None:
            state, hook = make_hook()
            wrapped.timed = TimedHook(hook)
            wrapped.register_comm_hook(state, wrapped.timed.hook)
        return wrapped

    return Method(wrap)


def ours(**options: Any) -> Method:
    """Return penstock's wrapper."""
    return Method(
        lambda model: DistributedDataParallel(model, device_ids=[0], measure_seconds=MEASURE_SECONDS, **options)
    )


def adamw(model: nn.Module, wrapped: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5)


def compressed_adamw(model: nn.Module, wrapped: nn.Module) -> torch.optim.Optimizer:
    return CompressedAdamW(model.parameters(), lr=1e-5, ddp=wrapped, warmup_steps=WARMUP_STEPS)


WARMUP_STEPS = 8  # of CompressedAdamW: over before anything is timed, as planning takes more iterations
MEASURE_SECONDS = 5.0  # that a wrapper may measure, once for each codec
VIEWS = {"gradient_as_bucket_view": True}
METHODS = {
    "none": Method(lambda model: model),
    "ddp, nothing sent": stock(lambda: (None, send_nothing)),
    "ddp, nothing sent, bucket view": stock(lambda: (None, send_nothing), **VIEWS),
    "stock": stock(),
    "stock, bucket view": stock(**VIEWS),
    "fp16 hook": stock(lambda: (None, default_hooks.fp16_compress_hook)),
    "powersgd 4": stock(power_hook),
    "plain hook": stock(lambda: (PlainState(), plain_hook)),
    "onebit by host": stock(lambda: host_hook("parameter_server", "onebit")),
    "gtopk by host": stock(lambda: host_hook("gtopk_doubling", "gtopk")),
    "gtopk hook": stock(lambda: comm_hook("gtopk_doubling", codec="gtopk")),
    "gtopk hook, tree": stock(lambda: comm_hook("gtopk", codec="gtopk")),
    "onebit hook": stock(lambda: comm_hook("parameter_server", codec="onebit")),
    "onebit hook, ring": stock(lambda: comm_hook("ring", codec="onebit")),
    "onebit hook, all_gather": stock(lambda: comm_hook("all_gather", codec="onebit")),
    "onebit hook, hierarchical": stock(lambda: comm_hook("hierarchical", codec="onebit")),
    "blocks(bits=4) hook": stock(lambda: comm_hook("parameter_server", codec="blocks(bits=4)")),
    "dense plan": ours(),
    "onebit": ours(codec="onebit"),
    "onebit, bucket view": ours(codec="onebit", **VIEWS),
    "onebit, dense_below=1025": ours(codec="onebit", dense_below=1025),
    "blocks(bits=4)": ours(codec="blocks(bits=4)"),
    "blocks(bits=4), bucket view": ours(codec="blocks(bits=4)", **VIEWS),
    "gtopk": ours(codec="gtopk"),
    "terngrad": ours(codec="terngrad"),
    "auto": ours(codec="auto"),
    "none, AdamW": Method(lambda model: model, adamw),
    "CompressedAdamW onebit(block=256)": Method(ours(codec="onebit(block=256)").wrap, compressed_adamw),
}
USUAL = (
    "none", "stock", "powersgd 4", "plain hook", "dense plan", "onebit", "blocks(bits=4)", "auto", "none, AdamW",
    "CompressedAdamW onebit(block=256)",
)  # fmt: skip


def make_model(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a model, its inputs and its targets, the same on every rank."""
    torch.manual_seed(0)
    model: nn.Module
    if name == "resnet":
        model = ResNet((3, 4, 6, 3)).to(DEVICE)
        return model, torch.randn(64, 3, 128, 128, device=DEVICE), torch.randint(0, 1000, (64,), device=DEVICE)
    if name == "vgg":
        model = vgg16_cifar().build().to(DEVICE)
        return model, torch.randn(256, 3, 32, 32, device=DEVICE), torch.randint(0, 10, (256,), device=DEVICE)
    model = GPT(50257, 1024, width=768, depth=12, heads=12, dropout=0.1).to(DEVICE)
    words = torch.randint(0, 50257, (8, 257), device=DEVICE)
    return model, words[:, :-1].contiguous(), words[:, 1:].contiguous()


class Contestant:
    """A training by one method: model, wrapper, data and optimizer."""

    def __init__(self, name: str, method: Method) -> None:
        self.model, self._inputs, self._targets = make_model(name)
        begun = time.perf_counter()
        self.wrapped = method.wrap(self.model)
        self.optimizer = method.optimizer(self.model, self.wrapped)
        self.start: dict[str, Any] = {}  # of a wrapper that plans
        if isinstance(self.wrapped, DistributedDataParallel):
            self._start(self.wrapped, begun)
        self.steps(4)  # with the planned buckets
        self.optimizer.zero_grad(set_to_none=True)

    def _start(self, wrapped: DistributedDataParallel, begun: float) -> None:
        """Train until a plan is in force, and until no plans race any more; note when either was."""
        iterations = 0
        while wrapped.plan is None and iterations < PATIENCE:  # it profiles, measures and plans
            self.steps(1)
            iterations += 1
        self.start = {"seconds": since(begun), "held_seconds": round(wrapped.held_seconds, 2), "iterations": iterations}
        for _ in range(PATIENCE):
            if not wrapped._planning.is_racing:
                break
            self.steps(1)
        self.start["raced_seconds"] = since(begun)

    def steps(self, count: int) -> None:
        """Do some iterations and wait for the device."""
        for _ in range(count):
            self.optimizer.zero_grad(set_to_none=True)
            logits = self.wrapped(self._inputs)
            nn.functional.cross_entropy(logits.flatten(0, -2), self._targets.flatten()).backward()
            self.optimizer.step()
        torch.cuda.synchronize()

    def time(self, iterations: int) -> tuple[float, float | None]:
        """Return milliseconds per iteration on the slowest rank, and those that this rank's host was in a hook."""
        self.steps(1)  # others have trained since
        timed = getattr(self.wrapped, "timed", None)
        if timed is not None:
            timed.seconds = 0.0
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.steps(iterations)
        ms = round(max(gathered((time.perf_counter() - start) / iterations)) * 1e3, 2)
        self.optimizer.zero_grad(set_to_none=True)  # leaves their memory to the next
        return ms, None if timed is None else round(timed.seconds / iterations * 1e3, 3)


PATIENCE = 90  # iterations until a plan is in force, or until it has raced


def since(begun: float) -> float:
    """Return the seconds since a moment."""
    return round(time.perf_counter() - begun, 2)


def outside_mb() -> float:
    """Return what each rank has on the device beside torch's allocator, in MB: kernels, contexts, NCCL's buffers."""
    torch.cuda.synchronize()
    dist.barrier()
    free, total = torch.cuda.mem_get_info()
    return (total - free - sum(gathered(torch.cuda.memory_reserved()))) / dist.get_world_size() / 1e6


def caches() -> str:
    """Return whether a job before has left measured networks on this machine, and so kernels: cold or warm."""
    folder = measurement_folder(None)
    return "warm" if folder is not None and folder.is_dir() and any(folder.iterdir()) else "cold"


def time_methods(results: Results, name: str, methods: Sequence[str]) -> None:
    """Time all methods on a model in turns, and compare the ranks' weights after penstock's."""
    begun, contestants = time.time(), {}
    for label in methods:
        gc.collect()
        before, outside = torch.cuda.memory_allocated(), outside_mb()
        contestants[label] = made = Contestant(name, METHODS[label])
        gc.collect()
        held = results.held_mb.setdefault(name, {})[label] = round((torch.cuda.memory_allocated() - before) / 1e6, 1)
        beside = results.outside_mb.setdefault(name, {})[label] = round(outside_mb() - outside, 1)
        if made.start:
            results.starts.setdefault(name, {})[label] = {"caches": results.caches, **made.start}
        results.say(name, label, "ready,", held, "MB,", beside, "MB outside", made.start)
    rows, host_ms = results.ms.setdefault(name, {}), results.host_ms.setdefault(name, {})
    rows |= {label: [] for label in methods}
    for turn in range(results.rounds):
        for label, contestant in contestants.items():
            iterations = WORKLOADS[name].iterations
            slow = label in ("stock", "stock, bucket view", "fp16 hook", "dense plan") and dist.get_world_size() > 1
            ms, in_hook = contestant.time(max(3, iterations // 4) if slow else iterations)
            rows[label].append(ms)
            if in_hook is not None:
                host_ms[label] = in_hook
        results.say(name, "round", turn, {label: ms[-1] for label, ms in rows.items()})
        results.save()
        if agreed(time.time() - begun > WORKLOADS[name].limit_seconds):
            break
    results.say(name, "host ms in the hook", host_ms)
    for label, contestant in contestants.items():
        if not label.startswith(("none", "ddp")):
            results.weights_equal[f"{name} {label}"] = weights_equal(contestant.model)
        if isinstance(contestant.wrapped, DistributedDataParallel):
            results.said[f"{name} {label}"] = contestant.wrapped.explain()
            results.say(name, label, "explains\n" + contestant.wrapped.explain())
    contestants.clear()
    torch.cuda.empty_cache()
    dist.barrier()


def agreed(answer: bool) -> bool:
    """Return rank 0's answer on every rank."""
    answers = [answer]
    dist.broadcast_object_list(answers)
    return answers[0]


def measure(results: Results, options: argparse.Namespace) -> None:
    """Measure what is wanted, and write it part by part."""
    dist.all_reduce(torch.zeros(1, device=DEVICE))
    results.say("connected")
    if options.bits:
        check_bits(results)
        results.save()
    if options.kernels:
        time_kernels(results)
    for name in options.models:
        time_methods(results, name, options.methods or USUAL)
        results.save()
    results.say("done")
    dist.barrier()


def main() -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("models", nargs="*", help=f"any of {' '.join(WORKLOADS)}")
    parser.add_argument("--rate", required=True, help="of the links, for the record: 10gbit")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="0: starts and memory alone")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="for the record")
    parser.add_argument("--methods", type=lambda text: text.split(";"), help="rows, with ; between them")
    parser.add_argument("--bits", action="store_true", help="compare the bits of both routes")
    parser.add_argument("--kernels", action="store_true", help="time the codecs' kernels")
    options = parser.parse_args()
    for found, known in ((options.models, WORKLOADS), (options.methods or (), METHODS)):
        if unknown := [each for each in found if each not in known]:
            parser.error(f"found {'; '.join(unknown)}; wanted any of {'; '.join(known)}")
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl")
    service = " through CUDA's multi-process service" if "CUDA_MPS_PIPE_DIRECTORY" in os.environ else ""
    gpus = f"1 x {torch.cuda.get_device_name(DEVICE)}, shared by all ranks{service}"
    try:
        measure(Results(options.out, options.rate, options.ranks_per_host, gpus, options.rounds, caches()), options)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: NCCL's threads would wait for the other ranks
    os._exit(0)  # the process groups of all methods are left to the end of the process


if __name__ == "__main__":
    main()
