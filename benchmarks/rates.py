"""What slower and faster links do: `penstock bench rates`, results kept beside this file."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "rates", "--out", "benchmarks/results/rates.json"]
    main()
