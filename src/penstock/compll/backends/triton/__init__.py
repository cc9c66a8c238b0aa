"""The GPU back end: IR to Triton source (`write_triton`), launched on torch tensors (`backend`, `run`, `many`)."""
