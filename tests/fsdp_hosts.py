"""Sharded training on emulated hosts, four NCCL ranks on one GPU: what is run and checked, with pytest or as a script.

PYTHONPATH=src:tests python tests/fsdp_hosts.py          all checks on the GPU, a line each; exits with how many failed
PYTHONPATH=src:tests python tests/fsdp_hosts.py --cpu    the same over gloo, to try the script itself
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_hosts import run_checks
from penstock.cluster import emulated_cluster
from penstock.cluster.processes import Collected

TIMEOUT_SECONDS = 280.0
CODECS = ("blocks(bits=4)", "onebit(block=256)", "bf16")
LIKE_TORCH = (  # of `torch_fsdp.CASES`, by the engine's own sums
    "accumulation inside hosts",
    "gradients in buckets, kept after a step",
    "weights kept after forward",
    "activation checkpointing",
    "a layer that is called twice",
    "layers without gradients",
    "a frozen layer",
    "cut by columns",
    "an optimizer that steps in backward",
)
CODED = ("padded shards", "bf16, sums in fp32", "accumulation with messages", "accumulation inside hosts", "all of it",
         "a layer that is called twice", "layers without gradients")  # fmt: skip


# What each rank does.


def be_a_rank(device: str, folder: str) -> dict[str, Any]:
    """Train by torch's own HSDP and by ours, then save and load; return what came of it."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import torch_fsdp as fsdp
    from penstock.torch.fsdp.sharding import _held

    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, mesh = dist.get_rank(), fsdp.mesh_of((2, 2), device)
    large = fsdp.Sizes(64, 192, 30, 50, scaled=False, layers=4)
    found: dict[str, Any] = {"rank": rank}

    def trained(model: Any, steps: int, **options: Any) -> list[float]:
        return fsdp.train(model, rank, fsdp.Case(steps=steps, **options), device)

    def digest(model: Any) -> str:
        return hashlib.sha256(b"".join(each.tobytes() for each in fsdp.weights(model))).hexdigest()[:16]

    for name, policy in (("fp32", {}), ("bf16", fsdp.BF16), ("bf16 sums", fsdp.BF16_SUMS)):
        digests = []
        for make in (fsdp.native, fsdp.ours):
            model = make(fsdp.made(large).to(device), mesh, **policy)
            trained(model, 6, accumulate=2, clip=1.0)
            digests.append(digest(model))
        found[f"{name} as torch's own"] = digests[0] == digests[1]
    for planner, sizes in (("single", large), ("wfbp", fsdp.Sizes())):
        digests = []
        for make, more in ((fsdp.native, {}), (fsdp.ours, fsdp.quick(planner, strategy="native", bulk=False))):
            model = make(fsdp.made(sizes).to(device), mesh, **more)
            trained(model, 6, accumulate=2, by="")
            digests.append(digest(model))
        found[f"planned by {planner} as torch's own"] = digests[0] == digests[1]
    plain = trained(fsdp.native(fsdp.made(large).to(device), mesh), 40)
    for codec in CODECS:
        model = fsdp.ours(fsdp.made(large).to(device), mesh, codec=codec, profile_iterations=2, measure_seconds=1.0,
                          measurements=False)  # fmt: skip
        losses = trained(model, 40)
        exchange = _held(model).averages.exchange
        found[codec] = {
            "digest": digest(model),
            "plan": model.plan is not None,
            "queued": messages.sent_nbytes if (messages := exchange.communicator.messages) is not None else 0,
            "loss": sum(losses[-10:]) / sum(plain[-10:]),
            "sent": model.bytes_sent().sent_nbytes,
            "dense": model.bytes_sent().dense_nbytes,
        }
    state, path = {"exchange": model.exchange_state_dict()}, f"{folder}/state"
    dcp.save(state, checkpoint_id=path)
    again = fsdp.ours(fsdp.made(large).to(device), mesh, codec=CODECS[-1])
    loaded = {"exchange": again.exchange_state_to_load(path)}
    dcp.load(loaded, checkpoint_id=path)
    again.load_exchange_state_dict(loaded["exchange"])
    kept = again.exchange_state_dict()["residual"]
    found["residuals kept"] = all(
        bool((kept[name].to_local() == value.to_local()).all()) for name, value in state["exchange"]["residual"].items()
    )
    found["owed"] = float(sum(value.to_local().abs().sum() for value in kept.values()))
    found["offloaded"] = offloaded(fsdp, mesh, rank, device) if device == "cuda" else True
    dist.barrier()
    return found


