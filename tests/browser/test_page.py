"""The page, as somebody on call uses it."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest

from tests.browser.looking import OPERATOR, VIEWER, Looking, System
from tests.commands import usher
from tests.process.crew import KEYS
from tests.process.machine import until

pytestmark = pytest.mark.process


def test_a_stuck_ticket_is_explained_with_where_its_handler_stands_and_its_consumer_drained(
    looking: Looking, system: System
) -> None:
    system.send("INC-17", 3, do="hang")
    looking.sign_in(OPERATOR)
    page = looking.page
    group = page.locator(".group").filter(has=page.locator("td", has_text="INC-17"))
    group.wait_for()  # it comes by itself, when it has stood still for long enough
    troubles = page.locator("#alarms li, #stuck .group").count()
    assert page.locator("#count-overview").inner_text() == str(troubles)
    assert page.title() == f"({troubles}) Overview · Usher"
    assert "handed over: on c" in group.inner_text()
    group.locator("summary").click()
    stuck = group.locator("tr", has_text="INC-17")
    assert stuck.locator("td").nth(4).inner_text() == "2"
    owner = stuck.locator("td").nth(5).inner_text()
    stuck.get_by_role("link", name="INC-17").click()

    looking.see(": attempt 1 of 9, fencing token")
    assert page.locator("h1").inner_text().split() == ["INC-17", "running"]
    assert page.locator("#explain tbody tr").count() == 3
    assert page.locator("#story").get_by_text("sent").count() == 3

    page.locator("#explain").get_by_role("link", name=owner).click()
    row = page.locator("#process tbody tr", has_text="INC-17")
    assert re.search(r"asked\.py:\d+ in handle$", row.locator("td").last.inner_text().splitlines()[0])
    assert "MiB" in page.locator("#process").inner_text()
    page.get_by_role("button", name="Drain...").click()
    page.get_by_label("Reason").fill("it hangs <b>often</b>")
    page.get_by_role("button", name="Drain", exact=True).click()
    looking.see("is handed nothing more")
    page.get_by_role("link", name="Actions").click()
    line = page.locator("tbody tr").first
    told = [line.locator("td").nth(at).inner_text() for at in (1, 2, 4)]
    assert told == ["operator-token", "drain", "it hangs <b>often</b>"]
    looking.go(f"/consumers/{owner}")
    page.get_by_role("button", name="Resume...").click()
    page.get_by_role("button", name="Resume", exact=True).click()
    looking.see("gets work again")


def test_on_a_phone_nothing_is_scrolled_sideways_and_the_head_is_low(looking: Looking, system: System) -> None:
    before, long_name = system.letters(), "a-ticket-of-a-customer-with-a-rather-long-name-0815"
    (system.folder / "mended").unlink(missing_ok=True)
    system.send(long_name, do="give up", says="no such product in the warehouse of the northern district")
    system.send("INC-21", 3, do="hang")
    history = {"since_ms": 1, "executions": 3, "before": "", "unproven": [f"{'tickets_of_a_customer' * 9}: empty"]}
    system.link.call("HSET", KEYS.archived, "history", json.dumps(history))
    until(lambda: system.letters() > before, 30, "there is a dead letter")
    looking.sign_in(OPERATOR)
    page = looking.page
    page.set_viewport_size({"width": 390, "height": 844})
    wide = (
        "[document.documentElement, ...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth >"
        " one.clientWidth).length"
    )
    paths = ("/", "/charts", "/tickets", "/tickets/INC-21", "/consumers", "/consumers/c1", "/dead-letters", "/streams")
    for path in (*paths, "/audit", "/doctor", "/rules", "/actions"):
        looking.go(path)
        assert page.evaluate(wide) == 0, path
        assert page.locator("header").bounding_box()["height"] <= 64, path
    page.get_by_role("button", name="Menu").click()
    page.get_by_role("navigation").get_by_role("link", name="Dead letters").click()
    row = page.locator("tbody tr", has_text="0815")
    row.first.wait_for()  # ``evaluate_all`` does not
    named = "cells => cells.map(cell => getComputedStyle(cell, '::before').content)"
    assert '"Ticket"' in row.locator("td").evaluate_all(named), "each line says what it is"


def test_keys_and_colours(looking: Looking) -> None:
    looking.sign_in(VIEWER)
    page = looking.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("/")
    page.keyboard.type("INC/18 ?")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Search: INC/18 ?").wait_for()
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ground) != light, "as the system is set"


_GAPS = """performance.getEntriesByType('resource').filter(one => one.initiatorType === 'fetch').map(one => one.startTime)
    .map((at, n, all) => n ? at - all[n - 1] : Infinity)"""


def test_a_page_that_renews_itself_leaves_alone_what_somebody_does_there(looking: Looking, system: System) -> None:
    (system.folder / "mended").unlink(missing_ok=True)
    system.send("INC-22", 2, do="hang")
    looking.sign_in(OPERATOR)
    page = looking.page
    group = page.locator(".group").filter(has=page.locator("td", has_text="INC-22"))
    group.locator("summary").click()
    group.get_by_role("link", name="INC-22").first.focus()
    page.evaluate("window.focused = document.activeElement; window.same = true")
    for number in range(2):
        before = system.letters()
        system.send(f"more-{number}", do="give up", says="renewed")
        page.locator("#figures a[href='/dead-letters']").get_by_text(f"{before + 1}", exact=True).wait_for()
    assert page.evaluate("document.activeElement === window.focused && window.focused.isConnected")
    assert group.locator("details").evaluate("one => one.open") and page.evaluate("window.same")
    assert page.locator("#figures polyline").first.get_attribute("points")
    assert page.locator("#as-of time").get_attribute("title").endswith("UTC"), "times stay those of this browser"
    gaps = page.evaluate(_GAPS)
    assert len(gaps) >= 2
    assert min(gaps) >= 1900, "no more than one in two seconds, as far as a busy browser starts them on time"

    looking.go("/tickets/INC-22")
    page.get_by_role("button", name="Pause ticket...").click()
    page.get_by_label("Reason").filter(visible=True).fill("half a sen")
    until(lambda: len(page.evaluate(_GAPS)) > 0, 30, "it has asked for itself")
    assert page.get_by_label("Reason").filter(visible=True).input_value() == "half a sen"


def test_a_page_without_fresh_news_is_not_green_and_reads_work_at_once_when_redis_is_back(
    looking: Looking, system: System
) -> None:
    looking.sign_in(OPERATOR)
    page, paths = looking.page, ("/rules", "/dead-letters", "/actions", "/streams", "/tickets", "/")
    bar = page.locator("#stale")
    page.locator("#link").get_by_text("Live").wait_for()
    assert not bar.is_visible()
    os.kill(system.server.pid, signal.SIGSTOP)
    try:
        bar.get_by_text("Not up to date since").wait_for(timeout=12_000)
        assert page.title().startswith("Not up to date")
        assert "Nothing is stuck" not in page.locator("main").inner_text()
        assert "Not up to date" in page.locator("#link").inner_text()
        assert system.ask("GET", "/explain?id=x", timeout=15)["title"] == "redis_unavailable"
        assert usher("stuck", "--redis-url", system.server.url) == 2
        assert system.ask("GET", "/health")["status"] == "failing"
    finally:
        os.kill(system.server.pid, signal.SIGCONT)
    bar.wait_for(state="hidden")
    assert page.title().endswith("Overview · Usher")
    assert not page.title().startswith("Not")

    os.kill(system.server.pid, signal.SIGKILL)
    bar.get_by_text("Redis does not answer").wait_for()
    system.server.stop()
    system.server.start()
    bar.wait_for(state="hidden")
    page.close()  # it asks again and again, and would meet the connection that is gone
    page.context.clear_cookies()  # so would the look at who has signed out
    answered = {}
    for path in paths:
        system.link.close()
        system.link.call("CLIENT", "KILL", "TYPE", "normal")  # as a restart does to connections in no use
        told = page.context.request.get(f"{looking.root}{path}", headers={"Authorization": f"Bearer {OPERATOR}"})
        answered[path] = told.status
    assert answered == dict.fromkeys(paths, 200)
    looking.troubles = [one for one in looking.troubles if "status of 503" not in one]
