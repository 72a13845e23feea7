"""A real system (Redis, a master, consumers) and a real browser to look at it with."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.commands.leader import living_consumers
from common.embedded import EmbeddedRedis
from tests.browser.looking import OPERATOR, VIEWER, Looking, System
from tests.process.crew import Crew
from tests.process.machine import kill_all_of, processes_of

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_API = "a-token-of-the-api"
#: What the messages ask for; the errors are what a hostile producer makes them.
_HANDLER = """
import pathlib, time
from consumer import GiveUp
MENDED = pathlib.Path(__file__).with_name("mended")
def handle(message):
    do, says = message.fields.get("do", ""), message.fields.get("says", "it did not work")
    if do == "hang":
        time.sleep(600)
    if do == "fail":
        raise ValueError(says)
    if do == "give up" and not MENDED.exists():
        raise GiveUp(says)
"""


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A browser. The tests are skipped, saying what is missing, where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the tests in a browser need `pip install playwright`")
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None:
        pytest.skip("the tests in a browser need chromium (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def system() -> Iterator[System]:
    """One master that asks for tokens, and two consumers."""
    with tempfile.TemporaryDirectory(prefix="usher-t-", dir="/tmp") as name:
        folder = Path(name)
        (folder / "asked.py").write_text(_HANDLER)
        with EmbeddedRedis(folder / "redis", port=None, durable=False) as server:
            tokens = {"USHER_API_TOKEN": _API, "USHER_OPERATOR_TOKEN": OPERATOR, "USHER_VIEWER_TOKEN": VIEWER}
            with Crew(folder, server.url, **tokens) as crew:
                crew.start_master()
                for consumer in ("c1", "c2"):
                    crew.start_consumer(consumer, "asked:handle", PYTHONPATH=str(folder), USHER_MAX_ATTEMPTS="9", USHER_CONCURRENCY="16")
                crew.until(lambda: living_consumers(crew.masters, _API) >= {"c1", "c2"}, 60, "consumers are registered")
                made = System(crew, server.url, folder)
                yield made
                made.link.close()
        left = processes_of(folder)
        kill_all_of(folder)
        assert not left


@pytest.fixture
def looking(chromium: Any, system: System) -> Iterator[Looking]:
    """Somebody who looks, with a browser that keeps nothing; at the end it has to have behaved."""
    context = chromium.new_context(base_url=system.url, viewport={"width": 1280, "height": 800})
    made = Looking(context, system)
    yield made
    context.close()
    assert not made.troubles
