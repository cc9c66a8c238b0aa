"""One worker of a training job: joins the others, trains, and tells how it went.

`penstock train` starts it as `python -m penstock.train.worker JOB`; under torchrun, mpirun or Slurm the command line
calls `work` itself.
"""

import contextlib
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from time import sleep

import torch
import torch.distributed as dist

from penstock.errors import PenstockError, TrainError, TransportError
from penstock.fields import Fields
from penstock.machine import describe_machine, versions
from penstock.network import Network
from penstock.plan import Plan
from penstock.run_record import CodecCost, CodecLine, RunRecord, run_document
from penstock.runtime.device.messages import nccl_takes
from penstock.runtime.executor import TIMEOUT_SECONDS
from penstock.runtime.transport.meeting import join_group
from penstock.timeline import Span, Timeline
from penstock.torch.checkpoint_folder import check_model, check_optimizer, fitting
from penstock.torch.clocks import device_name
from penstock.torch.collective_errors import GroupRanks, together
from penstock.torch.engines import end_mpi
from penstock.torch.saved_folder import MODEL, rank_file
from penstock.torch.servers import ParameterServers
from penstock.train.events import Event, Tell, Wish, drop_event, tell_launcher
from penstock.train.job import MPI, Job, Saved, find_checkpoint, job_from_fields
from penstock.train.loop import Loop, same_weights
from penstock.train.method import Wrapped, settle
from penstock.train.save_state import load_common, load_own, seed_everything, set_random_state
from penstock.train.update import Update, make_scaler
from penstock.zoo.load import find_task
from penstock.zoo.task import Shard, to_device

LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "Connection refused")


def work(job: Job, tell: Tell, wish: Wish, local_rank: int) -> bool:
    """Train in a process group that exists; return False where it was stopped before the end.

    Where a rank is gone, `TransportError` names it, whatever the others were doing.
    """
    with together("training", None):
        return _work(job, tell, wish, local_rank)


def _work(job: Job, tell: Tell, wish: Wish, local_rank: int) -> bool:
    servers = ParameterServers(job.servers) if job.servers else None
    if servers is not None and servers.is_server:
        servers.serve()
        return True
    rank, device = dist.get_rank(), device_for(job.device, local_rank)
    loop = _begin(job, tell if rank == 0 else drop_event, device, servers)
    told = {"steps": job.steps, "explain": loop.wrapped.explain(), "metric_name": loop.task.metric_name}
    loop.tell(Event("ready", loop.step, told))
    finished = loop.run(wish)
    record = make_record(loop)
    digest = same_weights(loop.wrapped.model.module, loop.group)
    values = {"record": run_document(record), "weights_sha256": digest}
    if servers is not None:
        servers.close()
    loop.tell(Event("done" if finished else "stopped", loop.step, values))
    return finished


def _begin(job: Job, tell: Tell, device: torch.device, servers: ParameterServers | None) -> Loop:
    """Build everything and bring it to where training starts or goes on."""
    rank, world_size = dist.get_rank(), dist.get_world_size() - job.servers
    saved = find_checkpoint(job.resume) if job.resume else None
    task = find_task(job.task)
    shard = Shard(rank, world_size, job.batch or task.batch, job.seed)
    seed_everything(job.seed)
    module = task.model().to(device)
    same_world = saved is not None and saved.world_size == world_size
    scaler = make_scaler(job, device)
    wrapped = Wrapped(module, job, device, saved if same_world else None, scaler, servers)
    update = Update(job, task.optimizer(wrapped.model.parameters()), device, scaler)
    loop = Loop(job, task, wrapped, update, shard, tell)
    seed_everything(job.seed * 65_537 + rank)
    batch = to_device(next(task.batches(shard, 0)), device)
    loop.computing_seconds = job.accumulate * settle(lambda model: update.loss(task, model, batch), wrapped, device)
    if saved is not None:
        _take_over(loop, saved, same_world)
    return loop


def _take_over(loop: Loop, saved: Saved, same_world: bool) -> None:
    """Put everything as it was when the checkpoint was written."""
    common = load_common(saved, loop.device)
    own = [load_own(saved, rank) for rank in range(saved.world_size)]
    check_model(saved.path / MODEL, loop.wrapped.model.module, common["model"])
    check_optimizer(saved.path / MODEL, "optimizer", loop.update.optimizer, common["optimizer"])
    with fitting(saved.path / MODEL):
        loop.wrapped.model.module.load_state_dict(common["model"])
        loop.update.load(common)
        loop.history.load(common["history"])
    loop.wrapped.load_exchange_states([each["exchange"] for each in own])
    loop.step = saved.step
    if same_world:
        with fitting(saved.path / rank_file(loop.shard.rank)):
            set_random_state(own[loop.shard.rank]["random"])


