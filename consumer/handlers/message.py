"""What a handler gets: the message, and whether it may still act on it."""

from __future__ import annotations

from typing import Any, ClassVar

from usher.common.base.clock import now_s
from usher.common.protocol.attempts import NEVER, Attempts
from usher.common.protocol.message import UID_FIELD, EntryView, as_mapping, first_value, ticket_text
from usher.common.protocol.sources import FROM_FIELD, SCOPED_TICKET_FIELD


class OwnLease:
    """This incarnation's lease, as far as it can be known here.

    ``ends_s`` is counted from before the renewal was sent, so the lease cannot have ended anywhere earlier. Written by
    the heartbeat, read by all: one float, so no lock.
    """

    #: Handlers start only in this part of the lease: the rest is for the clock's drift and for what lies between check
    #: and start.
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

    ``fence`` only grows per ticket: hand it to whatever stores an effect, and let that refuse a lower one. ``attempt``
    is 1 for the first start. ``deadline`` is the time.monotonic() by which the handler should be done, or None.
    """

    __slots__ = (
        *("_lease", "alone", "attempt", "crashes", "deadline", "failures", "fence", "first_ms"),
        *("end_us", "lane", "losses", "plain", "shares_call", "slot", "start_us", "ticket"),
    )

    stream: ClassVar[str] = ""  # that is worked on; see message_type
    #: Whether nothing may come of it (`usher rehearse`): sinks roll back. Ask it before an effect that none of them
    #: makes.
    is_rehearsal: ClassVar[bool] = False
    start_us: int  # of the last start; not before there was one
    end_us: int  # when its handler returned; not before

    def __init__(
        self,
        ticket: bytes,
        stream_id: bytes,
        fence: int,
        flat: list[bytes] | None,
        lease: OwnLease,
        known: Attempts = NEVER,
    ) -> None:
        self.stream_id = stream_id  # not by the base's own: that call would cost as much as all the rest
        self._flat = flat
        self._fields = None
        self.ticket = ticket
        self.fence = fence
        # Of former owners; ``attempt`` is counted up at each start, ``failures`` at each that ended badly.
        self.attempt, self.failures, self.crashes, self.losses = known
        self.plain = known is NEVER and flat is not None  # nothing speaks against starting it at once
        self.slot = self.first_ms = 0  # the journal's slot; 0: none
        self.alone = (
            False  # it was in a call of several messages that failed as a whole: the next call is about it alone
        )
        self.shares_call = False  # it is, or was last, in a call of several messages
        self.deadline: float | None = None
        self.lane: Any = None  # the held one, when what comes after it must wait for its acknowledgement
        self._lease = lease

    @property
    def ticket_id(self) -> str:
        """The ticket's id; "" when the message has none (USHER_UNKEYED=spread): then ``ticket`` names this message and
        no other."""
        return ticket_text(self.ticket)

    @property
    def scoped_ticket_id(self) -> str:
        """The ticket as Usher tells it apart from all others: ``<source>/<ticket_id>`` where several streams are taken
        in, else ``ticket_id``. What is kept per ticket, fences above all, must be kept under this one."""
        return ticket_text(self.ticket)

    @property
    def source(self) -> str:
        """The ticket stream that the producer added it to."""
        return self.stream

    @property
    def source_id(self) -> str:
        """Its id in ``source``."""
        return self.id

    def still_mine(self) -> bool:
        """Whether this process still owns the ticket. Ask before an effect that no fence guards; the answer can be old
        by the time you act."""
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
        return {"ticket": self.scoped_ticket_id, "id": self.id, "fence": self.fence, "attempt": self.attempt}

    def __repr__(self) -> str:
        return f"<Message {self.id} of ticket {self.scoped_ticket_id!r}, fence {self.fence}, attempt {self.attempt}>"


class GatheredMessage(Message):
    """A message of one of several ticket streams, gathered into the work stream (lua/sources/gather.lua). Handlers see
    what the producer sent."""

    __slots__ = ()

    def _header(self) -> tuple[str, int, str]:
        """Source id, how much of the ticket is not the producer's, source. Without a body nobody knows."""
        source_id, _, rest = (first_value((self._flat or ())[:2], FROM_FIELD) or b"").partition(b" ")
        length, _, source = rest.partition(b" ")
        return source_id.decode(), int(length or 0), source.decode()

    @property
    def ticket_id(self) -> str:
        return ticket_text(self.ticket).encode()[self._header()[1] :].decode()

    @property
    def source(self) -> str:
        return self._header()[2] or self.stream

    @property
    def source_id(self) -> str:
        return self._header()[0] or self.id

    @property
    def uid(self) -> str:
        """Producers of different sources need not know of each other: their uids are told apart."""
        given = first_value(self._flat or (), UID_FIELD)
        return f"{self.source}/{given.decode('utf-8', 'surrogateescape') if given else self.source_id}"

    @property
    def fields(self) -> dict[str, str]:
        if self._fields is None:
            flat = self._flat or []
            at = 0
            while flat[at : at + 1] and flat[at] in (FROM_FIELD, SCOPED_TICKET_FIELD):
                at += 2
            self._fields = as_mapping(flat[at:])
        return self._fields


def message_type(stream: str, is_gathered: bool, is_rehearsal: bool = False) -> type[Message]:
    """What messages of ``stream`` are. It is their class that knows the stream, and whether this is a rehearsal: a
    message pays nothing for it."""
    base = GatheredMessage if is_gathered else Message
    made: type[Message] = type(
        base.__name__, (base,), {"__slots__": (), "stream": stream, "is_rehearsal": is_rehearsal}
    )
    return made
