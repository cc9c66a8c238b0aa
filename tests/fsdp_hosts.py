"""Sharded training by four NCCL ranks on two emulated hosts that share a GPU, beside torch's own HSDP.

PYTHONPATH=src:tests python tests/fsdp_hosts.py                  all checks on the GPU, a line each
PYTHONPATH=src:tests python tests/fsdp_hosts.py codec offload    those whose names hold one of the words
PYTHONPATH=src:tests python tests/fsdp_hosts.py --cpu            the same over gloo, to try the script itself
PYTHONPATH=src:tests python tests/fsdp_hosts.py --json OUT.json  keep what was found as a record of a benchmark

Ranks are started once and go through the checks in order. Where one raises or hangs, what the rank said last is
printed, and new ranks go on with the next check. After `--seconds` none is begun any more. The exit code counts the
checks that failed or were not begun.

Layers of most checks are large for the links: messages take longer than the rest of the backward pass, so that memory
which is used again too early, or read too early, shows in the weights.
"""

import argparse
import faulthandler
import hashlib
import json
import os
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

import torch_fsdp as fsdp
from penstock.bench.record import make_record, save_record
from penstock.cluster import EmulatedCluster, emulated_cluster
from penstock.cluster.processes import Collected
from penstock.errors import ClusterError
from penstock.torch.fsdp.sharding import _held

HOSTS, PER_HOST, RATE = 2, 2, "5gbit"
HANGS_SECONDS = {"cuda": 40.0, "cpu": 300.0}  # of one check
MOST_SECONDS = 1500.0  # of all of them, on a busy CPU
DONE = "check: "  # begins the line that rank 0 prints of one
WIDE = fsdp.Sizes(512, 1536, 32, 64, scaled=False, layers=4)  # a shard of a layer takes 10 ms between the hosts
CODEC = "blocks(bits=4)"


@dataclass(frozen=True)
class Place:
    """Where a check is run: one of the ranks."""

    mesh: DeviceMesh
    folder: str  # that all ranks see

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def device(self) -> str:
        return self.mesh.device_type


Check = Callable[[Place], str]  # returns what is wrong on this rank, or nothing


# What is checked.


def has_torch_s_bits(case: fsdp.Case, place: Place) -> str:
    """Train by torch's own and by ours, without a codec."""
    return fsdp.compared(place.rank, place.mesh, _there(case, place))


def loses_nothing(case: fsdp.Case, place: Place, in_16_bits: bool = False, compiles: bool = False) -> str:
    """Add what was applied and what is owed up, for each element, beside torch's own gradients."""
    found = fsdp.kept(place.rank, place.mesh, CODEC, _there(case, place), compiles)
    return ", ".join(filter(None, (found.wrong(in_16_bits), wrong_weights(found.weights))))


def wrong_weights(weights: Sequence[Any]) -> str:
    """Say what is wrong with this rank's weights: all ranks have the same, and none of them is NaN or infinity."""
    digests = gathered(hashlib.sha256(b"".join(each.tobytes() for each in weights)).hexdigest())
    is_finite = all(np.isfinite(each).all() for each in weights)
    wrong = {"ranks have different weights": len(set(digests)) > 1, "weights are not finite": not is_finite}
    return ", ".join(text for text, is_wrong in wrong.items() if text and is_wrong)


def _there(case: fsdp.Case, place: Place) -> fsdp.Case:
    """Return a case as it is where the ranks are: on a GPU what is offloaded goes to pinned memory."""
    if "offload_policy" not in case.torch:
        return case
    return replace(case, torch=dict(case.torch) | {"offload_policy": CPUOffloadPolicy(place.device == "cuda")})


