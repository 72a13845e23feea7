"""The moment of trouble: many letters at once, a message that fails again and again, a session that has ended."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from tests.browser.looking import OPERATOR, Looking, System
from tests.commands import usher
from tests.process.crew import KEYS
from tests.process.machine import until


def test_many_letters_at_once_are_an_alarm_counted_and_two_clicks_from_running_again(
    looking: Looking, system: System, capsys: pytest.CaptureFixture[str]
) -> None:
    """10,000 in 20 s were no alarm; groups counted "the newest 200", and the button beside 147 acted on 5,600."""
    (system.folder / "mended").unlink(missing_ok=True)
    before, page = system.letters(), looking.page
    [first, *_] = system.send("INC-77", do="give up", says="the shop is closed")
    rows = [("ticket_id", f"many-{n}", "do", "give up", "says", f"closed for order {n}") for n in range(10_000)]
    system.link.pipeline([("XADD", KEYS.stream, "*", *row) for row in rows])
    until(lambda: system.letters() == before + 10_001, 60, "all are dead letters")
    looking.sign_in(OPERATOR)
    looking.go("/")
    page.locator("#alarms li.bad", has_text="messages were given up in the last 10 minutes").wait_for()
    kind = page.locator("#given-up tbody tr").first
    kind.locator("td", has_text=f"{before + 10_001:,}").first.wait_for()  # the page counts once a second
    assert "asked:handle" in kind.inner_text()
    assert "became a dead letter" in "".join(system.ask("GET", "/explain?id=many-7")["sentences"])
    assert system.ask("GET", "/health")["status"] == "ok"
    usher("stuck", "--redis-url", system.server.url)
    assert f"given up: {before + 10_001:,} dead letters" in capsys.readouterr().out
    page.locator("#alarms li.bad a").first.click()
    looking.go(f"/messages/{first}")
    looking.see("Was given up: it is a dead letter")
    page.locator("#message a[href^='/dead-letters/']").click()
    page.get_by_role("heading", name="Dead letter").wait_for()
    assert "the shop is closed" in page.locator("main").inner_text()
    looking.go("/dead-letters")
    page.locator(".trace mark", has_text="raise GiveUp(says)").wait_for()  # the failing line, unfolded
    page.locator("tr[id^='kind-'] button", has_text="Redrive all...").first.click()
    button = page.get_by_role("button", name=f"Redrive all {before + 10_001:,}")
    button.wait_for()
    assert system.letters() == before + 10_001, "nothing is done before somebody says so"
    (system.folder / "mended").touch()
    page.get_by_label("Reason").fill("it is open")
    button.click()
    until(lambda: system.letters() == 0, 90, "all are redriven")
    looking.see(f"{before + 10_001:,} of {before + 10_001:,}")
    looking.go("/actions")
    assert "of the kind" in page.locator("tbody tr").first.inner_text()


def test_what_fails_shows_its_attempts_as_bars_though_the_run_log_has_moved_on(
    looking: Looking, system: System
) -> None:
    """Its timeline was empty at 34 messages a second, and its attempts were gone after 15 minutes."""
    [entry_id] = system.send("INC-78", do="fail", says="it is broken")
    until(lambda: b"\n" in (system.link.call("HGET", KEYS.errors, f"h{entry_id}") or b""), 60, "it failed twice")
    system.link.call("DEL", KEYS.runs)
    looking.sign_in(OPERATOR)
    looking.go("/tickets/INC-78")
    bars = looking.page.locator("#attempts svg.gantt")
    assert bars.count() >= 2
    assert bars.first.locator("rect.failed").count() == 1
    row = looking.page.locator("#attempts tbody tr").first.inner_text()
    assert "ValueError in asked.py" in row and "failed" in row.lower()
    assert looking.page.locator("#story tr.failed").count() >= 2


def test_the_page_of_a_session_that_has_ended_shows_the_way_in(looking: Looking, system: System) -> None:
    """It said "no answer from this master" for as long as it was open."""
    looking.sign_in(OPERATOR)
    looking.go("/")
    looking.page.context.clear_cookies()
    looking.page.get_by_label("Token").wait_for(timeout=15_000)
    assert "/login?next=" in looking.page.url


def test_all_times_of_a_card_are_of_one_zone(chromium: object, system: System) -> None:
    context = chromium.new_context(base_url=system.url, timezone_id="Asia/Kolkata")  # type: ignore[attr-defined]
    looking = Looking(context, system)
    system.send("INC-79", do="fail", says="it is broken")
    looking.sign_in(OPERATOR)
    until(lambda: "Next attempt at" in _summary(looking), 60, "it waits for its next attempt")
    told = _summary(looking)
    assert "UTC" not in told
    hour = (time.gmtime().tm_hour * 60 + time.gmtime().tm_min + 330) // 60 % 24
    assert f" {hour:02d}:" in told or f" {(hour + 1) % 24:02d}:" in told
    context.close()


def _summary(looking: Looking) -> str:
    looking.go("/tickets/INC-79")
    return str(looking.page.locator("#explain").inner_text())


def test_few_clicks_lead_from_the_overview_to_the_reason_the_line_the_stack_a_retry_and_a_redrive(
    looking: Looking, system: System
) -> None:
    """At most 1, 1, 2, 2, 2."""
    (system.folder / "mended").unlink(missing_ok=True)
    before, page = system.letters(), looking.page
    for ticket, does in (("clicks-1", "fail"), ("clicks-2", "hang"), ("clicks-3", "give up")):
        system.send(ticket, do=does, says="no")
    until(lambda: system.letters() > before, 30, "it is a dead letter")
    looking.sign_in(OPERATOR)

    def two_clicks(first: Any, second: str, role: str = "button") -> None:
        looking.go("/")
        first.click()
        page.get_by_role(role, name=re.compile(second)).first.click()

    failing = page.locator(".group", has_text="retrying: ValueError in").first
    failing.wait_for()
    assert re.search(r"asked\.py:\d+", failing.inner_text()), "no click to the reason, and to its line"
    two_clicks(page.locator(".group a", has_text="clicks-2").first, r"^c[12]$", "link")
    page.locator("#process tr", has_text="clicks-2").get_by_text("in handle").first.wait_for()
    two_clicks(failing.get_by_role("button", name="now..."), r"^Retry (all )?\d")
    looking.see("Retry: tickets")
    (system.folder / "mended").touch()
    two_clicks(page.locator("#given-up button", has_text="Redrive all").first, r"^Redrive (all )?\d")
    until(lambda: system.letters() <= before, 30, "it is redriven")
