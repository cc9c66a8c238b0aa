"""Programs on tensors in device memory: staged through pinned host memory, or moved by NCCL directly."""
