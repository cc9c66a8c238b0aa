import json

import pytest

from penstock.errors import FormatError
from penstock.network import LinearCost, Network
from penstock.plan import Bucket, Plan
from penstock.run_record import (
    CodecCost,
    CodecLine,
    Evaluation,
    RouteUse,
    RunRecord,
    Step,
    load_run,
    run_document,
    save_run,
)
from penstock.timeline import Span, Timeline
from penstock.trace import Tensor, Trace

TIMELINE = Timeline((Span("forward", "compute", 0.0, 0.5), Span("bucket 0", "network", 0.5, 1.0, rank=1)))
BARE = RunRecord("stock DDP", "chars", "held-out bits per character", 4, "gloo", "a CPU", "loopback")
FULL = RunRecord(
    "onebit",
    "chars",
    "held-out bits per character",
    4,
    "gloo",
    "a CPU",
    "emulated hosts, 1gbit",
    codec="onebit",
    planner="exact",
    strategy="auto",
    machine={"cpu": "x", "cores": 2, "memory_gib": 7.5},
    versions={"torch": "2.13.0"},
    steps=(Step(1, 0.5, 5.1), Step(2, 1.0, None)),
    evaluations=(Evaluation(2, 1.0, -3.9),),
    iteration_seconds=0.5,
    compute_seconds=0.3,
    hidden_seconds=0.1,
    exposed_seconds=0.2,
    samples_per_second=64.0,
    bytes_per_iteration=1000,
    dense_bytes_per_iteration=32000,
    plan=Plan("chars", 4, "exact", (Bucket(("b", "a"), 16, "ring", "onebit", 2),), timeline=TIMELINE),
    trace=Trace("chars", "a CPU", 8, "float32", 0.1, (Tensor("b", 1, 0.1), Tensor("a", 3, 0.2))),
    network=Network(4, 1e-4, 1e-9, 1e-10, {"ring": LinearCost(6e-4, 1.6e-9)}),
    codec_cost=CodecCost(0.03, CodecLine(1e-5, 1e-10), CodecLine(2e-5, 2e-10)),
    routes_used=(RouteUse("ring+onebit", 2, 4000, 130), RouteUse("native", 1, 40, 40)),
    predicted=TIMELINE,
    measured=TIMELINE,
)


@pytest.mark.parametrize("run", [BARE, FULL], ids=["bare", "full"])
def test_a_run_survives_the_round_trip(tmp_path, run):
    save_run(run, tmp_path / "run.json")
    assert load_run(tmp_path / "run.json") == run


def test_what_a_run_does_not_know_is_null():
    document = run_document(BARE)
    absent = ("codec", "planner", "plan", "trace", "network", "codec_cost", "iteration_seconds", "bytes_per_iteration")
    assert [document[name] for name in absent] == [None] * len(absent)
    assert document["timeline"] == {"predicted": None, "measured": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 0}, "workers: found 0; wanted a whole number >= 1"),
        ({"iteration_seconds": -1}, "iteration_seconds: found -1; wanted a finite number >= 0 or null"),
        ({"steps": [{"step": 1, "seconds": 0.1, "loss": "nan"}]}, "steps[0].loss: found 'nan'"),
        ({"machine": {"cpu": []}}, "machine: found {'cpu': []}; wanted an object of strings and numbers"),
        ({"plan": {"planner": "exact"}}, "plan.buckets: found nothing"),
        ({"codec_cost": {"ratio": 1}}, "codec_cost.encode: found nothing"),
        ({"timeline": {"measured": [{"name": "x"}]}}, "timeline.measured[0].start_seconds: found nothing"),
        ({"timeline": []}, "timeline: found []; wanted a JSON object"),
        ({"speed": 1}, "speed: found 1; wanted no such field"),
    ],
)
def test_a_broken_file_names_its_field(tmp_path, change, message):
    (tmp_path / "run.json").write_text(json.dumps(run_document(FULL) | change))
    with pytest.raises(FormatError, match=r"run\.json: ") as caught:
        load_run(tmp_path / "run.json")
    assert message in str(caught.value)
