"""Measured tables with peers beside us; `penstock bench` runs them, and results are kept as JSON."""
