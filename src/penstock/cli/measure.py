"""`penstock measure`: fits the network between the workers of this job."""

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import JsonOption, check_routes, complete_codecs, complete_strategies, new_file, split_list

if TYPE_CHECKING:
    from penstock.runtime.measure_network import Measurement


def measure(
    out: Annotated[
        str, typer.Option(metavar="FILE", help="write the penstock-network/1 file here", callback=new_file)
    ] = "",
    engine: Annotated[str, typer.Option(help="gloo or mpi; default: what started the workers")] = "",
    strategies: Annotated[
        str,
        typer.Option(
            help="all-reduces whose lines to measure, such as native,ring", autocompletion=complete_strategies
        ),
    ] = "native",
    codecs: Annotated[
        str,
        typer.Option(help="compressors whose curves to measure, such as onebit,dgc", autocompletion=complete_codecs),
    ] = "",
    seconds: Annotated[float, typer.Option(help="about how long to measure", min=0.1)] = 4.0,
    name: Annotated[str, typer.Option(help="the network's name in the file")] = "measured",
    json: JsonOption = False,
) -> None:
    """Measure alpha, beta, gamma, all-reduces and codecs, under torchrun, mpirun or `penstock cluster run`."""
    from penstock.cli.worker_processes import joined_transport
    from penstock.network import save_network
    from penstock.runtime.measure_network import measure_network

    routes, compressors = split_list(strategies), split_list(codecs)
    check_routes([*routes, *(f"ring+{codec}" for codec in compressors)])
    with joined_transport(engine) as transport:
        measured = measure_network(transport, name, seconds, routes, compressors)
        first = transport.rank == 0
    if not first:
        return
    _print(measured, json)
    if out:
        save_network(measured.network, out)


def _print(measured: "Measurement", json: bool) -> None:
    from penstock.cli.output import print_json, print_table
    from penstock.network import network_document

    if json:
        errors = {what: {"median": fit.median_error, "worst": fit.worst_error} for what, fit in measured.fits.items()}
        print_json(network_document(measured.network) | {"fit_errors": errors})
        return
    rows: list[tuple[object, ...]] = [
        (what, 1e6 * line.a_seconds, 1e9 * line.b_seconds_per_byte, f"{100 * fit.median_error:.1f}%", fit.points)
        for what, fit in measured.fits.items()
        for line in [fit.line]
    ]
    for what, fit in measured.fits.items():
        if fit.line.c_seconds_per_tensor:
            rows.append((f"{what}: each further tensor", 1e6 * fit.line.c_seconds_per_tensor, "", "", ""))
    for codec, curves in measured.network.codecs.items():
        for what, curve in (("encode", curves.encode), ("decode", curves.decode), ("decode and add", curves.merge)):
            rows.append((f"{codec}: {what}", 1e6 * curve.least_seconds, 1e9 * curve.seconds_per_byte, "", ""))
    title = f"network of {measured.network.workers} workers"
    print_table(title, ("what", "startup (us)", "ns per byte", "median error", "sizes"), rows)
