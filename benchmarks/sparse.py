"""Sparse all-reduces and the dense ring on emulated hosts: `penstock bench sparse`, results kept beside this file."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "sparse", "--out", "benchmarks/results/sparse.json"]
    main()
