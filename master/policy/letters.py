"""Dead letters as values: their facts, filters for them, and counts of them. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from usher.common.protocol.last_error import error_name, told
from usher.common.protocol.run_log import GAVE_UP, RunRecord, decode_kept
from usher.common.protocol.stream_id import is_id, milliseconds

#: Policy of a letter whose ticket waits for it.
HALT = "halt"
#: A name and a place of an error, as they are told.
_PLACED = re.compile(r".+ in .+:[0-9]+")
#: So many letters in ten minutes, and so many times as many as usual, are sudden; usual is what came in that many times
#: ten minutes before.
_SUDDEN, _TIMES_USUAL, _TIMES = 20, 5, 23
#: Before now, in ms: where the two times begin.
SUDDEN_MS = (600_000 * (_TIMES + 1), 600_000)
#: Name of the letters of all kinds that came after the first 200 of them.
_OTHERS = "further kinds: the index tells the first 200 apart"
_WRONG = "Numbers by error are not exact: letters, or their index, were changed by hand; it is made anew"
#: Most groups that are named one by one.
_SHOWN = 5
#: Most tickets of which a preview keeps the first message.
_MOST_TICKETS = 10_000


@dataclass(frozen=True)
class DeadLetter:
    """A dead letter: its facts about the message, without the message's fields (lua/includes/letter.lua). Times are in
    milliseconds since the epoch.

    ``id`` is the letter's own; its milliseconds are when it was written. ``cut``: fields or parts of them are missing.
    ``at``: file and line of the error, in the handler's own code; ``handler``: MODULE:FUNCTION. ``runs``: its
    executions, as far as they were kept.
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
    handler: str = ""
    runs: tuple[RunRecord, ...] = ()

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
        told = {
            name: value.decode(errors="replace") if isinstance(value, bytes) else value
            for name, value in vars(self).items()
            if name not in ("traceback", "runs", "ticket")
        }
        return told | {"ticket_id": self.ticket.decode(errors="replace"), "written_ms": self.written_ms}


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

    runs = decode_kept(known.get(b"usher-history", b""), text("ticket"), text("id"))
    if not runs and number("attempts") == 1:  # it was given up at once
        of_run = (text("owner"), text("ticket"), text("id"), number("fence"), 1)
        runs = [RunRecord(*of_run, 1000 * number("first-ms"), 1000 * number("last-ms"), GAVE_UP)]
    texts = ["reason", "error", "error_type", "traceback", "owner", "policy", "at", "handler"]
    facts: dict[str, Any] = {name: text(name.replace("_", "-")) for name in texts}
    facts |= {name: number(name.replace("_", "-")) for name in ["attempts", "first_ms", "last_ms", "fence", "fields"]}
    facts |= {"id": letter_id, "message_id": known.get(b"usher-id", b""), "ticket": known.get(b"usher-ticket", b"")}
    cut = b"usher-fields-cut" in known or b"usher-values-cut" in known
    return DeadLetter(cut=cut, runs=tuple(runs) if is_id(text("id")) else (), **facts)


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
    message's; ``group`` that of a ``Group``. ``after_ms`` and ``before_ms``: when the letter was written,
    in milliseconds since the epoch. ``sees_texts``: whether who asks may see the texts of errors."""

    ticket: bytes | None = None
    reason: str = ""
    error: str = ""
    id: bytes | None = None
    after_ms: int | None = None
    before_ms: int | None = None
    policy: str = ""
    sees_texts: bool = True
    group: str = ""

    @property
    def begin(self) -> bytes:
        """Return how the members of the index begin that are of these letters, or of more (lua/includes/index.lua); b""
        where it does not know them."""
        named = ((b"t", self.ticket), (b"m", self.id))
        found = (b"%b%d:%b " % (kind, len(value), value) for kind, value in named if value is not None)
        return b"g%b " % self.group.encode() if self.group else next(found, b"")

    @property
    def start(self) -> bytes:
        return b"-" if self.after_ms is None else b"%d-0" % max(0, self.after_ms)

    @property
    def end(self) -> bytes:
        return b"+" if self.before_ms is None else b"%d" % max(0, self.before_ms)

    def meets(self, group: Group) -> bool:
        """Return whether all letters of a group match, as far as what they have in common tells."""
        is_narrow = any(one is not None for one in (self.ticket, self.id, self.after_ms, self.before_ms))
        told = (group.reason, group.error_type, group.at, "", group.policy)
        return not is_narrow and self.group in ("", group.id) and self._has(*told)

    def _has(self, reason: str, name: str, at: str, error: str, policy: str) -> bool:
        is_meant = not self.error or has_error(self.error, name, at, error)
        asked, given = (text.lower().replace("_", " ") for text in (self.reason, reason))
        return is_meant and asked in given and self.policy in ("", policy)

    def fits(self, letter: DeadLetter) -> bool:
        """Return whether the letter matches, as far as one can tell that knows no groups."""
        whose = self.ticket in (None, letter.ticket) and self.id in (None, letter.id, letter.message_id)
        until_ms = letter.written_ms if self.before_ms is None else self.before_ms
        whose = whose and (self.after_ms or 0) <= letter.written_ms <= until_ms
        told = (letter.reason, letter.error_name, letter.at, letter.error * self.sees_texts, letter.policy)
        return whose and self._has(*told)


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
    """Letters that have reason, name of the error (``error_type``), policy and place of the error in common. Where the
    index counts them, it has a name for them (``id``), knows the handler, and how many are of each time asked for."""

    reason: str
    error_type: str
    policy: str
    at: str
    count: int
    id: str = ""
    handler: str = ""
    times: tuple[int, ...] = ()

    @property
    def told(self) -> str:
        return told(self.error_type, self.at)

    @property
    def why(self) -> str:
        return ": ".join(filter(None, (self.reason, self.told)))


class LetterCounts(NamedTuple):
    """Numbers of letters, exact: of all; of those in the index, which are less while it is mended; and of each kind,
    the largest first."""

    letters: int
    indexed: int
    groups: list[Group]

    @property
    def are_all(self) -> bool:
        return self.indexed == self.letters

    @property
    def wrong(self) -> str:
        return "" if self.are_all else _WRONG

    @property
    def sudden(self) -> str:
        """Tell of letters that come much faster than usual; "" when they do not. ``SUDDEN_MS`` are the times that were
        counted."""
        now, before = (sum(group.times[at] for group in self.groups) for at in (0, 1))
        usual = before / _TIMES
        if now < max(_SUDDEN, _TIMES_USUAL * usual):
            return ""
        first = max(self.groups, key=lambda group: group.times[0])
        most = f"most of them: {first.why}" if 2 * first.times[0] > now else f"of {len(self.groups)} kinds"
        return f"{now:,} messages were given up in the last 10 minutes, usual are {usual:,.0f}; {most}"


def parse_counts(reply: Sequence[Any]) -> LetterCounts:
    """Parse what count_letters.lua answers. The last time comes first."""
    groups = []
    for group_id, kind, count, *times in reply[2:]:
        reason, name, policy, at, handler = (
            kind.decode(errors="replace").split("\n") if kind else ("", _OTHERS, *[""] * 3)
        )
        name = error_name("", name) or name
        groups.append(Group(reason, name, policy, at, count, group_id.decode(), handler, tuple(reversed(times))))
    return LetterCounts(reply[0], reply[1], sorted(groups, key=lambda group: -group.count))


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
