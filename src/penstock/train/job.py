"""A `Job`: everything that all workers of one training run must know, as plain values that travel as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.errors import TrainError, did_you_mean, shorten
from penstock.fields import Fields, write_json
from penstock.network import Network, network_document, network_from_fields
from penstock.plan import Plan, plan_document, plan_from_fields
from penstock.planners import find_planner
from penstock.run_record import folder_name
from penstock.strategies import names, parse_strategy
from penstock.torch.saved_folder import Head, newest_whole, read_head, write_digests
from penstock.trace import Trace, trace_document, trace_from_fields

if TYPE_CHECKING:
    from penstock.exchange.compression import Compression, Warmup

STOCK = "stock"  # planner of torch's own DistributedDataParallel
AUTO = "auto"
LONGEST_NAME = 100  # characters of a run's name
DEVICES = ("cpu", "cuda")
GLOO, MPI = "gloo", "mpi"
ENGINES = (GLOO, MPI)
PRECISIONS = ("bf16", "fp16")  # of --amp
# What a checkpoint was made with and a resumed run must keep, or its bits would not be those of an unbroken one.
KEPT = (
    "task", "batch", "seed", "codec", "density", "warmup", "warmup_every", "dense_below",
    "momentum", "clip", "lr_warmup", "accumulate", "amp", "servers", "planner", "strategy", "engine",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """One training run."""

    task: str = "chars"
    workers: int = 4
    steps: int = 100  # in all, from the first start on
    batch: int = 0  # samples per worker and iteration; 0: the task's own
    seed: int = 1
    codec: str = ""  # "": gradients travel as they are
    density: float = 0.0  # of sparse codecs; 0: theirs
    warmup: str = ""  # of sparse codecs: densities before that, by name or one after the other
    warmup_every: int = 0  # iterations for each of them; 0: 1
    dense_below: int = 0  # tensors of fewer elements travel dense
    momentum: float = 0.0  # of SGD; with a codec the exchange's, corrected; 0: the task's own
    clip: float = 0.0  # L2 norm of all gradients; with a codec the exchange's; 0: none
    lr_warmup: int = 0  # iterations in which the learning rate rises to the task's
    accumulate: int = 1  # batches of each iteration
    amp: str = ""  # mixed precision: bf16 or fp16
    servers: int = 0  # so many ranks at the end only aggregate
    planner: str = "exact"
    strategy: str = AUTO
    network: str = ""  # a file from `penstock measure`; "": measured
    engine: str = GLOO  # what carries gradients
    device: str = "cpu"
    evaluate_every: int = 0  # steps; 0: about ten times
    save: str = ""  # folder of checkpoints
    save_every: int = 0  # steps; 0: at the end only
    resume: str = ""  # folder of checkpoints, or one of them
    name: str = ""  # of the run; "": after its method
    where: str = "loopback"
    nic: str = ""  # whose bytes are counted; "": those the wrapper says it sent

    @property
    def is_stock(self) -> bool:
        """Whether torch's own wrapper trains."""
        return self.planner == STOCK

    @property
    def all_reduce(self) -> str:
        """The strategy as the wrapper takes it: with servers of their own, only one will do."""
        return f"parameter_server(servers={self.servers}, dedicated=true)" if self.servers else self.strategy

    @property
    def codec_spec(self) -> str | None:
        """The codec as the wrapper takes it: `topk(density=0.01)`."""
        return (f"{self.codec}(density={self.density:g})" if self.density else self.codec) or None

    @property
    def warmup_spec(self) -> str | list[float] | None:
        """The warm-up as the wrapper takes it."""
        try:
            return [float(part) for part in self.warmup.split(",")] if "." in self.warmup else self.warmup or None
        except ValueError:
            raise TrainError(f"--warmup: found {self.warmup!r}; wanted paper, dgc or densities: 0.25,0.05") from None

    @property
    def compression(self) -> "Compression":
        """What the wrapper is asked to compress by."""
        from penstock.exchange.compression import Compression  # with all codecs, which `penstock --help` does not need

        warmup = cast("Warmup", self.warmup_spec), self.warmup_every or 1
        momentum, clip = (self.momentum, self.clip or None) if self.codec else (0.0, None)
        sent = self.codec or None, self.density or None, *warmup, self.dense_below
        return Compression(*sent, momentum=momentum, clip=clip)

    @property
    def method(self) -> str:
        """What a table calls this way of training."""
        if self.is_stock:
            return "stock DDP"
        how = f"{self.servers} servers" if self.servers else "" if self.strategy == AUTO else self.strategy
        dense = f"{self.planner} plan, {how}" if how else f"{self.planner} plan"
        return f"{self.codec_spec}, {dense}" if self.codec else dense

    def on(self, where: str, nic: str) -> "Job":
        """Return the job on another network."""
        return replace(self, where=where, nic=nic)

    def document(self) -> dict[str, Any]:
        """Return the job as JSON values; what is empty is left out."""
        return {name: value for name, value in asdict(self).items() if value != ""}

    def check(self) -> None:
        """Refuse what cannot work before any worker starts; needs no torch."""
        if self.device not in DEVICES:
            raise TrainError(f"--device: found {self.device!r}; wanted one of {', '.join(DEVICES)}")
        if self.engine not in ENGINES:
            raise TrainError(f"--engine: found {self.engine!r}; wanted one of {', '.join(ENGINES)}")
        if self.amp not in ("", *PRECISIONS):
            raise TrainError(f"--amp: found {self.amp!r}; wanted one of {', '.join(PRECISIONS)}")
        if not 0 <= self.momentum < 1:
            raise TrainError(f"--momentum: found {self.momentum:g}; wanted 0 or more and less than 1, such as 0.9")
        if self.clip < 0 or self.accumulate < 1:
            raise TrainError(f"--clip {self.clip:g}, --accumulate {self.accumulate}; wanted at least 0 and 1")
        if self.workers < 1 or self.steps < 1 or self.batch < 0:
            raise TrainError(
                f"{self.workers} workers, {self.steps} steps, batch {self.batch}: wanted at least 1 of each"
            )
        _check_name(self.name)
        if self.servers:
            self._check_servers()
        self._check_method()

    def _check_servers(self) -> None:
        if self.servers >= self.workers:
            raise TrainError(f"--servers {self.servers} of {self.workers} workers: wanted at least one that trains")
        if self.is_stock or self.strategy != AUTO:
            other = "stock DDP" if self.is_stock else f"--strategy {self.strategy}"
            raise TrainError(f"--servers {self.servers} with {other}: servers are a strategy; leave out one of the two")
        if self.engine != GLOO:
            raise TrainError(f"--servers {self.servers} with --engine {self.engine}: servers are reached over gloo")
        if self.amp == "fp16" and self.codec:
            raise TrainError(
                f"--servers {self.servers} with --amp fp16 and --codec {self.codec}: residuals of servers do not "
                "follow its scale; use --amp bf16"
            )

    def _check_method(self) -> None:
        if self.is_stock:
            self._check_stock()
        else:
            self._check_planned()
        if self.density and not 0 < self.density <= 1:
            raise TrainError(f"--density: found {self.density:g}; wanted a part such as 0.001")
        if self.density and not self.codec:
            raise TrainError("--density without --codec: dense gradients are sent whole; name a codec")
        if (self.warmup or self.dense_below) and not self.codec:
            option = "--warmup" if self.warmup else "--dense-below"
            raise TrainError(f"{option} without --codec: dense gradients are sent whole; name a codec")
        if self.warmup_every and not self.warmup:
            raise TrainError(f"--warmup-every {self.warmup_every} without --warmup: wanted densities to begin with")

    def _check_stock(self) -> None:
        if self.codec:
            raise TrainError(f"--codec {self.codec} with stock DDP, which has no codecs; leave out one of the two")
        if self.engine != GLOO:
            raise TrainError(
                f"--engine {self.engine} with stock DDP, which sends through torch.distributed; leave out one"
            )
        if self.strategy != AUTO:
            raise TrainError(f"--strategy {self.strategy} with stock DDP, which has an all-reduce; leave out one")

    def _check_planned(self) -> None:
        find_planner(self.planner)
        known = (AUTO, *names("all_reduce"))
        if (
            parse_strategy(self.strategy)[0] not in known and not self.codec
        ):  # sparse codecs have strategies of their own
            near = did_you_mean(self.strategy, known)
            raise TrainError(f"--strategy: found {self.strategy!r}; wanted one of {', '.join(known)}{near}")


