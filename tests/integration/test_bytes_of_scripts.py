"""No script reads, copies or writes more than a few large bodies at once, whatever it is asked for: Redis does nothing
else meanwhile. What it leaves it says, and the next call goes on there."""

from __future__ import annotations

import pytest

from tests.integration.factories import FIELD, Owner, World, fetch, hand_over, plan
from usher.common.readers.loop import ReliableStream
from usher.master.insight.stats import tickets_of
from usher.master.leader.entries import Rejected
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.operations.shelves import DeadLetters
from usher.master.policy.letters import LetterFilter

T = b"T"
_BODY = b"x" * 1_500_000
#: Entries of that size after which a call ends that only reads them, and one that also writes them.
_READ, _WRITTEN = 3, 2


def large(world: World, count: int = 8, ticket: bytes = T, start: int = 1) -> list[bytes]:
    return [world.add(b"%d-1" % n, FIELD, ticket, "body", _BODY) for n in range(start, start + count)]


def parked(world: World, leader: LeaderScripts, count: int = 8, start: int = 1) -> list[bytes]:
    ids = large(world, count, start=start)
    while fetch(leader, 100):
        pass
    return ids


def owned(world: World, leader: LeaderScripts, count: int = 8) -> tuple[list[bytes], Owner]:
    ids, owner = parked(world, leader, count), world.join("a")
    hand_over(leader, plan(owner, {T: ids}, {T: world.head(T)}))
    return ids, owner


def test_a_page_of_what_is_parked_ends_with_a_few(world: World) -> None:
    leader = world.elect()
    ids, after = parked(world, leader), None
    found: list[bytes] = []
    while (page := leader.read_parked(after, 500)).last is not None:
        assert len(page.found) <= _READ
        found, after = found + [one.id for one in page.found], page.last
    assert found == ids


def test_what_a_dead_owner_had_is_taken_back_a_few_at_a_time_and_its_loss_is_counted_once(world: World) -> None:
    leader = world.elect()
    ids, a = owned(world, leader)
    incarnation = a.incarnation
    world.end_lease(a)
    sizes = []
    while (page := leader.take_back(incarnation, 500)).last:
        sizes.append(len(page.found))
    assert (sum(sizes), max(sizes)) == (len(ids), _READ)
    assert world.pending() == {b"master": ids}
    assert world.link.call("HGETALL", world.keys.attempts) == [ids[0], b"0 0 0 1"], "only the first may have run"


def test_unusable_entries_become_letters_a_few_at_a_time(world: World) -> None:
    leader = world.elect()
    ids = parked(world, leader)
    left = [Rejected(entry_id, b"", "empty_ticket_id") for entry_id in ids]
    while left:
        over = leader.reject(left)
        assert over <= _WRITTEN
        del left[:over]
    assert [letter[0] for letter in world.state().letters()] == ids
    assert world.pending() == {}


def test_strays_are_found_a_few_at_a_time_and_the_others_stay_where_they_are(world: World) -> None:
    leader = world.elect()
    ids = parked(world, leader)
    world.make_idle("stranger", 100_000, *ids)
    cursor, found = b"0-0", []
    for _ in range(len(ids)):
        swept = leader.sweep([], 50_000, cursor, 100)
        assert len(swept.strays) <= _READ
        found += [stray.id for stray, _ in swept.strays]
        cursor = swept.cursor
        assert world.pending().get(b"stranger", []) == ids[len(found) :]
        if cursor == b"0-0":
            break
    assert found == ids


def test_a_plain_reader_takes_over_and_gives_up_a_few_at_a_time(world: World) -> None:
    leader = world.elect()
    ids = parked(world, leader)
    world.make_idle("dead", 100_000, *ids)
    reader = ReliableStream(world.link, world.keys.stream, world.keys.group, "r")
    cursor, taken = b"0-0", []
    for _ in range(len(ids)):
        claimed = reader.claim_idle(100, 50_000, cursor)
        assert len(claimed.messages) <= _READ
        taken += claimed.messages
        cursor = claimed.cursor
        if cursor == b"0-0":
            break
    assert [message.stream_id for message in taken] == ids
    assert reader.move_to_dead_letters(taken, "x", remove=False) == ids


def test_letters_are_read_redriven_and_dropped_a_few_at_a_time(world: World) -> None:
    leader = world.elect()
    ids = parked(world, leader)
    for at in range(0, len(ids), 2):
        leader.reject([Rejected(entry_id, b"", "x") for entry_id in ids[at : at + 2]])
    letters = DeadLetters(world.link, world.keys)
    assert [one.message_id for one in letters.page(LetterFilter(), None, 100).letters] == ids
    assert [one.message_id for one in letters.page(LetterFilter(b""), None, 100).letters] == ids
    newest = letters.newest(LetterFilter(), None, 100, 10.0)
    assert ([one.message_id for one in newest.letters], newest.cursor) == (ids[::-1], None)
    named = world.letter_ids()
    assert [one.word for one in letters.redrive(named[:4])] == ["added"] * 4
    assert [one.word for one in letters.drop(named)] == ["gone"] * 4 + ["dropped"] * 4


@pytest.mark.parametrize("command", [("XRANGE", "-", "+"), ("XREVRANGE", "+", "-")])
def test_questions_look_at_a_few_and_say_where_to_go_on(world: World, command: tuple[str, ...]) -> None:
    large(world)
    last = b"6-1" if command[0] == "XREVRANGE" else b"3-1"
    args = (*command, 100, FIELD, b"none")
    assert world.scripts.run("find_entries", (world.keys.stream,), args) == [_READ, last, [], 0]


def test_no_field_and_no_head_is_looked_for_without_end(world: World) -> None:
    leader = world.elect()
    ids = parked(world, leader)
    assert list(tickets_of(world.scripts, world.keys, FIELD, ids)) == [(one, T) for one in ids], "in several answers"
    for group, name in (("", ""), (world.keys.group, "master")):
        args = ("XRANGE", "-", "+", 100, FIELD, T, "", group, name)
        assert world.scripts.run("find_entries", (world.keys.stream,), args) == [_READ, ids[_READ - 1], ids[:_READ], 0]
    values = world.scripts.run("read_fields", (world.keys.stream,), (1, "", 2, FIELD, "none", *ids))
    assert values == [[[T[:1], len(T)], None]] * _READ


def test_the_run_log_of_full_batches_is_bounded_by_bytes(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    for n in range(60):
        [entry_id] = world.owned(leader, a, T)
        record = b'{"ids":["%b"],"x":"%b"}' % (entry_id, b"x" * (80_000 if n % 2 else 10))
        a.steps.ack([entry_id], record, 40)
    kept = world.link.call("XRANGE", world.keys.runs, "-", "+")
    size = sum(len(part) for _, fields in kept for part in fields)
    assert size <= 40 * 8192 + 100_000
