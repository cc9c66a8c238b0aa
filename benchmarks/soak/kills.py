"""Kills one rank of small training jobs, again and again, and says how the other ranks ended.

    python benchmarks/soak/kills.py --cases 1000
    python benchmarks/soak/kills.py --engines nccl --cases 24 --at-once 8    on a machine with a GPU and 16 cores

A case is made from its seed: engine, route, ranks, victim, signal, and the phase of training in which the signal comes,
at a random moment of it. Good is a survivor that ends before `limit_seconds` have passed, and that names the rank which
is gone, or says that it cannot know. The exit code is 1 where a survivor hangs, fewer than 99% are good, or more than
1% of the cases of a route never began: their job failed before the signal. The record is written as cases end, and a
second run goes on where it stopped: seeds that it has are left out. After something was mended, `--again` runs the
cases that were not good once more, and the record keeps how they ended before; `--anew ROUTE` forgets all cases of a
route, of which others have come since, and the record says which commit they were run again with; a campaign
with other cases has a record of its own (`--first 1000 --cases 160 --out benchmarks/results/soak-kills-later.json`).
So has one with some routes or phases only (`--routes "onebit by ring,gtopk" --phases backward --out OUT.json`): of the
seeds from the first on, those whose cases have them.

All ranks are forked from one process that has torch and penstock loaded and has started no thread; over MPI, mpirun
starts a small program for each rank, which has the rank forked here with mpirun's environment, and ends as it ends.
Ranks of NCCL share one GPU in turns: each counts as a host of its own, so that they meet over sockets. CUDA's
multi-process service is not used: with the death of one of its clients the others, of all jobs, are in a state that
CUDA does not define. Their store is kept by a process beside the ranks, as torchrun keeps it, and outlives rank 0.
"""

import argparse
import faulthandler
import gc
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # any optimizer imports it
import torch.distributed as dist
from campaign import RESULTS, Campaign

import penstock.codecs.sparse.published
import penstock.planning.choose
import penstock.planning.survey
import penstock.torch.device_measure  # noqa: F401  # what a rank would import later
from penstock.cluster.building import run_command
from penstock.cluster.worker_commands import find_mpirun
from penstock.errors import PenstockError
from penstock.runtime.transport.meeting import STORE, join_group
from penstock.torch import DistributedDataParallel
from penstock.torch.overlap import BulkSynchronous
from penstock.torch.saved_folder import checkpoint_path
from penstock.torch.servers import ParameterServers, Server
from penstock.torch.wrapper_planning import WrapperPlanning
from penstock.train.job import Job, Saved
from penstock.train.save_state import random_state, save_checkpoint

NCCL = "nccl"
NEXT_FORWARD = "next-forward"
DEDICATED = "onebit by dedicated servers"
ROUTES: dict[str, dict[str, Any]] = {  # options of the wrapper
    "dense native": {"strategy": "native"},
    "dense ring": {"strategy": "ring"},
    "onebit by ring": {"strategy": "ring", "codec": "onebit"},
    "blocks by servers": {"strategy": "parameter_server", "codec": "blocks(bits=4)"},
    DEDICATED: {"codec": "onebit"},  # by the last rank, which trains nothing; over gloo only
    "gtopk": {"codec": "gtopk", "density": 0.05},
    "hierarchical": {"strategy": "hierarchical(ranks_per_node=2)", "codec": "onebit"},
    NEXT_FORWARD: {},
}
ENGINES = {"gloo": 0.9, "mpi": 0.1}  # and their share of cases: mpirun takes long to start
OVER = {  # routes and numbers of ranks by engine; contexts of one GPU take turns, so there are few
    "gloo": (tuple(ROUTES), (2, 3, 3, 4, 4, 5, 6, 8)),
    "mpi": (tuple(name for name in ROUTES if name != NEXT_FORWARD), (2, 3, 3, 4, 4, 5, 6, 8)),
    NCCL: (("dense native", "onebit by ring", "blocks by servers", "gtopk", "hierarchical"), (2, 3, 3, 4)),
}
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGTERM": signal.SIGTERM}
NCCL_SIGNALS = ("SIGKILL", "SIGKILL", "SIGSTOP", "SIGTERM")  # each as often as it is here
WINDOWS = {  # seconds in which the signal comes after a rank has said that it is there
    "start": 0.3,
    "construction": 0.2,
    "profiling": 0.1,
    "measuring": 0.6,
    "adoption": 0.05,
    "backward": 0.02,
    "between": 0.005,
    "save": 0.03,
}
LATER = ("backward", "between", "save")  # come again and again
GOOD = ("named", "cannot know")
LEAST_GOOD = 0.99  # of survivors
MOST_NOT_BEGUN = 0.01  # of the cases of each route
HANGS = ("hangs", "hangs at exit")
TIMEOUTS = {  # of jobs, in seconds: where nothing else tells of the victim, and elsewhere
    "gloo": (10.0, 30.0),
    "mpi": (10.0, 30.0),
    NCCL: (15.0, 30.0),
}
LIMIT = {"times_the_timeout": 1.5, "and_seconds": 40.0}  # for survivors to end in: notes, exit, a machine that is busy
LOGGED = 20_000  # characters of each rank's stderr, at most
STACKS_SECONDS = 15.0  # between two looks at where a rank is, for one that hangs
WARM_SECONDS = 90.0
SEEDS_A_CASE = 200  # that are looked at: one route of eight and one phase of eight is every 64th
TRIES = 3  # of a case whose job failed before the signal, as on a busy machine; each with twice the timeout


