"""Somebody who looks at the page with a browser, and the system that is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.redis_client import Link
from tests.process.crew import KEYS, Crew

OPERATOR, VIEWER = "a-token-of-operators", "a-token-of-viewers"
#: No step takes longer, also on a busy machine.
PATIENCE_MS = 30_000
_WATCH = """
window.reports = [];
document.addEventListener('securitypolicyviolation', (event) => reports.push(event.violatedDirective + ' ' + event.blockedURI));
"""


class System:
    """What runs, and how messages get in."""

    def __init__(self, crew: Crew, redis_url: str, folder: Path) -> None:
        self.crew = crew
        self.url = crew.masters[0]
        self.folder = folder
        self.link = Link(redis_url, "test:browser")

    def send(self, ticket: str, count: int = 1, **fields: str) -> list[str]:
        """Ids of ``count`` messages of ``ticket``."""
        flat = [text for pair in fields.items() for text in pair]
        replies = self.link.pipeline([("XADD", KEYS.stream, "*", "ticket_id", ticket, "n", n, *flat) for n in range(count)])
        return [bytes(reply).decode() for reply in replies]

    def letters(self) -> int:
        return int(self.link.call("XLEN", KEYS.dead))


class Looking:
    """A page, and what went wrong with it: script errors, policy reports, dialogs, requests that leave."""

    def __init__(self, context: Any, system: System) -> None:
        self.page = context.new_page()
        self.troubles: list[str] = []
        self.refusals: list[str] = []
        self._system = system
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.add_init_script(_WATCH)
        self.page.on("pageerror", lambda error: self.troubles.append(f"script: {error}"))
        self.page.on("console", self._console)
        self.page.on("dialog", self._dialog)
        self.page.on("request", self._request)
        self.accepts_dialogs = False

    def sign_in(self, token: str) -> None:
        self.page.goto("/")
        self.page.get_by_label("Token").fill(token)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.get_by_role("navigation").wait_for()

    def go(self, path: str) -> Any:
        """Open a page, and note what its policy has stopped."""
        response = self.page.goto(path, wait_until="load")
        self.look_for_reports()
        return response

    def look_for_reports(self) -> None:
        self.troubles += [f"policy: {report}" for report in self.page.evaluate("window.reports || []")]

    def see(self, text: str) -> None:
        self.page.get_by_text(text).first.wait_for()

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            (self.refusals if "status of 4" in message.text else self.troubles).append(f"console: {message.text}")

    def _dialog(self, dialog: Any) -> None:
        if self.accepts_dialogs:
            dialog.accept()
            return
        self.troubles.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, request: Any) -> None:
        if not request.url.startswith(self._system.url + "/"):
            self.troubles.append(f"request: {request.url}")
