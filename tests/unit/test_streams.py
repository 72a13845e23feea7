"""Inbox records: what a leader names, whatever the tickets are called, the consumer reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.streams import HandOver, parse_inbox, separator

_TICKETS = st.lists(st.binary(max_size=6) | st.text("\n0a", max_size=9).map(str.encode), min_size=1, unique=True)


def _read(*fields: bytes) -> list[HandOver]:
    [(record_id, parts)] = parse_inbox([[b"inbox", [[b"5-0", list(fields)]]]])
    assert record_id == b"5-0"
    return parts


@given(_TICKETS, st.data())
def test_any_of_the_tickets_are_told_apart_in_any_order(tickets: list[bytes], data: st.DataObject) -> None:
    some = data.draw(st.lists(st.sampled_from(tickets), min_size=1, unique=True))
    between = separator(tickets)
    assert between.join(some).split(between) == some


@given(_TICKETS)
def test_a_record_names_each_tickets_ids_under_the_fence_of_the_call_or_its_own(tickets: list[bytes]) -> None:
    between = separator(tickets)
    lines = [(b"", b"7 ")[number % 2] + b" ".join(b"%d-%d" % (number, n) for n in range(number % 3 + 1)) for number in range(len(tickets))]
    wanted = [HandOver(t, (9, 7)[n % 2], [b"%d-%d" % (n, k) for k in range(n % 3 + 1)]) for n, t in enumerate(tickets)]
    assert _read(b"fence", b"9", b"between", between, b"tickets", between.join(tickets), b"ids", b"\n".join(lines)) == wanted


def test_a_call_that_gave_no_fence_names_those_that_stay() -> None:
    assert _read(b"fence", b"", b"between", b"\n", b"tickets", b"T", b"ids", b"7 1-1 1-2") == [HandOver(b"T", 7, [b"1-1", b"1-2"])]


def test_a_record_of_a_leader_of_a_former_version_is_read_also_with_tickets_of_our_names() -> None:
    assert _read(b"T", b"7 1-1 1-2", b"U", b"8 2-1") == [HandOver(b"T", 7, [b"1-1", b"1-2"]), HandOver(b"U", 8, [b"2-1"])]
    names = [b"fence", b"between", b"tickets", b"ids"]
    assert [part.ticket for part in _read(*(field for name in names for field in (name, b"7 1-1")))] == names


def test_an_empty_reply_names_nothing() -> None:
    assert list(parse_inbox(None)) == []
