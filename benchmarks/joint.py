"""Is `joint` as fast as the best of twenty hand-made configurations: `penstock bench joint`, results beside this."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "joint", "--out", "benchmarks/results/joint.json"]
    main()
