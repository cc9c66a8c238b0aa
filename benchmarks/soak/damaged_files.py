"""Files of every format that penstock reads, changed in their bytes or in their structure, and loaded.

A format is a folder of honest files and what reads them: a loader, or a command of `penstock`. Damage to JSON swaps
types, removes and doubles fields, and puts numbers and texts there that no writer of ours has. Where a file lies under
a digest, half of the cases make the digest anew, as an author of a hostile file would.
"""

import hashlib
import io
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import typer
from damaged_payloads import Outcome
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros

import penstock.compll
from penstock.bench.record import load_record, make_record, save_record
from penstock.cli.main import app
from penstock.cluster.slots import _holder_lives
from penstock.cluster.topology import parse_delay, parse_rates
from penstock.codecs.registry import make_codec
from penstock.codecs.spec import parse_spec
from penstock.compll.cache import load_program as load_compiled
from penstock.compll.frontend.source import compile_file
from penstock.curves import CodecCurves, Curve
from penstock.errors import CompileError, PenstockError
from penstock.exchange.state import OWED, check_states
from penstock.fields import write_json
from penstock.integrations.exchange_files import file_name, read_exchange, write_exchange
from penstock.network import LinearCost, Network, load_network, save_network
from penstock.plan import load_plan, parse_route, save_plan
from penstock.planners import find_planner
from penstock.planning.measurement_cache import load_kept
from penstock.program.document import load_program, save_program
from penstock.run_record import CodecCost, CodecLine, Evaluation, RouteUse, RunRecord, Step, load_run, save_run
from penstock.simulator.iteration import predict
from penstock.strategies import Options, build, compressed_program, parse_strategy
from penstock.torch import Checkpoints, fully_shard_with
from penstock.torch.arrays import TORCH
from penstock.torch.checkpoint_folder import HEAD as TRAINING
from penstock.torch.checkpoint_folder import check_model, check_optimizer, fitting
from penstock.torch.saved_folder import MODEL, SUMS, rank_file, write_digests
from penstock.torch.state_file import write_state
from penstock.trace import Tensor, Trace, load_trace, save_trace
from penstock.train.job import HEAD, Job, Saved, find_checkpoint, write_saved
from penstock.train.loop import History
from penstock.train.save_state import load_common, load_own, random_state, seed_everything, set_random_state

MOST_LINES = 3  # of a CompileError: the message, the line of the source, a caret
LONGEST_MESSAGE = 2_000  # characters; a message may quote a name
_ALGORITHMS = Path(penstock.compll.__file__).parent / "algorithms"
Files = dict[str, bytes]


@dataclass(frozen=True)
class Format:
    """What is damaged, and what reads it."""

    name: str
    make: Callable[[Path], None]  # writes honest files into a folder
    read: Callable[[Path], object]
    share: float  # of the cases
    seal: Callable[[Path], None] | None = None  # makes digests anew
    hurts: tuple[str, ...] = ()  # names of the files that are damaged; all, where there are none


class FileCases:
    """All cases of one seed."""

    kind = "files"

    def __init__(self, seed: int, formats: Sequence[str] = ()) -> None:
        """Without `formats`, cases are of all."""
        self._seed, self._formats = seed, _named(formats)
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-damage-", dir=_quick_folder())
        self._honest = {each.name: self._made(each) for each in self._formats}

    def _made(self, of: Format) -> Files:
        place = self._place(of)
        place.mkdir()
        of.make(place)
        found = {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}
        if (outcome := _read(of, place, "")).result != "loaded":
            raise AssertionError(f"what is honest is {outcome}")
        return found

    def _place(self, of: Format) -> Path:
        return Path(self._folder.name) / of.name.replace(" ", "-").replace(",", "")

    def run(self, number: int) -> Outcome:
        """Do one case."""
        draw = Random(f"{self._seed} file {number}")
        (of,) = draw.choices(self._formats, [each.share for each in self._formats])
        honest, place = self._honest[of.name], self._place(of)
        name = draw.choice(sorted(of.hurts or honest))
        damage = draw.choice(tuple(DAMAGES) if is_json(honest[name]) else BYTES)
        (place / name).write_bytes(DAMAGES[damage](honest[name], draw))
        if of.seal is not None and Path(name).name != SUMS and draw.random() < 0.5:
            of.seal(place)
        try:
            return _read(of, place, damage)
        finally:
            self._mend(place, honest)

    def _mend(self, place: Path, honest: Files) -> None:
        for path in place.rglob("*"):
            if path.is_file() and str(path.relative_to(place)) not in honest:
                path.unlink()
        for name, data in honest.items():
            path = place / name
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)


