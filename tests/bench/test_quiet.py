"""Other people's work is seen, ours is not counted."""

import os
import subprocess
import sys
from time import sleep

from penstock.bench.quiet import busy_share, process_seconds, seconds_of_others


def test_a_busy_process_is_seen_unless_it_is_ours():
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        sleep(0.3)
        before = process_seconds()
        share = busy_share(1.0)
        after = process_seconds()
    finally:
        spinning.kill()
        spinning.wait()
    everybody = set(after)
    assert seconds_of_others(before, after, everybody - {spinning.pid}) > 0.1  # at least its share of a busy machine
    assert seconds_of_others(before, after, everybody) == 0.0
    assert 0.1 / os.cpu_count() < share <= 1.1


def test_a_process_that_started_meanwhile_counts_from_its_start():
    assert seconds_of_others({1: 5.0}, {1: 6.0, 2: 3.0, 3: 9.0}, ours={3}) == 4.0
