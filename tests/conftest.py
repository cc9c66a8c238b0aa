"""Shared test settings."""

import atexit
import os
import shutil
import signal
import tempfile
from importlib.util import find_spec
from pathlib import Path

from hypothesis import HealthCheck, settings

if not Path("/dev/nvidia0").exists():  # Triton decides when it is first imported, which torch may do in any test
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Threads of OpenMP spin while they wait: torch's of one worker of pytest would take the core of the other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if find_spec("triton"):  # before TensorFlow, which TensorBoard brings in where it is installed: Triton after it aborts
    from triton_interpreter import hasten

    hasten()  # imports Triton

# A shell that starts tests in the background has them ignore Ctrl-C, and so would every program that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Measurements are kept in the platform's cache folder: the user's own is neither read nor written here. Processes of
# a fork server have the environment that it was started with, so one folder is for all tests of a session. Compiled
# kernels and matplotlib's list of fonts, which take longest to make, stay where they are.
_CACHE = tempfile.mkdtemp(prefix="penstock-tests-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ.setdefault("MPLCONFIGDIR", str(Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "matplotlib")))
os.environ["XDG_CACHE_HOME"] = _CACHE

# A busy machine must not fail a property, nor a draw that nobody has seen: the same examples every time. Others are
# looked for with `--hypothesis-profile=search`, as `make test-all` does.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("penstock", settings.get_profile("search"), derandomize=True)
settings.load_profile("penstock")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write generated kernels to the golden files")
