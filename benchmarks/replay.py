"""Which planner is fastest, and was it predicted: `penstock bench replay`, results kept beside this file."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "replay", "--out", "benchmarks/results/replay.json"]
    main()
