"""`penstock check`: will it pay for this model, on this network? Five lines and a picture, within a minute."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import JsonOption, complete_tasks, completing

if TYPE_CHECKING:
    from penstock.network import Network
    from penstock.planning.worth import Worth
    from penstock.trace import Trace

DEADLINE_SECONDS = 60.0  # under a launcher from when torch is imported
FASTEST = 1_600 * 10**9  # bits per second, of --rate
FAST = 50 * 10**9  # bits per second: from here on networks with startups of FAST_LATENCY are usual
LATENCY, FAST_LATENCY = "50us", "10us"


def check(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="FILE.py:function, package.module:function, a name of ours, or a trace",
            autocompletion=complete_tasks,
        ),
    ] = "gpt2",
    workers: Annotated[int | None, typer.Option(help="alone: how many there would be; default 8", min=2)] = None,
    rate: Annotated[
        str | None, typer.Option(help="alone: of each network card, up to 1.6tbit, or none; default 10gbit")
    ] = None,
    latency: Annotated[
        str | None, typer.Option(help="alone: of one message; default 50us, from 50gbit on 10us")
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(
            help="adamw, adam, sgd or other; default: the task's own, for a trace adamw",
            autocompletion=completing(lambda: ("adamw", "adam", "sgd", "other")),
        ),
    ] = "",
    batch: Annotated[int, typer.Option(help="samples per worker; default: the model's own", min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    input_shape: Annotated[str, typer.Option(help="of one sample, where the function returns a bare module")] = "",
    seconds: Annotated[float, typer.Option(help="about how long to measure", min=2.0, max=50.0)] = 30.0,
    json: JsonOption = False,
) -> None:
    """Say whether penstock would pay: alone by prediction, under torchrun or mpirun from real iterations."""
    from penstock.cli.options import parse_counts
    from penstock.cli.worker_processes import is_worker
    from penstock.planning.worth import check_optimizer

    if optimizer:
        check_optimizer(optimizer)
    shape = tuple(parse_counts(input_shape, "--input-shape")) if input_shape else ()
    given = {"--workers": workers, "--rate": rate, "--latency": latency}
    if launched := is_worker():
        _check_launch(given)
        from penstock.bench.check_job import measured_worth  # before the clock starts: from a slow disk it takes long
    with _deadline():
        if launched:
            found = measured_worth(model, shape, optimizer, batch, device, seconds)
            about = "" if found is None else f"measured on {found.trace.device}"
        else:
            network = described_by(workers or 8, rate or "10gbit", latency)  # before anything is profiled
            trace, about, name, step_seconds = _profiled(model, shape, optimizer, batch, device, seconds / 2)
            found = predicted(trace, network, name, step_seconds, seconds / 2)
    if found is not None:  # on the first worker
        _print(found, about, json)


@contextmanager
def _deadline() -> Iterator[None]:
    timer = Timer(DEADLINE_SECONDS, _give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up() -> None:
    """End this process at the deadline, whatever it waits for."""
    print(
        f"penstock: check: no answer after {DEADLINE_SECONDS:g} s; wanted iterations of a few seconds at most: try a "
        "smaller --batch, and look whether the machine is busy with something else",
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)


def _check_launch(described: dict[str, int | str | None]) -> None:
    """Refuse a job of one worker, and a network that is described where it can be measured."""
    from penstock.errors import PenstockError
    from penstock.runtime.launch import place_of

    if place_of(os.environ).world_size == 1:
        raise PenstockError("one worker sends nothing; start two or more, or run `penstock check` alone")
    if given := [name for name, value in described.items() if value is not None]:
        raise PenstockError(
            f"{given[0]}: workers that a launcher started are counted, and their network is measured; leave it out, "
            "or run `penstock check` alone"
        )


def described_by(workers: int, rate: str, latency: str | None = None) -> "Network":
    """Return the network that options describe."""
    from penstock.cluster.topology import parse_delay, parse_rate
    from penstock.planning.worth import described_network

    bits_per_second = parse_rate(rate, FASTEST)
    fast = bits_per_second is None or bits_per_second >= FAST
    return described_network(workers, bits_per_second, parse_delay(latency or (FAST_LATENCY if fast else LATENCY)))


def predicted(
    trace: "Trace", network: "Network", optimizer: str, step_seconds: float | None = None, seconds: float = 1.0
) -> "Worth":
    """Predict for workers that are not here; codecs are measured for so long where the model computes on processors."""
    from dataclasses import replace

    from penstock.exchange.compression import AUTO_CODECS
    from penstock.planning.worth import described_routes, with_gpus, worth

    if on_gpu := not _is_processor(trace.device):
        network = with_gpus(network)
    else:
        from penstock.runtime.measure_codecs import measure_codecs

        network = replace(network, codecs=measure_codecs(AUTO_CODECS, seconds=min(1.0, seconds / len(AUTO_CODECS))))
    return worth(trace, network, described_routes(on_gpu), optimizer, step_seconds=step_seconds)


def _profiled(
    model: str, shape: tuple[int, ...], optimizer: str, batch: int, device: str, seconds: float
) -> "tuple[Trace, str, str, float | None]":
    """Return a trace, what it is of, the optimizer and its step's seconds.

    That is a file, a profile of this machine, or where it has no GPU a shipped trace of another one.
    """
    from penstock.errors import PenstockError
    from penstock.task_names import task_of_ours
    from penstock.traces import find_trace, is_shipped

    if model.endswith((".json", ".csv")):
        trace = find_trace(model)
        return trace, f"trace {model} of {trace.device}", optimizer or "adamw", None
    task_of_ours(model)  # refuses a misspelt one at once: importing torch takes seconds
    if is_shipped(model) and device == "auto" and not _has_gpu():
        trace = find_trace(model)
        if batch:
            raise PenstockError(
                f"--batch: the shipped trace of {model} has batch {trace.batch}, and there is no GPU here to profile "
                "another one; leave it out, or profile on this processor with --device cpu"
            )
        return trace, shipped_about(trace), optimizer or "adamw", None
    from penstock.bench.check_job import profiled

    trace, name, step_seconds = profiled(model, shape, optimizer, batch, device, seconds)
    return trace, f"profiled here on {trace.device}", name, step_seconds


def _with_article(device: str) -> str:
    """Return a device's name with its article: letters that are spelt out begin with a vowel's sound.

    >>> _with_article("H200")
    'an H200'
    """
    return f"{'an' if device[:1] in 'AEFHILMNORSX8' else 'a'} {device}"


def _has_gpu() -> bool:
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return torch.cuda.is_available()


def _is_processor(device: str) -> bool:
    """Return whether a trace's device is a processor: `penstock profile` names those with their threads."""
    return "thread" in device or device.lower().startswith("cpu")


