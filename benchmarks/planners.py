"""How long planning takes: `penstock bench planners`, results kept beside this file."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "planners", "--out", "benchmarks/results/planners.json"]
    main()
