"""Asks a consumer over HTTP what it does with a ticket: the one thing about it that nobody writes down.

The question goes to the address that the consumer registered, which the masters' allow-list let through: beside its health endpoint, without
redirects, and with small caps on time and bytes. What comes back is read strictly; anything odd is no answer.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import orjson
import requests

from common.clock import wall_ms
from master.policy.explain_facts import OwnEntry, OwnerTold

_CONNECT_S, _READ_S = 0.5, 1.0
_MOST_BYTES = 64 * 1024
_HEALTH, _TICKETS = "/api/health", "/api/tickets/"


def ask_owner(health_url: str, ticket_id: str) -> OwnerTold | None:
    """What the owner with this health URL does with the ticket; None: it did not say, or its health URL is not one of ours."""
    if not health_url.endswith(_HEALTH):
        return None
    try:
        asked = health_url.removesuffix(_HEALTH) + _TICKETS + quote(ticket_id.encode("utf-8", "surrogateescape"), safe="")
        with requests.Session() as session:
            session.trust_env = False  # no proxy of the environment: the address that was registered is the one that is asked
            with session.get(asked, timeout=(_CONNECT_S, _READ_S), allow_redirects=False, stream=True) as response:
                body = next(response.iter_content(_MOST_BYTES), b"")
                return read_answer(body, wall_ms()) if response.status_code == 200 else None
    except (requests.RequestException, OSError, ValueError):
        return None


def read_answer(body: bytes, now_ms: int) -> OwnerTold | None:
    """The answer in a body. Its times are moved to our clock: ``time_ms`` says when it was made on the other one."""
    try:
        document: dict[str, Any] = orjson.loads(body)
        ahead_ms = int(document["time_ms"]) - now_ms
        entries = tuple(_entry(entry, ahead_ms) for entry in document["entries"])
        return OwnerTold(entries, int(document["max_attempts"]))
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
    )
