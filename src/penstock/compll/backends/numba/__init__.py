"""numba."""
