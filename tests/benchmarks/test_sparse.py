"""Sparse all-reduces: predictions, claims, blocks; and one small run on emulated hosts."""

import json
import subprocess
import sys
from pathlib import Path
from time import sleep

import numpy as np
import pytest

from penstock.bench.jobs import Place
from penstock.cluster import emulated_cluster
from penstock.codecs.sparse.sparse_codec import SparseCodec
from penstock.errors import ClusterError
from penstock.network import Network
from rounds import Rounds, measure_rounds, rounds_from
from runtime.threads import run_ranks
from sparse import alpha_beta_seconds, claims, floor_seconds, local_seconds
from sparse_worker import Preselected, random_block

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sparse.py"
LINK = Network(workers=16, alpha_seconds=0.0, beta_seconds_per_byte=8e-9, gamma_seconds_per_byte=0.0)


@pytest.mark.parametrize(
    ("strategy", "milliseconds"), [("topk_allgather", 120.0), ("gtopk", 64.0 + 8.0), ("gtopk_doubling", 32.0 + 8.0)]
)
def test_a_megabyte_block_on_16_hosts_at_1_gigabit_is_predicted_by_hand(strategy, milliseconds):
    found = alpha_beta_seconds(strategy, 16, 100_000_000, 1_000_000, 0.002, LINK)
    assert found == pytest.approx(milliseconds * 1e-3)


def test_the_dense_ring_is_predicted_too():
    assert alpha_beta_seconds("ring", 16, 100_000_000, None, 0.0, LINK) == pytest.approx(1.5, rel=0.01)


@pytest.mark.parametrize(
    ("strategy", "messages", "merges"), [("gtopk", (4 + 3 + 2 + 1) + (8 + 6 + 3 + 4), 30), ("gtopk_doubling", 36, 160)]
)
def test_a_prediction_adds_up_steps_as_long_as_so_many_at_once_take(strategy, messages, merges):
    at_once_messages, at_once_merges = (
        {1: 1.0, 2: 2.0, 4: 3.0, 8: 4.0, 16: 9.0},
        {1: 0.0, 2: 5.0, 4: 10.0, 8: 15.0, 16: 40.0},
    )
    at_once = Rounds(at_once_messages, at_once_merges, {4: 8.0, 3: 6.0, 2: 3.0, 1: 1.0}, 0.5)
    assert at_once.seconds(strategy, 16) == (messages, merges)
    assert rounds_from(json.loads(json.dumps(at_once.document()))) == at_once


def test_top_k_is_a_stream_of_messages_to_everybody():
    assert Rounds({}, {}, {}, 0.5).seconds("topk_allgather", 16) == (7.5, 0.0)


def test_the_floor_is_bytes_over_rate():
    assert floor_seconds("gtopk", Place(16, "1gbit"), 100_000_000, 1_000_000) == pytest.approx(0.064)
    assert floor_seconds("ring", Place(16, "1gbit"), 100_000_000, None) == pytest.approx(1.5)
    assert floor_seconds("ring", Place(16, "none"), 100_000_000, None) is None


def test_messages_and_merges_are_measured_as_many_at_once_as_programs_have():
    def rank(transport):
        return measure_rounds(transport, ("gtopk", "gtopk_doubling"), 1000, lambda: sleep(0.002))

    first, *others = run_ranks(5, rank)
    assert all(each == first for each in others)
    assert set(first.messages) == {1, 2, 4}  # one way in pairs; four only both ways
    assert all(seconds >= 0.002 for seconds in first.merges.values())
    assert set(first.merges) == {1, 2, 4}
    assert set(first.first_children) == {1, 2, 3}


def row(strategy, seconds, **more):
    fixed = {"hosts": 16, "engine": "gloo", "density": 0.005, "merges": "waited", "block_nbytes": 1_000_000}
    numbers = {"alpha_seconds": 1e-4, "beta_seconds_per_byte": 8e-9, "predicted_seconds": seconds}
    return {**fixed, **numbers, "strategy": strategy, "seconds": seconds, **more}


def test_claims_are_what_the_rows_say():
    rows = [
        row("topk_allgather", 0.12),
        row("gtopk", 0.07, predicted_seconds=0.05),
        row("gtopk_doubling", 0.05),
        row("ring", 1.4, density=None, merges=None, block_nbytes=None),
    ]
    found = {claim.text.split(",")[0]: (round(claim.value, 3), claim.holds) for claim in claims(rows)[:4]}
    assert found == {
        "gtopk over top-k": (1.714, True),
        "gtopk over the dense ring": (20.0, True),
        "doubling over tree and broadcast": (1.4, True),
        "gtopk is faster as predicted": (1.714, True),
    }
    off = [claim for claim in claims(rows) if claim.text.startswith("model off")]
    assert [(round(claim.value, 2), claim.holds) for claim in off] == [(0.0, True), (0.4, False), (0.0, True)]


def test_what_startups_decide_is_not_held_against_the_model():
    assert claims([row("gtopk", 0.1, predicted_seconds=0.01, alpha_seconds=1.0)]) == []


def test_preselected_blocks_merge_like_any_other():
    codec = SparseCodec(0.01, index_form="int32")
    blocks = [Preselected(codec, 10_000, seed) for seed in range(2)]
    write = blocks[0].block.copy()
    total = np.zeros(10_000, np.float32)
    for block in blocks:
        codec.decode_add(block.block, total)
    residual = np.zeros(10_000, np.float32)
    blocks[0].merge(blocks[1].block, write, residual)
    codec.decode_add(write, residual)
    assert np.array_equal(residual, total)
    assert not np.array_equal(random_block(codec, 10_000, 0), random_block(codec, 10_000, 1))


def test_what_a_rank_does_by_itself_is_timed():
    (found,) = local_seconds(50_000, [0.01], "smaller")
    assert found["density"] == 0.01
    assert all(found[f"{name}_seconds"] > 0 for name in ("encode", "merge", "decode", "decode_add"))


@pytest.mark.root
@pytest.mark.slow
def test_a_run_on_emulated_hosts_keeps_rows_claims_and_the_record(tmp_path):
    try:
        with emulated_cluster(hosts=1, rate="1gbit"):
            pass
    except ClusterError as error:
        pytest.skip(str(error))
    out = tmp_path / "sparse.json"
    options = "--hosts 3 --numel 100000 --rounds 1 --dense-rounds 1 --patience 0 --merges computed --json --out"
    command = [sys.executable, str(SCRIPT), *options.split(), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [one["strategy"] for one in document["rows"]] == 2 * ["topk_allgather", "gtopk", "gtopk_doubling"] + ["ring"]
    assert json.loads(out.read_text())["rows"] == document["rows"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--densities", "few"), "--densities: found 'few'; wanted numbers with commas between, as 0.001,0.005"),
        (
            ("--numel", "1000", "--merges", "guessed"),
            "merges 'guessed'; wanted computed or waited",
        ),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    command = [sys.executable, str(SCRIPT), "--hosts", "2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 2
    assert message in done.stderr