@dataclass(frozen=True, slots=True)
class Case:
    """One job and one death."""

    seed: int
    engine: str  # gloo, mpi or nccl
    route: str
    ranks: int
    victim: int
    signal: str
    handled: bool  # SIGTERM: the rank has a handler and leaves by `sys.exit`, where Python comes to it
    phase: str
    nth: int  # of the phase's turns
    share: float  # of its window
    store: str  # where the ranks meet: in a file, at rank 0, or at a process beside them
    planner: str
    timeout_seconds: float
    device: str = "cpu"


def case_of(seed: int, engines: Sequence[str]) -> Case:
    """Return the case that a seed stands for."""
    chance = random.Random(seed)
    (engine,) = chance.choices(engines, [ENGINES.get(each, 1.0) for each in engines])
    routes, numbers = OVER[engine]
    route, ranks = chance.choice(routes), chance.choice(numbers)
    what = chance.choice(NCCL_SIGNALS if engine == NCCL else tuple(SIGNALS))
    phases = [name for name in WINDOWS if route != NEXT_FORWARD or name not in ("profiling", "measuring", "adoption")]
    phase = chance.choice(phases)
    victim = chance.randrange(ranks)
    if route == DEDICATED:
        engine, ranks = "gloo", max(3, ranks)  # one that trains by itself sends nothing to a server
    return Case(
        seed,
        engine,
        route,
        ranks,
        victim,
        what,
        what == "SIGTERM" and chance.random() < 0.5,
        phase,
        chance.randint(1, 5) if phase in LATER else 1,
        chance.random(),
        _store(engine, phase, chance),
        chance.choice(("exact", "wfbp")),
        TIMEOUTS[engine][0 if what == "SIGSTOP" or phase == "start" else 1],
        "cuda" if engine == NCCL else "cpu",
    )


def chosen_cases(
    first: int, count: int, engines: Sequence[str], routes: Sequence[str], phases: Sequence[str]
) -> list[Case]:
    """Return the first cases from a seed on that have one of the routes and one of the phases; fewer where few have."""
    cases = (case_of(seed, engines) for seed in range(first, first + SEEDS_A_CASE * count))
    return list(islice((case for case in cases if case.route in routes and case.phase in phases), count))


def _store(engine: str, phase: str, chance: random.Random) -> str:
    if engine == NCCL:
        return "launcher"
    return "rank 0" if phase == "start" else chance.choice(("file", "rank 0"))


# What a rank does


Say = Callable[..., None]


