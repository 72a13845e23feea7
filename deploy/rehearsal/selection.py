"""Selection of messages to rehearse: what became of them before, and what follows from how it went. Pure: values in,
words out."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from usher.common.base.errors import MessageUndecodable
from usher.common.protocol.attempts import NEVER, Attempts
from usher.common.protocol.message import REPLAY_OF, UID_FIELD, check_ticket, first_value, ticket_value
from usher.common.protocol.run_log import RunRecord
from usher.common.protocol.stream_id import is_id, rank
from usher.consumer.isolation.values import NOT_RUN, CallResult, Piece
from usher.master.policy.letters import DeadLetter

#: Reasons of letters whose message no handler was ever given, nor would be if it were redriven.
_FOR_NOBODY = frozenset({"no_ticket_id", "empty_ticket_id", "ticket_id_too_long", "ticket_id_not_utf8"})
_NOBODY = "no handler is ever given it ({})"
DEAD, DONE, HELD, HALT, WAITING, ENDED, UNKNOWN = (
    "dead_letter",
    "done",
    "in_processing",
    "halted",
    "waiting",
    "ended",
    "unknown",
)


class Before(NamedTuple):
    """The fate of a message until now. ``state``: one of the words above; ``told``: details, for people."""

    state: str
    told: str = ""

    def text(self) -> str:
        """Describe it in a few words.

        >>> Before(DONE).text(), Before(DEAD, "gave up: it is broken").text()
        ('done', 'gave up: it is broken')
        """
        return self.told or self.state.replace("_", " ")


@dataclass(frozen=True)
class Candidate:
    """A message that can be rehearsed, without its body. ``fence``: the highest one known of it, else 0; ``known``: its
    attempts, as its next start would find them; ``unfit``: why no handler can be given it, or ""; ``run``: its last
    execution, as far as it is known."""

    message_id: bytes
    ticket: bytes
    before: Before
    letter: DeadLetter | None = None
    fence: int = 0
    known: Attempts = NEVER
    unfit: str = ""
    run: RunRecord | None = None

    @property
    def is_over(self) -> bool:
        """Return True when nothing of it runs or waits, and a handler can be given it."""
        return not self.unfit and self.before.state in (DONE, ENDED, UNKNOWN)

    @property
    def id(self) -> str:
        """Return the id that commands use: that of its letter, if it has one."""
        return (self.letter.id if self.letter is not None else self.message_id).decode(errors="replace")

    @property
    def place(self) -> int:
        """Return its place in the order of the stream; for the letter of something that never was an entry, the
        letter's place."""
        own = self.message_id.decode(errors="replace")
        return rank(self.message_id) if is_id(own) or self.letter is None else rank(self.letter.id)

    def piece(self, flat: Sequence[bytes]) -> Piece:
        """Return what the handler's process is given."""
        return Piece(self.ticket, self.message_id, self.fence, (*self.known,), tuple(flat))


def of_letter(letter: DeadLetter, ticket: bytes) -> Candidate:
    """Make a candidate of a dead letter. It would be redriven with attempts that begin anew."""
    reason = letter.reason.replace("_", " ")
    why = f"{reason}: {letter.error}" if letter.error else reason
    before = Before(DEAD, f"{why} (halted)" if letter.policy == "halt" else why)
    unfit = _NOBODY.format(letter.reason) if letter.reason in _FOR_NOBODY else unfit_of(letter.ticket or None)
    return Candidate(letter.message_id, ticket, before, letter, letter.fence, NEVER, unfit)


def unfit_of(ticket: bytes | None) -> str:
    """Return why no handler can be given a message of this ticket (None: it has none), or ""."""
    try:
        check_ticket(ticket)
    except MessageUndecodable as why:
        return _NOBODY.format(why.reason)
    return ""


def in_order(candidates: Iterable[Candidate], most: int | None = None) -> list[Candidate]:
    """Put candidates in the order of the stream, each message once (its letter says more than its entry); only the
    newest ``most``."""
    found: dict[bytes, Candidate] = {}
    for one in candidates:
        if one.message_id not in found or found[one.message_id].letter is None:
            found[one.message_id] = one
    ordered = sorted(found.values(), key=lambda one: one.place)
    return ordered if most is None else ordered[-most:]


class Rehearsed(NamedTuple):
    """A message, and how the call with it ended."""

    candidate: Candidate
    now: CallResult

    def document(self) -> dict[str, Any]:
        """Return the document for programs. Bytes that are not UTF-8 are shown, not kept."""
        one = self.candidate
        return {
            "letter_id": None if one.letter is None else one.letter.id.decode(errors="replace"),
            "message_id": one.message_id.decode(errors="replace"),
            "ticket_id": _display_ticket(one.ticket),
            "fence": one.fence,
            "attempt": one.known.starts + 1,
            "before": {"state": one.before.state, "told": one.before.text()}
            | ({"reason": one.letter.reason, "error": one.letter.error} if one.letter is not None else {}),
            "now": self.now.document(),
            "taken": self.now.is_taken,
        }

    def row(self) -> tuple[str, str, str, str, str, str]:
        """Return a row for people: kind, id, ticket, before, now, seconds."""
        one, now = self.candidate, self.now
        kind = "message" if one.letter is None else "letter"
        return kind, one.id, _display_ticket(one.ticket), one.before.text()[:80], now.told()[:160], f"{now.seconds:.3f}"


