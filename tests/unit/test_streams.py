"""Inbox records: what a leader names, whatever the tickets are called, the consumer reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.integration.factories import bodies_of
from usher.common.redis.replies import HandOver, InboxRecord, pack_entry, pack_part, pack_parts, parse_inbox
from usher.master.leader.entries import EntryParser

_TICKETS = st.lists(st.binary(max_size=6) | st.text("\n0a", max_size=9).map(str.encode), min_size=1, unique=True)


def _record(parts: bytes, fence: bytes = b"9") -> InboxRecord:
    fields = [b"fence", fence, b"parts", parts]
    [record] = parse_inbox([[b"inbox", [[b"5-0", fields]]]])
    return record


_FLAT = st.lists(st.binary(max_size=9), max_size=4)


@given(_TICKETS, st.data())
def test_a_record_names_each_tickets_entries_under_its_fence_or_the_tickets_own(
    tickets: list[bytes], data: st.DataObject
) -> None:
    wanted, bodies, packed = [], {}, []
    for number, ticket in enumerate(tickets):
        entries = {b"%d-%d" % (number, n): data.draw(_FLAT) for n in range(number % 3 + 1)}
        packed.append(pack_part(ticket, (b"", b"7")[number % 2], [pack_entry((one, *entries[one])) for one in entries]))
        wanted.append(HandOver(ticket, (9, 7)[number % 2], list(entries)))
        bodies |= {one: flat for one, flat in entries.items() if flat}
    told = pack_parts(packed)
    record = _record(told)
    assert (record.parts, bodies_of([record])) == (wanted, bodies)
    assert (record.id, record.size) == (b"5-0", len(told))
    assert all(_record(told[:at]) == InboxRecord(b"5-0") for at in range(len(told)))


def test_a_record_of_a_form_that_is_not_known_names_nothing_and_stops_nobody() -> None:
    for fields in ([b"novelty", b"1"], [b"recall", b"2"], [b"T", b"7 1-1", b"U", b"x"], []):
        [record] = parse_inbox([[b"inbox", [[b"5-0", fields]]]])
        assert record == InboxRecord(b"5-0")
    for parts in (b"x", b":7\r\n", b"-ERR x\r\n", b"*1\r\n:1\r\n", b"*1\r\n*2\r\n$1\r\nT\r\n$0\r\n\r\n"):
        assert _record(parts) == InboxRecord(b"5-0")
    assert _record(b"*0\r\n", b"x") == InboxRecord(b"5-0")


def test_bodies_go_with_the_inbox_while_they_are_small_and_not_too_many() -> None:
    sizes = [10, 9000, *[8000] * 140, 10]
    entries = [(b"%d-1" % n, [b"t", b"T", b"body", b"x" * (size - 6)]) for n, size in enumerate(sizes)]
    news = EntryParser(b"t").parse(b"0-0", entries, True)
    assert [news.bodies.get(one) for one, _ in entries[:3]] == [
        pack_entry((b"0-1", *entries[0][1])),
        None,
        pack_entry((b"2-1", *entries[2][1])),
    ]
    assert sum(map(len, news.bodies.values())) <= 1024 * 1024
    assert list(news.bodies) == [one for n, (one, _) in enumerate(entries) if n != 1 and n <= 131]
