"""Our collectives beside gloo's and Open MPI's own: `penstock bench collectives`, results kept beside this file."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "collectives", "--out", "benchmarks/results/collectives.json"]
    main()
