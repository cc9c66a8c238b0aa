"""One world for a process, made once."""

import pytest

from penstock.adaptor import current
from penstock.errors import PenstockError


def test_a_process_joins_once_and_may_leave(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(PenstockError, match=r"call init\(\) first"):
        current.rank()
    current.init()
    first = current.world()
    current.init()
    assert current.world() is first
    assert (current.rank(), current.size(), current.local_rank(), current.local_size()) == (0, 1, 0, 1)
    assert current.is_initialized()
    current.shutdown()
    current.shutdown()
    assert not current.is_initialized()
