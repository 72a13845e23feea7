"""Replay: messages that are over become new entries of their stream, in order per ticket, one of each at a time.

Masters and consumers see ordinary messages: they are handed over under the fence of their ticket's next owner, and
counted, logged and audited as such. A message of a ticket is added only when the one before it is done; behind one that
is not, the rest of its ticket is left alone.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from usher.common.base.backoff import backoff_s
from usher.common.base.clock import now_s
from usher.common.base.errors import ReplyUnknown
from usher.common.protocol.keys import Keys, uid_key
from usher.common.redis.client import Link
from usher.common.redis.scripts import ScriptRunner
from usher.deploy.rehearsal.candidates import (
    DONE,
    HELD,
    NOT_REPLAYED,
    UNKNOWN,
    WAITING,
    Before,
    Candidate,
    Candidates,
    Replayed,
    again,
    seconds_of,
)

#: How long Redis remembers that a replay has added a message, in ms: within a day it goes on where it was cut off.
_KNOWN_MS = 86_400_000
#: Tickets that a replay has messages of in the stream at a time.
_AT_ONCE = 100
#: Seconds between two looks at what became of them: while something ends, and after a while of nothing.
_LOOK_S, _LONGEST_LOOK_S = 0.05, 1.0
#: Most names and values: more do not fit on Lua's stack.
_MOST_VALUES = 7000
_TRIES = 6


@dataclass
class Replay:
    """A replay, known by its name: who gives the same one again goes on. ``rate``: most messages a second; ``check`` is
    called at each turn, and may raise; ``done`` is filled as it goes."""

    link: Link
    keys: Keys
    finder: Candidates
    name: str
    rate: float
    same_uid: bool
    check: Callable[[int], object]
    done: list[Replayed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._scripts = ScriptRunner(self.link)
        self._rng = random.Random()
        self._queues: dict[bytes, deque[Candidate]] = {}
        self._running: dict[bytes, Candidate] = {}  # by the new id

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Replay these messages, which are in the order of the stream. Raises what ``Link.call`` and ``check`` raise;
        ``done`` and ``open`` then tell how far it came."""
        for one in candidates:
            self._queues.setdefault(one.ticket, deque()).append(one)
        began_s, added, pause_s = now_s(), 0, _LOOK_S
        while self._queues or self._running:
            self.check(len(self.done))
            allowed = 1 + int((now_s() - began_s) * self.rate) - added
            most = max(1, int(self.rate * pause_s))  # what a stall kept back does not come at once
            now_added = self._add(min(allowed, most, _AT_ONCE - len(self._running)))
            added += now_added
            pause_s = _LOOK_S if self._look() or now_added else min(2 * pause_s, _LONGEST_LOOK_S)
            if self._queues or self._running:
                time.sleep(pause_s)

    def open(self) -> list[Replayed]:
        left = [one for queue in self._queues.values() for one in queue]
        return [
            *(Replayed(one, new_id, Before(WAITING, "added; not over yet")) for new_id, one in self._running.items()),
            *(Replayed(one, b"", Before(NOT_REPLAYED, "not added")) for one in left),
        ]

    def _add(self, most: int) -> int:
        busy, before = {one.ticket for one in self._running.values()}, len(self._running)
        for ticket in [ticket for ticket in self._queues if ticket not in busy][: max(0, most)]:
            one = self._queues[ticket][0]
            flat = self.finder.body(one)
            if flat is None or len(flat) > _MOST_VALUES:
                self._stop(ticket, "its fields are gone" if flat is None else "it has too many fields")
                continue
            self._running[self._sent(one, flat)] = one
            self._next(ticket)
        return len(self._running) - before

    def _sent(self, one: Candidate, flat: list[bytes]) -> bytes:
        """Add an entry, once, and return its id: Redis knows the uid when an answer is lost, and when this name is
        given again."""
        stream, (uid, fields) = self.keys.stream, again(flat, one.message_id, self.name, self.same_uid)
        for failures in range(1, _TRIES + 1):
            try:
                keys = (stream, stream, stream, uid_key(stream, uid))
                [[new_id, _]], _ = self._scripts.run("send", keys, (_KNOWN_MS, 0, "", 0, len(fields), *fields))
                return bytes(new_id)
            except ReplyUnknown:
                if failures == _TRIES:
                    raise
                time.sleep(backoff_s(failures, 0.1, 2.0, self._rng))
        raise AssertionError("not reached")

    def _look(self) -> int:
        if not self._running:
            return 0
        ended = 0
        for seen in self.finder.states([(new_id, one.ticket) for new_id, one in self._running.items()]):
            if seen.before.state in (WAITING, HELD):
                continue
            one = self._running.pop(seen.message_id)
            self.done.append(Replayed(one, seen.message_id, seen.before, seconds_of(seen.run)))
            ended += 1
            if seen.before.state not in (DONE, UNKNOWN) and one.ticket in self._queues:
                self._stop(one.ticket, f"behind {one.id}, which was not done")
        return ended

    def _next(self, ticket: bytes) -> None:
        self._queues[ticket].popleft()
        if not self._queues[ticket]:
            del self._queues[ticket]

    def _stop(self, ticket: bytes, why: str) -> None:
        self.done += [Replayed(one, b"", Before(NOT_REPLAYED, why)) for one in self._queues.pop(ticket)]
