"""A logging handler that a handler's module brings along: whatever it does, it holds up nothing of a consumer."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import requests

from tests.hands import ask, group_of
from tests.nightly import more
from tests.process.crew import KEYS, Crew
from usher import Link

pytestmark = pytest.mark.process

_MODULE = """
import logging, time


class Brought(logging.Handler):
    def emit(self, record):
        time.sleep(SECONDS)


logging.getLogger().addHandler(Brought())
log = logging.getLogger("shop")


def handle(message):
    log.warning("handled %s", message.id)
    if message.fields.get("fails"):
        raise ValueError("no")
"""
_MESSAGES = 2000


@pytest.mark.parametrize("seconds", [*more(3), 1_000_000], ids=["3 s a line", "for ever"])
def test_a_logging_handler_that_waits_holds_up_nothing(folder: Path, link: Link, seconds: int) -> None:
    (folder / "brought.py").write_text(_MODULE.replace("SECONDS", str(seconds)))
    with Crew(folder, link.url) as crew:
        crew.start(1, ["c1"], "brought:handle", USHER_MAX_ATTEMPTS="2", USHER_RETRY_SECONDS="0.1")
        fields = [("fails", "1") if number % 100 == 0 else ("n", "1") for number in range(_MESSAGES)]
        began_s = time.monotonic()
        link.pipeline([("XADD", KEYS.stream, "*", "ticket_id", f"T{n % 20}", *pair) for n, pair in enumerate(fields)])
        crew.until(lambda: _is_done(link), 30, "all are handled")
        assert time.monotonic() - began_s < 20, "as fast as without it"
        log = (crew.logs / "c1").read_text()
        assert len(set(re.findall(r"handled (\d+-\d+)", log))) == _MESSAGES, "each line is in the log of its consumer"
        assert len(crew.events("message_given_up", "c1")) == _MESSAGES // 100
        crew.until(lambda: crew.events("log_lines_dropped", "c1"), 10, "what the handler misses is told")
        (row,) = ask(f"{crew.masters[0]}/api/consumers").document["consumers"]
        assert row["state"] == "live" and not crew.events("consumer_lost"), "its lease was renewed"
        page = requests.get(f"{row['health_url'].removesuffix('/api/health')}/metrics", timeout=10).text
        dropped = re.search(r"^usher_log_lines_dropped_total (.*)$", page, re.MULTILINE)
        assert dropped is not None and float(dropped[1]) > 100
        began_s = time.monotonic()
        assert crew.stop("c1") == 0
        assert time.monotonic() - began_s < 10 and crew.events("consumer_drained", "c1")


def _is_done(link: Link) -> bool:
    if not link.call("EXISTS", KEYS.stream):
        return False
    facts = group_of(link.call("XINFO", "GROUPS", KEYS.stream), KEYS.group, link.call("GET", KEYS.taken)) or {}
    return facts.get(b"pending") == 0 and facts[b"entries-read"] == _MESSAGES
