"""ReliableStream and its scripts: every step asks whose the entries are, and what can be lost is lost in no step."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.integration.memory import full_memory
from tests.integration.rewound import set_back
from usher.common.base.errors import GroupMissing
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.stream_id import ZERO, GroupPosition, Span
from usher.common.readers.loop import RETURNED, SUSPECT, ReliableStream, StreamMessage, goes_on_at
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import pairs
from usher.master.operations.shelves import DeadLetters

KEYS = Keys("payments", "billing")
#: A letter, a step that fails, an answer: ``stream_own.lua``, ``stream_claim.lua`` and ``stream_leave.lua`` are tried
#: here against a real server.


@pytest.fixture
def link(any_redis_url: str) -> Iterator[Link]:
    made = Link(any_redis_url, "test")
    yield made
    made.close()


@pytest.fixture
def a(link: Link) -> ReliableStream:
    made = ReliableStream(link, KEYS.stream, KEYS.group, "a")
    made.ensure_group()
    return made


@pytest.fixture
def b(link: Link, a: ReliableStream) -> ReliableStream:
    return ReliableStream(link, KEYS.stream, KEYS.group, "b")


def send(link: Link, *numbers: int) -> list[bytes]:
    return [link.call("XADD", KEYS.stream, b"%d-0" % number, "body", f"of {number}") for number in numbers]


def pending(link: Link) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for entry_id, owner, *_ in link.call("XPENDING", KEYS.stream, KEYS.group, "-", "+", 1000):
        found.setdefault(owner, []).append(entry_id)
    return found


def letters(link: Link) -> list[dict[bytes, bytes]]:
    return [pairs(fields) for _, fields in link.call("XRANGE", KEYS.dead, "-", "+")]


def ids(messages: list[StreamMessage]) -> list[bytes]:
    return [message.stream_id for message in messages]


def make_idle(link: Link, owner: str, *entry_ids: bytes) -> None:
    link.call("XCLAIM", KEYS.stream, KEYS.group, owner, 0, *entry_ids, "IDLE", 100_000, "JUSTID")


class TestReading:
    def test_pending_ones_are_read_again_but_for_those_excluded_and_that_is_no_delivery(
        self, link: Link, a: ReliableStream
    ) -> None:
        sent = send(link, *range(1, 1501))
        a.read_new(2000, None)
        assert ids(a.read_pending(3)) == sent[:3]
        assert ids(a.read_pending(10, exclude=set(sent[:1400]))) == sent[1400:1410]
        assert a.read_pending(10, exclude=set(sent)) == []
        counts = {row[3] for row in link.call("XPENDING", KEYS.stream, KEYS.group, "-", "+", 2000)}
        assert counts == {1}

    def test_a_pending_one_without_a_body_is_told_as_such(self, link: Link, a: ReliableStream) -> None:
        [first, _] = send(link, 1, 2)
        a.read_new(10, None)
        link.call("XDEL", KEYS.stream, first)
        assert [(message.stream_id, message.body_is_gone) for message in a.read_pending(10)] == [
            (b"1-0", True),
            (b"2-0", False),
        ]


class TestAcknowledge:
    def test_what_is_done_leaves_the_group_and_on_request_the_stream(self, link: Link, a: ReliableStream) -> None:
        sent = send(link, 1, 2, 3)
        a.read_new(10, None)
        a.charge({sent[0]: 1})
        assert a.acknowledge(sent[:1]) == sent[:1]
        assert a.acknowledge(sent[1:2], remove=True) == sent[1:2]
        assert pending(link) == {b"a": sent[2:]}
        assert [entry_id for entry_id, _ in link.call("XRANGE", KEYS.stream, "-", "+")] == [sent[0], sent[2]]
        assert link.call("EXISTS", KEYS.attempts) == 0

    def test_what_somebody_else_has_is_left_alone(self, link: Link, a: ReliableStream, b: ReliableStream) -> None:
        """The losing side: a bare XACK would acknowledge, and XDEL destroy, what b works on."""
        sent = send(link, 1)
        a.read_new(1, None)
        make_idle(link, "b", *sent)
        b.charge({sent[0]: 2})
        assert a.acknowledge(sent, remove=True) == []
        assert a.move_to_dead_letters([StreamMessage(sent[0], [])], "x") == []
        assert a.charge({sent[0]: 9}) == sent
        assert a.touch(sent) == a.give_back(sent) == sent
        assert (pending(link), link.call("XLEN", KEYS.stream), letters(link)) == ({b"b": sent}, 1, [])
        assert link.call("HGETALL", KEYS.attempts) == [sent[0], b"2"]

    def test_an_entry_that_another_group_reads_is_not_removed(self, link: Link, a: ReliableStream) -> None:
        link.call("XGROUP", "CREATE", KEYS.stream, "audit", 0)
        first, second = send(link, 1, 2)
        [_, message] = a.read_new(10, None)
        a.acknowledge([first], remove=True)
        a.move_to_dead_letters([message], "x")
        assert (pending(link), link.call("XLEN", KEYS.stream)) == ({}, 2)
        assert second == message.stream_id

    def test_an_entry_that_a_log_consumer_may_not_have_read_is_not_removed(self, link: Link, a: ReliableStream) -> None:
        """It reads without a group; an entry that goes above its checkpoint would be skipped without a word."""
        [first, _] = send(link, 1, 2)
        link.call("HSET", LogKeys(KEYS.stream).checkpoints, "totals", "1 0-0 1700000000000")
        [_, message] = a.read_new(10, None)
        a.acknowledge([first], remove=True)
        a.move_to_dead_letters([message], "x")
        assert (pending(link), link.call("XLEN", KEYS.stream)) == ({}, 2)

    def test_an_entry_that_a_lost_group_would_read_again_is_not_removed(self, link: Link, a: ReliableStream) -> None:
        other = ReliableStream(link, KEYS.stream, "audit", "c")
        other.ensure_group()
        for reader in (a, other):
            reader.save_position()
        link.call("XGROUP", "DESTROY", KEYS.stream, "audit")
        [first, _] = send(link, 1, 2)
        [_, message] = a.read_new(10, None)
        a.acknowledge([first], remove=True)
        a.move_to_dead_letters([message], "x")
        assert (pending(link), link.call("XLEN", KEYS.stream)) == ({}, 2)
        link.call("HDEL", LogKeys(KEYS.stream).groups, "audit")
        last = send(link, 3)
        a.read_new(10, None)
        a.acknowledge(last, remove=True)
        assert link.call("XLEN", KEYS.stream) == 2, "its own position is in nobody's way"

    def test_a_lost_group_is_told(self, link: Link, a: ReliableStream) -> None:
        send(link, 1)
        link.call("XGROUP", "DESTROY", KEYS.stream, KEYS.group)
        steps = (
            lambda: a.acknowledge([b"1-0"]),
            lambda: a.touch([b"1-0"]),
            lambda: a.claim_idle(1, 0),
            lambda: a.read_pending(1),
            a.save_position,
        )
        for step in steps:
            with pytest.raises(GroupMissing):
                step()


class TestDeadLetters:
    def test_the_letter_is_like_any_other_and_the_entry_is_gone(self, link: Link, a: ReliableStream) -> None:
        sent = send(link, 1, 2)
        messages = a.read_new(10, None)
        messages[0].attempt, messages[0].first_ms, messages[0].last_ms = 3, 10, 20
        assert a.move_to_dead_letters(messages, "gave_up", {sent[0]: "ValueError: x"}) == sent
        first, second = letters(link)
        assert first == {
            b"usher-id": sent[0], b"usher-ticket": b"", b"usher-reason": b"gave_up", b"usher-error": b"ValueError: x", b"usher-attempts": b"3",
            b"usher-owner": b"a", b"usher-first-ms": b"10", b"usher-last-ms": b"20", b"usher-policy": b"skip",
            b"usher-fence": b"0", b"usher-error-type": b"", b"usher-traceback": b"", b"usher-fields": b"1", b"body": b"of 1",
        }  # fmt: skip
        assert (second[b"usher-id"], second[b"usher-error"]) == (sent[1], b"")
        assert (pending(link), link.call("XLEN", KEYS.stream)) == ({}, 0)

    def test_one_of_too_many_fields_for_its_letter_stays_in_the_stream_and_can_be_redriven(
        self, link: Link, a: ReliableStream
    ) -> None:
        fields = [part for number in range(3100) for part in (f"f{number}", number)]
        sent = [*send(link, 1), link.call("XADD", KEYS.stream, "2-0", *fields)]
        assert a.move_to_dead_letters(a.read_new(10, None), "gave_up") == sent
        assert (pending(link), [row[0] for row in link.call("XRANGE", KEYS.stream, "-", "+")]) == ({}, sent[1:])
        [_, letter_id] = [row[0] for row in link.call("XRANGE", KEYS.dead, "-", "+")]
        [outcome] = DeadLetters(link, KEYS).redrive([letter_id])
        assert outcome.word == "added"
        [again] = a.read_new(10, None)
        assert (len(again.fields), again.uid) == (3101, "2-0")

    def test_when_the_letter_cannot_be_written_nothing_happens(self, link: Link, a: ReliableStream) -> None:
        sent = send(link, 1)
        messages = a.read_new(1, None)
        link.call("SET", KEYS.dead, "no stream")
        with pytest.raises(CommandRefused, match="WRONGTYPE"):
            a.move_to_dead_letters(messages, "x")
        make_idle(link, "a", *sent)
        with pytest.raises(CommandRefused, match="WRONGTYPE"):
            a.claim_idle(10, 1000)
        assert (pending(link), link.call("XLEN", KEYS.stream)) == ({b"a": sent}, 1)


class TestClaiming:
    def test_what_a_dead_reader_had_is_suspect_and_what_was_given_back_is_not(
        self, link: Link, a: ReliableStream, b: ReliableStream
    ) -> None:
        sent = send(link, 1, 2, 3, 4)
        a.read_new(10, None)
        a.charge({sent[0]: 2})
        assert a.give_back(sent[2:3]) == []
        assert a.give_back(sent[3:], suspect=True) == []
        assert pending(link) == {b"a": sent[:2], RETURNED.encode(): sent[2:3], SUSPECT.encode(): sent[3:]}
        assert ids(b.claim_idle(10, 60_000).messages) == sent[2:], (
            "what was given back is idle at once, what is fresh is left alone"
        )
        make_idle(link, "a", *sent[:2])
        make_idle(link, RETURNED, sent[2])
        make_idle(link, SUSPECT, sent[3])
        claimed = b.claim_idle(10, 60_000)
        assert [(one.stream_id, one.is_suspect, one.failures) for one in claimed.messages] == [
            (sent[0], True, 2), (sent[1], True, 0), (sent[2], False, 0), (sent[3], True, 0),
        ]  # fmt: skip
        assert (claimed.cursor, pending(link)) == (ZERO, {b"b": sent})
        assert {row[3] for row in link.call("XPENDING", KEYS.stream, KEYS.group, "-", "+", 10)} == {1}, (
            "taking over is no delivery"
        )

    def test_what_consumers_noted_of_attempts_is_understood(
        self, link: Link, a: ReliableStream, b: ReliableStream, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A master had the group before; and what nobody can read stops no message, and is told."""
        sent = send(link, 1, 2, 3)
        link.call("HSET", KEYS.attempts, sent[0], "3 2 1 0", sent[1], "three", sent[2], "4 4 0 0")
        a.read_new(10, None)
        make_idle(link, "a", *sent)
        link.call("XDEL", KEYS.stream, sent[2])
        assert [(one.stream_id, one.failures) for one in b.claim_idle(10, 60_000).messages] == [
            (sent[0], 2),
            (sent[1], 0),
        ]
        assert {(one.message, one.levelname) for one in caplog.records} == {("attempts_unreadable", "ERROR")}
        assert [one.failures for one in b.read_pending(10)] == [2, 0]
        assert [letter[b"usher-attempts"] for letter in letters(link)] == [b"4"]

    def test_a_touch_keeps_others_away(self, link: Link, a: ReliableStream, b: ReliableStream) -> None:
        sent = send(link, 1, 2)
        a.read_new(10, None)
        make_idle(link, "a", *sent)
        assert a.touch(sent[:1]) == []
        assert ids(b.claim_idle(10, 60_000).messages) == sent[1:]

    def test_what_was_delivered_before_the_clock_was_set_back_waits_no_longer_than_all_else(
        self, link: Link, a: ReliableStream, b: ReliableStream
    ) -> None:
        """By its time it is idle for less than nothing: nobody would take it over for as long as the step."""
        sent = send(link, 1, 2, 3)
        a.read_new(10, None)
        set_back(link, KEYS.stream, 3_600_000)
        link.call("XDEL", KEYS.stream, sent[2])
        b.claim_idle(10, 60_000)
        assert set(pending(link)) == {b"a"}, "who had it may live"
        time.sleep(0.2)
        assert ids(b.claim_idle(10, 150).messages) == sent[:2]
        assert [letter[b"usher-reason"] for letter in letters(link)] == [b"body_gone"]
        assert {row[3] for row in link.call("XPENDING", KEYS.stream, KEYS.group, "-", "+", 10)} == {1}, (
            "a touch is no delivery"
        )

    def test_the_cursor_finds_what_lies_behind_many_young_ones(
        self, link: Link, a: ReliableStream, b: ReliableStream
    ) -> None:
        sent = send(link, *range(1, 51))
        a.read_new(100, None)
        make_idle(link, "a", sent[-1])
        cursor, found = ZERO, []
        for _ in range(10):
            claimed = b.claim_idle(1, 60_000, cursor)
            found += ids(claimed.messages)
            cursor = claimed.cursor
            if cursor == ZERO:
                break
        assert found == [sent[-1]]

    def test_one_whose_body_is_gone_becomes_a_letter(self, link: Link, a: ReliableStream, b: ReliableStream) -> None:
        sent = send(link, 1, 2)
        a.read_new(10, None)
        a.charge({sent[0]: 2})
        make_idle(link, "a", *sent)
        link.call("XDEL", KEYS.stream, sent[0])
        claimed = b.claim_idle(10, 60_000)
        assert (ids(claimed.messages), claimed.gone) == (sent[1:], sent[:1])
        [letter] = letters(link)
        assert (letter[b"usher-id"], letter[b"usher-reason"], letter[b"usher-owner"], letter[b"usher-attempts"]) == (
            sent[0], b"body_gone", b"a", b"2",
        )  # fmt: skip
        assert pending(link) == {b"b": sent[1:]}
        assert link.call("EXISTS", KEYS.attempts) == 0


