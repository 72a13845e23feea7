"""ack.lua: only the owner whose lease lives takes messages out of the pending list; their attempts go with them."""

from __future__ import annotations

import pytest

from tests.integration.factories import TRICKY_IDS, World, spent
from usher.common.base.errors import OwnershipLost, ReplyUnknown
from usher.common.protocol.attempts import Attempts
from usher.common.protocol.last_error import NotedError


def test_what_is_finished_leaves_the_pending_list_and_the_index_stays(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", *TRICKY_IDS)
    record = world.stream.record_of(b"T")
    assert record is not None
    for done in range(1, len(ids)):
        a.steps.ack([ids[done - 1]])
        assert world.pending() == {a.name: ids[done:]}
        assert world.stream.record_of(b"T") == record
        assert world.record(b"T") == (*record[:2], ids[done:])
    a.steps.ack(ids[-1:])
    assert world.record(b"T") is None


def test_an_id_that_is_the_beginning_of_another_is_another(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", b"1-10", b"1-11", b"11-1")
    with world.unchanged():
        a.steps.ack([b"1-1", b"10-1", b"0-11", b"1-0"])
    a.steps.ack([b"1-1", b"1-10"])
    assert world.pending() == {a.name: ids[1:]}


def test_without_a_lease_nothing_happens(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T")
    a.steps.charge({ids[0]: Attempts(1, 1)})
    world.end_lease(a)
    with world.unchanged(), pytest.raises(OwnershipLost):
        a.steps.ack(ids, b"run", 100)


def test_while_nothing_special_happens_no_script_runs(world: World) -> None:
    """A renewal of the lease stops a transaction, and attempts need the script."""
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", *[b"%d-1" % n for n in range(1, 6)])
    a.steps.renew(60_000)

    def acknowledge() -> None:
        a.steps.ack(ids[:1], b"ran", 100)
        world.link.call("PEXPIRE", world.keys.lease(a.incarnation), 60_000)
        a.steps.ack(ids[1:2], b"ran", 100)
        a.steps.ack(ids[2:3])

    calls = spent(world.link, acknowledge)
    assert (calls["evalsha"], calls["eval"], calls["xack"]) == (0, 0, 3)
    a.steps.charge({ids[3]: Attempts(1, 1)})
    a.steps.ack(ids[3:4], b"ran", 100)
    assert world.link.call("EXISTS", world.keys.attempts) == 0
    assert world.pending() == {a.name: ids[4:]}
    assert world.link.call("XLEN", world.keys.runs) == 3


def test_a_lease_that_ended_since_redis_was_asked_acknowledges_nothing(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    first, second = world.owned(leader, a, b"T", b"1-1", b"2-1")
    a.steps.ack([first], b"ran", 100)
    world.end_lease(a)
    with world.unchanged(), pytest.raises(OwnershipLost):
        a.steps.ack([second], b"ran", 100)


def test_who_may_not_multi_acknowledges_by_the_script(world: World) -> None:
    """Without MULTI each command of a transaction would be one by itself, which no WATCH stops."""
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.link.call("ACL", "SETUSER", "default", "-multi")
    try:
        a.steps.ack(ids[:1], b"ran", 100)
        a.steps.ack([b"9-9"], b"ran", 100)
        world.end_lease(a)
        with world.unchanged(), pytest.raises(OwnershipLost):
            a.steps.ack(ids[1:], b"ran", 100)
    finally:
        world.link.call("ACL", "SETUSER", "default", "+multi")
    assert (world.pending(), world.link.call("XLEN", world.keys.runs)) == ({a.name: ids[1:]}, 2)


def test_a_multi_that_is_refused_later_is_a_reply_that_is_not_known(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", b"1-1", b"2-1", b"3-1")
    for one in ids[:2]:
        a.steps.ack([one], b"ran", 100)
    world.link.call("ACL", "SETUSER", "default", "-multi")
    try:
        with pytest.raises(ReplyUnknown):
            a.steps.ack(ids[2:], b"ran", 100)
        a.steps.ack(ids[2:], b"ran", 100, is_again=True)
    finally:
        world.link.call("ACL", "SETUSER", "default", "+multi")
    assert (world.pending(), world.link.call("XLEN", world.keys.runs)) == ({}, 3), "no run is in the log twice"


def test_an_entry_whose_body_is_gone_is_acknowledged_like_any_other(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.delete(ids[0])
    a.steps.ack(ids)
    assert world.pending() == {}


def test_the_run_log_gets_each_batch_once(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    first, second, third = world.owned(leader, a, b"T", b"1-1", b"2-1", b"3-1")
    record = bytes(range(256))
    a.steps.ack([first], record, 100)
    a.steps.ack([first], record, 100, is_again=True)  # its reply was lost
    a.steps.ack([second], b"", 0)
    world.link.call("XACK", world.keys.stream, world.keys.group, third)
    a.steps.ack([third], b"ran", 100)  # Redis has dropped it meanwhile, or somebody has ended it: it ran all the same
    told = [fields for _, fields in world.link.call("XRANGE", world.keys.runs, "-", "+")]
    assert told == [[b"batch", record], [b"batch", b"ran"]]


def test_a_batch_that_comes_again_and_was_never_heard_is_in_the_run_log(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T")
    a.steps.ack(ids, b"ran", 100, is_again=True)
    assert world.link.call("XLEN", world.keys.runs) == 1


def test_the_run_log_is_kept_short(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", *[b"%d-1" % n for n in range(1, 401)])
    for entry_id in ids:
        a.steps.ack([entry_id], b"x", 10)
    assert world.link.call("XLEN", world.keys.runs) < 200
    a.steps.ack(world.owned(leader, a, b"T", b"500-1"), b"x", 10_000_000)


def test_with_attempts_their_errors_are_forgotten(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    first, second = world.owned(leader, a, b"T", b"1-1", b"2-1")
    for entry_id in (first, second):
        a.steps.charge({entry_id: Attempts(1, 1)}, errors={entry_id: NotedError(b"{}", b"trace")})
    assert world.link.call("HLEN", world.keys.errors) == 4
    a.steps.ack([first])
    assert sorted(world.link.call("HKEYS", world.keys.errors)) == [second, b"t" + second]
    assert world.link.call("HKEYS", world.keys.attempts) == [second]
