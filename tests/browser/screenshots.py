"""Pictures of every page, to be looked at: ``python -m tests.browser.screenshots FOLDER [TICKETS ...]``. For an empty
system, 40 stuck tickets and 100,000 (or for as many as are said): 1280 and 400 px wide, light and dark; and a sheet of each
combination, with all of its pages. No test."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from tests.browser.looking import LAUNCH, OPERATOR, System, running_system
from tests.process.crew import KEYS
from tests.process.machine import until

_PAGES = {
    "overview": "/",
    "charts": "/charts",
    "tickets": "/tickets",
    "retrying": "/tickets?state=retrying&sort=age",
    "search": "/tickets?q=INC-1",
    "search-by-field": "/tickets?q=do%3Dfail",
    "ticket-that-hangs": "/tickets/INC-1",
    "ticket-that-fails": "/tickets/INC-2",
    "ticket-unknown": "/tickets/unknown",
    "consumers": "/consumers",
    "dead-letters": "/dead-letters",
    "delayed": "/delayed",
    "rules": "/rules",
    "streams": "/streams",
    "audit": "/audit",
    "doctor": "/doctor",
    "actions": "/actions",
    "problem": "/nowhere",
}
#: So many tickets are stuck in all sorts of ways, and none is given up while one looks; more are mostly halted, and none
#: is tried again.
_FEW, _OF_FEW = 100, {"USHER_RETRY_SECONDS": "3"}
_OF_MANY = {"USHER_DEAD_LETTER_POLICY": "halt", "USHER_RETRY_SECONDS": "3600"}
_WIDTHS, _SCHEMES, _TICKETS = (1280, 400), ("light", "dark"), (0, 40, 100_000)
#: Nothing may be wider than the page, but what says that it scrolls.
_OVERFLOWS = """document.documentElement.scrollWidth > document.documentElement.clientWidth"""


_FOUND = {
    "id": "1700000000000-0",
    "ticket": "INC-1",
    "owner": "c1:7",
    "detail": "started at 12:00:01 while 1690000000000-0 ran on c2",
}
_AUDIT = {
    "run": "2026-11-22T12-00-00",
    "started_ms": 1_795_348_800_000,
    "seconds": 12.5,
    "verdict": "bad",
    "unproven": 3,
    "pending": 6,
    "executions": 12_345,
    "repeated": 2,
    "findings": [
        {
            "check": "overlap",
            "severity": "bad",
            "count": 1,
            "means": "two messages of a ticket ran at the same time",
            "examples": [_FOUND],
        }
    ],
}


def main(folder: Path, all_tickets: list[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**LAUNCH)
        for tickets in all_tickets:
            with running_system(
                100_000, USHER_SHOWN_FIELDS="do,says", **(_OF_MANY if tickets > _FEW else _OF_FEW)
            ) as system:
                fill(system, tickets)
                for width in _WIDTHS:
                    for scheme in _SCHEMES:
                        context = browser.new_context(
                            base_url=system.url, color_scheme=scheme, viewport={"width": width, "height": 800}
                        )
                        name, there = f"{tickets}-{width}-{scheme}", in_index(system)
                        assert there >= tickets, f"{there} tickets are left in the index"
                        print(f"{name}: {there} tickets are in the index")  # noqa: T201
                        shoot_all(context.new_page(), folder, name, bool(tickets))
                        context.close()
        browser.close()


def shoot_all(page: Any, folder: Path, name: str, is_busy: bool) -> None:
    """Make pictures of all pages as one sees them, and their sheet; say how long each took to come."""
    made: list[str] = []
    took: list[str] = []

    def go(what: str, path: str) -> None:
        began = time.monotonic()
        page.goto(path)
        took.append(f"{what} {1000 * (time.monotonic() - began):.0f}")

    def shoot(what: str) -> None:
        made.append(f"{name}-{what}.png")
        page.screenshot(path=folder / made[-1], full_page=True)
        if page.evaluate(_OVERFLOWS):
            print(f"{made[-1]} is wider than its page")  # noqa: T201

    page.goto("/")
    shoot("login")
    page.get_by_label("Token").fill(OPERATOR)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("navigation").wait_for()
    if is_busy:
        act(page)
    for what, path in _PAGES.items():
        go(what, path)
        page.wait_for_timeout(3000 if what == "overview" else 300)
        shoot(what)
        if what == "overview" and page.locator("summary").count():
            page.locator("summary").first.click(position={"x": 4, "y": 4})
            shoot("overview-opened")
    if is_busy:
        page.goto("/tickets/INC-1")
        page.locator("#story a[href^='/messages/']").first.click()
        shoot("message")
        page.goto("/dead-letters")
        page.locator("td a.id[href^='/dead-letters/']").first.click()
        shoot("dead-letter")
        page.go_back()
        page.get_by_role("button", name="Preview redrive").click()
        page.get_by_role("button", name=re.compile("Redrive .*[0-9]")).wait_for(timeout=120_000)
        shoot("bulk")
        page.goto("/tickets?state=handed_over")
        page.get_by_role("button", name="Pause all...").click()
        page.get_by_role("button", name=re.compile("^Pause (all )?[0-9]")).wait_for(timeout=120_000)
        shoot("bulk-pause")
        page.get_by_label("Reason").fill("the payment service is away")
        page.get_by_role("button", name=re.compile("^Pause (all )?[0-9]")).click()
        page.get_by_text("done", exact=True).wait_for(timeout=120_000)
        shoot("bulk-pause-done")
        page.goto("/rules")
        shoot("rules-alike")
        page.get_by_role("button", name=re.compile("^Resume all [0-9]")).click()
    print(f"{name}: ms to load: {', '.join(took)}")  # noqa: T201
    sheet(page, folder, name, made)


def sheet(page: Any, folder: Path, name: str, made: list[str]) -> None:
    """Put the pictures side by side, each with its name."""
    side = "".join(f"<figure><figcaption>{one}</figcaption><img src='{one}'></figure>" for one in made)
    look = "body{display:flex;flex-wrap:wrap;gap:8px;background:#888}img{width:100%}"
    look += "figure{margin:0;width:400px;max-height:900px;overflow:hidden}"
    (folder / f"{name}.html").write_text(f"<!doctype html><style>{look}</style>{side}")
    page.goto((folder / f"{name}.html").absolute().as_uri())
    page.set_viewport_size({"width": 2560, "height": 800})
    page.screenshot(path=folder / f"sheet-{name}.png", full_page=True, timeout=120_000)


def fill(system: System, tickets: int) -> None:
    """Of few tickets all are stuck: three in four fail, the others hang. Of many all stay in the index: one in ten waits
    for its next try, a few hang, and the others are halted, as when what their handlers need is down."""
    few, many = ("fail", "hang", "fail", "fail"), ("fail", *["give up"] * 9)
    for at in range(0, tickets, 1000):
        rows = []
        for n in range(at, min(at + 1000, tickets)):
            does = few[n % 4] if tickets <= _FEW else "hang" if n % (tickets // 20) == 1 else many[n % 10]
            rows.append(("XADD", KEYS.stream, "*", "ticket_id", f"INC-{n}", "do", does, "says", f"no account {n}"))
        system.link.pipeline(rows)
    if tickets:
        system.send("INC-1", 4, text="what waits behind")
        system.send("INC-given-up", do="give up", says="no such account")
        system.link.call("SET", KEYS.audit, json.dumps(_AUDIT))
        until(lambda: in_index(system) >= tickets, 900, "all of them are in the index")
        time.sleep(20)


def in_index(system: System) -> int:
    return int(system.link.call("HLEN", KEYS.tickets))


def act(page: Any) -> None:
    """So that rules and actions have something to show."""
    page.goto("/tickets/INC-2")
    if page.get_by_role("button", name="Pause ticket").count():
        page.locator("#why-rule").fill("the other side is being repaired")
        page.get_by_role("button", name="Pause ticket").click()
    page.goto("/consumers")
    if page.get_by_role("button", name="Drain c2").count():
        page.get_by_label("Reason").fill("update of c2")
        page.get_by_role("button", name="Drain c2").click()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(one) for one in sys.argv[2:]] or [*_TICKETS])
