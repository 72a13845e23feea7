"""Owner question: asks a consumer over HTTP what it does with a ticket, or what it runs: facts that are written down
nowhere.

The request goes where health requests go (``usher.master.membership.consumer_http``), beside the health endpoint. The
answer is parsed strictly; anything odd counts as no answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson

from usher.common.base.clock import wall_ms
from usher.master.membership.consumer_http import ConsumerHttpClient, RequestBounds
from usher.master.membership.health_url import HealthHosts
from usher.master.policy.explain.facts import OwnEntry, OwnerTold

_BOUNDS = RequestBounds(connect_s=0.5, read_s=1.0, whole_s=1.5, most_bytes=64 * 1024)
_HEALTH, _TICKETS, _RUNNING = "/api/health", "/api/tickets/", "/api/running"
#: Characters of a name that a consumer tells.
_LONGEST = 300


class OwnerQuestion:
    """Question to a ticket's owner; many threads may call it."""

    def __init__(self, hosts: HealthHosts, ca: Path | None = None) -> None:
        self._asker = ConsumerHttpClient(hosts, _BOUNDS, ca)

    def __call__(self, health_url: str, ticket_id: str) -> OwnerTold | None:
        """Ask the owner with this health URL what it does with the ticket. Return None when it did not say, or when its
        health URL is not one that we ask."""
        if not health_url.endswith(_HEALTH):
            return None
        # Dots are quoted too: clients and proxies remove a part of a path that is "." or "..".
        path = _TICKETS + quote(ticket_id.encode("utf-8", "surrogateescape"), safe="").replace(".", "%2E")
        answer = self._asker.ask({"owner": health_url}, end=_HEALTH, instead=path)["owner"]
        return read_answer(answer.body, wall_ms()) if answer.status == 200 else None

    def process(self, health_url: str) -> dict[str, Any] | None:
        """Ask the consumer with this health URL what its process is and runs. Return None when it did not say: one of a
        former version has no such answer."""
        if not health_url.endswith(_HEALTH):
            return None
        answer = self._asker.ask({"owner": health_url}, end=_HEALTH, instead=_RUNNING)["owner"]
        return read_process(answer.body, wall_ms()) if answer.status == 200 else None

    def close(self) -> None:
        self._asker.close()


def read_answer(body: bytes, now_ms: int) -> OwnerTold | None:
    """Parse the answer in a body; None when it is none. Its times are moved to our clock: ``time_ms`` says when it was
    made by the other one."""
    try:
        document: dict[str, Any] = orjson.loads(body)
        ahead_ms = int(document["time_ms"]) - now_ms
        entries = tuple(_entry(entry, ahead_ms) for entry in document["entries"])
        return OwnerTold(entries, int(document["max_attempts"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def read_process(body: bytes, now_ms: int) -> dict[str, Any] | None:
    """Parse what a consumer tells of its process; None when it is not that. Its times are moved to our clock."""
    try:
        document: dict[str, Any] = orjson.loads(body)
        ahead_ms, memory = int(document["time_ms"]) - now_ms, document["memory_bytes"]
        running = [
            {
                "ticket_id": str(one["ticket_id"]),
                "id": str(one["id"]),
                "attempt": int(one["attempt"]),
                "started_ms": int(one["started_ms"]) - ahead_ms,
            }
            for one in document["running"]
        ]
        told = {name: str(document[name])[:_LONGEST] for name in ("incarnation", "host", "version", "handler")}
        numbers = {"pid": int(document["pid"]), "memory_bytes": None if memory is None else int(memory)}
        return {**told, **numbers, "running": running, "runs": int(document["runs"])}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _entry(entry: dict[str, Any], ahead_ms: int) -> OwnEntry:
    started_ms, due_ms = int(entry["started_ms"] or 0), int(entry["due_ms"] or 0)
    return OwnEntry(
        str(entry["id"]).encode(),
        str(entry["state"]),
        int(entry["attempt"]),
        started_ms and max(1, started_ms - ahead_ms),
        due_ms and max(1, due_ms - ahead_ms),
        bool(entry.get("apart")),
    )
