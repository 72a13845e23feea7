"""Inbox records: what a leader names, whatever the tickets are called, the consumer reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from usher.common.redis.replies import HandOver, InboxRecord, pack_bodies, parse_inbox, separator, unpack_bodies
from usher.master.leader.entries import EntryParser

_TICKETS = st.lists(st.binary(max_size=6) | st.text("\n0a", max_size=9).map(str.encode), min_size=1, unique=True)


def _read(*fields: bytes) -> list[HandOver]:
    [record] = parse_inbox([[b"inbox", [[b"5-0", list(fields)]]]])
    assert record.id == b"5-0"
    return record.parts


@given(_TICKETS)
def test_a_record_names_each_tickets_ids_under_the_fence_of_the_call_or_its_own(tickets: list[bytes]) -> None:
    between = separator(tickets)
    lines = [
        (b"", b"7 ")[number % 2] + b" ".join(b"%d-%d" % (number, n) for n in range(number % 3 + 1))
        for number in range(len(tickets))
    ]
    wanted = [HandOver(t, (9, 7)[n % 2], [b"%d-%d" % (n, k) for k in range(n % 3 + 1)]) for n, t in enumerate(tickets)]
    assert (
        _read(b"fence", b"9", b"between", between, b"tickets", between.join(tickets), b"ids", b"\n".join(lines))
        == wanted
    )


@given(_TICKETS)
def test_a_recall_names_each_ticket_under_its_fence_with_its_ids(tickets: list[bytes]) -> None:
    between = separator(tickets)
    lines = [b"%d %d-1 %d-2" % (number, number, number) for number in range(len(tickets))]
    fields = [b"recall", b"1", b"between", between, b"tickets", between.join(tickets), b"ids", b"\n".join(lines)]
    [record] = parse_inbox([[b"inbox", [[b"5-0", fields]]]])
    assert (record.parts, record.order) == ([], None)
    assert record.recalled == [HandOver(t, n, [b"%d-1" % n, b"%d-2" % n]) for n, t in enumerate(tickets)]


def test_a_record_of_a_form_that_is_not_known_names_nothing_and_stops_nobody() -> None:
    for fields in ([b"novelty", b"1"], [b"recall", b"2", b"T", b"1-1"], [b"T", b"7 1-1", b"U", b"x"], []):
        [record] = parse_inbox([[b"inbox", [[b"5-0", fields]]]])
        assert record == InboxRecord(b"5-0", [])


@given(st.dictionaries(st.binary(min_size=1, max_size=5), st.lists(st.binary(max_size=9), max_size=4), min_size=1))
def test_bodies_come_as_they_were_packed_and_a_part_of_them_is_none(bodies: dict[bytes, list[bytes]]) -> None:
    blob = pack_bodies([(one, *fields) for one, fields in bodies.items()])
    assert unpack_bodies(blob) == bodies
    assert all(unpack_bodies(blob[:at]) is None for at in range(len(blob)))


def test_bodies_go_with_the_inbox_while_they_are_small_and_not_too_many() -> None:
    sizes = [10, 9000, *[8000] * 140, 10]
    entries = [(b"%d-1" % n, [b"t", b"T", b"body", b"x" * (size - 6)]) for n, size in enumerate(sizes)]
    news = EntryParser(b"t").parse(b"0-0", entries, True)
    assert [news.bodies.get(one) for one, _ in entries[:3]] == [entries[0][1], None, entries[2][1]]
    assert sum(len(part) for fields in news.bodies.values() for part in fields) <= 1024 * 1024
    assert list(news.bodies) == [one for n, (one, _) in enumerate(entries) if n != 1 and n <= 132]
