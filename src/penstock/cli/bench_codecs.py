"""`penstock bench codecs`: codecs beside the same algorithms in torch, and beside a copy."""

from typing import Annotated, Any

import typer

from penstock.cli.options import JsonOption, RecordOption


def bench_codecs(
    device: Annotated[str, typer.Option(help="cpu (one core) or cuda")] = "cpu",
    nbytes: Annotated[
        int, typer.Option(help="of the float32 gradient; default 64 MB on cpu, 256 MB on cuda", min=0)
    ] = 0,
    rounds: Annotated[int, typer.Option(help="turns of each implementation", min=1)] = 25,
    peers: Annotated[str, typer.Option(help="eager, compiled, both with a comma between, or none")] = "eager,compiled",
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Time encode, decode and decode-and-add; peers take turns with us in the same run."""
    from rich.progress import track

    from penstock.bench.codec_times import NBYTES, Settings, codec_rows, every_case
    from penstock.bench.record import make_record, save_record
    from penstock.cli.output import print_json, stderr_console

    implementations = parse_peers(peers)
    check_device(device)
    settings = Settings(device, nbytes or NBYTES[device], rounds, implementations, every_case())
    total = len(settings.cases)
    rows = list(track(codec_rows(settings), "codecs", total, console=stderr_console(), transient=True))
    if json:
        print_json(rows)
    else:
        _print(rows)
    if out:
        save_record(make_record("codecs", rows, device=device_name(device)), out)


def parse_peers(text: str) -> tuple[str, ...]:
    """Return the implementations to time, ours first."""
    from penstock.errors import PenstockError

    chosen = [part.strip() for part in text.split(",") if part.strip() and part.strip() != "none"]
    if not set(chosen) <= {"eager", "compiled"}:
        raise PenstockError(f"--peers: found {text!r}; wanted eager, compiled, eager,compiled or none")
    return ("penstock", *chosen)


def check_device(device: str) -> None:
    """Raise unless there is such a device here."""
    import torch

    from penstock.errors import PenstockError

    if device not in ("cpu", "cuda"):
        raise PenstockError(f"--device: found {device!r}; wanted cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise PenstockError("--device cuda: torch sees no GPU here; use --device cpu")


def device_name(device: str) -> str:
    """Return what the device calls itself."""
    import torch

    from penstock.machine import processor

    return torch.cuda.get_device_name() if device == "cuda" else processor()


def _print(rows: list[dict[str, Any]]) -> None:
    from penstock.cli.output import format_seconds, print_table

    ours = {(row["codec"], row["operation"]): row["seconds"] for row in rows if row["implementation"] == "penstock"}
    print_table(
        f"codecs on {rows[0]['device']}, {rows[0]['nbytes'] / 2**20:.0f} MB",
        ("codec", "operation", "implementation", "time", "copies", "floor", "penstock is", "spread"),
        [
            (
                row["codec"],
                row["operation"],
                row["implementation"],
                format_seconds(row["seconds"]),
                f"{row['seconds'] / row['copy_seconds']:.2f}",
                f"{row['floor_seconds'] / row['copy_seconds']:.2f}",
                _faster(row, ours[row["codec"], row["operation"]]),
                f"{row['spread']:.0%}",
            )
            for row in rows
            if "error" not in row
        ],
    )
    for row in rows:
        if "error" in row:
            print(f"{row['codec']} {row['operation']}, {row['implementation']}: {row['error']}")


def _faster(row: dict[str, Any], ours_seconds: float) -> str:
    return "" if row["implementation"] == "penstock" else f"{row['seconds'] / ours_seconds:.1f}x faster"