def _named(formats: Sequence[str]) -> list[Format]:
    if unknown := set(formats) - {each.name for each in FORMATS}:
        raise PenstockError(f"formats {sorted(unknown)}; wanted some of {[each.name for each in FORMATS]}")
    return [each for each in FORMATS if not formats or each.name in formats]


def _read(of: Format, place: Path, damage: str) -> Outcome:
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            of.read(place)
    except PenstockError as error:
        text = str(error)
        lines = MOST_LINES if isinstance(error, CompileError) else 1
        if text.count("\n") >= lines or len(text) > LONGEST_MESSAGE or not _can_be_shown(text):
            return Outcome(of.name, damage, "long message", True, repr(text)[:300])
        return Outcome(of.name, damage, "refused")
    except MemoryError:
        return Outcome(of.name, damage, "memory", True)
    except (Exception, SystemExit) as error:
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        at = f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}" if where is not None else ""
        return Outcome(of.name, damage, f"uncaught {type(error).__name__}", True, f"{at}: {error!r}"[:300])
    return Outcome(of.name, damage, "loaded")


def _can_be_shown(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text and "\x1b" not in text


def _quick_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def is_json(data: bytes) -> bool:
    """Say whether a file, or what stands behind its first line, is JSON."""
    return data.lstrip()[:1] in (b"{", b"[") or data.partition(b"\n")[2][:1] == b"{"


# Damage to bytes


def _flip(data: bytes, draw: Random) -> bytes:
    made = bytearray(data or b"\0")
    for _ in range(draw.choice((1, 1, 1, 3, 20))):
        made[draw.randrange(len(made))] ^= 1 << draw.randrange(8)
    return bytes(made)


def _set(data: bytes, draw: Random) -> bytes:
    made = bytearray(data or b"\0")
    for _ in range(draw.choice((1, 1, 3, 10))):
        made[draw.randrange(len(made))] = draw.choice((0, 0xFF, 0x80, 9, 10, 34, 39, 48, 57, 91, 92, 123, 125))
    return bytes(made)


def _splice(data: bytes, draw: Random) -> bytes:
    start, stop = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    stop = min(stop, start + draw.choice((1, 10, 100, 10_000)))
    kind = draw.randrange(4)
    if kind == 0:
        return data[:start] + data[stop:]
    if kind == 1:
        return data[:stop] + data[start:]
    put = draw.choice(
        (b"9" * 400, b"9" * 5000, b"1e999999", b"\xed\xa0\x80", b"\r\n", b"(" * 3000, b"[" * 3000, b"NaN")
    )
    return data[:start] + put + data[start if kind == 2 else stop :]


_MOST_ADDED = 1 << 18  # characters that one change adds to a document
BYTES = ("bits", "bytes", "cut short", "extended", "spliced", "random bytes")


# Damage to the structure of JSON


class _Raw(str):
    """Text that is written as it is."""

    __slots__ = ()


_LEAVES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, -(2**63), 0.5, -0.5, 1e-320, 1e308, -1e308,
    "", " ", "x", "\n", "\0", "../..", "/etc/passwd", "<script>", "x" * 5000, "\ud800", "é", "data[0:4]", "ring+onebit",
    [], {}, [[]], [None], {"": None}, ["x"], [1, 2, 3], {"format": 1}, {"is": "Program"}, {"node": 0}, {"tensor": []},
    _Raw("9" * 400), _Raw("-" + "9" * 400), _Raw("9" * 5000), _Raw("1e999999"), _Raw("-1e999999"), _Raw("NaN"),
    _Raw("Infinity"), _Raw("-Infinity"), _Raw("1E400"), _Raw("[" * 900 + "]" * 900), _Raw("[" * 100_000), _Raw("{" * 9),
    _Raw("01"), _Raw("'x'"), _Raw('"\\ud800"'), _Raw('"\\udc00\\ud800"'), _Raw('{"a": 1, "a": 2}'), _Raw(""),
    _Raw('"data[0:' + "9" * 5000 + ']"'), _Raw('"data[0:' + "9" * 400 + ']"'),
)  # fmt: skip