def device_for(name: str, local_rank: int) -> torch.device:
    """Return this worker's device; workers that are more than the GPUs share them."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TrainError("--device cuda: torch sees no GPU here; choose --device cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


@contextlib.contextmanager
def process_group(
    device: str, local_world_size: int, patience_seconds: float = 0.0, servers: int = 0
) -> Iterator[None]:  # fmt: skip
    """Join the others as the environment says; NCCL carries gradients between GPUs where it takes this many workers.

    With servers, which may have no GPU, gloo does. Ranks wait for one another as long as for a message: by torch's own
    timeout, one that is stopped while losses are shared, or whose host is gone, holds the others for half an hour.

    Where a rank was lost, rank 0 stays for `patience_seconds` after it has left the group: others that learn of it only
    now find in its store who that is.
    """
    by_nccl = device == "cuda" and not servers and nccl_takes(local_world_size)
    join_group("cpu:gloo,cuda:nccl" if by_nccl else "gloo", timedelta(seconds=TIMEOUT_SECONDS))
    assert dist.group.WORLD is not None
    store, lost = dist.group.WORLD.get_group_store(), False
    try:
        yield
        with together("ending together", None):
            dist.barrier()
    except TransportError:
        lost = True
        raise
    finally:
        keeps = dist.get_rank() == 0
        dist.destroy_process_group()
        if lost and keeps:
            sleep(patience_seconds)
        del store


def main() -> None:
    """Train the job given as JSON on the command line; an error becomes an event, which names what happened."""
    wish = Wish().listen()
    job = job_from_fields(Fields(json.loads(sys.argv[1]), "the job"))
    local_rank, local_world_size = int(sys.argv[2]), int(sys.argv[3])
    try:
        with process_group(job.device, local_world_size, servers=job.servers):
            work(job, tell_launcher, wish, local_rank)
    except Exception as error:
        traceback.print_exc()
        tell_launcher(Event("failed", 0, {"message": describe(error), "follows": follows_another(error)}))
        sys.stderr.flush()
        os._exit(1)  # gloo's own shutdown may wait for ranks that are gone
    if job.engine == MPI:  # mpirun takes a rank that leaves without MPI's own shutdown for one that failed
        end_mpi()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch has aborted, now and then, while the interpreter took it down


def describe(error: Exception) -> str:
    """Return an error in one line, with where it was raised unless it is one of ours, which say it themselves."""
    text = (str(error).strip() or "no message").splitlines()[0]
    if isinstance(error, PenstockError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((each for each in reversed(frames) if "site-packages" not in each.filename), frames[-1])
    return f"{type(error).__name__}: {text} ({os.path.basename(frame.filename)}:{frame.lineno})"


def follows_another(error: Exception) -> bool:
    """Say whether an error looks like the echo of another rank's: a connection that went away."""
    return isinstance(error, TransportError | dist.DistNetworkError) or any(sign in str(error) for sign in LOST)


# Builds the record of a run that is over.


_PACKAGES = ("penstock", "numpy", "numba", "torch", "mpi4py", "openmpi")


def make_record(loop: Loop) -> RunRecord:
    """Return the record; all ranks call this, since the measured timeline is that of all ranks."""
    job, plan = loop.job, loop.wrapped.plan
    trace, network = loop.wrapped.found
    sent, dense = loop.meter.per_iteration(loop.step - loop.first)
    split = loop.history.split(loop.computing_seconds)
    whole = split.iteration_seconds
    return RunRecord(
        name=job.name or job.method,
        task=loop.task.name,
        metric_name=loop.task.metric_name,
        workers=loop.shard.world_size,
        engine=job.engine,
        device=device_name(loop.device),
        where=job.where,
        codec=job.codec_spec,
        planner=None if job.is_stock else job.planner,
        strategy=None if job.is_stock else job.strategy,
        machine=describe_machine(),
        versions=versions(_PACKAGES),
        steps=tuple(loop.history.steps),
        evaluations=tuple(loop.history.evaluations),
        iteration_seconds=split.iteration_seconds,
        compute_seconds=split.compute_seconds,
        hidden_seconds=split.hidden_seconds,
        exposed_seconds=split.exposed_seconds,
        samples_per_second=loop.shard.batch * loop.job.accumulate * loop.shard.world_size / whole if whole else None,
        bytes_per_iteration=sent,
        dense_bytes_per_iteration=dense,
        plan=plan,
        trace=trace,
        network=network,
        codec_cost=_codec_cost(network, plan),
        routes_used=loop.wrapped.routes_used(),
        predicted=plan.timeline if plan is not None and plan.timeline.spans else None,
        measured=_all_timelines(loop.wrapped.measured_timeline(), loop.group),
    )


def _codec_cost(network: Network | None, plan: Plan | None) -> CodecCost | None:
    """Return what the codec of most bytes costs, by the name it has in plans, where the network's curves say so."""
    nbytes = Counter[str]()
    for bucket in plan.buckets if plan is not None else ():
        nbytes[bucket.codec or ""] += bucket.nbytes
    codec = next((codec for codec, _ in nbytes.most_common() if codec), None)
    if network is None or codec is None or codec not in network.codecs:
        return None
    curves = network.codecs[codec]
    encode, decode = curves.encode, curves.decode
    return CodecCost(
        curves.ratio,
        CodecLine(encode.startup_seconds, encode.seconds_per_byte),
        CodecLine(decode.startup_seconds, decode.seconds_per_byte / curves.ratio),  # a record counts compressed bytes
    )


def _all_timelines(own: Timeline | None, group: dist.ProcessGroup) -> Timeline | None:
    """Return the last iteration of all ranks in one timeline; clocks start with each rank's forward pass."""
    found: list[Timeline | None] = GroupRanks(group).gather(own, "sharing timelines")
    spans: tuple[Span, ...] = tuple(span for each in found if each is not None for span in each.spans)
    return Timeline(spans) if spans else None


if __name__ == "__main__":
    main()
