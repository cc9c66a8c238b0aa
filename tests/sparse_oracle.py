"""Sparse exchange written down naively, in float64 over whole vectors: what the codec and the programs must equal."""

import numpy as np


def keep_largest(values, count):
    """Return `values` with all but the `count` largest magnitudes set to 0; among equals the first are kept."""
    order = np.argsort(-np.abs(values), kind="stable")[:count]
    kept = np.zeros_like(values)
    kept[order] = values[order]
    return kept


def dyadic(rng, shape, bits=6):
    """Return random multiples of 1/8 that are exact in float32, and of which many are equal or zero."""
    return rng.integers(-(1 << bits), 1 << bits, shape).astype(np.float32) / 8
