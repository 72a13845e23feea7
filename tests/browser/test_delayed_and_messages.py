"""The page of delayed messages, and the page of a message, as an operator uses them; with scripts and without."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.browser.looking import OPERATOR, Looking, System
from tests.hands import LogKeys
from tests.process.crew import KEYS
from tests.process.machine import until

pytestmark = pytest.mark.process


def delay(system: System, ticket: str, after_s: float, **fields: str) -> str:
    """Add a delayed message, and wait until the leader has put it in order; its id."""
    log, due_ms = LogKeys(KEYS.stream), int((time.time() + after_s) * 1000)
    flat = [text for pair in fields.items() for text in pair]
    entry_id = bytes(system.link.call("XADD", log.delayed, "*", "due_ms", due_ms, "ticket_id", ticket, *flat)).decode()
    until(lambda: system.link.call("ZCARD", log.due) == system.link.call("XLEN", log.delayed), 30, "it is in order")
    return entry_id


def waiting(system: System, ticket: str) -> int:
    entries = system.link.call("XRANGE", LogKeys(KEYS.stream).delayed, "-", "+")
    return sum(ticket.encode() in flat for _, flat in entries)


def test_chosen_messages_are_sent_now_and_moved(looking: Looking, system: System) -> None:
    ids = [delay(system, "later-1", 3600 * hours, text="<b>hello</b>") for hours in (1, 2, 3)]
    looking.sign_in(OPERATOR)
    page = looking.page
    page.get_by_role("link", name="Delayed").click()
    row = page.locator("#delayed-list tbody tr", has_text=ids[0])
    assert "<b>hello</b>" in row.inner_text()

    row.get_by_role("checkbox").check()
    page.evaluate("window.same = true")
    fresh = delay(system, "later-2", 60)
    page.locator("#delayed-list tbody tr", has_text=fresh).wait_for()  # it comes by itself
    assert page.evaluate("window.same"), "without being loaded again"
    assert row.get_by_role("checkbox").is_checked(), "and what is chosen stays chosen"
    page.get_by_role("button", name="Send now...").click()
    looking.see("1 message of ticket later-1 will be sent now")
    assert waiting(system, "later-1") == 3, "nothing is done before somebody says so"
    page.get_by_label("Reason").fill("they wait for it")
    page.get_by_role("button", name="Send now 1").click()
    looking.see("1 message to be sent now")
    until(lambda: waiting(system, "later-1") == 2, 10, "the leader has sent it")

    page.locator("tr", has_text=ids[1]).get_by_role("checkbox").check()
    page.locator("#at").fill("2030-01-01T00:00:01")
    at = page.evaluate("new Date('2030-01-01T00:00:01').toISOString().replace('T', ' ').replace('Z', ' UTC')")
    page.get_by_role("button", name="Move...").click()
    looking.see("1 message of ticket later-1 will be due at")
    page.get_by_role("button", name="Move 1").click()
    looking.see(f"1 message moved to {at}")  # in the browser's own zone

    looking.go("/actions")
    assert "they wait for it" in page.locator("tbody tr").nth(1).inner_text()


def test_without_scripts_everything_works(chromium: Any, system: System) -> None:
    entry_id = delay(system, "plain-1", 3600, text="x")
    context = chromium.new_context(base_url=system.url, java_script_enabled=False, timezone_id="Europe/Berlin")
    page = context.new_page()
    page.goto("/delayed")
    page.get_by_label("Token").fill(OPERATOR)
    page.get_by_role("button", name="Sign in").click()
    page.locator("tr", has_text=entry_id).get_by_role("checkbox").check()
    page.locator("#at").fill("2030-01-01T00:00:01")
    page.get_by_role("button", name="Move...").click()
    page.get_by_role("button", name="Move 1").click()
    page.get_by_text("1 message moved to 2030-01-01 00:00:01.000 UTC").wait_for()
    page.locator("tr", has_text=entry_id).get_by_role("link", name=entry_id).click()
    assert "Waits for its time" in page.locator("#message").inner_text()
    page.go_back()
    page.locator("tr", has_text=entry_id).get_by_role("checkbox").check()
    page.get_by_role("button", name="Drop...").click()
    page.get_by_role("button", name="Drop 1").click()
    page.get_by_text("1 message dropped").wait_for()
    context.close()
    assert waiting(system, "plain-1") == 0
