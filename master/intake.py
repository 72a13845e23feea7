"""Intake: the doorbell that wakes the dispatcher, and the sorting of what it read into what can be handed over and what cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from common.errors import MessageUndecodable
from common.message import LONGEST_TICKET, check_ticket, unkeyed_ticket
from common.redis_client import Link
from common.service import Service
from common.streams import TicketStream
from master.leader_steps import Found, Rejected

#: What may be shown of a ticket id that nobody can use.
_SHOWN = 64
#: The reason of entries above USHER_LONGEST_MESSAGE_BYTES.
TOO_LARGE = "too_large"


class Doorbell(Service):
    """Waits for entries above an id with a plain XREAD: nothing is consumed, so a lost reply is simply asked again.

    It rings once per ``arm``: under load the dispatcher reads without it.
    """

    name = "doorbell"
    _BLOCK_MS = 2000

    def __init__(self, link: Link, stream: TicketStream, ring: Callable[[], None]) -> None:
        super().__init__()
        self._link = link
        self._stream = stream
        self._ring = ring
        self._lock = threading.Lock()
        self._after: bytes | None = None  # guarded by self._lock

    def arm(self, after: bytes) -> None:
        """Ring when the stream has an entry above ``after``."""
        with self._lock:
            if self._after == after:
                return
            self._after = after
        self.wake()

    def run_once(self) -> float:
        with self._lock:
            after = self._after
        if after is None:
            return self.stalls_after_s / 3
        if self._stream.wait_for_news(after, self._BLOCK_MS):
            with self._lock:
                if self._after == after:
                    self._after = None
            self._ring()
        return 0.0

    def interrupt(self) -> None:
        self._link.interrupt()

    def on_end(self) -> None:
        self._link.close()


def sort_out(found: Iterable[Found], spread: bool = False) -> tuple[list[tuple[bytes, bytes]], list[Rejected]]:
    """(id, ticket) of what can be handed over, and what must become a dead letter, with the reason.

    With ``spread`` a message without a ticket id is a ticket of its own, so it waits for no other, and any consumer may get it.
    """
    usable: list[tuple[bytes, bytes]] = []
    rejected: list[Rejected] = []
    for entry in found:
        if entry.size:
            rejected.append(Rejected(entry.id, (entry.ticket or b"")[:LONGEST_TICKET], TOO_LARGE))
            continue
        try:
            usable.append((entry.id, check_ticket(entry.ticket)))
        except MessageUndecodable as why:
            if spread and entry.ticket is None:
                usable.append((entry.id, unkeyed_ticket(entry.id)))
                continue
            rejected.append(Rejected(entry.id, (entry.ticket or b"")[:_SHOWN], why.reason))
    return usable, rejected
