"""Runs tests of this folder by name and prints how they end: `python -m conformance [-v] [FLAVOUR,...] TEST...`.

    cd tests; python -m conformance stock,ring torch/test_ddp_create_graph

-v prints what the ranks printed, tracebacks included.
"""

import sys
import time

from conformance.suites import NAMES, OURS, STOCK, Runs


def main(arguments: list[str]) -> None:
    """Run what was asked for."""
    is_verbose = "-v" in arguments
    tests = [each for each in arguments if each in NAMES]
    flavours = [each for each in arguments if each not in NAMES and each != "-v"]
    runs = Runs()
    for flavour in flavours[0].split(",") if flavours else [STOCK, *OURS]:
        for test in tests:
            start = time.monotonic()
            outcome = runs.outcome(test, flavour)
            print(f"{flavour:7} {test:75} {outcome.kind:8} {time.monotonic() - start:6.1f} s  {outcome.says[:300]!r}")
    runs.stop()
    if is_verbose:
        print(runs.log)


if __name__ == "__main__":
    main(sys.argv[1:])
