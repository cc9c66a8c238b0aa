"""Who should decide which message travels next: `penstock bench coordinator`, results kept beside this file."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "coordinator", "--out", "benchmarks/results/coordinator.json"]
    main()
