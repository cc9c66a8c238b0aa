"""`penstock profile`: how long each gradient of a model takes, on this machine."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import JsonOption, complete_tasks, new_file

if TYPE_CHECKING:
    from penstock.torch.profile import Profile


def profile(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="a name of the zoo, FILE.py:function or package.module:function",
            autocompletion=complete_tasks,
        ),
    ],
    out: Annotated[
        str, typer.Option(metavar="FILE", help="write the trace here (penstock-trace/1)", callback=new_file)
    ] = "",
    batch: Annotated[int, typer.Option(help="samples per iteration; default: the model's own", min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 for autocast")] = "float32",
    iterations: Annotated[int, typer.Option(help="iterations to measure", min=1)] = 20,
    warmup: Annotated[int, typer.Option(help="iterations before that", min=0)] = 5,
    input_shape: Annotated[str, typer.Option(help="of one sample, where the function returns a bare module")] = "",
    top: Annotated[int, typer.Option(help="how many of the slowest tensors to show", min=1)] = 15,
    json: JsonOption = False,
) -> None:
    """Time the forward pass and the gradient of each tensor in real training iterations, in the order they come."""
    import warnings

    from penstock.cli.options import parse_counts
    from penstock.trace import save_trace

    shape = tuple(parse_counts(input_shape, "--input-shape")) if input_shape else ()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        measured = _measure(model, shape, batch, device, dtype, iterations, warmup)
    for warning in caught:
        typer.echo(f"penstock: {warning.message}", err=True)
    _print(measured, out, top, json)
    if out:
        save_trace(measured.trace, out)


def _measure(
    model: str, shape: tuple[int, ...], batch: int, device: str, dtype: str, iterations: int, warmup: int
) -> "Profile":
    from penstock.cli.output import progress, stderr_console
    from penstock.errors import ProfileError
    from penstock.task_names import task_of_ours

    task_of_ours(model)  # refuses a misspelt one at once: importing torch takes seconds
    try:
        from penstock.zoo import find_task
        from penstock.zoo.run_task import profile_task
    except ModuleNotFoundError as error:
        raise ProfileError(f"no module {error.name!r}; profiling needs torch: pip install 'penstock[torch]'") from None

    task = find_task(model, shape)
    with progress("profiling", warmup + iterations, stderr_console().is_terminal) as done:
        return profile_task(
            task,
            device=device,
            batch=batch,
            dtype=dtype,
            iterations=iterations,
            warmup=warmup,
            on_step=partial(done, task.name),
        )


def _print(measured: "Profile", out: str, top: int, json: bool) -> None:
    from penstock.cli.output import print_json
    from penstock.trace import trace_document

    if json:
        odd = {"moved": measured.moved, "occasional": measured.occasional, "unused": measured.unused}
        spread = {
            "forward_spread_seconds": measured.forward_spread_seconds,
            "backward_spread_seconds": measured.backward_spread_seconds,
            "tensor_spread_seconds": measured.tensor_spread_seconds,
        }
        print_json(trace_document(measured.trace) | {"iterations": measured.iterations} | spread | odd)
    else:
        _print_slowest(measured, out, top)


def _print_slowest(measured: "Profile", out: str, top: int) -> None:
    from penstock.cli.output import format_seconds, print_table

    trace = measured.trace
    places = sorted(range(len(trace.tensors)), key=lambda place: -trace.tensors[place].backward_seconds)[:top]
    rows = [
        (
            place + 1,
            trace.tensors[place].name,
            trace.tensors[place].numel,
            format_seconds(trace.tensors[place].backward_seconds),
            format_seconds(measured.tensor_spread_seconds[place]),
            f"{trace.tensors[place].backward_seconds / (trace.backward_seconds or 1):.1%}",
        )
        for place in places
    ]
    forward = f"forward {_with_spread(trace.forward_seconds, measured.forward_spread_seconds)}"
    backward = f"backward {_with_spread(trace.backward_seconds, measured.backward_spread_seconds)}"
    unused = f"; no gradient: {', '.join(measured.unused)}" if measured.unused else ""
    print_table(
        f"{trace.model}, batch {trace.batch} on {trace.device}: {forward}, {backward}; "
        f"the slowest of {len(trace.tensors)} tensors",
        ("ready as", "tensor", "elements", "backward", "spread", "share"),
        rows,
        note=f"measured, {trace.source}{unused}{'; trace in ' + out if out else ''}",
    )


def _with_spread(seconds: float, spread: float) -> str:
    from penstock.cli.output import format_seconds

    return f"{format_seconds(seconds)} (spread {format_seconds(spread)})"
