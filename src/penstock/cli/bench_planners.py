"""`penstock bench planners`: how long planning takes."""

from penstock.cli.options import JsonOption, RecordOption


def bench_planners(
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Time the planners up to 100,000 tensors, and a 2,048-worker scaling study."""
    from rich.progress import track

    from penstock.bench.planners import SIZES, planner_rows, study_row
    from penstock.bench.record import make_record, save_record
    from penstock.cli.output import format_seconds, print_json, print_table, stderr_console

    total = 3 * len(SIZES) + 2
    rows = list(track(planner_rows(), "planners", total, console=stderr_console(), transient=True))
    rows.append(study_row())
    record = make_record("planners", rows)
    if out:
        save_record(record, out)
    if json:
        print_json(rows)
        return
    print_table(
        "planning time on one core",
        ("planner", "tensors", "median", "spread"),
        [(r["planner"], r["tensors"], format_seconds(r["seconds"]), format_seconds(r["spread"])) for r in rows],
    )