def _display_ticket(ticket: bytes) -> str:
    return "" if ticket.startswith(b"\xff") else ticket.decode(errors="replace")


def redrive_command(done: Sequence[Rehearsed], given: Mapping[str, str | None]) -> str | None:
    """Return the command line that redrives the letters that are taken now; None when there are none. ``given``: the
    flags with which Usher was found.

    >>> redrive_command([], {}) is None
    True
    """
    ids = [one.candidate.letter.id.decode() for one in done if one.now.is_taken and one.candidate.letter is not None]
    flags = [
        word for field, value in given.items() if value is not None for word in (f"--{field.replace('_', '-')}", value)
    ]
    return shlex.join(["usher", "dead", "redrive", *ids, *flags]) if ids else None


def exit_code(done: Sequence[Rehearsed]) -> int:
    """Return 0 when all were taken, 1 when some were not."""
    return 0 if all(one.now.is_taken for one in done) else 1


# ---- replay ----------------------------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """Selection of entries to replay: between two ids, both included, of a ticket (None: of all), with these values."""

    first: bytes
    last: bytes
    ticket: bytes | None
    where: tuple[tuple[bytes, bytes], ...]

    def fits(self, flat: Sequence[bytes]) -> bool:
        """Return True when a message's fields have the values, and it is no copy that a replay added: one that goes on
        finds those of its first part."""
        return first_value(flat, REPLAY_OF) is None and all(
            ticket_value(flat, name) == value for name, value in self.where
        )

    def told(self) -> str:
        """Describe the selection, for people.

        >>> Wanted(b"0-0", b"9-0", b"42", ((b"kind", b"ride"),)).told()
        'ticket 42, kind=ride, from 0-0 to 9-0'
        """
        parts = [] if self.ticket is None else [f"ticket {self.ticket.decode(errors='replace')}"]
        parts += [b"=".join(one).decode(errors="replace") for one in self.where]
        return ", ".join([*parts, f"from {self.first.decode()} to {self.last.decode()}"])


NOT_REPLAYED = "not_replayed"


def again(flat: Sequence[bytes], entry_id: bytes, name: str, same_uid: bool) -> tuple[bytes, list[bytes]]:
    """Return the uid under which a replay knows that it has added a message, and the fields of its new entry. The new
    entry has that uid, or with ``same_uid`` the original's, by which sinks that have its effect know it.

    >>> again([b"ticket_id", b"42", b"uid", b"order-7"], b"5-1", "fix", False)
    (b'order-7@fix', [b'ticket_id', b'42', b'uid', b'order-7@fix', b'usher_replay_of', b'5-1'])
    """
    former = first_value(flat, UID_FIELD) or entry_id
    uid = former + b"@" + name.encode()
    kept = [
        part
        for pair in zip(flat[::2], flat[1::2], strict=True)
        if pair[0] not in (UID_FIELD, REPLAY_OF)
        for part in pair
    ]
    return uid, [*kept, UID_FIELD, former if same_uid else uid, REPLAY_OF, entry_id]


class Replayed(NamedTuple):
    """A message, its new entry (b"": none), and what came of that."""

    candidate: Candidate
    new_id: bytes
    now: Before
    seconds: float | None = None

    @property
    def comparison(self) -> str:
        """Compare with the original: ``same``, ``differs``, or ``unknown`` where either is."""
        states = (self.candidate.before.state, self.now.state)
        if UNKNOWN in states or self.now.state in (WAITING, HELD, NOT_REPLAYED):
            return "unknown"
        return "same" if (states[0] == DONE) == (states[1] == DONE) else "differs"

    def document(self) -> dict[str, Any]:
        """Return the document for programs."""
        one = self.candidate
        return {
            "message_id": one.message_id.decode(),
            "ticket_id": _display_ticket(one.ticket),
            "before": {"state": one.before.state, "told": one.before.text(), "seconds": seconds_of(one.run)},
            "new_id": self.new_id.decode() or None,
            "now": {"state": self.now.state, "told": self.now.text(), "seconds": self.seconds},
            "comparison": self.comparison,
        }

    def row(self) -> tuple[str, ...]:
        """Return a row for people: message, ticket, before, now, seconds before and now."""
        one, seconds = self.candidate, (seconds_of(self.candidate.run), self.seconds)
        words = (one.before.text()[:80], self.now.text()[:160])
        return one.id, _display_ticket(one.ticket), *words, *("" if s is None else f"{s:.3f}" for s in seconds)


def seconds_of(run: RunRecord | None) -> float | None:
    """Return the duration of an execution; None when it is not known, or has not ended."""
    return None if run is None or not run.end_us else (run.end_us - run.start_us) / 1e6


def as_replayed(one: Rehearsed) -> Replayed:
    """Return a rehearsal as the replay into a shadow that it is."""
    now = one.now
    before = Before(DONE) if now.is_taken else Before(NOT_REPLAYED if now.how == NOT_RUN else ENDED, now.told())
    return Replayed(one.candidate, b"", before, now.seconds)
