"""Batches of acknowledgements. Pure.

Per ticket the acknowledged ids are always a prefix in id order: lanes finish in order, and this ledger keeps that
order. One batch is under way at a time; a batch whose reply was lost goes again, unchanged, before anything later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from usher.common.protocol.attempts import Attempts
from usher.common.protocol.last_error import NotedError

#: Number of messages that is worth a call; with fewer the acker waits for more.
_WORTH_A_CALL = 200
#: A ticket window that lasts for the whole wait, even for a ticket with tens of thousands of messages a second.
_WIDE_WINDOW = 256


def linger(flush_s: float, strict: bool, spare: int, ticket_window: int) -> tuple[float, int]:
    """Return for how long finished messages wait for their acknowledgement, from the last write on, and how many of
    them wait for no more. ``spare``: messages that the consumer may have beyond those that run; ``ticket_window``: most
    messages of one ticket. The leader hands more over when it hears that half of them are done.

    >>> linger(0.02, False, 1992, 512), linger(0.02, True, 12, 512)
    ((0.02, 200), (0.005, 6))
    """
    is_waited_for = strict or ticket_window < _WIDE_WINDOW
    return flush_s / 4 if is_waited_for else flush_s, max(1, min(_WORTH_A_CALL, spare // 2))


class Finished(NamedTuple):
    """An execution that ended, as it was then. Times are microseconds since the epoch."""

    ticket: bytes
    stream_id: bytes
    fence: int
    attempt: int
    start_us: int
    end_us: int
    flat: Sequence[bytes] = ()
    interrupted: bool = False


class FailedAttempt(NamedTuple):
    """A start that did not end in success, and the message's attempts after it. ``outcome`` is a word of
    common/protocol/run_log.py. ``error``: None where a dead letter tells it."""

    run: Finished
    outcome: str
    attempts: Attempts
    error: NotedError | None = None


class AckLedger:
    """Finished messages on their way to Redis. Many threads may append to ``finished``; ``next_batch`` and ``settle``
    are called from one. ``is_again``: the batch under way was asked for before; ``taken``: how many of ``finished`` it
    has. ``absorbed``: what runs ended beside their message, by its id; ``into``: the id of the run by that of what it
    absorbed, in this batch. They are acknowledged together."""

    def __init__(self, most: int) -> None:
        self.finished: deque[Any] = deque()  # append and popleft of a deque are atomic
        self.is_again = False
        self._most = most
        self._under_way: list[Any] = []
        self.taken = 0
        self.absorbed: dict[bytes, Sequence[Any]] = {}
        self.into: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self.finished) + (self.taken if self._under_way else 0)

    def next_batch(self, most: int | None = None) -> list[Any]:
        """Return the batch that is under way, or a new one of up to ``most`` messages; empty when there is nothing."""
        self.is_again = bool(self._under_way)
        if not self.is_again:
            limit, take = self._most if most is None else min(self._most, most), self.finished.popleft
            self.taken = min(limit, len(self.finished))
            self.into = {}
            if not self.absorbed:
                self._under_way = [take() for _ in range(self.taken)]
            else:
                limit, self.taken = self.taken, 0
                while self.taken < limit and len(self._under_way) < self._most:  # a script has no room for many more
                    run, self.taken = take(), self.taken + 1
                    others = self.absorbed.pop(run.stream_id, ())
                    self.into |= {one.stream_id: run.stream_id for one in others}
                    self._under_way += (run, *others)
        return self._under_way

    def settle(self) -> None:
        self._under_way = []
