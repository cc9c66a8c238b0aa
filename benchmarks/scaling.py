"""What more hosts do: `penstock bench scaling`, results kept beside this file."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "scaling", "--out", "benchmarks/results/scaling.json"]
    main()
