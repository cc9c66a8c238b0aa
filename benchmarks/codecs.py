"""Codecs beside the same algorithms in torch: `penstock bench codecs`, results kept beside this file."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    device = "cuda" if "--device=cuda" in sys.argv or "cuda" in sys.argv else "cpu"
    sys.argv[1:1] = ["bench", "codecs", "--out", f"benchmarks/results/codecs_{device}.json"]
    main()
