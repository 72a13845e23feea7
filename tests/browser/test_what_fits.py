"""The page has room for long values, and buttons are where there is something to act on."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.browser.looking import OPERATOR, Looking, System, running_system
from tests.hands import LogKeys
from tests.process.crew import KEYS

pytestmark = [pytest.mark.process, pytest.mark.slow]

_LONG = "no account of that name at any of the banks that were asked " * 4


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running_system(USHER_SHOWN_FIELDS="says") as made:
        yield made


def test_a_long_value_takes_one_line_and_is_whole_under_the_pointer(looking: Looking, system: System) -> None:
    system.send("long-1", do="fail", says=_LONG)
    system.send("long-2", do="hang", says="short")
    looking.sign_in(OPERATOR)
    page = looking.page
    for path in ("/tickets", "/tickets/long-1", "/tickets?q=do%3Dfail"):
        looking.go(path)
        value = page.locator("td.shown bdi", has_text="no account").first
        assert value.get_attribute("title") == _LONG, path
        assert value.evaluate("one => one.scrollWidth > one.clientWidth"), path
        assert value.bounding_box()["height"] < 30, path
    looking.go("/tickets")
    short = page.locator("td.shown bdi", has_text="short").first
    assert short.evaluate("one => one.scrollWidth <= one.clientWidth"), "what fits is not cut"


def test_nothing_offers_to_act_on_no_delayed_message(looking: Looking, system: System) -> None:
    looking.sign_in(OPERATOR)
    looking.go("/delayed")
    page = looking.page
    looking.see("nothing waits for its time")
    assert page.get_by_role("button", name="Send now...").count() == 0
    due_ms = int((time.time() + 3600) * 1000)
    system.link.call("XADD", LogKeys(KEYS.stream).delayed, "*", "due_ms", due_ms, "ticket_id", "later")
    page.get_by_role("button", name="Send now...").wait_for()  # with the row, which comes by itself
    assert page.locator("#delayed-list tbody tr").count() == 1
