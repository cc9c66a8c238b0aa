"""Memory that malloc knows nothing of, and malloc's free pages returned."""

import ctypes
import gc
import subprocess
import sys

import numpy as np
import pytest

from penstock.runtime.pages import HUGE, fresh_pages, give_back_pages
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
