"""A stream as masters and consumers would have left it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.common.redis.replies import pack_entry, pack_part
from usher.master.policy.rules import Rule, dump, rule_id

GROUP = "g"
_HOUR_MS = 3_600_000
#: So wide that a slow machine makes no finding of what is well.
LIMITS = SimpleNamespace(
    owner_idle_ms=_HOUR_MS, parked_ms=_HOUR_MS, deliveries=20, attempts=5, clocks_ms=1000, reaped_ms=50
)
CAP = 40


class Seeder:
    """Writes one stream as masters and consumers would have left it."""

    def __init__(self, link: Link, stream: str) -> None:
        self._link = link
        self.keys = Keys(stream, GROUP)
        self._starts: dict[str, int] = {}  # that count, by id
        link.call("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")

    def add(self, *entries: tuple[str, str]) -> None:
        """(id, ticket) each."""
        self._link.pipeline(
            [("XADD", self.keys.stream, entry_id, "ticket_id", ticket, "number", 1) for entry_id, ticket in entries]
        )

    def read(self) -> None:
        """The master reads all."""
        self._link.call("XREADGROUP", "GROUP", GROUP, "master", "COUNT", 100_000, "STREAMS", self.keys.stream, ">")

    def own(self, owner: str, *ids: str, idle_ms: int = 0, deliveries: int = 1) -> None:
        self._link.call(
            "XCLAIM", self.keys.stream, GROUP, owner, 0, *ids, "IDLE", idle_ms, "RETRYCOUNT", deliveries, "JUSTID"
        )

    def index(self, ticket: str, record: str) -> None:
        """Write a ticket's record, and what it says into its owner's inbox."""
        self._link.call("HSET", self.keys.tickets, ticket, record)
        owner, _, told = record.partition(" ")
        if ":" in owner:
            self.tell(owner, ticket, told)

    def tell(self, owner: str, ticket: str, told: str) -> None:
        """``told``: fence and ids, of a hand-over that draws a fence of its own."""
        fence, *ids = told.encode().split(b" ")
        part = pack_part(ticket.encode(), fence, [pack_entry((one,)) for one in ids])
        self._link.call("XADD", self.keys.inbox(owner), "*", "fence", 1, "parts", b"*1\r\n" + part)

    def rule(self, rule: Rule) -> None:
        self._link.call("HSET", self.keys.rules, rule_id(rule.target, rule.value), b"1 0 " + dump(rule))

    def live(self, *incarnations: str) -> None:
        for name in incarnations:
            self._link.call("SET", self.keys.lease(name), "live", "PX", 10 * _HOUR_MS)
            consumer, _, generation = name.partition(":")
            self._link.call("HSET", self.keys.consumers, consumer, f"{generation} uuid 1 1 - http://127.0.0.1:1")

    def over(self, *ids: str) -> None:
        self._link.call("XACK", self.keys.stream, GROUP, *ids)

    def ran(self, consumer: str, *runs: tuple[Any, ...], record: str = "*") -> None:
        """(id, ticket, fence, start us, end us[, outcome[, attempt]]) each, in one record."""
        columns: dict[str, Any] = {"consumer": consumer, "attempts": [self._attempt(*run) for run in runs]}
        for at, name in enumerate(("ids", "tickets", "fences", "start_us", "end_us")):
            columns[name] = [run[at] for run in runs]
        if any(len(run) > 5 for run in runs):
            columns["outcomes"] = [run[5] if len(run) > 5 else "done" for run in runs]
        self._link.call("XADD", self.keys.runs, record, "batch", orjson.dumps(columns))

    def _attempt(self, *run: Any) -> int:
        """Count a start as consumers do: what failed counts, until the message is over."""
        before = self._starts.get(run[0], 0)
        outcome, attempt = (*run[5:], *("done", before + 1)[max(0, len(run) - 5) :])
        is_counted = outcome in ("failed", "crashed", "retry_later")
        self._starts[run[0]] = attempt if is_counted else 0
        return int(attempt)

    def letter(self, entry_id: str, ticket: str) -> None:
        self._link.call(
            "XADD", self.keys.dead, "*", "usher-id", entry_id, "usher-ticket", ticket, "usher-reason", "gave_up"
        )


class Killed(Exception):
    """The process dies here."""


def die(*_: object, **__: object) -> None:
    raise Killed


def kill_at(patched: pytest.MonkeyPatch, step: int, store: Any = None) -> None:
    """From now on the ``step``-th call of those that leave a trace outside of the process, or in a store, kills it."""
    passed = 0

    def deadly(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed == step:
                raise Killed
            return None if own is os.fsync else own(*given, **named)

        return call

    of_files = ((Path, "replace"), (Path, "mkdir"), (Path, "unlink"), (os, "fsync"), (shutil, "rmtree"))
    of_store = ((store, name) for name in ("pipe_file", "put_file", "rm_file") if store)
    for place, name in (*of_files, (Link, "call"), *of_store):
        patched.setattr(place, name, deadly(getattr(place, name)))