def _print(found: "Worth", about: str, json: bool) -> None:
    from penstock.cli.output import print_json, print_lines

    if json:
        print_json(_document(found))
        return
    print_lines("\n".join(shown(found, about)))
    print_lines(f"\nmodel: {found.trace.source}")
    if found.stock_sample is None:
        print_lines(_assumptions(found))


def shown(found: "Worth", about: str) -> list[str]:
    """Return what is printed: what was asked, five lines, a picture."""
    trace, network = found.trace, found.network
    where = network.name if found.stock_sample is None else f"{network.workers} workers, network measured"
    return [f"{trace.model}, batch {trace.batch}: {about}; {where}", "", *found.lines(), "", *found.picture()]


def shipped_about(trace: "Trace") -> str:
    """Return what a shipped trace is of."""
    return f"trace of {_with_article(trace.device.removeprefix('NVIDIA '))}, not your GPU"


def _assumptions(found: "Worth") -> str:
    """Say what a prediction rests on."""
    if _is_processor(found.trace.device):
        rest = "codecs: measured here; sums at 10 GB/s"
    else:
        rest = "codecs and sums: assumed, two to four passes over a GPU's memory at 1 TB/s"
    return f"network: {found.network.source}\n{rest}\n`torchrun ... -m penstock check` measures all of it"


def _document(found: "Worth") -> dict[str, object]:
    return {
        "model": found.trace.model,
        "workers": found.network.workers,
        "optimizer": found.optimizer,
        "measured": found.stock_sample is not None,
        "spread": found.spread,
        "stock_seconds": found.stock_seconds,
        "waiting_seconds": found.waiting_seconds,
        "merged_seconds": found.seconds_of(found.merged),
        "coded_seconds": {codec: found.seconds_of(plan) for codec, plan in found.coded.items()},
        "not_measured_at_least_seconds": dict(found.bounds),
        "advised_seconds": found.advised_seconds,
        "answer": found.verdict,
        "codec": found.codec,
        "write": found.code,
    }
