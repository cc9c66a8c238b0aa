"""Cores, memory and GPUs of this machine, and where penstock keeps what it compiled."""

import os
import shutil
import tempfile
from pathlib import Path

from penstock.compll.cache import default_cache
from penstock.doctor.finding import Finding, missing, works
from penstock.doctor.probe import Probe, probe

LEAST_CACHE_NBYTES = 100 * 2**20
_GPUS = """
import torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print("; ".join(names))
"""


def check_machine() -> list[Finding]:
    """Return findings about cores, memory and GPUs."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [check_cores(cores, os.cpu_count() or cores), works("memory", f"{memory:.1f} GiB"), check_gpus()]


def check_cores(usable: int, present: int) -> Finding:
    """Say how many cores this process may use; with one, workers and their communication take turns."""
    found = f"{usable} of {present} usable by this process"
    if usable == 1:
        return missing("cores", found, "several workers on one core only take turns: use more cores to measure speed")
    return works("cores", found)


def check_gpus(look: Probe = probe) -> Finding:
    """Say which GPUs torch sees."""
    ran, said = look(_GPUS)
    if not ran:
        return missing("GPUs", f"torch cannot say: {said}", "mend torch first")
    if not said:
        return missing("GPUs", "torch sees none", "training runs on the CPU; GPUs want a driver and a CUDA torch")
    return works("GPUs", said)


def check_caches() -> list[Finding]:
    """Return findings about the folder of compiled compressors."""
    return [check_cache(default_cache())]


def check_cache(folder: Path) -> Finding:
    """Say whether a cache folder can be written and has room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return missing("cache", f"{folder}: {error.strerror}", f"make {folder} writable, or every start compiles anew")
    if free < LEAST_CACHE_NBYTES:
        return missing("cache", f"{folder}: {free / 2**20:.0f} MiB free", "free some room on that disk")
    return works("cache", f"{folder}, {free / 2**30:.0f} GiB free")
