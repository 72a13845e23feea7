"""The page, as somebody on call uses it."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.browser.looking import OPERATOR, PATIENCE_MS, VIEWER, Looking, System
from tests.process.crew import KEYS
from tests.process.machine import until

pytestmark = pytest.mark.process


def test_a_stuck_ticket_is_found_and_explained_and_its_consumer_drained(looking: Looking, system: System) -> None:
    system.send("INC-17", 3, do="hang")
    looking.sign_in(OPERATOR)
    page = looking.page
    group = page.locator(".group").filter(has=page.locator("td", has_text="INC-17"))
    group.wait_for()  # it comes by itself, when it has stood still for long enough
    assert page.locator("#count-overview").inner_text() == str(page.locator("#stuck tbody tr").count())
    assert "handed over: on c" in group.locator("summary").inner_text()
    group.locator("summary").click(position={"x": 4, "y": 4})  # beside its links
    stuck = group.locator("tr", has_text="INC-17")
    assert stuck.locator("td").nth(4).inner_text() == "2"
    owner = stuck.locator("td").nth(5).inner_text()
    stuck.get_by_role("link", name="INC-17").click()

    looking.see(": attempt 1 of 9, fencing token")
    assert page.locator("h1").inner_text().split() == ["INC-17", "running"]
    assert page.locator("#explain tbody tr").count() == 3
    assert page.locator("#story").get_by_text("sent").count() == 3

    page.get_by_role("link", name="Consumers").click()
    page.get_by_label("Reason").fill("it hangs <b>often</b>")
    page.get_by_role("button", name=f"Drain {owner}").click()
    looking.see("is handed nothing more")
    page.locator("tr", has_text=owner).get_by_text("drained by an operator").wait_for()
    page.get_by_role("link", name="Actions").click()
    line = page.locator("tbody tr").first
    assert [line.locator("td").nth(at).inner_text() for at in (1, 2, 4)] == [
        "operator-token",
        "drain",
        "it hangs <b>often</b>",
    ]

    page.get_by_role("link", name="Consumers").click()
    page.get_by_role("button", name=f"Resume {owner}").click()
    looking.see("gets work again")


def test_a_dead_letter_is_redriven_and_the_timeline_tells_it(looking: Looking, system: System) -> None:
    before = system.letters()
    system.send("INC-18", do="give up", says="no such account")
    until(lambda: system.letters() == before + 1, 30, "it is a dead letter")
    looking.sign_in(OPERATOR)
    page = looking.page
    looking.go("/tickets?q=INC-18")
    page.get_by_role("link", name="1 of this ticket").click()
    row = page.locator("tbody tr", has_text="INC-18")
    assert "GiveUp: no such account" in row.inner_text()
    (system.folder / "mended").touch()
    row.get_by_role("checkbox").check()
    page.get_by_label("Reason", exact=True).last.fill("the account is there now")
    page.get_by_role("button", name="Redrive chosen").click()
    looking.see("redrive")
    until(lambda: system.letters() == before, 30, "it is redriven")
    looking.go("/tickets/INC-18")
    page.locator("#story tr", has_text="done").wait_for()  # the page follows its ticket
    assert page.locator("#story tr", has_text="gave up").count() == 1


def test_a_viewer_sees_no_buttons_and_is_refused(looking: Looking, system: System) -> None:
    before = system.letters()
    system.send("INC-19", do="give up", says="for viewers")
    (system.folder / "mended").unlink(missing_ok=True)
    system.send("INC-19", do="give up", says="for viewers")
    until(lambda: system.letters() > before, 30, "there is a dead letter")
    looking.sign_in(VIEWER)
    page = looking.page
    paths = ("/", "/tickets", "/tickets/INC-19", "/consumers", "/dead-letters", "/delayed", "/streams")
    for path in (*paths, "/audit", "/doctor", "/rules", "/actions"):
        assert looking.go(path).status == 200
        buttons = page.locator("main button").all_inner_texts()
        assert set(buttons) <= {"Filter"}, path
    post = """async ([path, body]) => (await fetch(path, {method: 'POST', body: new URLSearchParams({...body,
        csrf_token: document.querySelector('[name=csrf_token]').value})})).status"""
    for path, body in (
        ("/consumers/drain", {"name": "c1"}),
        ("/dead-letters/bulk", {"what": "drop"}),
        ("/rules/set", {"target": "everything", "action": "pause"}),
        ("/api/rules", {}),
    ):
        assert page.evaluate(post, [path, body]) == 403
    looking.go("/tickets/INC-19")
    page.locator("#story a[href^='/messages/']").first.click()
    page.get_by_role("heading", name="Message").wait_for()
    assert page.locator(".fields").count() == 0, "what a message says is for operators"


def test_without_a_token_there_is_only_the_way_in(looking: Looking) -> None:
    page = looking.page
    looking.go("/dead-letters?error=x")
    assert page.url.endswith("/login?next=%2Fdead-letters%3Ferror%3Dx")
    assert page.get_by_role("navigation").count() == 0
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    looking.see("No viewer or operator has this token")
    page.get_by_label("Token").fill(VIEWER)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/dead-letters?error=x")
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Token").wait_for()
    looking.go("/tickets")
    assert "/login?next=" in page.url


def test_on_a_phone_nothing_is_scrolled_sideways(looking: Looking, system: System) -> None:
    before = system.letters()
    (system.folder / "mended").unlink(missing_ok=True)
    system.send(
        "a-ticket-of-a-customer-with-a-rather-long-name-0815",
        do="give up",
        says="no such product in the warehouse of the northern district",
    )
    system.send("INC-21", 3, do="hang")
    history = {
        "since_ms": 1,
        "executions": 3,
        "before": "",
        "unproven": [f"{'tickets_of_a_customer' * 9}: the run log is empty"],
    }
    system.link.call("HSET", KEYS.archived, "history", json.dumps(history))
    until(lambda: system.letters() > before, 30, "there is a dead letter")
    looking.sign_in(OPERATOR)
    page = looking.page
    page.set_viewport_size({"width": 390, "height": 844})
    wide = (
        "[document.documentElement, ...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth >"
        " one.clientWidth).length"
    )
    for path in (
        "/",
        "/tickets",
        "/tickets/INC-21",
        "/consumers",
        "/dead-letters",
        "/streams",
        "/audit",
        "/doctor",
        "/rules",
        "/actions",
    ):
        looking.go(path)
        assert page.evaluate(wide) == 0, path
    looking.go("/dead-letters")
    row = page.locator("tbody tr", has_text="0815")
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
    page.get_by_role("button", name="Use the dark theme").click()
    assert page.evaluate(ground) != light
    looking.go("/doctor")
    assert page.evaluate(ground) != light, "it stays"


def test_the_overview_follows_without_being_loaded_again(looking: Looking, system: System) -> None:
    looking.sign_in(VIEWER)
    page = looking.page
    page.get_by_role("contentinfo").get_by_text("Live").wait_for(timeout=PATIENCE_MS)
    page.evaluate("window.same = true")
    (system.folder / "mended").unlink(missing_ok=True)
    before = system.letters()
    system.send("INC-20", 2, do="give up", says="live")
    page.locator("#figures a[href='/dead-letters']").get_by_text(f"{before + 2}", exact=True).wait_for()
    assert page.evaluate("window.same")
    assert page.locator("polyline").first.get_attribute("points")


_GAPS = """performance.getEntriesByType('resource').filter(one => one.initiatorType === 'fetch').map(one => one.startTime)
    .map((at, n, all) => n ? at - all[n - 1] : Infinity)"""


def test_a_page_that_renews_itself_leaves_alone_what_somebody_does_there(looking: Looking, system: System) -> None:
    (system.folder / "mended").unlink(missing_ok=True)
    system.send("INC-22", 2, do="hang")
    looking.sign_in(OPERATOR)
    page = looking.page
    group = page.locator(".group").filter(has=page.locator("td", has_text="INC-22"))
    group.locator("summary").click(position={"x": 4, "y": 4})
    group.get_by_role("link", name="INC-22").first.focus()
    page.evaluate("window.focused = document.activeElement")
    for number in range(2):
        before = system.letters()
        system.send(f"more-{number}", do="give up", says="renewed")
        page.locator("#figures a[href='/dead-letters']").get_by_text(f"{before + 1}", exact=True).wait_for()
    assert page.evaluate("document.activeElement === window.focused && window.focused.isConnected")
    assert group.locator("details").evaluate("one => one.open")
    assert page.locator("#as-of time").get_attribute("title").endswith("UTC"), "times stay those of this browser"
    gaps = page.evaluate(_GAPS)
    assert len(gaps) >= 2
    assert min(gaps) >= 1900, "no more than one in two seconds, as far as a busy browser starts them on time"

    looking.go("/consumers")
    page.get_by_label("Reason").fill("half a sen")
    page.evaluate("window.first = document.querySelector('#consumers time, #consumers tr')")
    until(lambda: len(page.evaluate(_GAPS)) > 0, 30, "it has asked for itself")
    assert page.get_by_label("Reason").input_value() == "half a sen"
    assert page.evaluate("window.first.isConnected")


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
    finally:
        os.kill(system.server.pid, signal.SIGCONT)
    bar.wait_for(state="hidden")
    assert page.title() == "Overview · Usher"

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
