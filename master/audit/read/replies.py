"""Replies of Redis as Arrow columns, straight from their bytes: no Python object per value.

A page of 10,000 pending entries is 40,000 values. As Python objects they cost more than everything else that the audit
does with them; as lines of one buffer they cost almost nothing. A reply is taken this way only where every line is
proven to be what it is taken for: all heads have the right form, and each announced length is that of the line behind
it. Then, from the first line on, there is no second way to read it. What does not pass (a value with a line break in
it) is ``None``, and the caller decodes it in the usual way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_CR, _LF = 13, 10
_PENDING_LINES = 7  # *4 $ id $ consumer :idle :deliveries
_HEAD_LINES = 4  # *2 $ id *2k, and then $ name $ value k times


class PendingPage(NamedTuple):
    """Equally long columns of pending entries, in id order."""

    ids: pa.Array
    consumers: pa.Array
    idle_ms: pa.Array
    deliveries: pa.Array


class EntryPage(NamedTuple):
    """Entries of a stream with their tickets, in id order; a ticket is null where there is none."""

    ids: pa.Array
    tickets: pa.Array


class _Lines:
    """A reply, line by line. ``starts``, ``ends``: of each line's content in ``data``."""

    def __init__(self, reply: bytes) -> None:
        self._reply = reply
        self.data = np.frombuffer(reply, np.uint8)
        ends = np.flatnonzero(self.data[:-1] == _CR)
        self.ends = ends[self.data[ends + 1] == _LF]
        self.starts = np.concatenate((np.zeros(1, np.int64), self.ends[:-1] + 2)) if len(self.ends) else self.ends

    def __len__(self) -> int:
        return len(self.ends)

    def begin_with(self, lines: Any, kind: bytes) -> bool:
        """Whether each of ``lines`` is there, and of a kind: ``*``, ``$`` or ``:``."""
        there = bool(((lines >= 0) & (lines < len(self))).all())
        return there and bool((self.data[self.starts[lines]] == kind[0]).all())

    def numbers(self, lines: Any) -> Any:
        """The number behind the first character of each line. Only what ``begin_with`` has seen has one."""
        first, end = self.starts[lines] + 1, self.ends[lines]
        value: Any = np.zeros(len(lines), np.int64)
        for back in range(int((end - first).max(initial=0)), 0, -1):
            at = end - back
            inside = at >= first
            value = np.where(inside, value * 10 + self.data[np.where(inside, at, 0)] - 48, value)
        return value

    def size(self, line: int) -> int | None:
        """The number of one line ``*4``, None when it is no such line."""
        text = self._reply[self.starts[line] : self.ends[line]] if line < len(self) else b""
        return int(text[1:]) if text[:1] == b"*" and text[1:].isdigit() else None

    def are_announced(self, heads: Any) -> bool:
        """Whether the lines behind ``heads`` (``$15``) are as long as these say."""
        return self.begin_with(heads, b"$") and bool(
            (self.numbers(heads) == (self.ends - self.starts)[heads + 1]).all()
        )

    def texts(self, lines: Any) -> pa.Array:
        """The contents of lines, as bytes; of a line below 0 null."""
        offsets: Any = np.empty(2 * len(self) + 1, np.int32)  # contents and line breaks by turns
        offsets[0:-1:2], offsets[1::2], offsets[-1] = self.starts, self.ends, len(self._reply)
        every = pa.Array.from_buffers(
            pa.binary(), 2 * len(self), [None, pa.py_buffer(offsets), pa.py_buffer(self._reply)]
        )
        return every.take(pa.array(2 * lines, mask=lines < 0))


def pending_page(reply: bytes) -> PendingPage | None:
    """The reply of ``XPENDING key group start end count``, whatever follows it left out."""
    lines = _Lines(reply)
    rows = _number_of_rows(lines)
    if rows is None or len(lines) < 1 + rows * _PENDING_LINES:
        return None
    first: Any = 1 + np.arange(rows) * _PENDING_LINES
    heads = np.concatenate((first + 1, first + 3))
    if not (
        lines.begin_with(first, b"*")
        and lines.are_announced(heads)
        and lines.begin_with(np.concatenate((first + 5, first + 6)), b":")
    ):
        return None
    idle, deliveries = (pa.array(lines.numbers(first + at)) for at in (5, 6))
    return PendingPage(lines.texts(first + 2), lines.texts(first + 4), idle, deliveries)


def entry_page(reply: bytes, ticket_field: bytes) -> EntryPage | None:
    """The reply of ``XRANGE``, whatever follows it left out."""
    lines = _Lines(reply)
    rows = _number_of_rows(lines)
    if rows is None:
        return None
    first = _first_lines(lines, rows)
    if first is None or not (lines.begin_with(first, b"*") and lines.begin_with(first + 3, b"*")):
        return None
    sizes = lines.numbers(first + 3)
    end = int(first[-1] + _HEAD_LINES + 2 * sizes[-1]) if rows else 1
    if not 0 < end <= len(lines) or not (first[1:] == (first + _HEAD_LINES + 2 * sizes)[:-1]).all():
        return None
    in_pairs: Any = np.ones(end, bool)  # all but the heads: `$15` and a value by turns
    in_pairs[0] = in_pairs[first] = in_pairs[first + 3] = False
    if not lines.are_announced(np.flatnonzero(in_pairs)[::2]):
        return None
    return EntryPage(lines.texts(first + 2), lines.texts(_first_values(lines, first, sizes, ticket_field)))


def _number_of_rows(lines: _Lines) -> int | None:
    one: Any = np.zeros(1, np.int64)
    rows = int(lines.numbers(one)[0]) if lines.begin_with(one, b"*") else -1
    return rows if 0 <= rows < len(lines) else None


def _first_lines(lines: _Lines, rows: int) -> Any:
    """The first line of each entry; None when it cannot be. Entries with as many fields as the first one need no look
    at each."""
    if not rows:
        return np.zeros(0, np.int64)
    evenly: Any = 1 + np.arange(rows) * ((len(lines) - 1) // rows)
    if lines.begin_with(evenly + 3, b"*"):
        sizes = lines.numbers(evenly + 3)
        if (_HEAD_LINES + 2 * sizes == (len(lines) - 1) // rows).all():
            return evenly
    found, at = [], 1
    for _ in range(rows):
        size = lines.size(at + 3)
        if size is None:
            return None
        found.append(at)
        at += _HEAD_LINES + 2 * size
    return np.array(found)


def _first_values(lines: _Lines, first: Any, sizes: Any, field: bytes) -> Any:
    """The line of the value of the first field of a name, in each entry; -1 where there is none."""
    found = np.full(len(first), -1)
    waiting = np.arange(len(first))
    for place in range(int(sizes.max(initial=0)) // 2):
        waiting = waiting[sizes[waiting] > 2 * place]
        names = first[waiting] + _HEAD_LINES + 1 + 4 * place
        hit = pc.equal(lines.texts(names), pa.scalar(field)).to_numpy(zero_copy_only=False)
        found[waiting[hit]] = names[hit] + 2
        waiting = waiting[~hit]
        if not len(waiting):
            break
    return found
