"""What profiling costs: `penstock bench profile`, results kept beside this file."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "profile", "--out", "benchmarks/results/profile_cpu.json"]
    main()
