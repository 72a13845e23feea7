"""The message that a handler gets, and the lease that says whether it may still act on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import orjson

from usher.common.base.clock import now_s
from usher.common.base.errors import OwnershipLost
from usher.common.protocol.attempts import NEVER, Attempts
from usher.common.protocol.keys import REPLY_FIELD, LogKeys
from usher.common.protocol.message import UID_FIELD, EntryView, as_mapping, first_value, reply_address
from usher.common.protocol.sources import FROM_FIELD, SCOPED_TICKET_FIELD


class OwnLease:
    """The lease of this incarnation, as far as it can be known here.

    ``ends_s`` is counted from before the renewal was sent, so the lease cannot have ended anywhere earlier. The
    heartbeat writes it, all read it: one float, so no lock.
    """

    #: Handlers start only in this part of the lease: the rest allows for the clock's drift and for the time between
    #: check and start.
    _START_PART = 0.9

    def __init__(self, lease_s: float, sent_s: float) -> None:
        self.lease_s = lease_s
        self.renewed(sent_s)

    def renewed(self, sent_s: float) -> None:
        """Note that Redis extended the lease; the call was sent at ``sent_s``."""
        self.ends_s = sent_s + self.lease_s
        self.start_until_s = sent_s + self.lease_s * self._START_PART

    def end(self) -> None:
        self.ends_s = self.start_until_s = 0.0

    def may_start(self) -> bool:
        return now_s() < self.start_until_s

    def holds(self) -> bool:
        return now_s() < self.ends_s


#: What a caller is told: its kind, json or bytes, and itself; and most bytes of it, and for all callers of a run.
Told = tuple[bytes, bytes]
_LONGEST_RESULT, _MOST_FOR_ALL = 1 << 20, 1 << 22


def told(value: object, callers: int = 1) -> Told:
    """Encode what callers are told. Raises TypeError, ValueError."""
    kind, data = b"bytes", value
    if not isinstance(data, bytes):
        try:
            kind, data = b"json", orjson.dumps(value, default=lambda model: model.model_dump(mode="json"))
        except TypeError as wrong:  # a JSONEncodeError is one
            way_out = "give what JSON has, a pydantic model, a dataclass, or bytes of your own encoding"
            raise TypeError(f"a {type(value).__name__} cannot be sent to the caller ({wrong}): {way_out}") from None
    if len(data) > _LONGEST_RESULT:
        way_out = "store it, and send where it is, or send it in parts (message.progress)"
        raise ValueError(f"the result has {len(data):,} bytes, and at most {_LONGEST_RESULT:,} are sent: {way_out}")
    if len(data) * callers > _MOST_FOR_ALL:
        raise ValueError(
            f"the result has {len(data):,} bytes for each of {callers} callers: more than {_MOST_FOR_ALL:,}"
        )
    return kind, data


class Message(EntryView):
    """A message of a ticket, as a handler sees it.

    ``fence``, the fencing token, only grows per ticket: hand it to the place that stores an effect, and let that refuse
    a lower one. ``attempt`` is 1 for the first start. ``deadline`` is the time.monotonic() by which the handler should
    be done, or None.
    """

    __slots__ = (
        "_lease",
        "alone",
        "answer",
        "attempt",
        "crashes",
        "deadline",
        "end_us",
        "failures",
        "fence",
        "first_ms",
        "given",
        "interrupted",
        "lane",
        "losses",
        "plain",
        "slot",
        "start_us",
        "ticket",
    )

    stream: ClassVar[str] = ""  # the stream that is worked on; see message_type
    #: True in a dry run (`usher rehearse`), in which no effect may stay: sinks roll back. Check it before an effect
    #: that no sink makes.
    is_rehearsal: ClassVar[bool] = False
    #: The executor of the handler that runs; None in a child process, and for handlers of batches.
    runner: ClassVar[Any] = None
    cancelled_apart: ClassVar[threading.Event | None] = None  # of the run in a child process
    on_progress: ClassVar[Callable[[list[Message], Told], None]] = lambda some, told: None  # of each message_type
    answer: Told | None  # of this run; unset: none
    given: Any  # the result that this run has set, for callers of what is absorbed later; unset: none
    start_us: int  # time of the last start; unset before the first
    end_us: int  # time at which its handler returned; unset before that

    def __init__(
        self,
        ticket: bytes,
        stream_id: bytes,
        fence: int,
        flat: list[bytes] | None,
        lease: OwnLease,
        known: Attempts = NEVER,
    ) -> None:
        self.stream_id = stream_id  # not by the base's __init__: that call would cost as much as all the rest
        self._flat = flat
        self._fields = None
        self.ticket = ticket
        self.fence = fence
        # From former owners; ``attempt`` is counted up at each start, ``failures`` at each start that ended badly.
        self.attempt, self.failures, self.crashes, self.losses = known
        self.plain = known is NEVER and flat is not None  # without a past: it may start at once
        self.slot = self.first_ms = 0  # the journal's slot; 0: none
        self.interrupted = False
        self.alone = False  # it was in a call of several messages that failed as a whole: it runs alone next
        self.deadline: float | None = None
        self.lane: Any = None  # the held lane, when the next message must wait for this one's acknowledgement
        self._lease = lease

    @property
    def ticket_id(self) -> str:
        """The ordering key."""
        return self.ticket.decode()

    @property
    def scoped_ticket_id(self) -> str:
        """Return the ticket's name that is unique in Usher: ``<source>/<ticket_id>`` where several streams are taken
        in, else ``ticket_id``. Keep whatever you keep per ticket, fences above all, under this name."""
        return self.ticket.decode()

    @property
    def source(self) -> str:
        """Return the ticket stream that the producer added the message to."""
        return self.stream

    @property
    def source_id(self) -> str:
        return self.id

    def still_mine(self) -> bool:
        """Return whether this process still owns the ticket. Ask before an effect that no fence guards; the answer can
        be out of date by the time you act."""
        return self._lease.holds()

    def absorb(self, limit: int | None = None) -> list[Message]:
        """Take what waits of the ticket now into this run: up to ``limit`` messages, in order, which end with this one.

        Called first, it merges what has come; called between steps, it steers. When the run succeeds, all are
        acknowledged together. When it fails, all come back in order, and each runs alone the next time, uncharged; so
        do those of a run that a crash ended. Empty when nothing waits, or when this message runs alone: after a
        failure, and in a batch.
        """
        return self.runner.absorb(self, limit) if self.runner else []

    async def more(self, timeout_s: float) -> Message | None:
        """Wait for the next message of the ticket, up to ``timeout_s`` seconds, and absorb it. None: none came, or
        this process ends."""
        return await self.runner.more(self, timeout_s) if self.runner else None

    @property
    def cancelled(self) -> threading.Event:
        """Return the event that is set when somebody interrupts this run (``usher tickets interrupt``). An ``async
        def`` handler gets a CancelledError, too, once, at its next await. End by return, RetryLater or GiveUp."""
        return self.runner.beside(self).cancelled if self.runner else self.cancelled_apart or threading.Event()

    @property
    def is_asked(self) -> bool:
        return self._flat is not None and REPLY_FIELD in self._flat

    @property
    def reply_to(self) -> tuple[bytes, bytes] | None:
        """Return whom its result is for: a key, and the number of a call; None if nobody waits for it. A key that is
        none of its stream's is a stranger's: all acknowledgements beside it would be refused."""
        found = reply_address(self._flat or ()) if self.is_asked else None
        return found if found and found[0].startswith(LogKeys(self.source).replies("").encode()) else None

    def result(self, value: Any) -> None:
        """Set what its caller (``Producer.call``, ``stream``) is answered when it is done, as a return value other than
        None does. Raises TypeError and ValueError for what cannot be sent to a caller, if there is one."""
        self.given = value
        self.answer_all(value)

    def answer_all(self, value: Any, *others: Message) -> None:
        """Answer what this run ends, and ``others``, as far as somebody waits for its result: all get the same."""
        if callers := self._callers(*others):
            answer = told(value, len(callers))
            for one in callers:
                one.answer = answer

    def _callers(self, *others: Message) -> list[Message]:
        beside = self.runner.besides.get(self.stream_id) if self.runner else None
        ended = (self, *(beside.absorbed if beside else ()), *others)
        return [one for one in ended if one.reply_to is not None]

    def progress(self, chunk: Any) -> None:
        """Send a part of the result at once to its caller (``Producer.stream``), if there is one. Raises what
        ``result`` raises, OwnershipLost when this process' lease has ended, NotNow when too much waits to be sent."""
        if callers := self._callers():
            if not self._lease.holds():
                raise OwnershipLost("the lease has ended: another run of this message may be under way")
            type(self).on_progress(callers, told(chunk, len(callers)))

    @property
    def known(self) -> Attempts:
        return Attempts(self.attempt, self.failures, self.crashes, self.losses)

    def survived(self) -> None:
        """Clear the suspicion: its handler has ended, and this process has not."""
        self.crashes = self.losses = 0
        self.plain = True

    def crashed(self, is_blamed: bool) -> None:
        """Count an end of the child process in which it ran; if that is its doing, charge this start, and the ends of
        processes before."""
        self.failures = self.known.blamed().failures if is_blamed else self.failures
        self.crashes += 1

    @property
    def in_hand(self) -> bool:
        return self.slot != 0

    def facts(self) -> dict[str, Any]:
        return {"ticket": self.scoped_ticket_id, "id": self.id, "fence": self.fence, "attempt": self.attempt}

    def __repr__(self) -> str:
        return f"<Message {self.id} of ticket {self.scoped_ticket_id!r}, fence {self.fence}, attempt {self.attempt}>"


