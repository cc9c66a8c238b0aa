"""Shared test settings."""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

if not Path("/dev/nvidia0").exists():  # Triton decides when it is first imported, which torch may do in any test
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A busy machine must not fail a property, nor a draw that nobody has seen: the same examples every time. Others are
# looked for with `--hypothesis-profile=search`, as `make test-all` does.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("penstock", settings.get_profile("search"), derandomize=True)
settings.load_profile("penstock")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write generated kernels to the golden files")
