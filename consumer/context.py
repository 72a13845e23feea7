"""What a handler gets: the message, and whether it may still act on it."""

from __future__ import annotations

from typing import Any

from common.attempts import NEVER, Attempts
from common.clock import now_s
from common.message import EntryView, ticket_text


class OwnLease:
    """This incarnation's lease, as far as it can be known here.

    ``ends_s`` is counted from before the renewal was sent, so the lease cannot have ended anywhere earlier. Written by the heartbeat,
    read by all: one float, so no lock.
    """

    #: Handlers start only in this part of the lease: the rest is for the clock's drift and for what lies between check and start.
    _START_PART = 0.9

    def __init__(self, lease_s: float, sent_s: float) -> None:
        self.lease_s = lease_s
        self.renewed(sent_s)

    def renewed(self, sent_s: float) -> None:
        """Redis extended the lease; the call was sent at ``sent_s``."""
        self.ends_s = sent_s + self.lease_s
        self.start_until_s = sent_s + self.lease_s * self._START_PART

    def end(self) -> None:
        """The lease is lost."""
        self.ends_s = self.start_until_s = 0.0

    def may_start(self) -> bool:
        return now_s() < self.start_until_s

    def holds(self) -> bool:
        return now_s() < self.ends_s


class Message(EntryView):
    """One message of a ticket, as a handler sees it.

    ``fence`` only grows per ticket: hand it to whatever stores an effect, and let that refuse a lower one. ``attempt`` is 1 for the
    first start. ``deadline`` is the time.monotonic() by which the handler should be done, or None.
    """

    __slots__ = (
        *("_lease", "alone", "attempt", "crashes", "deadline", "failures", "fence", "first_ms"),
        *("losses", "plain", "shares_call", "slot", "start_us", "ticket"),
    )

    start_us: int  # of the last start; not before there was one

    def __init__(
        self, ticket: bytes, stream_id: bytes, fence: int, flat: list[bytes] | None, lease: OwnLease, known: Attempts = NEVER
    ) -> None:
        super().__init__(stream_id, flat)
        self.ticket = ticket
        self.fence = fence
        # Of former owners; ``attempt`` is counted up at each start, ``failures`` at each that ended badly.
        self.attempt, self.failures, self.crashes, self.losses = known
        self.plain = known is NEVER and flat is not None  # nothing speaks against starting it at once
        self.slot = self.first_ms = 0  # the journal's slot; 0: none
        self.alone = False  # it was in a call of several messages that failed as a whole: the next call is about it alone
        self.shares_call = False  # it is, or was last, in a call of several messages
        self.deadline: float | None = None
        self._lease = lease

    @property
    def ticket_id(self) -> str:
        """The ticket's id; "" when the message has none (USHER_UNKEYED=spread): then ``ticket`` names this message and no other."""
        return ticket_text(self.ticket)

    def still_mine(self) -> bool:
        """Whether this process still owns the ticket. Ask before an effect that no fence guards; the answer can be old by the time you act."""
        return self._lease.holds()

    @property
    def known(self) -> Attempts:
        """What is known of its attempts."""
        return Attempts(self.attempt, self.failures, self.crashes, self.losses)

    def survived(self) -> None:
        """Its handler has ended, and this process has not: it is no suspect any more."""
        self.crashes = self.losses = 0
        self.plain = True

    @property
    def in_hand(self) -> bool:
        """Whether its handler runs, as far as the journal was told."""
        return self.slot != 0

    def facts(self) -> dict[str, Any]:
        """What every line of a log says about it."""
        return {"ticket": self.ticket_id, "id": self.id, "fence": self.fence, "attempt": self.attempt}

    def __repr__(self) -> str:
        return f"<Message {self.id} of ticket {self.ticket_id!r}, fence {self.fence}, attempt {self.attempt}>"
