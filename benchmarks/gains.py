"""Does exact gain what is predicted: `penstock bench gains`, results kept beside this file."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "gains", "--out", "benchmarks/results/gains.json"]
    main()
