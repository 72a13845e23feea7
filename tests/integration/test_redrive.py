"""dead_letter.lua with the policy halt, redrive.lua and read_letters.lua: a
ticket that waits for an operator, and what the operator does."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tests.doors import environ_of
from tests.integration.factories import Owner, World, bury, fetch, hand_over, plan
from tests.integration.memory import full_memory
from usher.cli import usher
from usher.common.base.errors import OwnershipLost
from usher.common.redis.client import CommandRefused
from usher.common.redis.replies import pairs
from usher.consumer.lifecycle.owner_scripts import Buried, Letter
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.operations.action_log import StepResult
from usher.master.operations.shelves import DeadLetters
from usher.master.policy.letters import LetterFilter, Preview

T = b"T"


@pytest.fixture
def letters(world: World) -> DeadLetters:
    return DeadLetters(world.link, world.keys)


def _changed(world: World) -> list[bytes]:
    entries = world.link.call("XRANGE", world.keys.changed, "-", "+")
    return [fields[1] for _, fields in entries if fields[0] == b"ticket"]


def _halted(world: World) -> tuple[LeaderScripts, Owner, list[bytes], bytes]:
    """A ticket that waits for the first of four messages; its owner had three of them. With the fence that it had."""
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, T, b"1-1", b"2-1", b"3-1")
    fence = world.head(T).split()[1]
    assert world.give_up(a, T, "halt") is Buried.HALTED
    return leader, a, ids + world.parked(leader, T, b"4-1"), fence


# ---- other groups ----


def test_a_redrive_says_which_groups_get_the_message_again(world: World, letters: DeadLetters) -> None:
    """Group `shipping` handled again what `billing` redrove, and nobody had said so."""
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, T, b"1-1")
    world.give_up(a, T, "skip")
    assert letters.other_groups() == []
    for name in ("shipping", "audit"):
        world.link.call("XGROUP", "CREATE", world.keys.stream, name, "$")
    assert letters.other_groups() == ["audit", "shipping"]
    environ = environ_of(world)
    told = CliRunner().invoke(usher, ["dead", "redrive", "--all", "--yes"], env=environ)
    assert "1 will be new messages: a new message is one for every group of the stream: audit and shipping" in (
        told.output
    )
    assert len(world.link.call("XREADGROUP", "GROUP", "shipping", "s", "STREAMS", world.keys.stream, ">")[0][1]) == 1


def test_a_halted_message_is_redriven_for_its_own_group_alone(world: World, letters: DeadLetters) -> None:
    _halted(world)
    world.link.call("XGROUP", "CREATE", world.keys.stream, "shipping", "$")
    preview = Preview()
    for page in letters.all(LetterFilter(), letters.last_id()):
        preview.add(page)
    assert (preview.count, preview.adds) == (1, 0)
    assert letters.redrive(world.letter_ids())[0].word == "resumed"
    assert world.link.call("XREADGROUP", "GROUP", "shipping", "s", "STREAMS", world.keys.stream, ">") is None


# ---- park ----


def test_a_parked_message_keeps_its_place_and_its_owner_keeps_nothing_of_the_ticket(world: World) -> None:
    _, a, ids, fence = _halted(world)
    assert world.pending() == {b"halted": ids[:1], b"master": ids[1:]}
    assert world.state().index == {T: b"halted " + fence + b" 1-1 2-1 3-1"}
    assert world.state().letters() == [(b"1-1", T, b"gave_up")]
    assert world.dead()[0][b"usher-policy"] == b"halt"
    assert _changed(world) == [T]
    assert a.steps.deregister(), "and it can leave"


def test_the_same_call_again_writes_no_second_letter(world: World) -> None:
    _, a, ids, fence = _halted(world)
    with world.unchanged():
        assert bury(a.steps, Letter(T, ids[0], "gave_up", "", 3, 1, 2, int(fence), "", "", "halt")) is Buried.HALTED
        assert bury(a.steps, Letter(T, ids[1], "gave_up", "", 3, 1, 2, int(fence), "", "", "halt")) is Buried.STALE
        assert bury(a.steps, Letter(T, ids[0], "gave_up", "", 3, 1, 2, int(fence) + 1, "", "", "halt")) is Buried.STALE


def test_who_has_the_ticket_anew_parks_nothing_by_a_call_of_before(world: World, letters: DeadLetters) -> None:
    """The answer was lost, the message redriven, and handed over to the same incarnation under another fence."""
    leader, a, ids, fence = _halted(world)
    letters.redrive(world.letter_ids())
    hand_over(leader, plan(a, {T: ids[:1]}, {T: world.head(T)}))
    with world.unchanged():
        assert bury(a.steps, Letter(T, ids[0], "gave_up", "", 3, 1, 2, int(fence), "", "", "halt")) is Buried.STALE


def test_without_a_lease_or_by_another_owner_nothing_is_parked(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    world.owned(leader, a, T, b"1-1", b"2-1")
    with world.unchanged():
        assert world.give_up(b, T, "halt") is Buried.STALE
    world.end_lease(a)
    with world.unchanged(), pytest.raises(OwnershipLost):
        world.give_up(a, T, "halt")


def test_where_there_is_nothing_to_park_the_rest_goes_back(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, T, b"1-1", b"2-1", b"3-1")
    fence = world.head(T).split()[1]
    world.delete(ids[0], ids[1])
    assert world.give_up(a, T, "halt") is Buried.RETURNED
    assert world.record(T) is not None
    assert world.pending()[b"master"][-1] == ids[2]
    assert world.head(T) == b"returned " + fence
    assert world.state().letters()[0] == (ids[0], T, b"body_gone")
    assert b"halted" not in world.pending()


def test_a_halted_ticket_is_nobodys(world: World) -> None:
    """Neither swept, nor taken back, nor given back, nor freed, nor reaped."""
    leader, a, ids, _ = _halted(world)
    before = world.state().index[T]
    world.make_idle("halted", 10_000_000, ids[0])
    assert leader.sweep([], 0, b"0-0", 100).strays == []
    world.end_lease(a)
    assert leader.take_back(a.incarnation, 10).last is None
    assert leader.left_behind(a.incarnation, [(T, ids)]) == [(one, T) for one in ids[1:]]
    assert leader.reap(a.incarnation, "a", a.registration.dump())
    assert (world.pending(), world.state().index[T]) == ({b"halted": ids[:1], b"master": ids[1:]}, before)


# ---- redrive ----


def test_a_redriven_ticket_goes_on_with_that_very_message_and_with_no_later_one(
    world: World, letters: DeadLetters
) -> None:
    leader, a, ids, fence = _halted(world)
    [letter_id] = world.letter_ids()
    assert letters.redrive([letter_id]) == [StepResult(letter_id, "resumed")]
    assert letters.leader_url == "http://one"
    assert world.pending() == {b"master": ids}
    assert world.state().index == {T: b"returned " + fence + b" 1-1 2-1 3-1"}
    assert world.dead() == []
    assert _changed(world) == [T, T]
    head = {T: world.head(T)}
    assert leader.turn(plan(a, {T: ids[3:]}, head)) is None, "a plan of a leader that has not heard of it"
    hand_over(leader, plan(a, {T: ids}, head))
    assert world.pending() == {a.name: ids}
    assert int(world.head(T).split()[1]) > int(fence)


@pytest.mark.parametrize("step", ["redrive", "drop"])
def test_what_is_asked_twice_happens_once(world: World, letters: DeadLetters, step: str) -> None:
    _halted(world)
    ids = world.letter_ids()
    assert [outcome.word for outcome in getattr(letters, step)(ids * 2)] == [
        {"redrive": "resumed", "drop": "released"}[step],
        "gone",
    ]
    with world.unchanged():
        assert [outcome.word for outcome in getattr(letters, step)(ids)] == ["gone"]


def test_attempts_begin_anew(world: World, letters: DeadLetters) -> None:
    _, _, ids, _ = _halted(world)
    world.link.call("HSET", world.keys.attempts, ids[0], "5 5 0")
    letters.redrive(world.letter_ids())
    assert world.link.call("HLEN", world.keys.attempts) == 0


def test_a_message_that_was_skipped_comes_to_the_end_with_its_uid(world: World, letters: DeadLetters) -> None:
    leader, a = world.elect(), world.join("a")
    world.add(b"1-1", "ticket_id", "T", "body", b"\xff\0", "usher-fields", "theirs")
    world.add(b"2-1", "ticket_id", "T", "uid", "order 7", "uid", "again")
    world.add(b"3-1", "ticket_id", "T", "uid", "", "body", "x")
    fetch(leader, 10)
    hand_over(leader, plan(a, {T: [b"1-1", b"2-1", b"3-1"]}))
    for entry_id in (b"1-1", b"2-1", b"3-1"):
        assert world.give_up(a, T, "skip", entry_id) is Buried.OK
    first, second, third = letters.redrive(world.letter_ids())
    assert [one.word for one in (first, second, third)] == ["added"] * 3
    entries = dict(world.link.call("XRANGE", world.keys.stream, "(3-1", "+"))
    assert list(entries) == [first.message_id, second.message_id, third.message_id]
    assert entries[first.message_id] == [
        b"ticket_id",
        b"T",
        b"body",
        b"\xff\0",
        b"usher-fields",
        b"theirs",
        b"uid",
        b"1-1",
    ]
    assert entries[second.message_id] == [b"ticket_id", b"T", b"uid", b"order 7", b"uid", b"again"]
    assert entries[third.message_id] == [b"ticket_id", b"T", b"uid", b"3-1", b"body", b"x"], "an empty uid is none"
    assert (world.dead(), world.pending(), _changed(world)) == ([], {}, [])


def test_what_was_rejected_comes_to_the_end_too(world: World, letters: DeadLetters) -> None:
    leader = world.elect()
    world.add(b"1-1", "text", "no ticket")
    fetch(leader, 1)
    leader.reject([(b"1-1", b"", "no_ticket_id")])  # type: ignore[list-item]
    [outcome] = letters.redrive(world.letter_ids())
    assert pairs(world.link.call("XRANGE", world.keys.stream, "(1-1", "+")[0][1]) == {
        b"text": b"no ticket",
        b"uid": b"1-1",
    }
    assert outcome.word == "added"


def test_what_was_cut_is_added_whole_from_the_stream_or_not_at_all(world: World, letters: DeadLetters) -> None:
    leader = LeaderScripts(world.scripts, world.keys, world.elect().epoch, "ticket_id", 5000)
    for entry_id in (b"1-1", b"2-1"):
        world.add(entry_id, "ticket_id", "T", "body", b"x" * 6000)
    fetch(leader, 2)
    leader.reject([(entry_id, b"T", "too_large") for entry_id in (b"1-1", b"2-1")])  # type: ignore[misc]
    world.delete(b"2-1")
    assert [outcome.word for outcome in letters.redrive(world.letter_ids())] == ["added", "cut"]
    [added] = world.link.call("XRANGE", world.keys.stream, "(2-1", "+")
    assert pairs(added[1]) == {b"ticket_id": b"T", b"body": b"x" * 6000, b"uid": b"1-1"}
    assert world.state().letters() == [(b"2-1", b"T", b"too_large")], "its letter stays"


def test_a_parked_message_whose_body_was_deleted_is_added_again_and_its_ticket_goes_on(
    world: World, letters: DeadLetters
) -> None:
    _, _, ids, fence = _halted(world)
    world.delete(ids[0])
    [outcome] = letters.redrive(world.letter_ids())
    assert outcome.word == "added"
    assert world.state().index == {T: b"returned " + fence + b" 2-1 3-1"}
    assert world.pending() == {b"master": ids[1:]}
    [(_, added)] = world.link.call("XRANGE", world.keys.stream, outcome.message_id, outcome.message_id)
    assert pairs(added)[b"uid"] == ids[0]


def test_a_halt_that_the_index_has_lost_ends_too(world: World, letters: DeadLetters) -> None:
    """The pending list says who has an entry; the index is only an index."""
    _, _, ids, fence = _halted(world)
    world.link.call("HDEL", world.keys.tickets, T)
    assert letters.redrive(world.letter_ids())[0].word == "resumed"
    assert world.state().index == {T: b"returned " + fence + b" 1-1"}
    assert world.pending() == {b"master": ids}


@pytest.mark.parametrize("step", ["redrive", "drop"])
def test_what_is_parked_while_another_has_its_ticket_is_left_alone(
    world: World, letters: DeadLetters, step: str
) -> None:
    _, a, ids, _ = _halted(world)
    world.spoil(T, a.name + b" 9 " + ids[3])
    with world.unchanged():
        assert [outcome.word for outcome in getattr(letters, step)(world.letter_ids())] == ["held"]
    world.apart_because = "the record was written by hand"


def test_what_somebody_wrote_among_the_letters_stops_nothing(world: World, letters: DeadLetters) -> None:
    _, _, ids, _ = _halted(world)
    for fields in (
        ("a", "b"),
        ("usher-id", "x", "usher-ticket", "T", "usher-fields", "1", "a", "b"),
        ("usher-id", "1-1", "usher-fields", "0"),
    ):
        world.link.call("XADD", world.keys.dead, "*", *fields)
    there = world.letter_ids()
    assert [outcome.word for outcome in letters.redrive(there)] == ["resumed", "cut", "cut", "cut"]
    assert len(letters.page(LetterFilter(), None, 10).letters) == 3
    assert [outcome.word for outcome in letters.drop(there)] == ["gone", "dropped", "dropped", "dropped"]
    assert world.pending() == {b"master": ids}


def test_nobody_need_lead(world: World, letters: DeadLetters) -> None:
    _halted(world)
    world.link.call("DEL", world.keys.leader)
    assert letters.redrive(world.letter_ids())[0].word == "resumed"
    assert letters.leader_url == ""


# ---- drop ----


def test_a_ticket_goes_on_without_a_dropped_message(world: World, letters: DeadLetters) -> None:
    leader, a, ids, fence = _halted(world)
    assert letters.drop(world.letter_ids())[0].word == "released"
    assert world.state() == ({b"master": ids[1:]}, {T: b"returned " + fence + b" 2-1 3-1"}, [])
    head = {T: world.head(T)}
    assert leader.turn(plan(a, {T: ids[3:]}, head)) is None
    hand_over(leader, plan(a, {T: ids[1:]}, head))


# ---- tail ----


# ---- many, full, and wrong ----


@pytest.mark.parametrize("drops", [False, True])
def test_a_full_server_lets_redrive_and_drop(world: World, letters: DeadLetters, drops: bool) -> None:
    leader, a, ids, _ = _halted(world)
    world.owned(leader, a, b"U", b"9-1")
    world.give_up(a, b"U", "skip")
    with full_memory(world.link):
        outcomes = (letters.drop if drops else letters.redrive)(world.letter_ids())
    assert [outcome.word for outcome in outcomes] == (["released", "dropped"] if drops else ["resumed", "added"])
    assert world.pending() == {b"master": ids[drops:]}


def test_a_full_server_lets_park(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, T, b"1-1", b"2-1")
    with full_memory(world.link):
        assert world.give_up(a, T, "halt") is Buried.HALTED
    assert world.pending() == {b"halted": ids[:1], b"master": ids[1:]}


@pytest.mark.parametrize("key", ["stream", "tickets", "attempts", "changed"])
@pytest.mark.parametrize("step", ["halt", "redrive", "drop"])
def test_a_key_of_another_type_stops_the_step_before_it_has_changed_anything(
    world: World, letters: DeadLetters, key: str, step: str
) -> None:
    _, _, _, _ = _halted(world)
    leader, b = (
        world.elect("http://one", succeed=world.link.call("GET", world.keys.leader).split()[0].decode()),
        world.join("b"),
    )
    world.owned(leader, b, b"U", b"8-1", b"9-1")
    record = world.record(b"U")
    assert record is not None
    name = getattr(world.keys, key)
    world.link.call("RENAME", name, "aside{ticket_stream}") if world.link.call("EXISTS", name) else None
    world.link.call("SET", name, "somebody else's")
    before = world.link.call("XLEN", world.keys.dead)
    letter = Letter(b"U", b"8-1", "gave_up", "", 1, 1, 2, record.fence, "", "", "halt")
    there = world.letter_ids()
    steps = {
        "halt": lambda: bury(b.steps, letter),
        "redrive": lambda: letters.redrive(there),
        "drop": lambda: letters.drop(there),
    }
    with pytest.raises(CommandRefused):
        steps[step]()
    assert world.link.call("XLEN", world.keys.dead) == before
    world.link.call("DEL", name)
    (
        world.link.call("RENAME", "aside{ticket_stream}", name)
        if world.link.call("EXISTS", "aside{ticket_stream}")
        else None
    )
    assert world.pending()[b"halted"] == [b"1-1"]
    assert world.pending()[b.name] == [b"8-1", b"9-1"]


# ---- gathered messages ----


def test_a_gathered_message_that_is_redriven_keeps_its_header_by_which_sinks_know_it(
    world: World, letters: DeadLetters
) -> None:
    leader, a = world.elect(), world.join("a")
    entry_id = world.add(b"1-1", "usher_from", "7-1 2 s", "usher_ticket", "s/T", "ticket_id", "T")
    fetch(leader, 10)
    hand_over(leader, plan(a, {b"s/T": [entry_id]}))
    assert bury(a.steps, Letter(b"s/T", entry_id, "gave_up", "", 1, 1, 2)) is Buried.OK
    [(letter_id, _)] = world.link.call("XRANGE", world.keys.dead, "-", "+")
    letters.redrive([letter_id])
    [*_, (_, fields)] = world.link.call("XRANGE", world.keys.stream, "-", "+")
    assert fields == [b"usher_from", b"7-1 2 s", b"usher_ticket", b"s/T", b"ticket_id", b"T"], (
        "no uid of the work stream"
    )
