"""Shared test settings."""

import os
from pathlib import Path

from hypothesis import settings

if not Path("/dev/nvidia0").exists():  # Triton decides when it is first imported, which torch may do in any test
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("penstock", deadline=None)  # a busy machine must not fail a property
settings.load_profile("penstock")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write generated kernels to the golden files")
