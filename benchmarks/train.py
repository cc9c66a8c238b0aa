"""How fast training is, stock DDP and its hooks beside us: `penstock bench train`, results kept beside this file."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "train", "--out", "benchmarks/results/train.json"]
    main()
