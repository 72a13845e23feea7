"""Dead letters as values: their facts, filters for them, and counts of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from usher.common.protocol.attempts import CUT_OFF, RAN_PAST
from usher.common.protocol.stream_id import milliseconds

#: Policy of a letter whose ticket waits for it.
PARK = "park"
#: Most groups that are named one by one.
_SHOWN = 5
#: Name of an error when nothing shows how the last start ended, and no crash was noted (consumer/policy/outcome.py).
_HUNG = "most likely hung"


@dataclass(frozen=True)
class DeadLetter:
    """A dead letter: its facts about the message, without the message's fields (lua/includes/letter.lua). Times are in
    milliseconds since the epoch.

    ``id`` is the letter's own; its milliseconds are when it was written. ``cut``: fields or parts of them are missing.
    """

    id: bytes
    message_id: bytes
    ticket: bytes
    reason: str
    error: str
    error_type: str
    traceback: str
    attempts: int
    owner: str
    first_ms: int
    last_ms: int
    policy: str
    fence: int
    fields: int
    cut: bool

    @property
    def written_ms(self) -> int:
        return milliseconds(self.id)

    @property
    def error_name(self) -> str:
        """Return the name of its error: its type; for a message that hung or took its process with it, and so raised
        nothing, words for that."""
        if self.error_type:
            return self.error_type
        return CUT_OFF if self.error.startswith(CUT_OFF) else _HUNG if self.error.startswith(RAN_PAST) else ""

    @property
    def group(self) -> tuple[str, str, str]:
        """Return the key that letters are counted by: reason, name of the error, policy."""
        return self.reason, self.error_name, self.policy

    def whole(self, fields: Sequence[bytes]) -> dict[str, Any]:
        """Return the letter with its traceback and its message's fields, as pairs: a name may come twice. Bytes that
        are not UTF-8 are shown as ``\\xff``."""
        text = [part.decode("utf-8", "backslashreplace") for part in fields]
        return self.row() | {
            "traceback": self.traceback,
            "message_fields": [list(pair) for pair in zip(text[::2], text[1::2], strict=False)],
        }

    def row(self) -> dict[str, Any]:
        """Return the letter for programs: bytes that are not UTF-8 are shown, not kept."""
        return {
            "id": self.id.decode(errors="replace"),
            "message_id": self.message_id.decode(errors="replace"),
            "ticket_id": self.ticket.decode(errors="replace"),
            "reason": self.reason,
            "error": self.error,
            "error_type": self.error_type,
            "attempts": self.attempts,
            "owner": self.owner,
            "first_ms": self.first_ms,
            "last_ms": self.last_ms,
            "written_ms": self.written_ms,
            "policy": self.policy,
            "fence": self.fence,
            "fields": self.fields,
            "cut": self.cut,
        }


def parse_letter(letter_id: bytes, head: Sequence[bytes]) -> DeadLetter:
    """Parse the flat list of our names and values. A value that is missing or not a number reads as empty or 0: an
    operator must see every letter."""
    known: dict[bytes, bytes] = {}
    for at in range(0, len(head) - 1, 2):
        known.setdefault(head[at], head[at + 1])

    def text(name: str) -> str:
        return known.get(b"usher-" + name.encode(), b"").decode(errors="replace")

    def number(name: str) -> int:
        value = text(name)
        return int(value) if value.isascii() and value.isdigit() and len(value) < 20 else 0

    return DeadLetter(
        letter_id,
        known.get(b"usher-id", b""),
        known.get(b"usher-ticket", b""),
        text("reason"),
        text("error"),
        text("error-type"),
        text("traceback"),
        number("attempts"),
        text("owner"),
        number("first-ms"),
        number("last-ms"),
        text("policy"),
        number("fence"),
        number("fields"),
        b"usher-fields-cut" in known or b"usher-values-cut" in known,
    )


def split_letter(flat: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Split a whole letter into our fields and the message's own; the last of ours says how many follow."""
    for at in range(0, len(flat) - 1, 2):
        if flat[at] == b"usher-fields":
            return list(flat[: at + 2]), list(flat[at + 2 :])
    return list(flat), []


@dataclass(frozen=True)
class LetterFilter:
    """Filter for letters: one matches when every condition given holds. ``reason`` and ``error`` are parts of the
    texts; ``error`` is looked for in the error's name too. ``id`` is a letter's or its message's. ``after_ms`` and
    ``before_ms``: when the letter was written, in milliseconds since the epoch."""

    ticket: bytes | None = None
    reason: str = ""
    error: str = ""
    id: bytes | None = None
    after_ms: int | None = None
    before_ms: int | None = None

    @property
    def start(self) -> bytes:
        """Lowest id that a matching letter can have, for XRANGE."""
        return b"-" if self.after_ms is None else b"%d-0" % max(0, self.after_ms)

    @property
    def end(self) -> bytes:
        """Highest id that a matching letter can have, for XRANGE."""
        return b"+" if self.before_ms is None else b"%d" % max(0, self.before_ms)

    def fits(self, letter: DeadLetter) -> bool:
        """Return whether the letter matches; its time is not checked, for only the range between ``start`` and ``end``
        is read."""
        return (
            (self.ticket is None or letter.ticket == self.ticket)
            and self.reason.lower() in letter.reason.lower()
            and (not self.error or self.error.lower() in f"{letter.error_name}\n{letter.error}".lower())
            and (self.id is None or self.id in (letter.id, letter.message_id))
        )


@dataclass(frozen=True)
class Group:
    """Letters that have reason, name of the error (``error_type``) and policy in common."""

    reason: str
    error_type: str
    policy: str
    count: int


def also_for(groups: Sequence[str]) -> str:
    """Say who else gets what a redrive adds to the end of the stream; "" when there is no other group.

    >>> also_for(["audit", "shipping"])
    'a new message is one for every group of the stream: audit and shipping handle it too'
    """
    shown = [*groups[:_SHOWN], *([f"{len(groups) - _SHOWN:,} more"] if len(groups) > _SHOWN else [])]
    listed = " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))
    verb = "handles" if len(groups) == 1 else "handle"
    return f"a new message is one for every group of the stream: {listed} {verb} it too" if groups else ""


class Preview:
    """Preview of a bulk action: counts letter by letter, so that none need be kept."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self.count = 0
        self.adds = 0  # that a redrive adds to the end of the stream: no ticket waits for them

    def add(self, letters: Iterable[DeadLetter]) -> None:
        for letter in letters:
            self._counts[letter.group] += 1
            self.count += 1
            self.adds += letter.policy != PARK

    @property
    def groups(self) -> list[Group]:
        """Groups of letters, largest first."""
        return [Group(*group, count) for group, count in self._counts.most_common()]