def _write(value: Any) -> str:
    if isinstance(value, _Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_write(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_write, value)) + "]"
    return json.dumps(value)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container in a document with every key or index in it."""
    found, left = [], [value]
    while left:
        one = left.pop()
        for key in one if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ():
            found.append((one, key))
            left.append(one[key])
    return found


def _structure(change: Callable[[Any, Any, Random], None]) -> Callable[[bytes, Random], bytes]:
    """Return what changes a document at one to three places; what stands before it, as a digest, stays."""

    def damaged(data: bytes, draw: Random) -> bytes:
        head, text, tail = _parts(data)
        document = json.loads(text)
        try:
            for _ in range(draw.choice((1, 1, 1, 2, 3))):
                if places := _places(document):
                    change(*draw.choice(places), draw)
            made = _write(document).encode(errors="surrogatepass")
        except RecursionError:  # nested too deep to be written
            made = b"[" * 100_000
        if head.startswith(b"penstock-state/1"):
            head = b"penstock-state/1 %d\n" % len(made)
        return head + made + tail

    return damaged


def _parts(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Return what stands before a document, the document, and what stands behind it."""
    if data.lstrip()[:1] in (b"{", b"["):
        return b"", data, b""
    head, _, rest = data.partition(b"\n")
    length = int(head.split()[1]) if head.startswith(b"penstock-state/1") else len(rest)
    return head + b"\n", rest[:length], rest[length:]


def _leaf(draw: Random) -> Any:
    """Return one of `_LEAVES` of its own: a second change may be made inside of it."""
    return deepcopy(draw.choice(_LEAVES))


def _replace(container: Any, key: Any, draw: Random) -> None:
    container[key] = _leaf(draw)


def _remove(container: Any, key: Any, draw: Random) -> None:
    container.pop(key)