def learns_by(codec: str, place: Place) -> str:
    """Train by a codec that is measured and planned; its residuals are saved, and loaded by another model."""
    options = {"codec": codec, "profile_iterations": 2, "measure_seconds": 1.0, "measurements": False}
    model = fsdp.ours(fsdp.made(WIDE).to(place.device), place.mesh, **options)
    plain, coded = (_loss(fsdp.native(fsdp.made(WIDE).to(place.device), place.mesh), place), _loss(model, place))
    messages = _held(model).averages.exchange.communicator.messages
    wrong = {
        "no plan": model.plan is None,
        "it went through the host": place.device == "cuda" and not (messages and messages.sent_nbytes),
        f"loss {coded:.3f}, torch's {plain:.3f}": not (plain < 2.0 and 0.85 < coded / plain < 1.15),
        wrong_weights(fsdp.weights(model)): True,
        "residuals of a checkpoint are others": not _residuals_are_kept(model, codec, place),
    }
    return ", ".join(text for text, is_wrong in wrong.items() if text and is_wrong)


def _loss(model: Any, place: Place) -> float:
    """Train on the same few batches; return the loss of the last of them, on all ranks together."""
    case, adamw = fsdp.Case(WIDE, steps=20, batches=4), torch.optim.AdamW(model.parameters(), lr=3e-4)
    return fmean(gathered(fmean(fsdp.train(model, place.rank, case, place.device, by=adamw)[-8:])))


def _residuals_are_kept(model: Any, codec: str, place: Place) -> bool:
    """Say whether another model has what this one owes, once it was saved and loaded."""
    path = f"{place.folder}/{codec}"
    saved = {"exchange": model.exchange_state_dict()}
    dcp.save(saved, checkpoint_id=path)
    other = fsdp.ours(fsdp.made(WIDE).to(place.device), place.mesh, codec=codec)
    loaded = {"exchange": other.exchange_state_to_load(path)}
    dcp.load(loaded, checkpoint_id=path)
    other.load_exchange_state_dict(loaded["exchange"])
    now = other.exchange_state_dict()["residual"]
    pairs = [(value.to_local(), now[name].to_local()) for name, value in saved["exchange"]["residual"].items()]
    return all(torch.equal(one, another) for one, another in pairs) and any(bool(one.any()) for one, _ in pairs)


def momentum_is_exchanged(place: Place) -> str:
    """Train by CompressedAdamW, past its warm-up, beside AdamW."""
    plain, coded, weights, frozen = fsdp.by_momentum(place.rank, (HOSTS, PER_HOST), place.device)
    ratio = sum(coded[-10:]) / sum(plain[-10:])
    wrong = {
        f"{ratio:.3f} of AdamW's loss": not 0.5 < ratio < 1.05,
        f"{frozen} of {len(weights)} second moments are frozen": frozen != len(weights),
        wrong_weights(weights): True,
    }
    return ", ".join(text for text, is_wrong in wrong.items() if text and is_wrong)


def compiled_has_torch_s_bits(backend: str, place: Place) -> str:
    """Train with torch.compile by torch's own and by ours, without a codec."""
    return fsdp.compiled(place.rank, (HOSTS, PER_HOST), place.device, backend)


