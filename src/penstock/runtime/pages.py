"""Memory straight from the operating system, which goes back to it, and what malloc holds, returned or moved.

glibc's malloc maps large blocks and unmaps them when they are freed, but every block up to 32 MiB that it unmaps
raises the size that counts as large. One 16 MiB buffer, freed, and every tensor below 16 MiB comes from the heap from
then on, whose pages stay with the process: VGG-16's temporary 9.4 MB then do. Buffers of our own, which come and go
beside a user's model, must not do that to it.
"""

import contextlib
import ctypes
import mmap
from pathlib import Path

import numpy as np

from penstock.runtime.transport import Bytes

HUGE = 1 << 22  # bytes from which numpy asks for huge pages too
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1, which Python does not name
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # "always [madvise] never"


def fresh_pages(nbytes: int) -> Bytes:
    """Return zeros that malloc knows nothing of; they are unmapped with the last view of them."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def give_back_pages() -> bool:
    """Let malloc return the free pages that it keeps; say whether it could (glibc only).

    Takes milliseconds, and the next use of the pages pays for them: call it between two phases, not in a loop.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def move_to_huge_pages(address: int, nbytes: int) -> bool:
    """Move memory that is in use to huge pages, in place; say whether the kernel did so (Linux 6.1 and later).

    torch's buckets lie in pages of 4 KB. Processors stop reading ahead at the end of a page, and look up 15,000 of them
    in 61 MB: in huge pages a copy into such a bucket took 3.6 ms and not 5.4, decoding into it 2.4 and not 3.2. Moving
    takes about 0.25 ms per MB, once.
    """
    if nbytes < HUGE or "[never]" in _setting():
        return False
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None)
    return int(libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _COLLAPSE)) == 0


def _setting() -> str:
    """Return what the administrator has said of huge pages; a kernel without them says nothing."""
    return _SETTING.read_text() if _SETTING.exists() else "[never]"
