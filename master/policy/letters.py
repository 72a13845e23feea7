"""Dead letters as values: their facts, filters for them, and counts of them. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from usher.common.protocol.last_error import error_name, told
from usher.common.protocol.stream_id import milliseconds

#: Policy of a letter whose ticket waits for it.
HALT = "halt"
#: A name and a place of an error, as they are told.
_PLACED = re.compile(r".+ in .+:[0-9]+")
#: Most groups that are named one by one.
_SHOWN = 5
#: Most tickets of which a preview keeps the first message.
_MOST_TICKETS = 10_000


@dataclass(frozen=True)
class DeadLetter:
    """A dead letter: its facts about the message, without the message's fields (lua/includes/letter.lua). Times are in
    milliseconds since the epoch.

    ``id`` is the letter's own; its milliseconds are when it was written. ``cut``: fields or parts of them are missing.
    ``at``: file and line of the error, in the handler's own code.
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
    at: str = ""

    @property
    def written_ms(self) -> int:
        return milliseconds(self.id)

    @property
    def error_name(self) -> str:
        return error_name(self.error_type, self.error)

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Return the key that letters are counted by: reason, name of the error, policy, place of the error."""
        return self.reason, self.error_name, self.policy, self.at

    @property
    def why(self) -> str:
        """Return reason, name and place of the error: who may not see what messages say may see this."""
        return ": ".join(filter(None, (self.reason, told(self.error_name, self.at))))

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
            "at": self.at,
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
        text("at"),
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
    texts; ``error`` is looked for in the error's name and place too (``has_error``). ``id`` is a letter's or its
    message's. ``after_ms`` and ``before_ms``: when the letter was written, in milliseconds since the epoch.
    ``sees_texts``: whether who asks may see the texts of errors."""

    ticket: bytes | None = None
    reason: str = ""
    error: str = ""
    id: bytes | None = None
    after_ms: int | None = None
    before_ms: int | None = None
    policy: str = ""
    sees_texts: bool = True

    @property
    def start(self) -> bytes:
        return b"-" if self.after_ms is None else b"%d-0" % max(0, self.after_ms)

    @property
    def end(self) -> bytes:
        return b"+" if self.before_ms is None else b"%d" % max(0, self.before_ms)

    def fits(self, letter: DeadLetter) -> bool:
        """Return whether the letter matches; its time is not checked, for only the range between ``start`` and ``end``
        is read."""
        return (
            (self.ticket is None or letter.ticket == self.ticket)
            and self.reason.lower() in letter.reason.lower()
            and (not self.error or has_error(self.error, letter.error_name, letter.at, letter.error * self.sees_texts))
            and self.policy in ("", letter.policy)
            and (self.id is None or self.id in (letter.id, letter.message_id))
        )


def has_error(asked: str, name: str, at: str, error: str) -> bool:
    """Return whether an error is meant by ``asked``: its name with its place, or a part of its name, place or text.

    >>> [has_error(asked, "KeyError", "shop.py:41", "KeyError: 'x'") for asked in ("keyerror in shop.py:41", "'X'")]
    [True, True]
    >>> has_error("Error in shop.py:41", "KeyError", "shop.py:41", "KeyError: 'x'")
    False
    """
    if _PLACED.fullmatch(asked):
        return asked.lower() == told(name, at).lower()
    return asked.lower() in f"{name}\n{at}\n{error}".lower()


@dataclass(frozen=True)
class Group:
    """Letters that have reason, name of the error (``error_type``), policy and place of the error in common."""

    reason: str
    error_type: str
    policy: str
    at: str
    count: int

    @property
    def told(self) -> str:
        return told(self.error_type, self.at)


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
        self._counts: Counter[tuple[str, str, str, str]] = Counter()
        self.count = 0
        self.adds = 0  # that a redrive adds to the end of the stream: no ticket waits for them
        self.first: dict[bytes, bytes] = {}  # of their tickets, as far as they are counted: its first letter's message

    def add(self, letters: Iterable[Any]) -> None:
        """``letters``: letters, or tickets, with a ``group`` and a ``policy``."""
        for letter in letters:
            self._counts[letter.group] += 1
            self.count += 1
            if letter.policy != HALT:
                self.adds += 1
                if len(self.first) < _MOST_TICKETS or letter.ticket in self.first:
                    self.first.setdefault(letter.ticket, letter.message_id)

    @property
    def groups(self) -> list[Group]:
        return [Group(*group, count) for group, count in self._counts.most_common()]
