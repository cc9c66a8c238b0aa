"""How closely emulated links hold their rate: `penstock bench links`, results kept beside this file."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "links", "--out", "benchmarks/results/links.json"]
    main()
