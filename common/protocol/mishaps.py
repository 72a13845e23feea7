"""Mishaps: accidents of a stream, as scripts count them (lua/includes/util.lua: count_up) beside its epochs and fences;
and declared losses: what was found to be lost, or to run again, written down when it was found. The page and the doctor
show both, and the audit tells a declared loss from a promise that was broken. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from usher.common.base.text import pluralize
from usher.common.protocol.keys import Keys
from usher.common.protocol.stream_id import Span, after, before, rank

#: Losses kept, roughly.
KEPT = 1000
#: First and last id.
IdRange = tuple[bytes, bytes]

_MEANS = {
    "group_lost": "the consumer group was lost, and made again",
    "set_back": "the group knows less than its leader did: Redis lost its last moments, or somebody set it back",
    "unread_cut": "cut from the stream before they were read",
}


#: Number of entries that were cut before they were read, and when that happened last, in seconds.
MISHAPS = ("unread_cut", "unread_cut_s")


def parse_mishaps(reply: Any) -> dict[str, int]:
    """Parse what HMGET says of ``MISHAPS`` in ``Keys.counters``."""
    numbers = (None, None) if isinstance(reply, Exception) else reply
    return {name: int(number or 0) for name, number in zip(MISHAPS, numbers, strict=True)}


class DeclaredLoss(NamedTuple):
    """A loss. ``kind``: see _MEANS; ``repeats``, ``lost``: ids between which messages may run again, or are lost;
    ``messages``: how many, 0 when it is not known; ``stream``: of a source, else ""; ``ms``: when it was declared."""

    kind: str
    repeats: IdRange | None = None
    lost: IdRange | None = None
    messages: int = 0
    stream: str = ""
    ms: int = 0

    def describe(self) -> str:
        """Return it in words.

        >>> DeclaredLoss("unread_cut", messages=2, lost=(b"5-1", b"9-0")).describe()
        '2 messages: cut from the stream before they were read; lost: between 5-1 and 9-0'
        """
        told = [f"{pluralize(self.messages, 'message')}: " if self.messages else "", _MEANS.get(self.kind, self.kind)]
        told += [f" (of {self.stream})"] if self.stream else []
        for word, ids in (("may run again", self.repeats), ("lost", self.lost)):
            told += [f"; {word}: between {ids[0].decode()} and {ids[1].decode()}"] if ids is not None else []
        return "".join(told)

    def document(self) -> dict[str, Any]:
        return {"ms": self.ms, "kind": self.kind, "text": self.describe()}


def gap_of(position: bytes, span: Span | None) -> IdRange | None:
    if span is None:
        return None
    last = span.last_generated if span.first is None else before(span.first)
    return (after(position), last) if rank(position) < rank(last) else None


def format_id_range(ids: IdRange | None) -> str:
    return f"{ids[0].decode()}..{ids[1].decode()}" if ids else "nothing"


def loss_command(keys: Keys, loss: DeclaredLoss) -> tuple[Any, ...]:
    fields = [b"kind", loss.kind, b"messages", loss.messages, b"stream", loss.stream]
    for name, ids in ((b"repeats", loss.repeats), (b"lost", loss.lost)):
        fields += [] if ids is None else [name, b"%b %b" % ids]
    return ("XADD", keys.losses, "MAXLEN", "~", KEPT, "*", *fields)


def losses_command(keys: Keys, most: int) -> tuple[Any, ...]:
    return ("XREVRANGE", keys.losses, "+", "-", "COUNT", most)


def parse_losses(reply: Any) -> list[DeclaredLoss]:
    return [] if isinstance(reply, Exception) else [_parse(entry_id, fields) for entry_id, fields in reply]


def _parse(entry_id: bytes, fields: list[bytes]) -> DeclaredLoss:
    said = dict(zip(fields[::2], fields[1::2], strict=True))
    repeats, lost = (_range(said.get(name)) for name in (b"repeats", b"lost"))
    kind, count, stream = (said.get(name, b"").decode(errors="replace") for name in (b"kind", b"messages", b"stream"))
    return DeclaredLoss(kind, repeats, lost, int(count) if count.isdecimal() else 0, stream, rank(entry_id) >> 64)


def _range(text: bytes | None) -> IdRange | None:
    first, _, last = (text or b"").partition(b" ")
    return (first, last) if last else None
