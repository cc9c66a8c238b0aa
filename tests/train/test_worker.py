"""Workers of a job: what their record says of the codec, and how long they wait for one another."""

import os
import subprocess
import sys

import pytest

from penstock.cluster.processes import Outcome, free_port
from penstock.curves import CodecCurves, Curve
from penstock.network import Network
from penstock.plan import Bucket, Plan
from penstock.train.events import drop_event
from penstock.train.start_workers import Output
from penstock.train.worker import _codec_cost

CURVES = CodecCurves(0.01, Curve(2e-10, 1e-5), Curve(1e-10, 3e-5))
NETWORK = Network(4, 1e-4, 1e-9, 1e-10, codecs={"sparse(density=0.1)": CURVES})


def plan(*codecs):
    buckets = tuple(Bucket((f"t{i}",), 4 << i, "ring", codec) for i, codec in enumerate(codecs))
    return Plan("toy", 4, "exact", buckets)


def test_a_sparse_codec_s_cost_is_found():
    cost = _codec_cost(NETWORK, plan("sparse(density=0.1)", None))
    assert cost.ratio == 0.01
    assert cost.encode.seconds_per_byte == 2e-10
    assert cost.decode.seconds_per_byte == pytest.approx(1e-8)  # of compressed bytes


@pytest.mark.parametrize("codecs", [("onebit",), (None,), ("sparse(density=0.1)", "onebit")])
def test_there_is_none_where_nobody_measured_the_codec_of_most_bytes(codecs):
    assert _codec_cost(NETWORK, plan(*codecs)) is None


def test_torchs_own_wrapper_has_no_plan_and_no_codec():
    assert _codec_cost(NETWORK, None) is None


def test_an_exit_code_that_no_signal_has_is_said_as_it_is():
    assert Output(drop_event).complaint(Outcome(255, 1, 0.1)) == "rank 1 ended with exit code 255: it printed nothing"


def test_ranks_of_a_job_wait_for_one_another_as_long_as_for_a_message_and_not_torchs_half_an_hour():
    code = """
import torch.distributed as dist
from penstock.train.worker import process_group
with process_group("cpu", 1):
    print(dist.group.WORLD._get_backend(dist.group.WORLD._device_types[0]).options._timeout)
"""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | place)
    assert result.stdout.strip() == "0:05:00", result.stderr