class TestFullMemory:
    def test_all_that_frees_something_works(self, link: Link, a: ReliableStream, b: ReliableStream) -> None:
        sent = send(link, 1, 2, 3, 4, 5)
        messages = a.read_new(10, None)
        make_idle(link, "a", *sent[3:])
        link.call("XDEL", KEYS.stream, sent[4])
        with full_memory(link):
            assert a.charge({sent[0]: 1}) == []
            assert a.acknowledge(sent[:1], remove=True) == sent[:1]
            assert a.move_to_dead_letters(messages[1:2], "x") == sent[1:2]
            assert a.touch(sent[2:3]) == []
            claimed = b.claim_idle(10, 60_000)
            assert (ids(claimed.messages), claimed.gone) == (sent[3:4], sent[4:])
            assert a.give_back(sent[2:3]) == []
            assert a.leave()
        assert pending(link) == {b"b": sent[3:4], RETURNED.encode(): sent[2:3]}
        assert [letter[b"usher-id"] for letter in letters(link)] == [sent[1], sent[4]]


class TestNames:
    def test_a_name_leaves_only_without_anything_pending(self, link: Link, a: ReliableStream) -> None:
        sent = send(link, 1)
        a.read_new(1, None)
        assert not a.leave()
        assert pending(link) == {b"a": sent}
        a.acknowledge(sent)
        assert a.leave()
        assert link.call("XINFO", "CONSUMERS", KEYS.stream, KEYS.group) == []

    def test_names_of_the_dead_are_forgotten(self, link: Link, a: ReliableStream, b: ReliableStream) -> None:
        send(link, 1, 2)
        b.read_new(1, None)
        ReliableStream(link, KEYS.stream, KEYS.group, "c").acknowledge(ids(a.read_new(1, None)))
        assert a.forget_readers(3_600_000) == 0
        link.call("XGROUP", "CREATECONSUMER", KEYS.stream, KEYS.group, "dead")
        assert a.forget_readers(0) == 1
        names = {pairs(row)[b"name"] for row in link.call("XINFO", "CONSUMERS", KEYS.stream, KEYS.group)}
        assert names == {b"a", b"b"}, "b has something pending, and a is who asks"