ENGINE = fsdp.quick(strategy="native", bulk=False)  # the engine sums what the plan merges
MERGED = fsdp.quick("single", strategy="native", bulk=False)
OFFLOAD = {"offload_policy": CPUOffloadPolicy()}
BITS = {
    "fp32": fsdp.Case(WIDE, accumulate=2, clip=1.0),
    "bf16, sums in fp32": fsdp.Case(WIDE, torch=fsdp.BF16, accumulate=2, clip=1.0),
    "bf16, sums in bf16": fsdp.Case(WIDE, torch=fsdp.BF16_SUMS, accumulate=2, clip=1.0),
    "each pass averaged and added": fsdp.Case(WIDE, accumulate=2, by=""),
    "bf16 sums averaged and added": fsdp.Case(WIDE, torch=fsdp.BF16_SUMS, accumulate=2, by=""),
    "one message": fsdp.Case(WIDE, ours=MERGED, accumulate=2, by=""),
    "one message, sums in bf16": fsdp.Case(WIDE, torch=fsdp.BF16_SUMS, ours=MERGED),
    "padded, a message for each layer": fsdp.Case(ours=fsdp.quick("wfbp", strategy="native", bulk=False)),
    "accumulation inside hosts": fsdp.Case(WIDE, ours=ENGINE, accumulate=3, by=fsdp.LATER),
    "gradients kept after a step": fsdp.Case(WIDE, ours=MERGED, to_none=False),
    "weights kept after forward": fsdp.Case(WIDE, torch=fsdp.KEEP, ours=ENGINE),
    "activation checkpointing": fsdp.Case(replace(WIDE, recomputes=True), ours=ENGINE),
    "a layer that is called twice": fsdp.Case(replace(WIDE, calls=2), ours=MERGED),
    "layers without gradients": fsdp.Case(fsdp.Sizes(skips=True), ours=MERGED),
    "a frozen layer": fsdp.Case(WIDE, ours=ENGINE, freezes="blocks.0"),
    "cut by columns": fsdp.Case(WIDE, torch=fsdp.COLUMNS, ours=ENGINE),
    "an optimizer that steps in backward": fsdp.Case(WIDE, ours=ENGINE, in_backward=True),
    "CPU offload": fsdp.Case(WIDE, torch=OFFLOAD, ours=ENGINE),
    "CPU offload, averaged and added": fsdp.Case(WIDE, torch=OFFLOAD, ours=MERGED, accumulate=2, by=""),
}
LOST = {
    "padded shards": fsdp.Case(),
    "fp32": fsdp.Case(WIDE),
    "bf16, sums in fp32": fsdp.Case(WIDE, torch=fsdp.BF16),
    "bf16, sums in bf16": fsdp.Case(WIDE, torch=fsdp.BF16_SUMS),
    "accumulation without messages": fsdp.Case(WIDE, accumulate=2),
    "each pass averaged and added": fsdp.Case(WIDE, accumulate=2, by=""),
    "accumulation inside hosts": fsdp.Case(WIDE, accumulate=2, by=fsdp.LATER),
    "gradients kept after a step": fsdp.Case(WIDE, to_none=False),
    "weights kept after forward": fsdp.Case(WIDE, torch=fsdp.KEEP),
    "activation checkpointing": fsdp.Case(replace(WIDE, recomputes=True)),
    "all of it": fsdp.Case(replace(WIDE, recomputes=True), torch=fsdp.BF16 | fsdp.KEEP, accumulate=2),
    "a layer that is called twice": fsdp.Case(replace(WIDE, calls=2)),
    "layers without gradients": fsdp.Case(fsdp.Sizes(skips=True)),
    "a frozen layer": fsdp.Case(WIDE, freezes="blocks.0"),
    "cut by columns": fsdp.Case(WIDE, torch=fsdp.COLUMNS),
    "CPU offload": fsdp.Case(WIDE, torch=OFFLOAD),
}
CHECKS: dict[str, Check] = {
    **{f"bits: {name}": partial(has_torch_s_bits, case) for name, case in BITS.items()},
    **{
        f"nothing lost: {name}": partial(loses_nothing, case, in_16_bits="sums in bf16" in name)
        for name, case in LOST.items()
    },
    **{f"codec: {codec}": partial(learns_by, codec) for codec in (CODEC, "onebit(block=256)", "bf16")},
    "CompressedAdamW": momentum_is_exchanged,
    "bits: torch.compile": partial(compiled_has_torch_s_bits, "aot_eager"),
    "nothing lost: torch.compile": partial(loses_nothing, fsdp.Case(fsdp.EVEN), compiles=True),
    "bits: torch.compile by inductor": partial(compiled_has_torch_s_bits, "inductor"),
}


# What each rank does.


def gathered(value: Any) -> list[Any]:
    """Return every rank's value."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def be_a_rank(device: str, folder: str, seconds: float, names: Sequence[str]) -> None:
    """Go through checks for so long; rank 0 prints a line of each, what is wrong by rank."""
    until = time.monotonic() + seconds
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    place = Place(fsdp.mesh_of((HOSTS, PER_HOST), device), folder)
    for name in names:
        if gathered(time.monotonic() > until)[0]:
            break
        started = time.monotonic()
        faulthandler.dump_traceback_later(HANGS_SECONDS[device], exit=True)
        found = gathered(CHECKS[name](place))
        faulthandler.cancel_dump_traceback_later()
        if place.rank == 0:
            wrong = "; ".join(f"rank {rank}: {said}" for rank, said in enumerate(found) if said)
            print(DONE + json.dumps([name, wrong, time.monotonic() - started]), flush=True)


# What starts them.


class Told(Collected):
    """Prints what rank 0 tells of each check, and keeps the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}  # what is wrong, by check

    def __call__(self, rank: int, stream: str, line: str) -> None:
        super().__call__(rank, stream, line)
        if rank == 0 and line.startswith(DONE):
            name, wrong, seconds = json.loads(line.removeprefix(DONE))
            self.found[name] = wrong
            print(f"{name}: {'FAILED  ' + wrong if wrong else 'ok'}  [{seconds:.1f} s]", flush=True)


