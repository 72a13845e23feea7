"""Pictures of every page, to be looked at: ``python -m tests.browser.screenshots FOLDER [TICKETS [WIDTH]]``, light and
dark. No test."""

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

_PAGES = {
    "overview": "/",
    "tickets": "/tickets",
    "search": "/tickets?q=INC-1",
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
    "findings": {"overlap": 1},
    "unproven": 3,
    "pending": 6,
    "executions": 12_345,
    "repeated": 2,
    "examples": [
        {
            "check": "overlap",
            "severity": "bad",
            "count": 1,
            "means": "two messages of a ticket ran at the same time",
            "examples": [_FOUND],
        }
    ],
}


def main(folder: Path, tickets: int, width: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with running_system(100_000) as system, sync_playwright() as playwright:
        browser = playwright.chromium.launch(**LAUNCH)
        fill(system, tickets)
        for scheme in ("light", "dark"):
            page = browser.new_context(
                base_url=system.url, color_scheme=scheme, viewport={"width": width, "height": 800}
            ).new_page()
            page.goto("/")
            shoot(page, folder, f"{tickets}-login-{scheme}")
            page.get_by_label("Token").fill(OPERATOR)
            page.get_by_role("button", name="Sign in").click()
            if scheme == "light" and tickets:
                act(page)
            for name, path in _PAGES.items():
                page.goto(path)
                page.wait_for_timeout(3000 if name == "overview" else 300)
                shoot(page, folder, f"{tickets}-{name}-{scheme}")
            if tickets:
                page.goto("/tickets/INC-1")
                page.locator("#story a[href^='/messages/']").first.click()
                shoot(page, folder, f"{tickets}-message-{scheme}")
                page.goto("/dead-letters")
                page.locator("tbody a.id").first.click()
                shoot(page, folder, f"{tickets}-dead-letter-{scheme}")
                page.go_back()
                page.get_by_role("button", name="Preview redrive").click()
                page.get_by_role("button", name=re.compile("Redrive .*[0-9]")).wait_for(timeout=120_000)
                shoot(page, folder, f"{tickets}-bulk-{scheme}")
        browser.close()


def fill(system: System, tickets: int) -> None:
    """A tenth hangs, fails or is given up; the rest waits behind those, or is done."""
    for at in range(0, tickets, 1000):
        some = range(at, min(at + 1000, tickets))
        does = ("done", "hang", "fail", "give up", "done", "done", "done", "done", "done", "done")
        system.link.pipeline(
            [
                ("XADD", KEYS.stream, "*", "ticket_id", f"INC-{n}", "do", does[n % 10], "says", f"no account {n}")
                for n in some
            ]
        )
    if tickets:
        system.send("INC-1", 4, text="what waits behind")
        system.link.call("SET", KEYS.audit, json.dumps(_AUDIT))
        time.sleep(15)


def act(page: Any) -> None:
    """So that rules and actions have something to show."""
    page.goto("/tickets/INC-2")
    page.get_by_label("Reason").fill("the other side is being repaired")
    page.get_by_role("button", name="Pause ticket").click()
    page.goto("/consumers")
    page.get_by_label("Reason").fill("update of c2")
    page.get_by_role("button", name="Drain c2").click()


def shoot(page: Any, folder: Path, name: str) -> None:
    page.screenshot(path=folder / f"{name}.png", full_page=True)


if __name__ == "__main__":
    tickets, width = [*sys.argv[2:], *("10", "1280")[len(sys.argv) - 2 :]]
    main(Path(sys.argv[1]), int(tickets), int(width))
