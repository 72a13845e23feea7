"""Pictures of every page, to be looked at: ``python -m tests.browser.screenshots FOLDER [TICKETS ...]``. For an empty
system, 40 stuck tickets and 100,000 (or for as many as are said): 1280 and 400 px wide, light and dark. No test."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from tests.browser.looking import LAUNCH, OPERATOR, System, running_system
from tests.process.crew import KEYS
from tests.process.machine import until

_PAGES = (
    *("/", "/charts", "/tickets", "/tickets?state=retrying&sort=age", "/tickets?q=INC-1", "/tickets?q=do%3Dfail"),
    *("/tickets/INC-1", "/tickets/INC-2", "/tickets/unknown", "/consumers", "/consumers/c1", "/dead-letters"),
    *("/delayed", "/rules", "/finished", "/streams", "/audit", "/doctor", "/actions", "/nowhere"),
)
#: So many tickets are stuck in all sorts of ways, and none is given up while one looks; more are mostly halted, and none
#: is tried again.
_FEW, _OF_FEW = 100, {"USHER_RETRY_SECONDS": "3"}
_OF_MANY = {"USHER_DEAD_LETTER_POLICY": "halt", "USHER_RETRY_SECONDS": "3600"}
#: Nothing may be wider than the page, but what says that it scrolls.
_OVERFLOWS = """document.documentElement.scrollWidth > document.documentElement.clientWidth"""
_AUDIT = (
    b'{"run":"2026-11-22","started_ms":1795348800000,"seconds":12.5,"verdict":"bad","unproven":3,"pending":6,"executions":12345,'
    b'"repeated":2,"findings":[{"check":"overlap","severity":"bad","count":1,"means":"two messages of a ticket ran at the same'
    b' time","examples":[{"id":"1700000000000-0","ticket":"INC-1","owner":"c1:7","detail":"started at 12:00:01 while'
    b' 1690000000000-0 ran on c2"}]}]}'
)


def main(folder: Path, all_tickets: list[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**LAUNCH)
        for tickets in all_tickets:
            more = _OF_MANY if tickets > _FEW else _OF_FEW
            with running_system(100_000, USHER_SHOWN_FIELDS="do,says", **more) as system:
                fill(system, tickets)
                for width, scheme in ((w, s) for w in (1280, 400) for s in ("light", "dark")):
                    look: Any = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
                    context = browser.new_context(base_url=system.url, **look)
                    shoot_all(context.new_page(), folder, f"{tickets}-{width}-{scheme}", bool(tickets))
                    context.close()
        browser.close()


def shoot_all(page: Any, folder: Path, name: str, is_busy: bool) -> None:
    """Make pictures of all pages as one sees them; say how long each took to come."""
    took: list[str] = []

    def shoot(what: str) -> None:
        page.screenshot(path=folder / f"{name}-{re.sub('[^a-zA-Z0-9]+', '-', what)}.png", full_page=True)
        if page.evaluate(_OVERFLOWS):
            print(f"{name}-{what} is wider than its page")  # noqa: T201

    page.goto("/")
    shoot("login")
    page.get_by_label("Token").fill(OPERATOR)
    page.get_by_role("button", name="Sign in").click()
    page.locator("main h1").wait_for()
    if is_busy:
        act(page)
    for path in _PAGES:
        began = time.monotonic()
        page.goto(path)
        took.append(f"{path} {1000 * (time.monotonic() - began):.0f}")
        page.wait_for_timeout(3000 if path == "/" else 300)
        shoot(path)
    if page.get_by_role("button", name="Menu").is_visible():
        page.get_by_role("button", name="Menu").click()
        shoot("menu")
    if is_busy:
        page.goto("/tickets/INC-2")
        page.get_by_role("button", name="Pause ticket...").click()
        shoot("sheet")
        page.goto("/tickets/INC-1")
        page.locator("#story a[href^='/messages/']").first.click()
        shoot("message")
        page.goto("/dead-letters")
        page.locator("td a.id[href^='/dead-letters/']").first.click()
        shoot("dead-letter")
        page.go_back()
        page.get_by_role("button", name="Redrive all...").first.click()
        page.get_by_role("button", name=re.compile("Redrive .*[0-9]")).wait_for(timeout=120_000)
        shoot("preview")
    print(f"{name}: ms to load: {', '.join(took)}")  # noqa: T201


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
        system.link.call("SET", KEYS.audit, _AUDIT)
        until(lambda: system.link.call("HLEN", KEYS.tickets) >= tickets, 900, "all of them are in the index")
        time.sleep(20)


def act(page: Any) -> None:
    """So that rules and actions have something to show."""
    for path, word, why in (
        ("/tickets/INC-6", "Pause ticket", "they asked"),
        ("/consumers/c2", "Drain", "update of c2"),
    ):
        page.goto(path)
        if page.get_by_role("button", name=f"{word}...").count():
            page.get_by_role("button", name=f"{word}...").click()
            page.get_by_label("Reason").filter(visible=True).fill(why)
            page.get_by_role("button", name=word, exact=True).click()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(one) for one in sys.argv[2:]] or [0, 40, 100_000])
