"""The real thing: programs on actual tensors, over memory, torch.distributed or MPI."""
