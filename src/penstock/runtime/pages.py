"""Memory straight from the operating system, which goes back to it, and what malloc holds, returned.

glibc's malloc maps large blocks and unmaps them when they are freed, but every block up to 32 MiB that it unmaps
raises the size that counts as large. One 16 MiB buffer, freed, and every tensor below 16 MiB comes from the heap from
then on, whose pages stay with the process: VGG-16's temporary 9.4 MB then do. Buffers of our own, which come and go
beside a user's model, must not do that to it.
"""

import contextlib
import ctypes
import mmap

import numpy as np

from penstock.runtime.transport import Bytes

HUGE = 1 << 22  # bytes from which numpy asks for huge pages too


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

    Takes milliseconds, and whoever needs the pages again pays for them: call it between two phases, not in a loop.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
