"""The real thing: programs on actual tensors, over memory, torch.distributed or MPI."""

from penstock.runtime.communicator import Communicator
from penstock.runtime.executor import Prepared, prepare
from penstock.runtime.transport import Transport, Work

__all__ = ["Communicator", "Prepared", "Transport", "Work", "prepare"]
