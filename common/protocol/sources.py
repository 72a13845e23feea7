"""The ticket streams that are taken in: one, or many that are gathered into one *work stream*.

``USHER_TICKET_STREAM`` is a name; or several names and patterns with ``*`` and ``?``, separated by commas. A single
plain name is worked on as it is. With more, each stream is a *source*, with a group of its own, and masters move its
entries, in order and each exactly once (lua/sources/gather.lua), to the end of the work stream. Everything behind works
on that stream: a consumer reads one inbox and one stream, with one batched read, however many sources there are, and a
new source costs it nothing.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from functools import cached_property

#: First and second field of a gathered entry: its origin (``<source id> <length> <source>``), and its ticket, of which
#: the first ``<length>`` bytes are not the producer's. See lua/sources/gather.lua.
FROM_FIELD = b"usher_from"
SCOPED_TICKET_FIELD = b"usher_ticket"
#: Number of shards in which the sources are spread over the masters.
SHARDS = 64

_LONGEST_NAME = 512
_TAG = re.compile(r"\{([^{}]+)\}")
#: Streams that Usher keeps for itself beside a ticket stream (common/protocol/keys.py), those that gathering writes,
#: and work streams: a pattern never takes them in.
_OWN = re.compile(
    rb"usher:|.*\{[^{}]+\}.*:(?:groups|delayed|replies:.+"
    rb"|[A-Za-z0-9._-]{1,128}:(?:dead|changed|runs|actions|losses|reports|inbox:.+))$",
    re.DOTALL,
)


def is_pattern(part: str) -> bool:
    """Return True if a part of the setting stands for any number of streams."""
    return "*" in part or "?" in part


@dataclass(frozen=True)
class SourceSelection:
    """The streams that the setting names: plain ``names`` and ``patterns``, in its order."""

    names: tuple[str, ...]
    patterns: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> SourceSelection:
        """Parse the setting. Raises ValueError, which names the fault and the way out.

        >>> SourceSelection.parse("orders, tickets:*")
        SourceSelection(names=('orders',), patterns=('tickets:*',))
        """
        parts = [part.strip() for part in text.split(",")] if "," in text else [text]
        for part in parts:
            _check(part)
        if len(set(parts)) < len(parts):
            raise ValueError("names a stream twice")
        return cls(tuple(part for part in parts if not is_pattern(part)), tuple(filter(is_pattern, parts)))

    @property
    def single(self) -> str | None:
        """The only stream, worked on as it is; None when there is a work stream."""
        return self.names[0] if len(self.names) == 1 and not self.patterns else None

    @cached_property
    def tag(self) -> str | None:
        """The hash tag that all streams share, so that they lie in one slot of a cluster; None if they differ, or if
        one has no tag."""
        tags = {found[1] if (found := _TAG.search(part)) else None for part in (*self.names, *self.patterns)}
        return tags.pop() if len(tags) == 1 else None

    def work_stream(self, group: str) -> str:
        """Return the stream to work on. The name of a work stream comes from the group: it does not change when a
        source is added.

        >>> [SourceSelection.parse(names).work_stream("g") for names in ("a,b", "a{7},b{7}", "a")]
        ['usher:{g}', 'usher:g{7}', 'a']
        """
        if self.single is not None:
            return self.single
        return f"usher:{group}{{{self.tag}}}" if self.tag else f"usher:{{{group}}}"

    def takes(self, key: bytes) -> bool:
        """Return True if the stream ``key`` is a source: by its name, or by a pattern unless Usher keeps it for itself.

        >>> sources = SourceSelection.parse("orders,tickets:*")
        >>> [sources.takes(key) for key in (b"orders", b"tickets:7", b"tickets:{7}:g:dead", b"other")]
        [True, True, False, False]
        """
        if key in self._encoded:
            return True
        is_meant = self._pattern is not None and self._pattern.fullmatch(key) and not _OWN.match(key)
        # A name that is not UTF-8 is nobody's stream.
        return bool(is_meant) and len(key) <= _LONGEST_NAME and key.decode(errors="ignore").encode() == key

    def prefixes(self) -> tuple[bytes, ...]:
        """Return the prefixes of all source names; no prefix begins with another one.

        >>> SourceSelection.parse("tickets:*,tickets,orders:?:x").prefixes()
        (b'orders:', b'tickets')
        """
        found: list[str] = []
        for start in sorted(re.split(r"[*?]", part, maxsplit=1)[0] for part in (*self.names, *self.patterns)):
            if not found or not start.startswith(found[-1]):
                found.append(start)
        return tuple(start.encode() for start in found)

    @cached_property
    def _encoded(self) -> frozenset[bytes]:
        return frozenset(name.encode() for name in self.names)

    @cached_property
    def _pattern(self) -> re.Pattern[bytes] | None:
        wild = {"*": b".*", "?": b"."}
        made = [b"".join(wild.get(one, re.escape(one.encode())) for one in pattern) for pattern in self.patterns]
        return re.compile(b"|".join(made), re.DOTALL) if made else None


def is_work_stream(name: str, group: str) -> bool:
    """Return True if masters of ``group`` gather several streams into ``name`` (``SourceSelection.work_stream``)."""
    return re.fullmatch(rf"usher:(\{{{re.escape(group)}\}}|{re.escape(group)}\{{[^{{}}]+\}})", name) is not None


def shard_of(source: bytes) -> int:
    """Return the shard of a source, the same in every process.

    >>> shard_of(b"orders")
    46
    """
    return zlib.crc32(source) % SHARDS


def _check(part: str) -> None:
    if not part:
        raise ValueError("has an empty name; separate several streams with single commas")
    if len(part) > _LONGEST_NAME:
        raise ValueError(f"has a name of more than {_LONGEST_NAME} characters")
    if is_pattern(part) and re.search(r"[\[\]\\^]", part):
        raise ValueError(f"{part!r}: a pattern knows only * (anything) and ? (any one character)")
    if ("{" in part or "}" in part) and not re.fullmatch(r"[^{}]+\{[^{}*?]+\}[^{}]*|\{[^{}*?]+\}[^{}]+", part):
        raise ValueError(
            "braces must enclose a part of the name, as in tickets{7}: Redis Cluster reads that part as the hash tag"
        )
