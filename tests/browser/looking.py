"""Somebody who looks at the page with a browser, and the system that is looked at."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

from tests.doors import tokens_file
from tests.hands import EmbeddedRedis, Role, living_consumers
from tests.process.crew import KEYS, Crew
from tests.process.machine import kill_all_of, processes_of
from usher import Link

#: The browser of this machine, and how playwright starts it.
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
LAUNCH = {"executable_path": BROWSER, "args": ["--no-sandbox", "--disable-gpu"]}
OPERATOR, VIEWER = "a-token-of-operators", "a-token-of-viewers"
_API = "a-token-of-the-api"
#: What the messages ask for; the errors are what a hostile producer makes them.
_HANDLER = """
import os, pathlib, time
from usher import GiveUp
MENDED, BAD = pathlib.Path(__file__).with_name("mended"), pathlib.Path(__file__).with_name("bad")
def handle(message):
    do, says = message.fields.get("do", ""), message.fields.get("says", "it did not work")
    while do == "hang" and not MENDED.exists():
        time.sleep(0.2)
    if do == "work":
        time.sleep(float(message.fields["seconds"]))
    if do == "crash" and not MENDED.exists():
        os.kill(os.getpid(), 9)
    if do == "deploy" and BAD.exists():
        message.fields["customer_id"]
    if do == "fail":
        raise ValueError(says)
    if do == "give up" and not MENDED.exists():
        raise GiveUp(says)
"""
#: No step takes longer, also on a busy machine.
PATIENCE_MS = 30_000
_WATCH = """
window.reports = [];
document.addEventListener('securitypolicyviolation', (event) => reports.push(event.violatedDirective + ' ' + event.blockedURI));
"""


class System:
    """What runs, and how messages get in."""

    def __init__(self, crew: Crew, server: EmbeddedRedis, folder: Path, capacity: int) -> None:
        self.crew, self.server, self.capacity = crew, server, capacity
        self.url = crew.masters[0]
        self.folder = folder
        self.link = Link(server.url, "test:browser")

    def send(self, ticket: str, count: int = 1, **fields: str) -> list[str]:
        """Ids of ``count`` messages of ``ticket``."""
        flat = [text for pair in fields.items() for text in pair]
        replies = self.link.pipeline(
            [("XADD", KEYS.stream, "*", "ticket_id", ticket, "n", n, *flat) for n in range(count)]
        )
        return [bytes(reply).decode() for reply in replies]

    def letters(self) -> int:
        return int(self.link.call("XLEN", KEYS.dead))

    def consumer(self, name: str) -> None:
        more = {"USHER_MAX_ATTEMPTS": "9", "USHER_CONCURRENCY": "16", "USHER_CAPACITY": str(self.capacity)}
        self.crew.start_consumer(name, "asked:handle", PYTHONPATH=str(self.folder), **more)

    def ask(self, method: str, path: str, **asked: Any) -> Any:
        """Return what the master answers to a program; {} if nothing."""
        head = {"Authorization": f"Bearer {OPERATOR}"}
        try:
            return requests.request(method, f"{self.url}/api{path}", headers=head, **{"timeout": 5} | asked).json()
        except requests.RequestException:
            return {}


@contextlib.contextmanager
def running_system(capacity: int = 2000, **settings: str) -> Iterator[System]:
    """Run one master that asks for tokens, and two consumers that hold up to ``capacity`` messages each; with these
    further ``settings``."""
    with tempfile.TemporaryDirectory(prefix="usher-t-", dir="/tmp") as name:
        folder = Path(name)
        (folder / "asked.py").write_text(_HANDLER)
        with EmbeddedRedis(folder / "redis", port=None, durable=False) as server:
            tokens = settings | {
                "USHER_API_TOKEN": _API,
                "USHER_TOKENS_FILE": tokens_file(
                    folder, (Role.OPERATOR, "operator-token", OPERATOR), (Role.VIEWER, "viewer-token", VIEWER)
                ),
            }
            with Crew(folder, server.url, **tokens) as crew:
                crew.start_master()
                made = System(crew, server, folder, capacity)
                for consumer in ("c1", "c2"):
                    made.consumer(consumer)
                crew.until(lambda: living_consumers(crew.masters, _API) >= {"c1", "c2"}, 60, "consumers are registered")
                yield made
                made.link.close()
        left = processes_of(folder)
        kill_all_of(folder)
        assert not left


class Looking:
    """A page, and what went wrong with it: script errors, policy reports, dialogs, requests that leave."""

    def __init__(self, context: Any, system: System) -> None:
        self.page = context.new_page()
        self.troubles: list[str] = []
        self.refusals: list[str] = []
        #: Where the page is: of a proxy, if one is asked.
        self.root = system.url
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.add_init_script(_WATCH)
        self.page.on("pageerror", lambda error: self.troubles.append(f"script: {error}"))
        self.page.on("console", self._console)
        self.page.on("dialog", self._dialog)
        self.page.on("request", self._request)
        self.accepts_dialogs = False

    def sign_in(self, token: str) -> None:
        self.page.goto(f"{self.root}/")
        self.page.get_by_label("Token").fill(token)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.get_by_role("navigation").wait_for()

    def go(self, path: str) -> Any:
        """Open a page, and note what its policy has stopped."""
        response = self.page.goto(f"{self.root}{path}", wait_until="load")
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
        if not request.url.startswith(self.root + "/"):
            self.troubles.append(f"request: {request.url}")
