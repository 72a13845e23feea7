"""Replies as columns: the same as hiredis reads, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hiredis
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow", reason="pip install -e '.[audit]' in Usher's folder")
from usher.common.protocol.message import first_value
from usher.master.audit.read.replies import entry_page, pending_page

MARK = b"+PONG\r\n"
FIELD = b"t"
#: Names and values that look like what is around them.
_NASTY = st.sampled_from(
    [b"", b"t", b"*2", b"$1", b"\r\n", b"a\r\n$1\r\nb", b"\r", b"\n", b":5", b"+PONG\r\n", b"\xff", b"x" * 120]
)
_IDS = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 99)).map(lambda part: b"%d-%d" % part)
_ENTRIES = st.lists(
    st.tuples(_IDS, st.lists(st.tuples(_NASTY, _NASTY | st.binary(max_size=20)), min_size=1, max_size=4)), max_size=6
)
_PENDING = st.lists(st.tuples(_IDS, _NASTY, st.integers(0, 10**12), st.integers(0, 10**9)), max_size=6)


def written(value: Any) -> bytes:
    """RESP, as Redis writes it."""
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%s\r\n" % (len(value), value)
    return b"*%d\r\n" % len(value) + b"".join(map(written, value))


def reply_of(entries: Sequence[tuple[bytes, Sequence[tuple[bytes, bytes]]]]) -> bytes:
    return written([(entry_id, [word for pair in pairs for word in pair]) for entry_id, pairs in entries]) + MARK


def decoded(reply: bytes) -> Any:
    reader = hiredis.Reader()
    reader.feed(reply)
    return reader.gets()


@settings(deadline=None)
@given(_ENTRIES)
@example([])
@example([(b"1-1", [(b"t", b"a")]), (b"2-1", [(b"t", b"b"), (b"other", b"c")])])
@example([(b"1-1", [(b"a", b"b"), (b"t", b"c")]), (b"2-1", [(b"t\r\n$1\r\na\r\n$1\r\nb", b"c")])])
def test_entries_are_read_as_hiredis_reads_them_or_not_at_all(
    entries: list[tuple[bytes, list[tuple[bytes, bytes]]]],
) -> None:
    reply = reply_of(entries)
    page = entry_page(reply, FIELD)
    words = [word for _, pairs in entries for pair in pairs for word in pair]
    if page is None:
        assert any(b"\r\n" in word for word in words), "only a line break in a value is a reason"
        return
    wanted = decoded(reply)
    assert page.ids.to_pylist() == [row[0] for row in wanted]
    assert page.tickets.to_pylist() == [first_value(row[1], FIELD) for row in wanted]


@settings(deadline=None)
@given(_PENDING)
@example([])
@example([(b"1-1", b"a\r\n:7\r\n:7", 1, 1)])
def test_pending_entries_are_read_as_hiredis_reads_them_or_not_at_all(
    rows: list[tuple[bytes, bytes, int, int]],
) -> None:
    reply = written(rows) + MARK
    page = pending_page(reply)
    if page is None:
        assert any(b"\r\n" in row[1] for row in rows)
        return
    assert [list(row) for row in zip(*(column.to_pylist() for column in page), strict=True)] == decoded(reply)


@settings(deadline=None)
@given(st.binary(max_size=60) | _ENTRIES.map(reply_of), st.integers(0, 400))
@example(b"-ERR no\r\n+PONG\r\n", 400)
@example(b"*1\r\n*4\r\n$1\r\n1\r\n", 400)
def test_a_part_of_a_reply_is_nothing(reply: bytes, end: int) -> None:
    """The mark may lie in a value: then what was taken is not the whole."""
    part = reply[:end]
    whole = decoded(part) if part[:1] == b"*" else False
    page, held = entry_page(part, FIELD), pending_page(part)
    if page is not None:
        assert page.ids.to_pylist() == [row[0] for row in whole]
    if held is not None:
        assert held.ids.to_pylist() == [row[0] for row in whole]