def run_checks(device: str, names: Sequence[str] = tuple(CHECKS), seconds: float = MOST_SECONDS) -> dict[str, str]:
    """Return what is wrong in each check, or nothing, from ranks on emulated hosts."""
    found, left, until = dict[str, str](), list(names), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder, emulated_cluster(HOSTS, RATE, gpus="shared") as cluster:
        if cluster.gpu is not None and cluster.gpu.complaint:
            print(cluster.gpu.complaint, flush=True)
        while left and (rest := until - time.monotonic()) > 0:
            done, complaint = _run(cluster, device, folder, rest, left)
            found |= done
            left = left[len(done) :]
            if complaint:
                found[left[0]] = complaint
                print(f"{left.pop(0)}: FAILED  {complaint}", flush=True)
            elif left:
                break
    return found | dict.fromkeys(left, "not begun")


def _run(
    cluster: EmulatedCluster, device: str, folder: str, seconds: float, names: Sequence[str]
) -> tuple[dict[str, str], str]:
    """Return what ranks found in checks, in order, and what ended them in the next one, or nothing."""
    told = Told()
    command = [sys.executable, str(Path(__file__).resolve()), "rank", device, folder, f"{seconds:.0f}", *names]
    try:
        most = seconds + HANGS_SECONDS[device]
        outcome = cluster.run(command, per_host=PER_HOST, sink=told, grace_seconds=1.0, timeout_seconds=most)
    except ClusterError as error:
        return told.found, str(error)
    if not outcome.exit_code:
        return told.found, ""
    said = [f"rank {rank}, the end of it: {told.text(rank, 'stderr')[-1200:]}" for rank in range(HOSTS * PER_HOST)]
    return told.found, "\n".join([f"rank {outcome.failed_rank} ended with {outcome.exit_code}", *said])


def write(out: str, device: str, found: dict[str, str]) -> None:
    """Write a record with what is wrong in each check, or nothing; without folders of this machine."""
    shape = {"hosts": HOSTS, "ranks_per_host": PER_HOST, "rate": RATE, "device": device}
    record = make_record("fsdp-checks", [{"check": name, "wrong": wrong} for name, wrong in found.items()], **shape)
    given = ["OUT.json" if each == out else each for each in sys.argv[1:]]
    record["command"] = shlex.join(["python", "tests/fsdp_hosts.py", *given])
    if device == "cuda":
        record["machine"]["gpus"] = f"1 x {torch.cuda.get_device_name(0)}, shared by all ranks"
    save_record(record, out)


def main() -> int:
    """Run the checks whose names hold one of the words; return how many failed or were not begun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="of the checks to run; default: all of them")
    parser.add_argument("--cpu", action="store_true", help="gloo ranks in host memory")
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS, help="after which no check is begun")
    parser.add_argument("--json", metavar="OUT.json", help="write a record with a row for each check")
    options = parser.parse_args()
    names = [name for name in CHECKS if not options.words or any(word in name for word in options.words)]
    device = "cpu" if options.cpu else "cuda"
    found = run_checks(device, names, options.seconds)
    if options.json:
        write(options.json, device, found)
    failed = [name for name, wrong in found.items() if wrong]
    print(f"{len(found) - len(failed)} of {len(found)} checks hold" + "".join(f"\n  not: {each}" for each in failed))
    return len(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        try:
            be_a_rank(sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5:])
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)  # at once: NCCL's threads would wait for the other ranks
    else:
        sys.exit(main())
