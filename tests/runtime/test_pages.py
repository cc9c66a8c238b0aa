"""Memory that malloc knows nothing of, and malloc's free pages returned."""

import ctypes
import gc
import mmap
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.runtime import pages as pages_module
from penstock.runtime.pages import HUGE, fresh_pages, give_back_pages, move_to_huge_pages
from penstock.runtime.views import Scratch

needs_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="wants glibc's malloc")

MAPPED = """
import ctypes
import sys

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "_1", "_2", "_3", "mapped", "_5", "_6", "used", "free", "top")]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.mallinfo2.restype = Info

def is_mapped(nbytes):  # would malloc map a block so large, rather than take it from its heap?
    before = libc.mallinfo2().mapped
    block = libc.malloc(nbytes)
    found = libc.mallinfo2().mapped > before
    libc.free(block)
    return found
"""


def in_a_fresh_process(code):
    """Return what code prints in a process whose malloc has seen little."""
    done = subprocess.run([sys.executable, "-c", MAPPED + code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("nbytes", [0, 1, 4096, HUGE, HUGE + 5])
def test_fresh_pages_are_zeros_that_can_be_written(nbytes):
    pages = fresh_pages(nbytes)
    assert pages.shape == (nbytes,)
    assert pages.dtype == np.uint8
    assert not pages.any()
    pages.fill(7)
    assert (pages == 7).all()


def test_a_view_keeps_its_pages_after_the_array_is_gone():
    view = fresh_pages(1 << 20)[100:104].view(np.float32)
    gc.collect()
    view[0] = 2.5
    assert view[0] == 2.5


@needs_glibc
def test_messages_of_a_measurement_do_not_change_what_malloc_maps():
    code = """
from penstock.runtime import timed
class Alone:
    rank, world_size = 0, 1
    def native(self, *_):
        pass
points = timed.agreed_points(Alone(), lambda *_: None, 1000.0)  # a budget that no hiccup spends
assert points[-1][0] == 16 << 20
del points
timed.noise(16 << 20)
print(is_mapped(8 << 20))
"""
    assert in_a_fresh_process(code) == ["True"]


@needs_glibc
def test_scratch_does_not_change_what_malloc_maps():
    code = """
from penstock.runtime.views import Scratch
scratch = Scratch()
for size in (1 << 20, 4 << 20, 16 << 20):
    scratch.reserve(size)
del scratch
print(is_mapped(8 << 20))
"""
    assert in_a_fresh_process(code) == ["True"]


@needs_glibc
def test_a_numpy_array_would_change_it():
    code = "import numpy\ndel_me = numpy.zeros(16 << 20, 'u1')\ndel del_me\nprint(is_mapped(8 << 20))"
    assert in_a_fresh_process(code) == ["False"]


@needs_glibc
def test_free_pages_of_the_heap_go_back():
    code = """
from pathlib import Path
from penstock.runtime.pages import give_back_pages
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
blocks = [libc.malloc(100_000) for _ in range(400)]  # too small to be mapped: 40 MB of heap
for block in blocks:
    ctypes.memset(block, 1, 100_000)
for block in blocks[:-1]:  # the last one keeps the heap's end where it is
    libc.free(block)
before = resident()
print(give_back_pages(), before - resident() > 30_000_000)
"""
    assert in_a_fresh_process(code) == ["True", "True"]


def test_larger_scratch_does_not_stand_beside_the_smaller_one():
    scratch = Scratch()
    scratch.reserve(1000)
    scratch.reserve(5000)
    assert scratch.memory.shape == (5000,)
    assert scratch.memory.ctypes.data % 64 == 0
    scratch.reserve(10)
    assert scratch.memory.shape == (5000,)


def test_returning_pages_says_whether_anything_could_be_returned():
    assert isinstance(give_back_pages(), bool)


def huge_nbytes(address):
    """Return the bytes on huge pages of the mapping that an address is in, as the kernel counts them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


def small_pages(nbytes):
    """Return numbers in memory that nobody has asked huge pages for, the mapping's address not a multiple of them."""
    values = np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    values[:] = np.arange(nbytes, dtype=np.uint8)
    return values


def test_memory_that_moves_to_huge_pages_keeps_its_bytes():
    values = small_pages(4 * HUGE + 4096)
    address, before = values.ctypes.data, huge_nbytes(values.ctypes.data)
    moved = move_to_huge_pages(address + 4, values.size - 9)  # as a bucket may lie
    assert (values == np.arange(values.size, dtype=np.uint8)).all()
    if moved:  # the kernel may lack the call, or free memory in one piece
        assert huge_nbytes(address) - before >= 3 * HUGE


def test_little_memory_stays_where_it_is():
    values = small_pages(HUGE - 4096)
    assert not move_to_huge_pages(values.ctypes.data, values.size)


@pytest.mark.parametrize("setting", ["always madvise [never]", None])
def test_who_wants_no_huge_pages_gets_none(setting, tmp_path, monkeypatch):
    path = tmp_path / "enabled"
    if setting is not None:
        path.write_text(setting)
    monkeypatch.setattr(pages_module, "_SETTING", path)
    values = small_pages(2 * HUGE)
    assert not move_to_huge_pages(values.ctypes.data, values.size)
