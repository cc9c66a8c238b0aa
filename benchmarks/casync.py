"""What each idea of HiPress adds (its Fig. 11): `penstock bench casync`, results kept beside this file."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "casync", "--out", "benchmarks/results/casync.json"]
    main()
