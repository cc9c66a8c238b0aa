"""A port of this machine where workers can meet."""

import random
import socket

from penstock.errors import ClusterError

RANGE = (20000, 32768)  # from 32768 on, Linux gives ports to whoever connects: one that is free now may soon not be
TRIES = 100


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that nobody listens at, and that nobody is given who does not ask for it by number.

    Between this look and the workers' first meeting seconds pass on a busy machine. At random, so that two programs
    that look at the same time do not find the same one.
    """
    for _ in range(TRIES):
        port = random.SystemRandom().randrange(*RANGE)
        with socket.socket() as listener:
            try:
                listener.bind((address, port))
            except OSError:
                continue
            return port
    raise ClusterError(
        f"{TRIES} ports of {address} between {RANGE[0]} and {RANGE[1]} are all in use; stop some program"
    )
