import random
import socket

import pytest

from penstock.cluster.ports import RANGE, TRIES, free_port
from penstock.errors import ClusterError


def test_a_free_port_can_be_bound_and_is_not_one_that_the_kernel_hands_out():
    with socket.socket() as listener, socket.socket() as other:
        port = free_port()
        listener.bind(("127.0.0.1", port))
        other.bind(("127.0.0.1", 0))
        assert RANGE[0] <= port < RANGE[1] <= other.getsockname()[1]


def test_a_port_in_use_is_not_chosen(monkeypatch):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        taken = holder.getsockname()[1]
        free = free_port()
        drawn = iter([taken, taken, free])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(drawn))
        assert free_port() == free


def test_where_all_are_in_use_it_is_said(monkeypatch):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        taken = holder.getsockname()[1]
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: taken)
        with pytest.raises(
            ClusterError, match=rf"{TRIES} ports of 127\.0\.0\.1 between 20000 and 32768 are all in use"
        ):
            free_port()
