"""dead_letter.lua: an owner gives up on a message; letter, acknowledgement and index are one step."""

from __future__ import annotations

import pytest

from tests.integration.factories import World, bury, fetch
from usher.common.base.errors import OwnershipLost
from usher.common.protocol import last_error
from usher.common.protocol.attempts import Attempts
from usher.common.protocol.last_error import LastError
from usher.common.redis.client import CommandRefused
from usher.consumer.lifecycle.owner_scripts import Buried, Letter


def _letter(ticket: bytes, entry_id: bytes, reason: str = "gave_up", error: str = "ValueError('x')") -> Letter:
    return Letter(ticket, entry_id, reason, error, 3, 1_700_000_000_001, 1_700_000_000_002, 5, "ValueError", "at x")


def test_the_message_leaves_with_all_that_is_known_of_it_and_its_fields_as_they_were(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    world.add(b"1-1", "ticket_id", "T", "body", b"\xff\0\n", "body", "again", "", "")
    fetch(leader, 10)
    world.end_lease(a)
    a = world.join("a")
    second = world.owned(leader, a, b"T")
    world.spoil(b"T", world.head(b"T") + b" 1-1 " + second[0])
    world.make_idle(a.incarnation, 0, b"1-1")
    world.link.call("HSET", world.keys.attempts, "1-1", 3, second[0], 1)
    assert bury(a.steps, _letter(b"T", b"1-1")) is Buried.OK
    [(_, fields)] = world.link.call("XRANGE", world.keys.dead, "-", "+")
    assert fields[:16] == [
        b"usher-id", b"1-1", b"usher-ticket", b"T", b"usher-reason", b"gave_up", b"usher-error", b"ValueError('x')",
        b"usher-attempts", b"3", b"usher-owner", a.name, b"usher-first-ms", b"1700000000001", b"usher-last-ms", b"1700000000002",
    ]  # fmt: skip
    assert fields[16:26] == [
        b"usher-policy", b"skip", b"usher-fence", world.head(b"T").split()[1], b"usher-error-type", b"ValueError", b"usher-traceback", b"at x",
        b"usher-fields", b"4",
    ]  # fmt: skip
    assert fields[26:] == [b"ticket_id", b"T", b"body", b"\xff\0\n", b"body", b"again", b"", b""]
    assert world.pending() == {a.name: second}
    assert world.link.call("HGETALL", world.keys.attempts) == [second[0], b"1"]


def test_one_from_the_middle_leaves_the_others_in_their_order(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", b"1-1", b"1-10", b"1-11", b"11-1")
    head = world.head(b"T")
    assert bury(a.steps, _letter(b"T", b"1-10")) is Buried.OK
    assert world.state().index == {b"T": head + b" 1-1 1-11 11-1"}
    assert world.pending() == {a.name: [ids[0], ids[2], ids[3]]}


def test_the_same_call_twice_writes_one_letter(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    first, second = world.owned(leader, a, b"T", b"1-1", b"2-1")
    bury(a.steps, _letter(b"T", first))
    with world.unchanged():
        assert bury(a.steps, _letter(b"T", first)) is Buried.GONE
    bury(a.steps, _letter(b"T", second))
    with world.unchanged():
        assert bury(a.steps, _letter(b"T", second)) is Buried.GONE
    assert len(world.dead()) == 2


def test_without_a_lease_nothing_is_given_up(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    [entry_id] = world.owned(leader, a, b"T")
    world.end_lease(a)
    with world.unchanged(), pytest.raises(OwnershipLost):
        bury(a.steps, _letter(b"T", entry_id))


def test_nobody_gives_up_what_another_owner_has(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    [entry_id] = world.owned(leader, b, b"T")
    with world.unchanged():
        assert bury(a.steps, _letter(b"T", entry_id)) is Buried.STALE


def test_an_entry_of_another_ticket_is_not_given_up_under_this_one(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T")
    [other] = world.owned(leader, a, b"U")
    with world.unchanged():
        assert bury(a.steps, _letter(b"T", other)) is Buried.GONE


@pytest.mark.parametrize("value", [b"", b"garbage", b"%s", b"%s five 1-1", b"\0", b"halted 5 1-1"])
def test_a_record_that_nobody_can_read_or_that_is_halted_is_not_ours(world: World, value: bytes) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T", b"1-1")
    world.spoil(b"T", value.replace(b"%s", a.name))
    with world.unchanged():
        assert bury(a.steps, _letter(b"T", b"1-1")) is Buried.STALE
    world.apart_because = "the record was written by hand"


def test_a_message_whose_body_is_gone_says_that_instead(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    [entry_id] = world.owned(leader, a, b"T")
    world.delete(entry_id)
    assert bury(a.steps, _letter(b"T", entry_id)) is Buried.OK
    assert world.state() == ({}, {}, world.dead())
    assert world.state().letters() == [(entry_id, b"T", b"body_gone")]


_ALIKE = LastError("E: away", at_ms=1_700_000_000_000, alike=7, since_ms=1_600_000_000_000)


@pytest.mark.parametrize(
    ("notes", "first_ms"),
    [
        ([LastError("E: no", at_ms=1_000_000_000_123)], b"1000000000123"),
        ([_ALIKE], b"1700000000000"),
        ([_ALIKE, LastError("E: no", at_ms=1_700_000_000_001)], b"1700000000000"),
    ],
)
def test_a_letter_was_first_tried_when_it_first_failed_whoever_had_it_then(
    world: World, notes: list[LastError], first_ms: bytes
) -> None:
    """An error alike tells since when others fail."""
    leader, a = world.elect(), world.join("a")
    [entry_id] = world.owned(leader, a, b"T")
    for number, note in enumerate(notes, 1):
        a.steps.charge({entry_id: Attempts(number, number)}, errors={entry_id: last_error.encode(note)})
    bury(a.steps, Letter(b"T", entry_id, "gave_up", "", 2, 1_700_000_000_000, 1_800_000_000_000))
    letter = world.dead()[0]
    assert (letter[b"usher-first-ms"], letter[b"usher-last-ms"]) == (first_ms, b"1800000000000")


def test_a_message_that_redis_dropped_from_the_list_is_still_ended_by_its_owner(world: World) -> None:
    """Redis >= 7 drops an entry without a body when it is touched; the index has it until the owner is done."""
    leader, a = world.elect(), world.join("a")
    [entry_id] = world.owned(leader, a, b"T")
    world.delete(entry_id)
    world.make_idle_if_there(a.incarnation, 100_000, entry_id)
    a.steps.renew(60_000)
    assert bury(a.steps, _letter(b"T", entry_id)) is Buried.OK
    for _ in range(2):
        world.spoil(b"T", a.name + b" 5 " + entry_id)  # as if the answer had been lost
        assert bury(a.steps, _letter(b"T", entry_id)) is Buried.GONE
        world.link.call("DEL", world.keys.letters)  # by hand: the newest letters are looked at
    world.link.call("HDEL", world.keys.tickets, "T")
    assert world.state().letters() == [(entry_id, b"T", b"body_gone")]
    assert (world.pending(), world.state().index) == ({}, {})


def test_a_message_of_thousands_of_fields_is_kept_as_far_as_it_fits_and_says_so(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    fields = ["ticket_id", "T", *[part for n in range(5000) for part in (f"f{n}", "v")]]
    world.add(b"1-1", *fields)
    fetch(leader, 1)
    world.spoil(b"T", a.name + b" 5 1-1")
    world.make_idle(a.incarnation, 0, b"1-1")
    assert bury(a.steps, _letter(b"T", b"1-1")) is Buried.OK
    [(_, letter)] = world.link.call("XRANGE", world.keys.dead, "-", "+")
    assert letter[24:30:2] == [b"usher-fields-cut", b"usher-bytes", b"usher-fields"]
    assert letter[25:30:2] == [b"2001", b"%d" % sum(map(len, fields)), b"3000"]
    assert letter[30:] == [field.encode() for field in fields[:6000]]


def test_when_the_letter_cannot_be_written_nothing_happens(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    [entry_id] = world.owned(leader, a, b"T")
    world.link.call("XADD", world.keys.dead, "18446744073709551615-18446744073709551615", "the last", "possible id")
    with world.unchanged(), pytest.raises(CommandRefused):
        bury(a.steps, _letter(b"T", entry_id))
