"""How much memory does a rank need: `penstock bench memory`, results kept beside this file."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "memory", "--out", "benchmarks/results/memory.json"]
    main()
