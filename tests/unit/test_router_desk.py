"""The desk of the stream router against a dictionary that plays Redis: lost replies, late subscribers, slow ones."""

from __future__ import annotations

import random

import pytest

from usher.common.protocol.stream_id import ZERO, rank
from usher.common.router.router import End, LastIdCheck, Read, RouterDesk, Subscription

_COUNT = 3


class Plot:
    """A desk, the streams that it reads, and what every subscription got."""

    def __init__(self, *, in_turn: bool = False) -> None:
        self.desk = RouterDesk(_COUNT)
        self.desk.in_turn = in_turn
        self.redis: dict[bytes, list[list[object]]] = {}
        self.got: dict[Subscription, list[bytes]] = {}
        self.under_way: list[Read] = []

    def add(self, key: bytes, number: int) -> None:
        self.redis.setdefault(key, []).append([b"%d-0" % number, [b"f", b"v"]])
        self.desk.announced([key])

    def subscribe(self, key: bytes, last: bytes = ZERO, room: int = 1000) -> Subscription:
        one = Subscription(self.desk, key, last, None, room)
        self.got[one] = []
        self.desk.add(one, check=True)
        return one

    def take(self, most: int = 10) -> list[Read]:
        reads = self.desk.take(most)
        self.under_way += reads
        return reads

    def reply(self, read: Read) -> list[LastIdCheck]:
        self.under_way.remove(read)
        above = [entry for entry in self.redis.get(read.of.key, ()) if rank(entry[0]) > rank(read.after)]
        return self.desk.came([read], {read.of.key: above[:_COUNT]} if above else {})

    def empty(self, one: Subscription) -> None:
        self.got[one] += [entry.stream_id for entry in one.take(1000, 0.0)]

    def settle(self) -> None:
        """Everybody takes what came, and replies come, until nothing is left to read."""
        for _ in range(3 * sum(map(len, self.redis.values())) + 10):
            for one in self.got:
                self.empty(one)
            self.take(1000)
            for read in [*self.under_way]:
                self.reply(read)

    def expected(self, key: bytes, after: bytes = ZERO) -> list[bytes]:
        return [entry[0] for entry in self.redis.get(key, ()) if rank(entry[0]) > rank(after)]


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("seed", range(150))
def test_everybody_gets_everything_once_whatever_happens_in_between(seed: int, in_turn: bool) -> None:
    rng = random.Random(seed)
    plot = Plot(in_turn=in_turn)
    began: dict[Subscription, bytes] = {}
    for number in range(1, rng.randrange(20, 90)):
        key, chance = rng.choice([b"a", b"b", b"c"]), rng.random()
        if chance < 0.4:
            plot.add(key, number)
        elif chance < 0.55:
            last = rng.choice([ZERO, *plot.expected(key)])
            began[plot.subscribe(key, last, rng.choice([1, 2, 1000]))] = last
        elif chance < 0.7:
            plot.take(rng.randrange(1, 4))
        elif chance < 0.85 and plot.under_way:
            plot.reply(rng.choice(plot.under_way))
        elif chance < 0.92 and plot.under_way:
            plot.desk.failed([plot.under_way.pop(rng.randrange(len(plot.under_way)))])
        elif plot.got:
            one = rng.choice(list(plot.got))
            if chance < 0.96:
                plot.empty(one)
            else:
                one.close()
    plot.settle()
    for one, last in began.items():
        expected = plot.expected(one.key, last)
        assert plot.got[one] == (expected if one.end is None else expected[: len(plot.got[one])])


@pytest.mark.parametrize("is_queued", [False, True])
def test_what_was_announced_is_read_in_that_order_and_once_however_often_it_was(is_queued: bool) -> None:
    plot = Plot()
    for key in (b"a", b"b", b"c"):
        plot.subscribe(key)
    for read in [] if is_queued else plot.take():
        plot.reply(read)
    for number, key in enumerate(b"b c b a b".split()):
        plot.add(key, number + 1)
    assert plot.desk.queued == (6 if is_queued else 3)
    assert [read.of.key for read in plot.take()] == [b"b", b"c", b"a"]


def test_two_subscriptions_of_a_stream_are_read_one_after_the_other() -> None:
    plot = Plot()
    early, late = plot.subscribe(b"a"), plot.subscribe(b"a", b"2-0")
    for number in (1, 2, 3):
        plot.add(b"a", number)
    for expected in (early, late):
        [read] = plot.take()
        assert read.of is expected
        plot.reply(read)


def test_a_check_says_nothing_about_who_closed_or_moved_after_it_was_asked() -> None:
    plot = Plot()
    moved, closed = plot.subscribe(b"a", b"4-0"), plot.subscribe(b"b", b"4-0")
    checks = [check for read in plot.take() for check in plot.reply(read)]
    assert [one for one, _ in checks] == [moved, closed]
    moved.last = b"5-0"
    closed.close()
    plot.desk.checked(checks, [[b"last-generated-id", b"3-0"]] * 2)
    assert closed.resets == moved.resets == 0 and closed.end is End.CLOSED


def test_in_turn_what_is_to_be_checked_is_checked_once_when_its_turn_comes() -> None:
    plot = Plot(in_turn=True)
    plot.subscribe(b"a", b"5-0")
    plot.reply(*plot.take())
    plot.desk.check_all()
    for expected in (True, False):
        [read] = plot.take()
        assert read.check is expected
        assert bool(plot.reply(read)) is expected


def test_a_sweep_comes_to_every_stream_and_what_is_announced_behind_it_counts_as_announced() -> None:
    plot = Plot()
    for number in range(5):
        plot.subscribe(b"%d" % number)
    for read in plot.take():
        plot.reply(read)
    plot.desk.check_all()
    for _ in range(3):
        plot.desk.sweep(2)
    plot.add(b"3", 1)
    first, *reads = plot.take()
    assert (first.of.key, first.swept, first.check) == (b"3", False, True)
    assert {read.of.key for read in reads} == {b"0", b"1", b"2", b"4"} and all(read.swept for read in reads)
    plot.add(b"0", 2)
    assert [read.of.key for read in reads if plot.desk.heard_of(read)] == [b"0"]
