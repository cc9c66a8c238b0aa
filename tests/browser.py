"""A headless Chromium for tests of pages; tests that want it skip where the machine has none."""

import shutil
from contextlib import contextmanager

import pytest

PATIENCE_MS = 240_000  # only what hangs takes so long, not what a busy machine slows down
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium():
    """Return the path of a Chromium of this machine, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium():
    """Start Chromium; skip the test where there is none or nothing to drive it with."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    path = find_chromium()
    if path is None:
        pytest.skip(f"no Chromium: looked for {', '.join(NAMES)}; apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=path, args=["--no-sandbox"], timeout=PATIENCE_MS
        )  # tests may run as root
        try:
            yield browser
        finally:
            browser.close()
