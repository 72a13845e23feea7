"""Stream cursor: how much the leader reads, and when what the doorbell heard spares it a turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.actors import Stage
from tests.integration.ears import Ear
from tests.integration.factories import FIELD, World
from tests.integration.test_protocol_rules import T
from usher.common.base.clock import now_s
from usher.common.protocol.stream_id import ZERO
from usher.common.redis.client import Link
from usher.master.dispatch.stream_cursor import IDLE_READ_S, StreamCursor
from usher.master.dispatch.stream_notifier import StreamNotifier
from usher.master.leader.entries import NO_NEW_ENTRIES, NewEntries
from usher.master.leader.leader_scripts import NotificationMismatch
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
        self.cursor.begin(ZERO, None)
        self.seen: list[bytes] = []

    def look(self, now_s: float = 0.0) -> NewEntries:
        """Take a turn: what was read, or heard, is taken, and more is read."""
        news = self.cursor.next(self.board, self.leader, now_s)
        if news is None:
            return NO_NEW_ENTRIES
        count = self.cursor.count(self.board, news)
        reply, read = self.leader.turn(NOTHING, news, count)
        if isinstance(reply, Exception):
            self.cursor.keep(news, read, count, is_mismatch=isinstance(reply, NotificationMismatch))
            raise reply
        self.cursor.advance(news, read, count, reply.newest)
        if self.cursor.was_told_wrong:
            self.cursor.follow(self.world.stream.position())
        self.seen += [found.id for found in news.found]
        return news

    def look_on(self) -> list[int]:
        """Turns until there is nothing; how many entries each of them took."""
        sizes: list[int] = []
        while (news := self.look()).found or self.cursor._read.found:
            sizes += [len(news.found)] * bool(news.found)
        return sizes


@pytest.fixture
def stage(any_redis_url: str) -> Iterator[Stage]:
    with Stage(any_redis_url) as made:
        yield made


@pytest.fixture
def ear(world: World) -> Ear:
    return Ear(world.link.url, "test:ear", world.keys.stream)


def _asked(ear: Ear, looker: Looker) -> int:
    """How many entries the doorbell may tell of."""
    looker.cursor.arm(looker.board)
    return ear.most


def test_the_bell_is_to_tell_of_a_few_while_they_are_small(world: World, ear: Ear) -> None:
    looker = Looker(world, ear=ear)
    looker.look()
    assert _asked(ear, looker) == 1, "nobody knows"
    for count, most in ((1, 8), (2, 16), (300, 32)):
        looker.cursor._may_have_more = True
        world.send_many([b"T"] * count)
        looker.look_on()
        assert _asked(ear, looker) == most
    looker.cursor._may_have_more = True
    world.add(b"1000000-0", FIELD, "T", "body", b"x" * 2000)
    looker.look_on()
    assert _asked(ear, looker) == 1
    looker.cursor.begin(looker.cursor.last_read, None)
    assert _asked(ear, looker) == 1


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


def test_what_the_bell_heard_is_taken_at_once_and_not_again_when_it_is_read(world: World, ear: Ear) -> None:
    looker = Looker(world, ear=ear)
    looker.look()
    ids = world.send_many([b"T", b"U"])
    ear.listen(ZERO)
    more = world.send_many([b"V"])
    news = looker.look()
    assert (bool(news.digest), news.is_all, looker.seen) == (True, True, ids)
    assert not looker.look().digest
    assert looker.seen == ids + more
    assert world.pending() == {b"master": ids + more}


def test_of_more_than_there_is_room_for_the_first_are_taken_and_the_others_are_read(world: World, ear: Ear) -> None:
    looker = Looker(world, batch=3, ear=ear)
    looker.look()
    ids = world.send_many([b"T"] * 5)
    ear.listen(ZERO)
    news = looker.look()
    assert (bool(news.digest), news.is_all, looker.seen) == (True, False, ids[:3])
    looker.look_on()
    assert looker.seen == ids


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


@pytest.mark.parametrize("is_much", [False, True])
def test_a_bell_that_tells_of_other_entries_again_and_again_is_not_listened_to_for_a_while(
    world: World, ear: Ear, is_much: bool
) -> None:
    """It may be connected to another server. Once, an entry may have been deleted."""
    looker = Looker(world, ear=ear)
    looker.look()
    for _ in range(3):
        assert ear.trouble is None
        [gone] = world.send(b"T")
        ear.listen(ZERO, is_much)
        world.delete(gone)
        if is_much:
            assert looker.look().found == []
        else:
            with pytest.raises(NotificationMismatch):
                looker.look()
    assert ear.trouble == "stream notifier: it told of entries that the leader did not find"


def test_what_was_heard_in_a_former_epoch_is_not_believed_in_the_next(world: World, ear: Ear) -> None:
    looker, ids = Looker(world, ear=ear), world.send_many([b"T"] * 2)
    ear.listen(ZERO)
    ids += world.send_many([b"T"] * 2)
    looker.cursor.begin(ZERO, ids[-1])
    assert not looker.look().digest
    looker.look_on()
    assert looker.seen == ids


def test_that_all_which_repeats_has_come_is_known_when_it_was_taken(world: World, ear: Ear) -> None:
    looker = Looker(world, ear=ear)
    looker.look()
    ids = world.send_many([b"T"] * 2)
    ear.listen(ZERO)
    looker.cursor.repeats_until = world.send_many([b"T"] * 2)[-1]
    heard = looker.look()
    assert (heard.is_all, [found.id for found in heard.found]) == (True, ids)
    assert not looker.cursor.is_past_repeats
    looker.look()
    assert looker.cursor.is_past_repeats


def test_what_the_bell_told_goes_to_its_owner_without_a_look_and_is_run_without_a_fetch(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    m.settle()
    [first] = stage.send(T)
    m.listen()
    m.link.calls.clear()
    m.turn()
    assert m.link.calls[0] == "hand_over"
    a.read_link.calls.clear()
    a.read_link.before = lambda step: a.read_link.calls.append(step)
    assert a.read() == 1
    assert set(a.read_link.calls) == {"PIPELINE"}
    a.work()
    assert stage.history.ids(T) == [first]


def test_of_large_entries_behind_small_ones_few_are_read(world: World) -> None:
    """The newest entry is looked at with each turn, and what a notification does not bring is many, or large."""
    looker, body = Looker(world), b"x" * 1_000_000
    world.send_many([b"T"] * 400)
    for _ in range(3):
        looker.look()
    for _ in range(20):
        world.link.call("XADD", world.keys.stream, "*", FIELD, "T", "body", body)
    looker.look_on()
    assert looker.cursor._page == 8
    assert len(looker.seen) == 420