def rank_body(case: Case, rank: int, folder: Path, say: Say) -> None:
    """Train until something goes wrong."""
    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    if case.handled:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"} | (nccl_environment(rank) if case.device == "cuda" else {})
    say("start")
    _join(case, rank, folder)
    say("construction")
    servers = ParameterServers(1) if case.route == DEDICATED else None
    if servers is not None and servers.is_server:
        _serve(servers, say)
    module = torch.nn.Sequential(*(torch.nn.Linear(96, 96) for _ in range(5))).to(case.device)
    step = _bulk_synchronous(module, say) if case.route == NEXT_FORWARD else _wrapped(case, module, say, servers)
    for number in range(1_000_000):
        step()
        say("between")
        if number % 4 == 3:
            say("save")
            _save(case, module, folder, number, None if servers is None else servers.workers)


def nccl_environment(rank: int) -> dict[str, str]:
    """Return what lets ranks of one GPU meet over loopback, each a host of its own."""
    alone = {"NCCL_HOSTID": f"host-{rank}", "NCCL_RAS_ENABLE": "0"}  # its RAS has one port for the whole machine
    return {**alone, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def _join(case: Case, rank: int, folder: Path) -> None:
    timeout = timedelta(seconds=case.timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if case.device == "cuda" else "gloo"
    if case.store == "file":
        where = f"file://{folder / 'store'}"
        dist.init_process_group(backend, init_method=where, rank=rank, world_size=case.ranks, timeout=timeout)
        return
    port = (folder / "port").read_text()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(case.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if case.store == "launcher":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as torchrun tells its ranks
    join_group(backend, timeout)


def _serve(servers: ParameterServers, say: Say) -> None:
    """Aggregate; a server is in the phase that rank 0 is in, and between two iterations it may be saved."""
    words = {"_open": "profiling", "_links": "measuring", "_follow": "adoption", "_begin": "backward"}
    for name, phase in words.items():
        _announce(Server, name, phase, say)
    for phase in ("between", "save"):
        _announce(Server, "_finish", phase, say)
    servers.serve()
    raise AssertionError("rank 0 trains until it is ended")


def _wrapped(case: Case, module: torch.nn.Module, say: Say, servers: ParameterServers | None) -> Callable[[], None]:
    for name, phase in (("_survey", "measuring"), ("_adopt", "adoption")):
        _announce(WrapperPlanning, name, phase, say)
    options: dict[str, Any] = {
        "servers": servers,
        "planner": case.planner,
        "measure_seconds": 0.2,
        "profile_iterations": 2,
        "measurements": False,
    }
    model = DistributedDataParallel(
        module, engine="mpi" if case.engine == "mpi" else None, **options, **ROUTES[case.route]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        say("forward" if model.plan else "profiling")
        loss = model(torch.randn(4, 96, device=case.device)).square().mean()
        say("backward" if model.plan else "profiling")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # as scripts print it; over NCCL nothing else waits for the device

    return step


def _announce(of: type, method: str, phase: str, say: Say) -> None:
    """Have a rank say when it begins what only the wrapper, or a server, knows of."""
    original = getattr(of, method)

    def announced(self: Any, *arguments: Any) -> Any:
        say(phase)
        return original(self, *arguments)

    setattr(of, method, announced)


def _bulk_synchronous(module: torch.nn.Module, say: Say) -> Callable[[], None]:
    model = BulkSynchronous(module, lambda parameters: torch.optim.SGD(parameters, lr=1e-3), algorithm="split")

    def step() -> None:
        say("forward")
        loss = model(torch.randn(4, 96)).square().mean()
        say("backward")
        loss.backward()
        model.step()

    return step


def _save(case: Case, module: torch.nn.Module, folder: Path, number: int, group: dist.ProcessGroup | None) -> None:
    saved = Saved(checkpoint_path(str(folder / "saved"), number), number, 1.0, case.ranks, Job(), None)
    common = {"model": module.state_dict(), "optimizer": {}, "history": {}}
    save_checkpoint(saved, common, {"exchange": {}, "random": random_state()}, group)


def live(case: Case, rank: int, folder: Path, channel: int) -> None:
    """Be a rank: say where it is, how it ended, and leave as a script does that raised an error."""

    def say(what: str, **more: Any) -> None:
        os.write(channel, (json.dumps({"at": what, "pid": os.getpid(), **more}) + "\n").encode())

    sys.stderr = open(error_file(folder, rank), "w")  # noqa: SIM115  # until the process ends
    os.dup2(sys.stderr.fileno(), 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(STACKS_SECONDS, repeat=True)
    try:
        rank_body(case, rank, folder, say)
    except Exception as error:
        ours = isinstance(error, PenstockError)
        frames = [f"{Path(each.filename).name}:{each.lineno}" for each in traceback.extract_tb(error.__traceback__)]
        say("ended", kind=type(error).__name__, ours=ours, message=str(error)[:1000], where=" ".join(frames[-8:]))
        if case.engine == "mpi":
            os._exit(0)  # as docs/runtime.md says: MPI's own shutdown waits for messages that never come
        sys.exit(0)  # mpirun would end the others at any other code


def error_file(folder: Path, rank: int) -> Path:
    """Return where a rank's stderr goes."""
    return folder / f"rank-{rank}.err"


# What one case does


@dataclass(slots=True)
class Rank:
    """What is known of one rank, from outside."""

    number: int
    errors: Path  # what it wrote to stderr
    reads: int  # end of the pipe that it says things on
    pid: int = 0
    at: str = ""
    turns: Counter[str] | None = None
    ended: dict[str, Any] | None = None  # what it said at its end
    exit_code: int | None = None
    rest: bytes = b""
    gone_at: float = 0.0
    launcher: socket.socket | None = None  # what mpirun started in its place, and waits for it to end

    def read(self) -> None:
        """Take in what it has said."""
        while select.select([self.reads], [], [], 0)[0]:
            told = os.read(self.reads, 65536)
            if not told:
                return
            *lines, self.rest = (self.rest + told).split(b"\n")
            for line in lines:
                event = json.loads(line)
                self.pid = event["pid"]
                if event["at"] == "ended":
                    self.ended = {**event, "since": time.monotonic()}
                else:
                    self.at = event["at"]
                    self.turns = (self.turns or Counter()) + Counter([self.at])

    def reap(self) -> None:
        """Notice that its process has ended."""
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code, self.gone_at = os.waitstatus_to_exitcode(status), time.monotonic()
                self.read()
                if self.launcher is not None:
                    self.launcher.sendall(str(self.exit_code).encode())


@dataclass(frozen=True, slots=True)
class Ended:
    """How a case ended."""

    case: Case
    phase: str  # that the victim was in
    outcomes: dict[str, int]  # of survivors
    slowest_seconds: float  # from the signal to the last survivor's end
    remarks: tuple[str, ...]  # where the end of one was not good, the ends of all survivors


def run_case(case: Case, logs: Path | None = None) -> Ended | None:
    """Run a job and kill one of its ranks; None where it failed before.

    `logs`: a file to which stderr of all ranks is added where the end is not good.
    """
    folder = Path(tempfile.mkdtemp(prefix="penstock-kills-"))
    keeper = choose_port(case, folder)
    mpirun = Mpirun(case, folder) if case.engine == "mpi" else None
    ranks = mpirun.ranks if mpirun else [start_rank(case, number, folder) for number in range(case.ranks)]
    victim, survivors = ranks[case.victim], [each for each in ranks if each.number != case.victim]
    found = _kill_in_phase(case, ranks) and _watch(case, victim, survivors)
    end_ranks(ranks)
    _end(keeper)
    if mpirun is not None:
        mpirun.end()
    if logs is not None and (not found or found.remarks):
        _keep_errors(case, ranks, logs)
    shutil.rmtree(folder, ignore_errors=True)
    return found or None


def choose_port(case: Case, folder: Path) -> int:
    """Write the port of the ranks' store to a file; return the process that keeps the store, 0 where a rank does."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    (folder / "port").write_text(str(listener.getsockname()[1]))
    if case.store != "launcher":
        listener.close()
        return 0
    if (pid := os.fork()) == 0:
        port = listener.getsockname()[1]
        kept = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        while kept:
            signal.pause()
    listener.close()
    return pid


def end_ranks(ranks: Sequence[Rank]) -> None:
    """End the ranks that have not ended, all at once: the driver takes its time for each."""
    left = [each.pid for each in ranks if each.exit_code is None]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    for pid in left:
        os.waitpid(pid, 0)
    for each in ranks:
        os.close(each.reads)


def _end(pid: int) -> None:
    if pid:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _keep_errors(case: Case, ranks: Sequence[Rank], logs: Path) -> None:
    """Add what ranks wrote to stderr to a file."""
    for each in ranks:
        if each.errors.exists():
            with open(logs, "a") as file:
                file.write(f"--- {case}, rank {each.number}\n{each.errors.read_text(errors='replace')[-LOGGED:]}\n")


IN_PLACE_OF_A_RANK = """
import json, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect(sys.argv[1])
link.sendall((json.dumps(dict(os.environ)) + "\\n").encode())
code = int(link.recv(64) or b"0")
signal.signal(signal.SIGTERM, signal.SIG_DFL)
os.kill(os.getpid(), -code) if code < 0 else os._exit(code)
"""


class Mpirun:
    """mpirun with fault tolerance (ULFM), whose ranks are forked here."""

    def __init__(self, case: Case, folder: Path) -> None:
        meeting = socket.socket(socket.AF_UNIX)
        meeting.bind(str(folder / "mpi"))
        meeting.listen()
        meeting.settimeout(60)
        launch = [find_mpirun(run_command), "--with-ft", "ulfm", "--allow-run-as-root", "--oversubscribe"]
        launch += ["--bind-to", "none", "-n", str(case.ranks)]
        with open(folder / "mpirun.err", "w") as said:
            command = [*launch, sys.executable, "-S", "-c", IN_PLACE_OF_A_RANK, str(folder / "mpi")]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        found = {}
        for _ in range(case.ranks):
            link, _address = meeting.accept()
            with link.makefile() as lines:
                environment = json.loads(lines.readline())
            number = int(environment["OMPI_COMM_WORLD_RANK"])
            found[number] = start_rank(case, number, folder, environment)
            found[number].launcher = link
        meeting.close()
        self.ranks = [found[number] for number in range(case.ranks)]

    def end(self) -> None:
        """Let what stands for ranks end, and mpirun with it."""
        for each in self.ranks:
            assert each.launcher is not None
            each.launcher.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_rank(case: Case, number: int, folder: Path, environment: Mapping[str, str] | None = None) -> Rank:
    """Fork a rank; it leaves by `SystemExit`, which nothing above catches."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        live(case, number, folder, writes)
    os.close(writes)
    return Rank(number, error_file(folder, number), reads, pid)


def _kill_in_phase(case: Case, ranks: Sequence[Rank]) -> bool:
    """Send the signal once the victim has been in the phase often enough; False where the job failed before."""
    victim, begun = ranks[case.victim], time.monotonic()
    while (victim.turns or Counter())[case.phase] < case.nth:
        if time.monotonic() - begun > 20 + 2 * case.timeout_seconds:
            return False
        select.select([victim.reads], [], [], 0.05)
        for each in ranks:
            each.read()
            each.reap()
        if any(each.exit_code is not None or each.ended for each in ranks):
            return False
    time.sleep(case.share * WINDOWS[case.phase])
    for each in ranks:
        each.reap()
    if any(each.exit_code is not None for each in ranks):
        return False
    os.kill(victim.pid, SIGNALS[case.signal])
    victim.read()
    return True


def _watch(case: Case, victim: Rank, survivors: Sequence[Rank]) -> Ended:
    """Wait for all survivors to end, or until they should have, and judge each."""
    struck = time.monotonic()
    deadline = struck + limit_seconds(case)
    phase = victim.at
    while time.monotonic() < deadline and any(each.exit_code is None for each in survivors):
        time.sleep(0.02)
        victim.reap()
        for each in survivors:
            each.read()
            each.reap()
    judged = [judge(case, each) for each in survivors]
    ends = [
        f"rank {each.number}, {_seconds(each, struck)}: {what}: {_said(each)}"
        for each, what in zip(survivors, judged, strict=True)
    ]
    remarks = ends if set(judged) - {*GOOD} else []
    slowest = max((each.gone_at for each in survivors), default=struck) - struck
    return Ended(case, phase, dict(Counter(judged)), round(max(slowest, 0.0), 1), tuple(remarks))


def limit_seconds(case: Case) -> float:
    """Return how long survivors have, from the signal to the end of their processes."""
    return LIMIT["times_the_timeout"] * case.timeout_seconds + LIMIT["and_seconds"]


def _seconds(rank: Rank, struck: float) -> str:
    """Return when a rank raised its error and when its process had ended, in seconds from the signal."""
    raised = "-" if rank.ended is None else f"{rank.ended['since'] - struck:.1f}"
    return f"{raised} and {'-' if rank.exit_code is None else f'{rank.gone_at - struck:.1f}'} s"


def _said(rank: Rank) -> str:
    if rank.ended is None or rank.exit_code is None:
        return f"exit code {rank.exit_code}, last seen at {last_stack(rank.errors)}"
    return f"{rank.ended['kind']}: {rank.ended['message']} ({rank.ended['where']})"


def last_stack(errors: Path) -> str:
    """Return where a rank was last seen, innermost first: the thread that crashed, else the main one; "": nowhere."""
    text = errors.read_text(errors="replace")
    crashed, stacks = text.rpartition("Fatal Python error")[1:]
    stack = (stacks.partition if crashed else text.rpartition)("(most recent call first):")[2].partition("\n\n")[0]
    return " ".join(f"{Path(file).name}:{line}" for file, line in re.findall(r'File "(.+?)", line (\d+)', stack)[:12])


BLAMED = re.compile(r"((?:rank \d+(?: and |, )?)+)(?: did not answer| left no word| died| did not come)")
PEER = re.compile(r"no message exchanged with rank (\d+)")
DIFFERENT = re.compile(r"rank (\d+) is in call")
CANNOT_TELL = "cannot be told"
UNKNOWN = ("another rank gave up because one died", "which rank is not known")


def judge(case: Case, rank: Rank) -> str:
    """Say how a survivor ended: one of GOOD, or what was wrong."""
    if rank.exit_code is None:
        return "hangs" if rank.ended is None else "hangs at exit"
    if rank.ended is None:
        return "crashed"
    return judge_message(rank.ended["message"], rank.ended["ours"], case.victim)


def judge_message(message: str, ours: bool, victim: int) -> str:
    """Judge what a survivor raised."""
    if not ours:
        return "raw"
    if DIFFERENT.search(message):
        return "blamed another"
    blamed = BLAMED.findall(message)
    if blamed:
        ranks = {int(number) for number in re.findall(r"\d+", blamed[-1])}
        if ranks == {victim}:
            return "named"
        told = "cannot know" if CANNOT_TELL in message else "among others"
        return told if victim in ranks else "blamed another"
    if STORE in message:  # which rank 0 keeps: the reader looks there
        return "cannot know" if victim == 0 or CANNOT_TELL in message else "points at rank 0"
    if any(each in message for each in UNKNOWN):
        return "cannot know"
    peer = PEER.search(message)
    if peer is None:
        return "silent"
    return "named" if int(peer[1]) == victim else "blamed another"


# All cases


def run_until_killed(case: Case, logs: Path | None) -> Ended | None:
    """Run a case, again with twice the timeout where the job failed before the signal came."""
    for attempt in range(TRIES):
        found = run_case(replace(case, timeout_seconds=case.timeout_seconds * 2**attempt), logs)
        if found is not None:
            return found
    return None


class Tally(Campaign):
    """What a record holds of the cases so far; outcomes are those of survivors."""

    def __init__(self, name: str, path: Path | None) -> None:
        super().__init__(name, ("engine", "route", "signal", "phase"), path)
        self.seeds = {seed for first, last in self.notes.get("seeds", ()) for seed in range(first, last + 1)}
        self.not_begun: list[int] = list(self.notes.get("not_begun", ()))
        self.routes_not_begun = Counter[str](self.notes.get("routes_not_begun", {}))
        self.slowest: dict[str, float] = dict(self.notes.get("slowest_seconds", {}))  # by signal

    def add(self, seed: int, route: str, found: dict[str, Any] | None) -> None:
        """Count one case."""
        self.seeds.add(seed)
        if found is None:
            self.not_begun.append(seed)
            self.routes_not_begun[route] += 1
            return
        case = found["case"]
        self.count(_key(found), found["outcomes"])
        self.slowest[case["signal"]] = max(self.slowest.get(case["signal"], 0.0), found["slowest_seconds"])
        if found["remarks"]:
            self.findings.append(found)

    def forget_findings(self) -> None:
        """Have cases that were not good, or never begun, run again; the record keeps how they ended."""
        self.seeds -= {*self.not_begun}
        self.not_begun, self.routes_not_begun = [], Counter()
        for found in [*self.findings]:
            self.count(_key(found), found["outcomes"], -1)
            self.seeds.remove(found["case"]["seed"])
            self.put_aside(found)

    def forget_route(self, route: str, engines: Sequence[str]) -> None:
        """Have all cases of a route run again; the record says with which commit the others were run."""
        self.seeds -= {seed for seed in self.seeds if case_of(seed, engines).route == route}
        for key in [key for key in self.cases if key[1] == route]:
            del self.cases[key]
        for key in [key for key in self.outcomes if key[1] == route]:
            del self.outcomes[key]
        self.notes["rest"] = {name: self.notes[name] for name in ("command", "commit")} | {"without": route}

    def write(self) -> None:
        """Write the record."""
        rest = {"rest": self.notes["rest"]} if "rest" in self.notes else {}
        self.save(
            survivors=dict(self.totals().most_common()),
            good=self.good,
            timeouts_seconds=TIMEOUTS,
            hangs_after=LIMIT,
            slowest_seconds=self.slowest,
            seeds=ranges(self.seeds),
            not_begun=self.not_begun,
            routes_not_begun=dict(self.routes_not_begun),
            **rest,
        )

    @property
    def good(self) -> float:
        """The share of survivors that ended well."""
        found = self.totals()
        return round(sum(found[each] for each in GOOD) / max(1, found.total()), 5)

    @property
    def holds(self) -> bool:
        """Whether no survivor hangs, enough are good, and the cases of every route began."""
        hangs = any(self.totals()[each] for each in HANGS)
        return self.good >= LEAST_GOOD and not hangs and all(map(self._began, self.routes_not_begun))

    def _began(self, route: str) -> bool:
        began = sum(number for key, number in self.cases.items() if key[1] == route)
        missing = self.routes_not_begun[route]
        return missing <= MOST_NOT_BEGUN * (began + missing)

    def __str__(self) -> str:
        cases = f"{len(self.seeds)} cases, {len(self.not_begun)} not begun"
        return f"{cases}, {self.good:.2%} good: {dict(self.totals())}, slowest {self.slowest}"


def _key(found: dict[str, Any]) -> tuple[str, ...]:
    case = found["case"]
    return case["engine"], case["route"], case["signal"], found["phase"]


def ranges(numbers: set[int]) -> list[list[int]]:
    """Return numbers as ranges, first and last.

    >>> ranges({0, 1, 2, 5})
    [[0, 2], [5, 5]]
    """
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def warm_up(seconds: float) -> None:
    """Have Triton compile what codecs need on a GPU, which keeps it: ranks would wait for one another's compiling."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-kills-"))
    ranks = []
    begun = time.monotonic()
    for number, route in enumerate(OVER[NCCL][0]):
        place = folder / str(number)
        place.mkdir()
        case = replace(case_of(0, [NCCL]), route=route, ranks=2, store="file", timeout_seconds=seconds, handled=False)
        ranks += [start_rank(case, rank, place) for rank in range(2)]
    while time.monotonic() < begun + seconds and any(
        "save" not in (each.turns or ()) and not each.ended for each in ranks
    ):
        time.sleep(0.1)
        for each in ranks:
            each.read()
    took = time.monotonic() - begun
    for each in ranks:
        print(
            f"warming up, {took:.0f} s: rank {each.number} came to {each.at!r}", *([_said(each)] if each.ended else [])
        )
    end_ranks(ranks)
    shutil.rmtree(folder, ignore_errors=True)


def run_all(
    cases: Sequence[Case], at_once: int, seconds: float, logs: Path | None
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Run cases in several processes, each the next as it is free; yield each case's end.

    After `seconds` no further case is begun.
    """
    until = time.monotonic() + seconds
    ordered = sorted(cases, key=lambda case: case.timeout_seconds)  # those that wait for it first: they take longest
    waiting, line = os.pipe()
    os.write(line, b"".join(struct.pack("i", number) for number in range(len(cases))))
    os.close(line)
    pipes: dict[int, bytes] = {}
    for _ in range(at_once):
        reads, writes = os.pipe()
        if os.fork() == 0:
            while time.monotonic() < until and (number := os.read(waiting, struct.calcsize("i"))):
                case = ordered[struct.unpack("i", number)[0]]
                found = run_until_killed(case, logs)
                told = json.dumps([case.seed, None if found is None else asdict(found)]) + "\n"
                os.write(writes, told.encode())
            os._exit(0)
        os.close(writes)
        pipes[reads] = b""
    os.close(waiting)
    while pipes:
        for reads in select.select(list(pipes), [], [])[0]:
            heard = os.read(reads, 1 << 20)
            if not heard:
                del pipes[reads]
                os.wait()
                continue
            *lines, pipes[reads] = (pipes[reads] + heard).split(b"\n")
            for each in lines:
                seed, found = json.loads(each)
                yield seed, found


def main() -> int:
    """Run the cases that the record does not have; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="seed of the first; the others follow")
    parser.add_argument("--seeds", help="only these, with commas; what is found is printed, and nothing is recorded")
    parser.add_argument("--again", action="store_true", help="run what the record has as not good again, too")
    parser.add_argument("--anew", choices=ROUTES, help="forget what the record has of this route")
    parser.add_argument("--engines", default=",".join(ENGINES), help=f"of {', '.join(OVER)}, with commas")
    parser.add_argument("--routes", default=",".join(ROUTES), help=f"of {', '.join(ROUTES)}, with commas")
    parser.add_argument("--phases", default=",".join(WINDOWS), help=f"of {', '.join(WINDOWS)}, with commas")
    parser.add_argument("--on-cpu", action="store_true", help="cases of NCCL over gloo, to try the script itself")
    parser.add_argument("--at-once", type=int, default=4, help="jobs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so long")
    parser.add_argument("--out", type=Path, help="the record; that of this campaign unless told")
    parser.add_argument("--logs", type=Path, help="add stderr of the ranks of cases that are not good to this file")
    options, begun = parser.parse_args(), time.monotonic()
    engines, routes, phases = (each.split(",") for each in (options.engines, options.routes, options.phases))
    for what, asked, known in (("engine", engines, OVER), ("route", routes, ROUTES), ("phase", phases, WINDOWS)):
        if unknown := [each for each in asked if each not in known]:
            parser.error(f"no {what} called {unknown[0]!r}; wanted some of {', '.join(known)}")
    is_part = {*routes} < {*ROUTES} or {*phases} < {*WINDOWS}
    if is_part and not options.seeds and options.out is None:
        parser.error("--routes and --phases want --out: the record of this campaign is of all of them")
    name = f"soak-kills-{NCCL}" if engines == [NCCL] else "soak-kills"
    tally = Tally(name, None if options.seeds else options.out or RESULTS / f"{name}.json")
    if options.again:
        tally.forget_findings()
    if options.anew:
        tally.forget_route(options.anew, engines)
    if options.seeds:
        wanted = [case_of(int(seed), engines) for seed in options.seeds.split(",")]
    else:
        wanted = chosen_cases(options.first, options.cases, engines, routes, phases)
    cases = [case for case in wanted if case.seed not in tally.seeds]
    if options.on_cpu:
        cases = [replace(case, device="cpu") for case in cases]
    if any(case.device == "cuda" for case in cases):
        warm_up(WARM_SECONDS)
    gc.freeze()  # ranks share what this process has loaded, and need not look through it when they end
    routes = {case.seed: case.route for case in cases}
    for seed, found in run_all(cases, options.at_once, options.seconds, options.logs):
        tally.add(seed, routes[seed], found)
        tally.write()
        if options.seeds or found is None or found["remarks"]:
            print(seed, found, flush=True)
        print(f"{time.monotonic() - begun:.0f} s: {tally}", flush=True)
    return 0 if tally.holds else 1


if __name__ == "__main__":
    sys.exit(main())
