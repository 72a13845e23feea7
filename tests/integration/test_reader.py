"""Stream cursor: how much the leader reads, and when."""

from __future__ import annotations

import pytest

from tests.integration.ears import Ear
from tests.integration.factories import FIELD, World
from usher.common.base.clock import now_s
from usher.common.protocol.stream_id import ZERO
from usher.common.redis.client import Link
from usher.master.dispatch.stream_cursor import IDLE_READ_S, StreamCursor
from usher.master.dispatch.stream_notifier import StreamNotifier
from usher.master.leader.entries import NO_NEW_ENTRIES, NewEntries
from usher.master.policy.board.board import Board
from usher.master.policy.board.plans import NOTHING


class Looker:
    """A cursor, what it may ask for, and a plan of nothing for what it sees."""

    def __init__(self, world: World, batch: int = 1000, ear: StreamNotifier | None = None, room: int = 10_000) -> None:
        self.world, self.leader = world, world.elect()
        self.leader.begin()
        self.board = Board(10)
        self.board.join("a:1", "a", 8, room, True)
        self.cursor = StreamCursor(batch, 100_000, ear)
        self.seen: list[bytes] = []

    def look(self, now_s: float = 0.0) -> NewEntries:
        """Take a turn: what was read is taken, and more is read."""
        news = self.cursor.next(self.board, self.leader, now_s)
        if news is None:
            return NO_NEW_ENTRIES
        count = self.cursor.count(self.board, news)
        answer = self.leader.turn(NOTHING, news, count)
        assert answer is not None
        self.cursor.advance(news, answer[1], count)
        self.seen += [found[0] for found in news.found]
        return news

    def look_on(self) -> list[int]:
        """Turns until there is nothing; how many entries each of them took."""
        sizes: list[int] = []
        while (news := self.look()).found or self.cursor._read.found:
            sizes += [len(news.found)] * bool(news.found)
        return sizes


@pytest.fixture
def ear(world: World) -> Ear:
    return Ear(world.link.url, "test:ear", world.keys.stream)


@pytest.mark.parametrize(("batch", "consumers", "room"), [(100, 1, 10_000), (1000, 1, 100), (25, 40, 10_000)])
def test_no_more_than_a_batch_or_than_there_is_room_for_and_of_many_consumers_more(
    world: World, batch: int, consumers: int, room: int
) -> None:
    looker = Looker(world, batch=batch, room=room)
    for number in range(1, consumers):
        looker.board.join(f"b{number}:1", f"b{number}", 8, room, True)
    ids = world.send_many([b"T"] * 250)
    assert looker.look_on() == [4, 16, 64, 100, 66]
    assert looker.seen == ids


@pytest.mark.parametrize(
    ("size", "sizes"), [(1000, [4, 16, 64, 116]), (100_000, [4, 16, 64, 83, 33]), (1_000_000, [4, *[8] * 9, 4])]
)
def test_of_large_entries_fewer_are_read(world: World, size: int, sizes: list[int]) -> None:
    looker = Looker(world)
    for number in range(200 if size < 1_000_000 else 80):
        world.add(b"%d-0" % (number + 1), FIELD, "T", "body", b"x" * size)
    assert looker.look_on() == sizes


def test_what_was_heard_while_there_is_no_room_is_read_when_there_is(world: World, ear: Ear) -> None:
    looker = Looker(world, ear=ear, room=0)
    ids = world.send_many([b"T"] * 5)
    ear.listen(ZERO)
    assert looker.look().found == []
    looker.board.join("b:1", "b", 8, 100, True)
    looker.look(IDLE_READ_S / 2)
    looker.look_on()
    assert looker.seen == ids


def test_a_bell_that_does_not_tell_of_what_a_look_finds_connects_anew(world: World) -> None:
    bell = StreamNotifier(Link(world.link.url, "test:bell"), "of a server that was replaced")
    looker = Looker(world, ear=bell)
    looker.look()
    looker.cursor.arm(looker.board)
    world.send(b"T")
    looker.look(now_s() + IDLE_READ_S)
    looker.cursor.arm(looker.board)
    assert bell._link.connections == 2
    bell.close()


def test_a_bell_of_another_server_is_not_listened_to_for_a_while(world: World, ear: Ear) -> None:
    looker = Looker(world, ear=ear)
    looker.look()
    [gone] = world.send(b"T")
    ear.listen(looker.cursor.last_read, run="another")
    world.delete(gone)
    assert looker.look().found == []
    assert ear.trouble == "stream notifier: it is connected to another server"


@pytest.mark.parametrize("becomes", ["deleted", "read by others", "newer than what comes again"])
def test_what_was_told_is_taken_once_whatever_becomes_of_it_meanwhile(world: World, ear: Ear, becomes: str) -> None:
    looker = Looker(world, ear=ear)
    looker.look()
    old = world.send_many([b"T"] * 2)
    looker.look_on()
    told, *more = world.send_many([b"T"] * 3)
    ear.listen(looker.cursor.last_read)
    if becomes == "deleted":
        world.delete(told)
    elif becomes == "read by others":
        world.link.call("XGROUP", "SETID", world.keys.stream, world.keys.group, told)
    else:
        world.link.call("XGROUP", "SETID", world.keys.stream, world.keys.group, "0-0")
    looker.look_on()
    again = [*old, told] if becomes.startswith("newer") else []
    assert looker.seen == [*old, told, *again, *more]
    assert looker.cursor.taken == more[-1]


def test_where_others_have_moved_the_group_it_goes_on(world: World, ear: Ear) -> None:
    looker = Looker(world, ear=ear)
    looker.look()
    skipped = world.send_many([b"T"] * 2)[-1]
    world.link.call("XGROUP", "SETID", world.keys.stream, world.keys.group, skipped)
    looker.look()
    ids = world.send_many([b"T"] * 2)
    looker.look_on()
    assert (looker.seen, looker.cursor.taken) == (ids, ids[-1])
    world.link.call("DEL", world.keys.leader)
    world.elect().begin()
    assert world.stream.last_delivered() == ids[-1]


def test_of_large_entries_behind_small_ones_few_are_read(world: World) -> None:
    """Where much is read, the newest entry is looked at with each turn."""
    looker, body = Looker(world), b"x" * 1_000_000
    world.send_many([b"T"] * 400)
    for _ in range(3):
        looker.look()
    for _ in range(20):
        world.link.call("XADD", world.keys.stream, "*", FIELD, "T", "body", body)
    looker.look_on()
    assert looker.cursor._page == 8
    assert len(looker.seen) == 420
