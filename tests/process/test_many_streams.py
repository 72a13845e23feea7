"""Several ticket streams on real programs: each tenant's tickets are its own, everything is told, and the work stream
stays short."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.hands import Keys
from tests.process.crew import Crew
from tests.process.machine import USHER, environ_for
from tests.tuned import tuned
from usher import Link

pytestmark = pytest.mark.process

_KEYS = Keys("usher:{g}", "g")
_QUICKLY = tuned(TRIM_S=0.5)
_SETTING = {"USHER_TICKET_STREAM": "orders,tenant:*", "USHER_GROUP": "g"}
_HANDLER = """
import os, pathlib
def handle(message):
    line = f"{message.ticket_id} {message.source} {message.source_id} {message.uid} {message.scoped_ticket_id} {sorted(message.fields)}\\n"
    with open(os.environ["SEEN"], "a") as out:
        out.write(line)
"""


def _told(folder: Path, redis_url: str, *words: str, fails: bool = False) -> Any:
    environ = environ_for(folder, USHER_REDIS_URL=redis_url, USHER_STATE_DIR=str(folder / "state"), **_SETTING)
    done = subprocess.run([*USHER, *words], env=environ, capture_output=True, timeout=60, check=False)
    assert bool(done.returncode) is fails, done.stderr.decode()
    return done.stderr.decode() if fails else json.loads(done.stdout)


def test_each_streams_tickets_are_its_own_and_all_is_told(folder: Path, link: Link) -> None:
    streams = ["orders", *(f"tenant:{number}" for number in range(20))]
    seen = folder / "seen"
    (folder / "watching.py").write_text(_HANDLER)
    redis_url, sent = link.url, dict[str, list[str]]()
    with Crew(folder, redis_url, SEEN=str(seen), USHER_TRIM_KEEP="0s", **_QUICKLY, **_SETTING) as crew:
        crew.start(2, ["c1", "c2"], "watching:handle", PYTHONPATH=str(folder))
        for _ in range(30):
            for name, reply in zip(
                streams,
                link.pipeline([("XADD", name, "*", "ticket_id", "42", "n", "1") for name in streams]),
                strict=True,
            ):
                sent.setdefault(name, []).append(reply.decode())
        crew.until(
            lambda: seen.exists() and len(seen.read_text().splitlines()) >= 30 * len(streams), 30, "all is handled"
        )
        handled: dict[str, list[str]] = {}
        for line in seen.read_text().splitlines():
            ticket, source, source_id, uid, scoped, fields = line.split(" ", 5)
            assert (ticket, uid, scoped, fields) == (
                "42",
                f"{source}/{source_id}",
                f"{source}/42",
                "['n', 'ticket_id']",
            )
            handled.setdefault(source, []).append(source_id)
        assert handled == sent, "each once, and in the order of its stream"
        crew.until(
            lambda: link.call("XLEN", _KEYS.stream) <= 120,
            20,
            "the work stream is cut, but for the node that is being filled",
        )

        def told() -> Any:
            return requests.get(f"{crew.masters[1]}/api/sources", timeout=10).json()["sources"]

        crew.until(
            lambda: [master["shards"] for master in told()["masters"]] == [32, 32], 20, "both masters gather a half"
        )
        assert sorted(master["url"] for master in told()["masters"]) == sorted(crew.masters)
        status = _told(folder, redis_url, "status", "--json")["sources"]
        assert (status["sources"], status["lag"], status["troubles"]) == (21, 0, {})
        assert sum(master["moved"] for master in status["masters"]) == 30 * len(streams)
        assert "--ticket-stream" in _told(folder, redis_url, "send", "--ticket", "1", "a=b", fails=True)
        sent["orders"] += [
            reply.decode() for reply in link.pipeline([("XADD", "orders", "*", "ticket_id", "42", "n", "1")] * 1000)
        ]
        crew.until(lambda: link.call("XLEN", "orders") <= 200, 30, "what was gathered is cut off the stream itself too")
        trimmed = _told(folder, redis_url, "trim", "--json", "--apply", "--ticket-stream", "orders")
        assert trimmed["decision"] == "nothing" or trimmed["floor"] == sent["orders"][-1], (
            "a source may be cut up to what was gathered"
        )
