"""Shared test settings."""

from hypothesis import settings

settings.register_profile("penstock", deadline=None)  # a busy machine must not fail a property
settings.load_profile("penstock")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write generated kernels to the golden files")
