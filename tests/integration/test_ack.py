"""ack.lua: only the owner whose lease lives takes messages out of the pending list and the index."""

from __future__ import annotations

import pytest

from tests.integration.factories import TRICKY_IDS, Owner, World
from usher.common.protocol.attempts import Attempts
from usher.common.protocol.last_error import NotedError
from usher.common.protocol.run_log import DONE, STALE, RunRecord, decode, encode
from usher.common.redis.scripts import ids_argument, sizes_argument
from usher.consumer.lifecycle.owner_scripts import AckAnswer
from usher.consumer.policy.acks import Finished


def _ack(world: World, owner: Owner, *lines: bytes, record: bytes = b"", length: int = 0) -> list[object]:
    """The bare script's answer, for each ticket: it tells only of those of which not all was done."""
    keys, tickets = world.keys, lines[::2]
    script_keys = (keys.stream, keys.lease(owner.incarnation), keys.tickets, keys.attempts, keys.runs, keys.errors)
    each = [line.split() for line in lines[1::2]]
    args = (keys.group, owner.incarnation, record, length, ids_argument(each), sizes_argument(each), *tickets)
    state, *told = world.scripts.run("ack", script_keys, args)
    by_number = dict(zip(told[::2], told[1::2], strict=True))
    assert b"OK" not in by_number.values()
    return [state, *(by_number.get(number, b"OK") for number in range(1, len(tickets) + 1))]