def _double(container: Any, key: Any, draw: Random) -> None:
    """Write a field twice, or an entry of a list a few hundred times."""
    if isinstance(container, list):
        most = max(1, _MOST_ADDED // len(_write(container[key])))  # thrice 300 times would be a file of 80 MB
        container[key:key] = [container[key]] * min(draw.choice((1, 2, 300)), most)
    else:
        again = draw.choice((container[key], *_LEAVES))  # which is written at once
        container[key] = _Raw(f"{_write(container[key])}, {json.dumps(key)}: {_write(again)}")


def _swap(container: Any, key: Any, draw: Random) -> None:
    """Write a number as text, text as a list, and so on."""
    value = container[key]
    container[key] = draw.choice((str(value), [value], {"value": value}, repr(value), not value))


def _rename(container: Any, key: Any, draw: Random) -> None:
    if isinstance(container, dict):
        new = draw.choice(("", "x", "\n", "\ud800", "__class__", "x" * 5000, str(key).upper(), "<script>"))
        container[new] = container.pop(key)
    else:
        container[key] = {"x": container[key]}


def _scale(container: Any, key: Any, draw: Random) -> None:
    """Change a number; where it is none, leave the document as it is."""
    value = container[key]
    if isinstance(value, int | float) and not isinstance(value, bool):
        container[key] = draw.choice((-value, value * 2, value + 1, value * 10**9, value / 3, value * 1e300, 0, 2**62))


DAMAGES: Mapping[str, Callable[[bytes, Random], bytes]] = {
    "bits": _flip,
    "bytes": _set,
    "cut short": lambda data, draw: data[: draw.randrange(len(data) or 1)],
    "extended": lambda data, draw: data + draw.choice((b"\0", b"{}", b"\n\n", b"x", data, b"\xff" * 100)),
    "spliced": _splice,
    "random bytes": lambda data, draw: draw.randbytes(draw.choice((0, 1, 2, 100, 5000))),
    "a value replaced": _structure(_replace),
    "a value removed": _structure(_remove),
    "a value doubled": _structure(_double),
    "a type swapped": _structure(_swap),
    "a key renamed": _structure(_rename),
    "a number changed": _structure(_scale),
}


# Honest files


def _trace() -> Trace:
    tensors = tuple(Tensor(f"layer{i}.weight", 1000 * (i + 1), 1e-3) for i in range(5))
    return Trace("small", "a CPU", 32, "float32", 4e-3, tensors, source="made up")


def _network() -> Network:
    lines = {"ring": LinearCost(1e-4, 1e-9), "ring+onebit": LinearCost(2e-4, 1e-10, 1e-5)}
    curve = Curve(1e-10, 1e-5, 2e-5)
    codecs = {"onebit": CodecCurves(0.03, curve, curve, curve, 64.0), "sparse": CodecCurves(0.01, curve, curve)}
    return Network(4, 1e-5, 1e-9, 1e-10, lines, codecs, "links", "made up")


def _plan() -> Any:
    from penstock.cost.ways import ways_for

    return predict(_trace(), find_planner("exact"), ways_for(_network(), ["ring"], [], [1], 4), 4)


def _run() -> RunRecord:
    plan, line = _plan(), CodecLine(1e-5, 1e-10)
    return RunRecord(
        "onebit, exact plan", "chars", "bits per character", 4, "gloo", "a CPU", "loopback", "onebit", "exact", "ring",
        {"cpu": "one", "cores": 2}, {"penstock": "1", "torch": "2"},
        tuple(Step(i, 0.1 * i, 3.0 / i) for i in range(1, 6)), (Evaluation(0, 0.0, 5.0), Evaluation(5, 0.5, 2.0)),
        0.1, 0.05, 0.02, 0.03, 1000.0, 2e4, 6e5, plan, _trace(), _network(), CodecCost(0.03, line, line),
        (RouteUse("ring+onebit", 2, 1000, 300),), plan.timeline, plan.timeline,
    )  # fmt: skip


def _make_runs(place: Path) -> None:
    for name in ("stock", "onebit"):
        (place / name).mkdir()
        save_run(_run(), place / name / "run.json")


def _make_program(strategy: str, coded: bool) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        program = (
            compressed_program(strategy, 3, 12, Options()) if coded else build("all_reduce", strategy, 3, 12, Options())
        )
        save_program(program, place / "program.json")

    return make


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def _exchange(rank: int) -> dict[str, Any]:
    memories = {"residual": {name: value.detach().clone() for name, value in _MODEL[0].named_parameters()}}
    return {
        "format": "penstock-exchange/2", "rank": rank, "world_size": 2, "iterations": 3, "scale": 1.0,
        "memories": memories,
    }  # fmt: skip


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model after a step, so that its optimizer has a state; in every process the same."""
    torch.manual_seed(20)
    model, optimizer = _model()
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


_MODEL = _trained()


def _make_checkpoint(place: Path) -> None:
    model, optimizer = _MODEL
    seed_everything(20)
    history = History()
    history.add_steps(1, [1.0, 0.5], [0.1, 0.1])
    history.add_evaluation(2, 0.7)
    common = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "history": history.state()}
    digests = {MODEL: write_state(place / MODEL, common)}
    for rank in range(2):
        own = {"exchange": _exchange(rank), "random": random_state()}
        digests[rank_file(rank)] = write_state(place / rank_file(rank), own)
    write_saved(Saved(place, 2, 0.2, 2, Job(), _plan(), _trace(), _network()), digests)


def _seal_checkpoint(place: Path, head: str = HEAD.file) -> None:
    names = [head, MODEL, *(rank_file(rank) for rank in range(2))]
    lines = (f"{hashlib.sha256((place / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    (place / SUMS).write_text("".join(lines))


def _seal_training(place: Path) -> None:
    _seal_checkpoint(place / "step-00000002", TRAINING.file)


def _read_checkpoint(place: Path) -> None:
    """Read a checkpoint and put everything back as a worker does; what is random is left as it was."""
    saved = find_checkpoint(str(place))
    saved.job.check()
    common = load_common(saved, torch.device("cpu"))
    own = [load_own(saved, rank) for rank in range(saved.world_size)]
    model, optimizer = _model()
    before = random_state()
    check_model(saved.path / MODEL, model, common["model"])
    check_optimizer(saved.path / MODEL, "optimizer", optimizer, common["optimizer"])
    with fitting(saved.path / MODEL):
        model.load_state_dict(common["model"])
        optimizer.load_state_dict(common["optimizer"])
        History().load(common["history"])
    _check_exchange([each["exchange"] for each in own])
    try:
        with fitting(saved.path / rank_file(0)):
            set_random_state(own[0]["random"])
    finally:
        set_random_state(before)


def _make_exchange(place: Path) -> None:
    for rank in range(2):
        write_exchange(place / file_name(rank, 2), _exchange(rank))


def _seal_exchange(place: Path) -> None:
    for path in place.glob("*.state"):
        data = path.read_bytes()[:-65]
        path.write_bytes(data + f"{hashlib.sha256(data).hexdigest()}\n".encode())


def _read_exchange(place: Path) -> None:
    _check_exchange(read_exchange(place))


def _check_exchange(states: Sequence[Mapping[str, Any]]) -> None:
    check_states(states, {name: tuple(each.shape) for name, each in _MODEL[0].named_parameters()}, TORCH)


def _make_training(place: Path) -> None:
    model, optimizer = _MODEL
    place /= "step-00000002"
    place.mkdir()
    common = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    digests = {MODEL: write_state(place / MODEL, common)}
    for rank in range(2):
        digests[rank_file(rank)] = write_state(place / rank_file(rank), {"exchange": _exchange(rank)})
    write_json(place / TRAINING.file, {"format": TRAINING.format, "step": 2, "world_size": 2})
    write_digests(place, TRAINING.file, digests)


def _read_training(place: Path) -> None:
    """Go on from a checkpoint of a script, alone; the exchange's state is compared with the model, and not kept."""
    _join_alone()
    model, optimizer = _model()
    wrapper = SimpleNamespace(module=model, load_exchange_state_dict=_check_exchange)
    Checkpoints(place, wrapper, optimizer=optimizer).load()  # all that `load` asks of it


@cache
def _join_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


@cache
def _sharded() -> tuple[Any, Any]:
    """Return a model that one rank has all of, as torch shards it, and the mesh of that rank."""
    _join_alone()
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
    return fully_shard_with(model, mesh, codec="onebit", measurements=False), mesh


def _make_sharded(place: Path) -> None:
    """Write a sharded exchange's state down, of tensors the shapes: torch writes and reads the files that hold it."""
    state = _sharded()[0].exchange_state_dict()
    shapes = {name: list(value.shape) for name, value in state[OWED[0]].items()}
    write_json(place / "state.json", {**state, OWED[0]: shapes})


def _read_sharded(place: Path) -> None:
    model, mesh = _sharded()
    try:
        state = json.loads((place / "state.json").read_bytes())
    except (ValueError, RecursionError) as error:
        raise PenstockError("no document") from error
    for kind in OWED if isinstance(state, dict) else ():
        for name, shape in state[kind].items() if isinstance(state.get(kind), dict) else ():
            with suppress(Exception):  # no shape, or a large one: the state holds what stands there
                if math.prod(shape) < 1000:
                    state[kind][name] = zeros(shape, device_mesh=mesh, placements=(Shard(0), Shard(1)))
    model.load_exchange_state_dict(state)


def _make_sources(place: Path) -> None:
    for path in _ALGORITHMS.glob("*.cll"):
        shutil.copy(path, place)


def _read_sources(place: Path) -> None:
    """Compile the source that was changed; all others are as they were shipped."""
    for path in sorted(place.glob("*.cll")):
        if path.read_bytes() != (_ALGORITHMS / path.name).read_bytes():
            compile_file(path)
            load_compiled(path, {}, place)


def _read_compiled(place: Path) -> None:
    load_compiled(_ALGORITHMS / "bf16.cll", {}, place)


def _seal_compiled(place: Path) -> None:
    for path in place.glob("*.program"):
        text = path.read_bytes().partition(b"\n")[2]
        path.write_bytes(b"penstock-program/1 %s\n%s" % (hashlib.sha256(text).hexdigest().encode(), text))


def _make_kernels(place: Path) -> None:
    _use_kernels(place)


def _use_kernels(place: Path) -> None:
    """Encode by kernels that a new process would take from this folder."""
    import numpy as np

    from penstock.compll.backends.numba.backend import NumbaKernels

    program = load_compiled(_ALGORITHMS / "bf16.cll", {}, place)
    payload = NumbaKernels(program, cache_dir=place).encode(np.ones(7, np.float32), {})
    assert payload.tobytes() == b"\x80\x3f" * 7


OPTIONS = (
    "ring+terngrad(bitwidth=2)/4", "topk(density=0.01)", "sparse(density=0.5, value_bits=16)", "1gbit,100mbit", "5ms",
    "hierarchical(ranks_per_node=4, outer=gtopk)", "parameter_server(servers=2, dedicated=true)",
    "blocks(bits=4,block=7)",
)  # fmt: skip


def _make_note(place: Path) -> None:
    (place / "n").write_text('{"pid": 1}')


def _make_options(place: Path) -> None:
    for number, text in enumerate(OPTIONS):
        (place / f"option-{number}.txt").write_text(text)


def _read_options(place: Path) -> None:
    """Read texts of the command line and of plans by everything that reads such; only what fits none is refused."""
    for number, honest in enumerate(OPTIONS):
        text = (place / f"option-{number}.txt").read_bytes().decode(errors="replace")
        if text == honest:
            continue
        readers: tuple[Callable[[str], object], ...] = (
            parse_route, parse_spec, parse_strategy, make_codec, parse_delay, lambda each: parse_rates(each, 2),
        )  # fmt: skip
        for read in readers:
            try:
                read(text)
            except PenstockError as error:
                if "\n" in str(error).replace(text, ""):
                    raise


def _command(*words: str) -> Callable[[Path], None]:
    """Return what calls `penstock` in a folder; exit code 1 says that something is not proved."""

    def call(place: Path) -> None:
        try:
            app([word.replace("@", str(place)) for word in words], standalone_mode=False)
        except typer.Exit as ended:
            if ended.exit_code not in (0, 1):
                raise

    return call


def _each(read: Callable[[Path], object], pattern: str = "*.json") -> Callable[[Path], None]:
    def read_all(place: Path) -> None:
        for path in sorted(place.glob(pattern)):
            read(path)

    return read_all


def _csv(place: Path) -> None:
    rows = "".join(f"layer{i},{100 * (i + 1)},{i}.5\n" for i in range(5))
    (place / "trace.csv").write_text(f"name,numel,backward_ms\n{rows}")


def _both(place: Path) -> None:
    save_trace(_trace(), place / "trace.json")
    save_network(_network(), place / "network.json")


FORMATS = (
    Format("trace", lambda place: save_trace(_trace(), place / "trace.json"), _each(load_trace), 8),
    Format("trace as CSV", _csv, _each(load_trace, "*.csv"), 8),
    Format("network, codec curves", lambda place: save_network(_network(), place / "n.json"), _each(load_network), 8),
    Format("plan and timeline", lambda place: save_plan(_plan(), place / "plan.json"), _each(load_plan), 8),
    Format("program", _make_program("ring", False), _each(load_program), 5),
    Format("program with a codec", _make_program("gtopk", True), _each(load_program), 5),
    Format("program, proved", _make_program("ring", False), _command("verify", "@/program.json"), 1.5),
    Format("program with a codec, proved", _make_program("gtopk", True), _command("verify", "@/program.json"), 1.5),
    Format("run record", lambda place: save_run(_run(), place / "run.json"), _each(load_run), 8),
    Format("trace and network, planned", _both, _command("plan", "@/trace.json", "--network", "@/network.json"), 2),
    Format("run records, reported", _make_runs, _command("report", "@"), 2),
    Format("measurement cache", lambda place: save_network(_network(), place / "n.json"),
           _each(lambda path: load_kept(path, 4)), 5),
    Format("checkpoint", _make_checkpoint, _read_checkpoint, 10, _seal_checkpoint),
    Format("checkpoint of a script", _make_training, _read_training, 8, _seal_training),
    Format("exchange state", _make_exchange, _read_exchange, 5, _seal_exchange),
    Format("exchange state, sharded", _make_sharded, _read_sharded, 4),
    Format("compressor source", _make_sources, _read_sources, 6),
    Format("compiled program", _read_compiled, _read_compiled, 2, _seal_compiled),
    Format("kernels", _make_kernels, _use_kernels, 0.5),
    Format("bench record", lambda place: save_record(make_record("x", [{"a": 1}]), place / "r.json"),
           _each(load_record), 5),
    Format("emulated cluster's note", _make_note,
           lambda place: _holder_lives(place / "n"), 3),
    Format("options as text", _make_options, _read_options, 5),
)  # fmt: skip
