"""A real system (Redis, a master, consumers) and a real browser to look at it with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.looking import BROWSER, LAUNCH, Looking, System, running_system


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser, for no longer than a file of tests: while it is there an event loop runs in this thread, and
    ``asyncio.run`` cannot be called. The tests are skipped, saying what is missing, where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the tests in a browser need `pip install playwright`")
    if BROWSER is None:
        pytest.skip("the tests in a browser need chromium (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(**LAUNCH)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running_system() as made:
        yield made


@pytest.fixture
def looking(chromium: Any, system: System) -> Iterator[Looking]:
    """Somebody who looks, with a browser that keeps nothing; at the end it has to have behaved."""
    context = chromium.new_context(base_url=system.url, viewport={"width": 1280, "height": 800})
    made = Looking(context, system)
    yield made
    context.close()
    assert not made.troubles
