"""`penstock verify`: proves a strategy's program, counts what it costs and draws it."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import JsonOption, PictureOption, complete_strategies
from penstock.errors import StrategyError

MOST_WORKERS = 1024  # a ring of so many sends two million messages, which are all held in memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.program import Program
    from penstock.strategies import Options
    from penstock.verify import Proof
    from penstock.verify.summary import Summary


def verify(
    name: Annotated[
        str,
        typer.Argument(
            help="a strategy, such as ring, or a penstock-program/1 .json; with --plan, a trace",
            autocompletion=complete_strategies,
        ),
    ] = "",
    workers: Annotated[int, typer.Option(help="world size", min=1, max=MOST_WORKERS)] = 4,
    operation: Annotated[
        str, typer.Option(help="all_reduce, broadcast, reduce, reduce_scatter or all_gather")
    ] = "all_reduce",
    numel: Annotated[int, typer.Option(help="elements of the tensor", min=0)] = 65536,
    itemsize: Annotated[int, typer.Option(help="bytes of one element", min=1)] = 4,
    root: Annotated[int, typer.Option(help="of a broadcast or reduce", min=0)] = 0,
    block_numel: Annotated[int, typer.Option(help="elements of a block; 0: the strategy's default", min=0)] = 0,
    partitions: Annotated[int, typer.Option(help="of a parameter server; 0: one per aggregator", min=0)] = 0,
    servers: Annotated[int, typer.Option(help="ranks at the end that aggregate; 0: every rank", min=0)] = 0,
    dedicated: Annotated[
        bool, typer.Option("--dedicated", help="servers only aggregate, and contribute nothing")
    ] = False,
    ranks_per_node: Annotated[int, typer.Option(help="hierarchical: size of a node", min=1)] = 2,
    nodes: Annotated[str, typer.Option(help="hierarchical: ranks of each node instead: 0,2,3/1,4")] = "",
    inner: Annotated[str, typer.Option(help="hierarchical: strategy inside a node")] = "spanning_tree",
    outer: Annotated[str, typer.Option(help="hierarchical: strategy between nodes")] = "ring",
    codec: Annotated[str, typer.Option(help="compress all messages of an all-reduce, with onebit or another")] = "",
    plan: Annotated[
        str, typer.Option(metavar="FILE", help="prove this penstock-plan/1 file in lanes, NAME being its trace")
    ] = "",
    list_: Annotated[bool, typer.Option("--list", help="name all strategies")] = False,
    program: Annotated[bool, typer.Option("--program", help="print the instructions")] = False,
    out: Annotated[str, typer.Option(metavar="FILE", help="write the program here as JSON")] = "",
    picture: PictureOption = "",
    json: JsonOption = False,
) -> None:
    """Prove that a strategy does what it promises, for a world size; exits with 1 where it does not."""
    from penstock.program.document import save_program
    from penstock.strategies import Options
    from penstock.verify import verify as prove
    from penstock.verify.summary import summarise

    if list_:
        _list(json)
        return
    if plan:
        _verify_plan(plan, name, json)
        return
    options = Options(
        block_numel or None,
        root,
        partitions or None,
        servers or None,
        dedicated,
        ranks_per_node,
        _plain(inner),
        _plain(outer),
        _nodes(nodes),
    )
    subject = _subject(name, operation, workers, numel, options, bool(codec))
    proof = prove(subject)
    summary = summarise(subject, proof.steps, itemsize, _payload_nbytes(codec))
    if out:
        save_program(subject, out)
    if picture:
        from penstock.report.program_picture import draw_program

        draw_program(subject, proof, picture)
    if json:
        from penstock.cli.output import print_json

        print_json(_document(subject, proof, summary, itemsize))
    else:
        _print(subject, proof, summary, show_program=program)
    if not proof.proved:
        raise typer.Exit(1)


def _verify_plan(path: str, trace_name: str, as_json: bool) -> None:
    """Prove the iteration that a plan is, whenever its buckets become ready."""
    from penstock.cli.output import print_json, print_lines
    from penstock.plan import load_plan
    from penstock.program.composition import LANES
    from penstock.runtime.request import plan_composition
    from penstock.traces import find_trace
    from penstock.verify import verify as prove

    plan = load_plan(path)
    trace = find_trace(trace_name or plan.model)
    plan.check_against(trace)
    proof = prove(plan_composition(plan, {tensor.name: tensor.numel for tensor in trace.tensors}))
    found = {
        "plan": plan.hash,
        "workers": plan.workers,
        "messages": len(plan.messages),
        "lanes": LANES,
        "proved": proof.proved,
        "findings": [str(finding) for finding in proof.findings],
    }
    if as_json:
        print_json(found)
    else:
        said = "proved" if proof.proved else f"NOT PROVED: {proof.findings[0]}"
        whole = f"{len(plan.messages)} messages in {LANES} lanes on {plan.workers} workers"
        print_lines(f"plan {plan.hash}, {whole}, whenever gradients become ready: {said}")
    if not proof.proved:
        raise typer.Exit(1)


def _nodes(text: str) -> tuple[tuple[int, ...], ...] | None:
    """Read `0,2,3/1,4`: two nodes, of ranks 0, 2, 3 and of 1, 4; nothing where nothing is said."""
    if not text:
        return None
    nodes = [node.split(",") for node in text.split("/")]
    if not all(rank.strip().isdecimal() for node in nodes for rank in node):
        raise StrategyError(f"--nodes {text}: wanted ranks, and a / between nodes, as in 0,2,3/1,4")
    return tuple(tuple(map(int, node)) for node in nodes)


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _list(as_json: bool) -> None:
    from penstock.cli.output import print_json, print_table
    from penstock.program import Collective
    from penstock.strategies import STRATEGIES

    by_operation = {
        one.value: [each.name for each in STRATEGIES.values() if one in each.builders] for one in Collective
    }
    if as_json:
        print_json(by_operation)
        return
    every = dict.fromkeys(name for known in by_operation.values() for name in known)
    rows = [[name, *("yes" if name in known else "" for known in by_operation.values())] for name in every]
    print_table("strategies", ("strategy", *by_operation), rows)


def _payload_nbytes(codec: str) -> "Callable[[int], int] | None":
    if not codec:
        return None
    from penstock.codecs.registry import make_codec

    return make_codec(codec).max_nbytes


def _subject(name: str, operation: str, workers: int, numel: int, options: "Options", compressed: bool) -> "Program":
    from penstock.program.document import load_program
    from penstock.strategies import build, compressed_program

    if not name:
        raise StrategyError("no strategy named; say which, as in `penstock verify ring`, or ask with --list")
    if compressed and _plain(operation) == "all_reduce" and not name.endswith(".json"):
        return compressed_program(_plain(name), workers, numel, options)
    return load_program(name) if name.endswith(".json") else build(operation, name, workers, numel, options)


def _document(program: "Program", proof: "Proof", summary: "Summary", itemsize: int) -> dict[str, Any]:
    return {
        "strategy": program.strategy,
        "operation": program.collective.value,
        "workers": program.world_size,
        "numel": program.numel,
        "itemsize": itemsize,
        "root": program.root,
        "proved": proof.proved,
        "findings": [str(finding) for finding in proof.findings],
        "steps": summary.steps,
        "messages": summary.messages,
        "bytes_per_link": summary.bytes_per_link,
        "bytes_per_nic": summary.bytes_per_nic,
        "least_steps": summary.least_steps,
        "least_bytes_per_nic": summary.least_nic_nbytes,
        "step_ratio": summary.step_ratio,
        "byte_ratio": summary.byte_ratio,
        "links": [{"source": s, "target": t, "nbytes": n} for (s, t), n in summary.link_nbytes.items()],
    }


def _print(program: "Program", proof: "Proof", summary: "Summary", show_program: bool) -> None:
    from penstock.cli.output import print_lines, print_table
    from penstock.report.program_text import draw_text

    links = len(summary.link_nbytes)
    title = f"{program.collective.value} by {program.strategy}, {program.world_size} ranks, {program.numel} elements"
    print_table(
        f"{title}: {'proved' if proof.proved else 'NOT PROVED'}",
        ("", "this program", "least possible", "ratio"),
        [
            ("steps", str(summary.steps), str(summary.least_steps), f"{summary.step_ratio:.3g}x"),
            (
                "bytes sent or received by the busiest rank",
                str(summary.bytes_per_nic),
                str(summary.least_nic_nbytes),
                f"{summary.byte_ratio:.3g}x",
            ),
            (f"bytes over the busiest of {links} links", str(summary.bytes_per_link), "", ""),
            ("messages", str(summary.messages), "", ""),
        ],
    )
    for finding in proof.findings:
        print_lines(finding)
    if show_program:
        print_lines(program)
    if proof.carried:
        print_lines(draw_text(program, proof))
        print("a > 1: the rank sends block a to rank 1 in that step; capitals or * are finished sums")
