"""Other people's work is seen, ours is not counted."""

import subprocess
import sys
from time import sleep

from penstock.bench.quiet import busy_share, process_seconds, seconds_of_others


def test_a_busy_process_is_seen_unless_it_is_ours():
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        while process_seconds().get(spinning.pid, 0.0) < 0.05:  # it spins
            sleep(0.01)
        before = after = process_seconds()
        share = busy_share(0.5)
        while after[spinning.pid] - before[spinning.pid] < 0.2:  # as soon as the other processes let it
            sleep(0.01)
            after = process_seconds()
    finally:
        spinning.kill()
        spinning.wait()
    everybody = set(after)
    assert seconds_of_others(before, after, everybody - {spinning.pid}) >= 0.2
    assert seconds_of_others(before, after, everybody) == 0.0
    assert 0 < share < 2  # about one where everybody wants to compute; the looks at both clocks may be apart


def test_a_process_that_started_meanwhile_counts_from_its_start():
    assert seconds_of_others({1: 5.0}, {1: 6.0, 2: 3.0, 3: 9.0}, ours={3}) == 4.0
