"""What makes kernels of a program: `reference` is the meaning, `numba` and `triton` must agree with it to the bit."""