def answers_of(asked: Iterable[Any]) -> list[tuple[bytes, ...]]:
    """Return the answers for messages that are done (see OwnerScripts.ack), of those whose callers can be told."""
    found = [(one.reply_to, one.stream_id, getattr(one, "answer", None) or told(None)) for one in asked]
    return [(to[0], stream_id, to[1], b"", *answer) for to, stream_id, answer in found if to]


class GatheredMessage(Message):
    """A message of one of several ticket streams, gathered into the work stream (lua/sources/gather.lua). Handlers see
    it as the producer sent it."""

    __slots__ = ()

    def _header(self) -> tuple[str, int, str]:
        """Return the source id, the length of the prefix that gathering put before the ticket, and the source. Without
        a body they are unknown: "", 0, ""."""
        source_id, _, rest = (first_value((self._flat or ())[:2], FROM_FIELD) or b"").partition(b" ")
        length, _, source = rest.partition(b" ")
        return source_id.decode(), int(length or 0), source.decode()

    @property
    def ticket_id(self) -> str:
        return self.ticket.decode().encode()[self._header()[1] :].decode()

    @property
    def source(self) -> str:
        return self._header()[2] or self.stream

    @property
    def source_id(self) -> str:
        return self._header()[0] or self.id

    @property
    def uid(self) -> str:
        """Return the uid, made unique by its source: producers of different sources need not know of each other."""
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
    """Return the class for messages of ``stream``. The class knows the stream, and whether this is a rehearsal, so that
    a message pays nothing for it."""
    base = GatheredMessage if is_gathered else Message
    made: type[Message] = type(
        base.__name__, (base,), {"__slots__": (), "stream": stream, "is_rehearsal": is_rehearsal}
    )
    return made
