"""`penstock check`: will it pay for this model, on this network? Five lines and a picture, within a minute."""

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import JsonOption

if TYPE_CHECKING:
    from penstock.curves import CodecCurves
    from penstock.planning.worth import Worth
    from penstock.trace import Trace


def check(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="FILE.py:function, package.module:function, a name of ours, or a trace"),
    ] = "gpt2",
    workers: Annotated[int, typer.Option(help="alone: how many workers there would be", min=2)] = 8,
    rate: Annotated[str, typer.Option(help="alone: of each network card, such as 10gbit")] = "10gbit",
    latency: Annotated[str, typer.Option(help="alone: of one message, such as 30us")] = "50us",
    optimizer: Annotated[str, typer.Option(help="adamw, adam, sgd or other: which codecs are safe")] = "adamw",
    batch: Annotated[int, typer.Option(help="samples per worker; default: the model's own", min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    input_shape: Annotated[str, typer.Option(help="of one sample, where the function returns a bare module")] = "",
    seconds: Annotated[float, typer.Option(help="about how long to measure", min=2.0)] = 30.0,
    json: JsonOption = False,
) -> None:
    """Say whether penstock would pay: alone by prediction, under torchrun or mpirun from real iterations."""
    from penstock.cli.options import parse_counts
    from penstock.cli.worker_processes import is_worker
    from penstock.planning.worth import check_optimizer

    check_optimizer(optimizer)
    shape = tuple(parse_counts(input_shape, "--input-shape")) if input_shape else ()
    if is_worker():
        from penstock.bench.check_job import measured_worth

        found = measured_worth(model, shape, optimizer, batch, device, seconds)
    else:
        found = _described(model, shape, workers, rate, latency, optimizer, batch, device, seconds)
    if found is not None:  # on the first worker
        _print(found, json)


def _described(
    model: str,
    shape: tuple[int, ...],
    workers: int,
    rate: str,
    latency: str,
    optimizer: str,
    batch: int,
    device: str,
    seconds: float,
) -> "Worth":
    """Predict for workers that are not here, from a profile of this machine or a trace of another."""
    from dataclasses import replace

    from penstock.cluster.topology import parse_delay, parse_rate
    from penstock.errors import PenstockError
    from penstock.planning.worth import described_network, described_routes, worth

    bits_per_second = parse_rate(rate)
    if bits_per_second is None:
        raise PenstockError(f"--rate: found {rate!r}; wanted a number, as in 10gbit")
    network = described_network(workers, bits_per_second, parse_delay(latency))
    trace = _trace(model, shape, batch, device, seconds / 2)
    curves = _curves(trace, seconds / 2)
    return worth(trace, replace(network, codecs=curves), described_routes(), optimizer)


def _trace(model: str, shape: tuple[int, ...], batch: int, device: str, seconds: float) -> "Trace":
    """Return a shipped trace or a file's where there is no GPU to profile on, otherwise a profile of this machine."""
    from penstock.traces import find_trace, is_shipped

    if model.endswith((".json", ".csv")):
        return find_trace(model)
    if is_shipped(model) and device == "auto" and not batch and not _has_gpu():
        return find_trace(model)
    from penstock.bench.check_job import profiled

    return profiled(model, shape, batch, device, seconds)


def _has_gpu() -> bool:
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return torch.cuda.is_available()


def _curves(trace: "Trace", seconds: float) -> "dict[str, CodecCurves]":
    """Return what codecs cost: measured here where the model computes on this processor, assumed for GPUs."""
    from penstock.exchange.compression import AUTO_CODECS
    from penstock.planning.worth import ASSUMED_GPU_CURVES

    if not _is_processor(trace.device):
        return dict(ASSUMED_GPU_CURVES)
    from penstock.runtime.measure_codecs import measure_codecs

    return measure_codecs(AUTO_CODECS, seconds=min(1.0, seconds / len(AUTO_CODECS)))


def _is_processor(device: str) -> bool:
    """Return whether a trace's device is a processor: `penstock profile` names those with their threads."""
    return "thread" in device or device.lower().startswith("cpu")


def _print(found: "Worth", json: bool) -> None:
    from penstock.cli.output import print_json

    if json:
        coded = {codec: plan.iteration_seconds for codec, plan in found.coded.items()}
        print_json(
            {
                "model": found.trace.model,
                "workers": found.network.workers,
                "stock_seconds": found.stock_seconds,
                "waiting_seconds": found.waiting_seconds,
                "merged_seconds": found.merged.iteration_seconds,
                "coded_seconds": coded,
                "advised_seconds": found.advised.iteration_seconds,
                "codec": found.codec,
                "write": found.code,
            }
        )
        return
    trace, network = found.trace, found.network
    print(f"{trace.model}, batch {trace.batch} on {trace.device}; {network.name}\n")
    print("\n".join(found.lines()))
    print()
    print("\n".join(found.picture()))
    print(f"\nmodel: {trace.source}\nnetwork: {network.source or 'measured between these workers'}")
    if not network.all_reduce:
        measured = "measured here" if _is_processor(trace.device) else "assumed, four passes over memory at 1 TB/s"
        print(f"codecs: {measured}; `torchrun ... -m penstock check` measures all of it")
