"""Is `joint` at least as fast as the best of twenty hand-made configurations? Simulated, on published clusters.

Codec curves are measured on this machine first and kept in the record; the traces' computation is an H200's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from configurations import hand_made, joint
from penstock.bench.record import make_record, save_record
from penstock.cli.options import JsonOption, RecordOption, split_list
from penstock.cli.output import format_seconds, print_json, print_table
from penstock.cost.clusters import CLUSTERS
from penstock.curves import CodecCurves, codec_curves_document
from penstock.runtime.measure_codecs import measure_codecs
from penstock.traces import find_trace
from study import start

NETWORKS = ("gtop-k-1gbe", "mg-wfbp-v100-10gbe", "hipress-100gbps")
DENSE = "ring"
CODECS = "onebit,terngrad(bitwidth=2)"
TRACES = "vgg16,bert_base,resnet50,googlenet,lstm_ptb"


def joint_rows(
    traces: Sequence[str], curves: Mapping[str, CodecCurves], networks: Sequence[str] = NETWORKS
) -> Iterator[dict[str, Any]]:
    """Yield a row for every network and trace: the best hand-made configuration, and `joint`."""
    codecs = list(curves)
    for name in networks:
        network = replace(CLUSTERS[name], codecs=curves)
        for model in traces:
            trace = find_trace(model)
            made = {each.name: each.plan(trace, network).iteration_seconds for each in hand_made(DENSE, codecs)}
            ours = joint(DENSE, codecs).plan(trace, network)
            best = min(made, key=lambda each: made[each])
            dense = min(seconds for each, seconds in made.items() if each.endswith(f", {DENSE}"))
            routes = dict.fromkeys(str(bucket.route) for bucket in ours.buckets)
            yield {
                "network": name,
                "workers": network.workers,
                "trace": model,
                "compute_seconds": trace.compute_seconds,
                "best_dense_seconds": dense,
                "best_hand_made": best,
                "best_hand_made_seconds": made[best],
                "joint_seconds": ours.iteration_seconds,
                "joint_messages": len(ours.buckets),
                "joint_routes": ", ".join(routes),
                "joint_over_best": ours.iteration_seconds / made[best],
            }


def compare_joint(
    traces: Annotated[str, typer.Option(help="what to plan")] = TRACES,
    codecs: Annotated[str, typer.Option(help="compressors to choose from")] = CODECS,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Compare joint with twenty hand-made configurations, simulated on published clusters."""
    names = traces.split(",")
    for name in names:
        find_trace(name)
    curves = measure_codecs(split_list(codecs))
    rows = list(joint_rows(names, curves))
    if out:
        notes = {codec: codec_curves_document(each) for codec, each in curves.items()}
        save_record(make_record("joint", rows, codec_curves=notes), out)
    if json:
        print_json(rows)
        return
    print_table(
        "simulated iterations: the best of twenty hand-made configurations, and joint",
        ("network", "workers", "trace", "best dense", "best hand-made", "", "joint", "against it"),
        [
            (
                *(row[name] for name in ("network", "workers", "trace")),
                format_seconds(row["best_dense_seconds"]),
                row["best_hand_made"],
                format_seconds(row["best_hand_made_seconds"]),
                format_seconds(row["joint_seconds"]),
                f"{row['joint_over_best']:.3f}x",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    start(compare_joint)