def _check_name(name: str) -> None:
    """Refuse the name of a run that cannot be that of a folder, before anything is trained."""
    if not name:
        return
    if len(name) > LONGEST_NAME:
        raise TrainError(f"--name: found {len(name)} characters; wanted at most {LONGEST_NAME}")
    if not name.isprintable() or "/" in name or "\\" in name or not folder_name(name):
        raise TrainError(f"--name: found {shorten(name)}; wanted words for a folder in --out, without slashes")


def job_from_fields(fields: Fields) -> Job:
    """Build a job from the fields of its document."""
    fields.reject_unknown(tuple(each.name for each in dataclass_fields(Job)))
    return Job(**{each.name: _read(fields, each.name, each.default) for each in dataclass_fields(Job)})


def _read(fields: Fields, name: str, default: Any) -> Any:
    """Return a field of the type that its default has."""
    if isinstance(default, str):
        return fields.optional_text(name) or "" if not default else fields.text(name, default)
    return fields.integer(name, 0, default) if isinstance(default, int) else fields.amount(name, default)


# Finding checkpoints and reading what they say about themselves; needs no torch, so a launcher can look first.


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint says about itself."""

    path: Path
    step: int  # iterations that were done
    seconds: float  # of training that they took
    world_size: int
    job: Job
    plan: Plan | None
    trace: Trace | None = None  # what the plan was made from, where it was
    network: Network | None = None
    digests: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of the files beside it, by their names


def write_saved(saved: Saved, digests: Mapping[str, str]) -> None:
    """Write what a checkpoint says about itself, and the digests of all its files."""
    write_json(saved.path / HEAD.file, saved_document(saved))
    write_digests(saved.path, HEAD.file, digests)


def saved_document(saved: Saved) -> dict[str, Any]:
    """Return what a checkpoint says about itself as a `penstock-checkpoint/2` document."""
    return {
        "format": HEAD.format,
        "step": saved.step,
        "seconds": saved.seconds,
        "world_size": saved.world_size,
        "job": saved.job.document(),
        "plan": None if saved.plan is None else plan_document(saved.plan),
        "trace": None if saved.trace is None else trace_document(saved.trace),
        "network": None if saved.network is None else network_document(saved.network),
    }


def _saved(fields: Fields) -> Saved:
    fields.reject_unknown(("format", "step", "seconds", "world_size", "job", "plan", "trace", "network"))
    job, plan, trace, network = (fields.optional_member(name) for name in ("job", "plan", "trace", "network"))
    if job is None:
        raise fields.error("job", "an object")
    return Saved(
        Path(),
        fields.integer("step", 0),
        fields.amount("seconds"),
        fields.integer("world_size", 1),
        job_from_fields(job),
        None if plan is None else plan_from_fields(plan),
        None if trace is None else trace_from_fields(trace),
        None if network is None else network_from_fields(network),
    )


HEAD = Head("job.json", "penstock-checkpoint/2", _saved)


def find_checkpoint(folder: str) -> Saved:
    """Return the newest whole checkpoint in `folder`, or the one that `folder` is."""
    path = Path(folder)
    found = read_head(path, HEAD) if (path / HEAD.file).is_file() else newest_whole(path, HEAD)
    if found is None:
        raise TrainError(f"{folder}: no checkpoint there; wanted a folder that `penstock train --save` wrote")
    return replace(found.said, path=found.path, digests=found.digests)