def test_a_finished_beginning_leaves_and_the_rest_stays_in_its_order(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", *TRICKY_IDS)
    fence = int(world.head(b"T").split()[1])
    for done in range(1, len(ids)):
        assert a.steps.ack({b"T": [ids[done - 1]]}, b"", 0) == AckAnswer({b"T": [ids[done - 1]]}, [])
        assert world.record(b"T") == (a.name, fence, ids[done:])
        assert world.pending() == {a.name: ids[done:]}


def test_the_same_call_twice_answers_that_it_is_done(world: World) -> None:
    """The reply was lost. Of a ticket that is gone whole, and of one that goes on."""
    leader, a = world.elect(), world.join("a")
    first, second, third = world.owned(leader, a, b"T", b"1-1", b"1-10", b"1-11")
    gone = world.owned(leader, a, b"U")
    lines = (b"T", first + b" " + second, b"U", gone[0])
    assert _ack(world, a, *lines, record=b"run", length=100) == [b"OK", b"OK", b"OK"]
    with world.unchanged():
        assert _ack(world, a, *lines, record=b"run", length=100) == [b"OK", [b"GONE", b"GONE"], [b"GONE"]]
    assert a.steps.ack({b"T": [first, second], b"U": gone}, b"", 0) == AckAnswer(
        {b"T": [first, second], b"U": gone}, []
    )
    assert world.pending() == {a.name: [third]}


def test_an_id_that_is_the_beginning_of_another_is_another(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", b"1-10", b"1-11", b"11-1")
    with world.unchanged():
        assert _ack(world, a, b"T", b"1-1") == [b"OK", [b"GONE"]]
        assert _ack(world, a, b"T", b"1-1 1-1 10-1 0-11 1") == [b"OK", [b"GONE"] * 5]
    assert _ack(world, a, b"T", b"1-1 1-10 1") == [b"OK", [b"GONE", b"OK", b"GONE"]]
    assert world.pending() == {a.name: ids[1:]}


def test_what_is_not_the_beginning_leaves_from_the_middle(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    first, second, third, fourth = world.owned(leader, a, b"T", b"1-1", b"1-2", b"1-10", b"1-11")
    assert _ack(world, a, b"T", b" ".join([second, b"9-9", fourth])) == [b"OK", [b"OK", b"GONE", b"OK"]]
    assert world.pending() == {a.name: [first, third]}
    assert _ack(world, a, b"T", b" ".join([third, first])) == [b"OK", [b"OK", b"OK"]]
    assert world.state() == ({}, {}, [])


def test_what_was_given_back_is_not_acknowledged_any_more(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T")
    a.steps.drain(60_000)
    world.give_back(a, {b"T": ids})
    with world.unchanged():
        assert a.steps.ack({b"T": ids}, b"", 0) == AckAnswer({}, [b"T"])


@pytest.mark.parametrize("value", [b"", b"garbage", b"%s", b"%s five 1-1", b" %s 5 1-1", b"\0", b"halted 5 1-1"])
def test_a_record_that_nobody_can_read_or_that_is_halted_is_not_ours_and_nothing_is_called_done(
    world: World, value: bytes
) -> None:
    """GONE would let the leader go on with the ticket while its entry is still pending."""
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", b"1-1")
    world.spoil(b"T", value.replace(b"%s", a.name))
    with world.unchanged():
        assert a.steps.ack({b"T": ids}, b"", 0) == AckAnswer({}, [b"T"])
    assert world.pending() == {a.name: ids}
    world.apart_because = "the record was written by hand"


def test_an_entry_whose_body_is_gone_is_acknowledged_like_any_other(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.delete(ids[0])
    assert a.steps.ack({b"T": ids}, b"", 0).done == {b"T": ids}
    assert world.state() == ({}, {}, [])


def test_the_run_log_gets_one_entry_per_batch_that_did_something(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", b"1-1", b"2-1")
    record = bytes(range(256))
    a.steps.ack({b"T": ids[:1]}, record, 100)
    a.steps.ack({b"T": ids[:1]}, record, 100)
    a.steps.ack({b"T": ids[1:]}, b"", 0)
    assert [fields for _, fields in world.link.call("XRANGE", world.keys.runs, "-", "+")] == [[b"batch", record]]


def test_the_run_log_tells_what_was_refused_from_what_was_acknowledged_beside_it(world: World) -> None:
    """Else what comes again would look as if it had been done, and known to be done. The record is in the order in
    which handlers ended."""
    leader, a = world.elect(), world.join("a")
    theirs, mine = world.owned(leader, a, b"T", b"1-1", b"2-1"), world.owned(leader, a, b"U", b"3-1", b"4-1")
    a.steps.drain(60_000)
    world.give_back(a, {b"T": theirs})
    ended = [Finished(b"T", b"1-1", 2**50, 1, 1_790_000_000_000_001, 1_790_000_000_000_002)]
    ended += [
        Finished(b"U", b"3-1", 7, 1, 3, 4),
        Finished(b"T", b"2-1", 2**50, 1, 5, 6),
        Finished(b"U", b"4-1", 7, 1, 7, 8),
    ]
    assert a.steps.ack({b"T": theirs, b"U": mine}, encode(a.incarnation, ended), 100) == AckAnswer({b"U": mine}, [b"T"])
    [(_, [_, record])] = world.link.call("XRANGE", world.keys.runs, "-", "+")
    runs = list(decode(record))
    assert [(run.id, run.outcome) for run in runs] == [("1-1", STALE), ("3-1", DONE), ("2-1", STALE), ("4-1", DONE)]
    assert runs[0] == RunRecord(
        a.incarnation, "T", "1-1", 2**50, 1, 1_790_000_000_000_001, 1_790_000_000_000_002, STALE
    )
    with world.unchanged():  # the reply was lost; what was done is in the log, and must not be done a second time
        a.steps.ack({b"T": theirs, b"U": mine}, encode(a.incarnation, ended), 100)


def test_a_batch_whose_reply_was_lost_is_not_refused_in_the_run_log_though_its_ticket_is_with_somebody_else_by_then(
    world: World,
) -> None:
    """It was done, and is known to be done; what the other one has of the ticket came after that."""
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    ids = world.owned(leader, a, b"T", b"1-1")
    record = encode(a.incarnation, [Finished(b"T", ids[0], 7, 1, 3, 4)])
    assert a.steps.ack({b"T": ids}, record, 100).stale == []
    world.owned(leader, b, b"T", b"2-1")
    with world.unchanged():
        assert a.steps.ack({b"T": ids}, record, 100).stale == [b"T"]


def test_the_run_log_is_kept_short(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", *[b"%d-1" % n for n in range(1, 401)])
    for entry_id in ids:
        a.steps.ack({b"T": [entry_id]}, b"x", 10)
    assert world.link.call("XLEN", world.keys.runs) < 200
    a.steps.ack({b"T": world.owned(leader, a, b"T", b"500-1")}, b"x", 10_000_000)


def test_thousands_of_entries_of_a_ticket_are_acknowledged_in_one_call(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", *[b"%d-1" % n for n in range(1, 9003)])
    world.link.call("HSET", world.keys.attempts, *[part for entry_id in ids for part in (entry_id, 1)])
    assert a.steps.ack({b"T": ids[1:]}, b"", 0).stale == []
    assert world.pending() == {a.name: ids[:1]}
    assert world.link.call("HLEN", world.keys.attempts) == 1


def test_an_empty_batch_changes_nothing(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T")
    with world.unchanged():
        assert a.steps.ack({}, b"run", 100) == AckAnswer({}, [])
        assert a.steps.ack({b"T": []}, b"run", 100) == AckAnswer({b"T": []}, [])


def test_after_the_group_was_made_again_the_index_still_lets_go(world: World) -> None:
    """The pending list is gone; what was finished must not come back from the index."""
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T")
    world.link.call("XGROUP", "DESTROY", world.keys.stream, world.keys.group)
    assert a.steps.ack({b"T": ids}, b"", 0).done == {b"T": ids}
    assert world.link.call("EXISTS", world.keys.tickets) == 0
    world.make_group()


def test_with_attempts_their_errors_are_forgotten(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    first, second = world.owned(leader, a, b"T", b"1-1", b"2-1")
    for entry_id in (first, second):
        a.steps.charge({entry_id: Attempts(1, 1)}, errors={entry_id: NotedError(b"{}", b"trace")})
    assert world.link.call("HLEN", world.keys.errors) == 4
    a.steps.ack({b"T": [first]}, b"", 0)
    assert sorted(world.link.call("HKEYS", world.keys.errors)) == [second, b"t" + second]