class TestGroup:
    def test_a_lost_group_goes_on_where_it_was_with_what_was_pending(self, link: Link, a: ReliableStream) -> None:
        sent = send(link, 1, 2, 3, 4)
        a.acknowledge(ids(a.read_new(2, None)))
        a.read_new(1, None)
        a.save_position()
        link.call("XGROUP", "DESTROY", KEYS.stream, KEYS.group)
        a.ensure_group(sent[2])
        assert ids(a.read_new(10, None)) == sent[2:]

    @pytest.mark.parametrize(
        ("saved", "seen", "span", "start"),
        [
            (None, ZERO, None, ZERO),
            (None, b"5-0", Span(b"1-0", b"9-0"), ZERO),
            (GroupPosition(b"5-0", None), b"5-0", Span(b"1-0", b"9-0"), b"5-0"),
            (GroupPosition(b"5-0", b"3-1"), b"5-0", Span(b"1-0", b"9-0"), b"3-0"),
            (GroupPosition(b"5-0", b"9-1"), b"5-0", Span(b"1-0", b"9-0"), b"5-0"),
            (GroupPosition(b"5-0", None), b"5-0", Span(None, b"2-0"), ZERO),
            (GroupPosition(b"5-0", None), ZERO, Span(b"1-0", b"2-0"), ZERO),
            (GroupPosition(b"5-0", None), b"5-0", None, ZERO),
        ],
    )
    def test_where_it_goes_on(self, saved: GroupPosition | None, seen: bytes, span: Span | None, start: bytes) -> None:
        assert goes_on_at(saved, seen, span) == start