def train_in_other_ways(device: str) -> dict[str, Any]:
    """Return what differs from torch's own, what a codec loses, and what CompressedAdamW learns."""
    from dataclasses import asdict, replace

    import torch
    import torch.distributed as dist

    import torch_fsdp as fsdp

    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, engine = dist.get_rank(), fsdp.quick(strategy="native", bulk=False)
    cases = {name: replace(fsdp.CASES[name], ours=engine) for name in LIKE_TORCH}
    coded = {name: fsdp.CODED[name] for name in CODED}
    kept = fsdp.conserved(rank, (2, 2), CODECS[0], coded, device=device)
    kept |= fsdp.conserved(rank, (2, 2), CODECS[0], {"compiled": fsdp.Case(fsdp.EVEN)}, True, device)
    plain, momentum, _, frozen = fsdp.by_momentum(rank, (2, 2), device)
    dist.barrier()
    return {
        "different": {name: said for name, said in fsdp.every_case(rank, (2, 2), cases, device).items() if said},
        "kept": {
            name: {key: value for key, value in asdict(each).items() if key != "weights"}
            | {"digest": hashlib.sha256(b"".join(one.tobytes() for one in each.weights)).hexdigest()[:16]}
            for name, each in kept.items()
        },
        "momentum": sum(momentum[-10:]) / sum(plain[-10:]),
        "frozen": frozen,
    }


def offloaded(fsdp: Any, mesh: Any, rank: int, device: str) -> bool:
    """Say whether training with weights and gradients in host memory has the bits of torch's own."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    models = [
        fsdp.native(fsdp.made(fsdp.EVEN), mesh, offload_policy=CPUOffloadPolicy()),
        fsdp.ours(fsdp.made(fsdp.EVEN), mesh, offload_policy=CPUOffloadPolicy(), **fsdp.quick(strategy="native")),
    ]
    for model in models:
        fsdp.train(model, rank, fsdp.Case(accumulate=2, by=""), device)
    mine = [[each.to_local().detach().numpy().copy() for each in model.parameters()] for model in models]
    return bool(fsdp.same(*mine))


# What is checked of them.


def found_by_ranks(rate: str, function: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a function of this file on two hosts of two ranks; return what each returned."""
    seen = Collected()
    with emulated_cluster(2, rate, gpus="shared") as cluster:
        command = [sys.executable, str(Path(__file__).resolve()), "rank", function, *arguments]
        outcome = cluster.run(command, per_host=2, sink=seen, timeout_seconds=TIMEOUT_SECONDS)
        said = seen.text(outcome.failed_rank or 0, "stderr")[-3000:]
    assert outcome.exit_code == 0, f"rank {outcome.failed_rank} ended with {outcome.exit_code}:\n{said}"
    return [json.loads(seen.text(rank).strip().splitlines()[-1]) for rank in range(4)]


def check_ranks(device: str, rate: str = "10gbit") -> str:
    """Two hosts of two ranks train as torch's own does, or alike to the bit where a codec is used."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = found_by_ranks(rate, "be_a_rank", device, folder)
    for rank in ranks:
        different = [name for name, value in rank.items() if name.endswith("as torch's own") and not value]
        assert not different, f"rank {rank['rank']}: {different}"
        assert rank["residuals kept"]
        assert rank["owed"] > 0
        assert rank["offloaded"]
    for codec in CODECS:
        found = [rank[codec] for rank in ranks]
        assert len({each["digest"] for each in found}) == 1, f"{codec}: ranks have different weights"
        assert all(each["plan"] for each in found)
        assert all(0.8 < each["loss"] < 1.2 for each in found), found
        assert device != "cuda" or all(each["queued"] for each in found), f"{codec} went through the host: {found}"
    return "; ".join(f"{codec}: {ranks[0][codec]}" for codec in CODECS)


def check_other_ways(device: str, rate: str = "10gbit") -> str:
    """Other ways to train have torch's bits; with a codec nothing is lost, by element; momentum is exchanged."""
    ranks = found_by_ranks(rate, "train_in_other_ways", device)
    for found in ranks:
        assert not found["different"], found["different"]
        assert 0.8 < found["momentum"] < 1.05
        assert found["frozen"] > 0
        for name, kept in found["kept"].items():
            assert kept["off"] < 1e-6, (name, kept)
            assert kept["owed"] > 1e-4, (name, kept)
            assert kept["norm_off"] < 1e-5, (name, kept)
            assert kept["is_planned"], name
            assert kept["digest"] == ranks[0]["kept"][name]["digest"], f"{name}: ranks have different weights"
    return f"{len(LIKE_TORCH)} cases as torch's own; {ranks[0]['kept']}; momentum {ranks[0]['momentum']:.3f}"


CHECKS: dict[str, Callable[[str], str]] = {
    "training on 2 x 2 ranks at 10 Gb/s": check_ranks,
    "other ways to train on 2 x 2 ranks": check_other_ways,
}


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        function = {each.__name__: each for each in (be_a_rank, train_in_other_ways)}[sys.argv[2]]
        print(json.dumps(function(*sys.argv[3:])), flush=True)
        os._exit(0)  # process groups are left to the end of the process
    else:
        sys.exit(run_checks(CHECKS, "cpu" if "--cpu" in sys.argv else "cuda"))
