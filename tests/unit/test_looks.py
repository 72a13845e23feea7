"""Looks: how many entries the next one may bring, and what is read of entries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from usher.master.leader.entries import EntryParser, NewEntries, PeekedEntry, notification_limit


@given(st.integers(0, 100_000), st.integers(0, 10**12))
def test_the_doorbell_tells_of_something_and_never_of_much(seen: int, size: int) -> None:
    most = notification_limit(seen, size)
    assert 1 <= most <= min(32, max(1, 8 * seen))
    assert most == 1 or size <= 1024 * seen


def test_after_small_ones_it_may_tell_of_more() -> None:
    assert [notification_limit(seen, 30 * seen) for seen in (1, 2, 3, 4, 64)] == [8, 16, 24, 32, 32]
    assert notification_limit(8, 0) == 32, "empty names and values"


def test_after_large_ones_or_none_it_tells_of_one() -> None:
    assert [
        notification_limit(0, 0),
        notification_limit(8, 8 * 1024 + 1),
        notification_limit(64, 63 * 30 + 64 * 1024),
    ] == [1, 1, 1]


def test_news_say_how_large_they_are_together() -> None:
    entries = [[b"1-1", [b"t", b"A", b"body", b"\0\xff"]], [b"2-1", [b"", b""]], [b"3-1", [b"x", b"t"]]]
    news = EntryParser(b"t").parse(b"0-0", entries, True)
    assert news == NewEntries(
        b"0-0", [PeekedEntry(b"1-1", b"A"), PeekedEntry(b"2-1", None), PeekedEntry(b"3-1", None)], True
    )
    assert news.size == 8 + 0 + 2


def test_no_entries_are_news_of_nothing() -> None:
    news = EntryParser(b"t", 5).parse(b"7-7", [], False, digest="digest")
    assert (news, news.size) == (NewEntries(b"7-7", [], False, digest="digest"), 0)


def test_only_what_is_longer_than_allowed_says_its_size_also_when_all_together_are() -> None:
    entries = [[b"1-1", [b"t", b"A", b"", b"xxx"]], [b"2-1", [b"t", b"B", b"", b"xxxx"]], [b"3-1", [b"other", b"x"]]]
    assert EntryParser(b"t", 5).parse(b"0-0", entries, True).found == [
        PeekedEntry(b"1-1", b"A"),
        PeekedEntry(b"2-1", b"B", 6),
        PeekedEntry(b"3-1", b"", 6),
    ]
