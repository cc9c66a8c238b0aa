"""The CPU back end: IR to numba source (`write_numba`), compiled, kept on disk and run (`backend`)."""
