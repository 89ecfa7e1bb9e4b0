"""A Chromium for tests of pages, wherever one is found; nothing is downloaded."""

import contextlib
import os
import shutil

import pytest

# A browser that hangs is given up; one of a busy machine is not.
MILLISECONDS = 600_000
# A browser of one's own, by its path.
VARIABLE = "PENZAI_SHARD_CHROMIUM"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def chromium_path(playwright):
    """The path of a Chromium; None without one.

    Args:
        playwright: What may have downloaded one itself.
    """
    if VARIABLE in os.environ:
        return os.environ[VARIABLE]
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    own = playwright.chromium.executable_path
    return found or (own if os.path.exists(own) else None)


@contextlib.contextmanager
def chromium():
    """A headless Chromium; tests skip where there is none."""
    driver = pytest.importorskip("playwright.sync_api")
    with driver.sync_playwright() as playwright:
        path = chromium_path(playwright)
        if path is None:
            pytest.skip(f"no Chromium: none of {', '.join(_NAMES)}, and {VARIABLE} is not set")
        browser = playwright.chromium.launch(executable_path=path, timeout=MILLISECONDS)
        try:
            yield browser
        finally:
            browser.close()
