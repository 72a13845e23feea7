"""The book of the stream router against a dictionary that plays Redis: lost replies, late subscribers, slow ones."""

from __future__ import annotations

import random

import pytest

from usher.common.protocol.message import EntryView
from usher.common.protocol.stream_id import ZERO, rank
from usher.common.router.schedule import LastIdCheck, Read, ReadPosition, ReadSchedule

_COUNT = 3


def entry(number: int) -> EntryView:
    return EntryView(b"%d-0" % number, [b"f", b"v"])


class Plot:
    """A book, the streams that it reads, and what every place got."""

    def __init__(self, *, in_turn: bool = False) -> None:
        self.book = ReadSchedule()
        if in_turn:
            self.book.in_turn = True
        self.redis: dict[bytes, list[EntryView]] = {}
        self.got: dict[ReadPosition, list[bytes]] = {}
        self.closed: set[ReadPosition] = set()
        self.under_way: list[Read] = []

    def add(self, key: bytes, number: int, announce: bool = True) -> None:
        self.redis.setdefault(key, []).append(entry(number))
        if announce:
            self.book.announced([key])

    def subscribe(self, key: bytes, last: bytes | None = ZERO) -> ReadPosition:
        place = ReadPosition(self.book.stream(key), last)
        self.got[place] = []
        self.book.add(place)
        return place

    def take(self, most: int = 10) -> list[Read]:
        reads = self.book.take(most)
        self.under_way += reads
        return reads

    def reply(self, read: Read, room: int = 1000) -> LastIdCheck | None:
        """The reply comes, and every place has room for so many entries; one that had less is held."""
        self.under_way.remove(read)
        entries = [one for one in self.redis.get(read.stream.key, ()) if rank(one.stream_id) > rank(read.after)][
            :_COUNT
        ]
        for place, share in self.book.shares(read, entries) if entries else ():
            taken = share[:room]
            place.held = len(share) > room
            self.got[place] += [one.stream_id for one in taken]
            if taken:
                place.last = taken[-1].stream_id
        self.book.finish(read, more=len(entries) >= _COUNT)
        return None if entries else self.book.to_check(read)

    def settle(self) -> None:
        """Everybody has room, and replies come, until nothing is left to read."""
        for place in self.got:
            if place not in self.closed:
                self.book.resume(place)
        turns = 3 * sum(map(len, self.redis.values())) + 10
        for _ in range(turns):
            for read in [*self.under_way, *self.take(1000)]:
                if read in self.under_way:
                    self.reply(read)

    def expected(self, key: bytes, after: bytes = ZERO) -> list[bytes]:
        return [one.stream_id for one in self.redis.get(key, ()) if rank(one.stream_id) > rank(after)]


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("seed", range(150))
def test_everybody_gets_everything_once_whatever_happens_in_between(seed: int, in_turn: bool) -> None:
    rng = random.Random(seed)
    plot = Plot(in_turn=in_turn)
    keys = [b"a", b"b", b"c"]
    began: dict[ReadPosition, tuple[bytes, bytes]] = {}
    for number in range(1, rng.randrange(20, 90)):
        key = rng.choice(keys)
        chance = rng.random()
        if chance < 0.4:
            plot.add(key, number)
        elif chance < 0.55:
            known = plot.expected(key) or [ZERO]
            last = rng.choice([ZERO, *known])
            began[plot.subscribe(key, last)] = (key, last)
        elif chance < 0.7:
            plot.take(rng.randrange(1, 4))
        elif chance < 0.85 and plot.under_way:
            plot.reply(rng.choice(plot.under_way), room=rng.choice([1, 2, 1000]))
        elif chance < 0.92 and plot.under_way:
            plot.book.failed(plot.under_way.pop(rng.randrange(len(plot.under_way))))
        elif chance < 0.96 and plot.got:
            plot.book.resume(
                rng.choice(
                    [place for place in plot.got if place not in plot.closed]
                    or [ReadPosition(plot.book.stream(b"x"), ZERO)]
                )
            )
        elif plot.got:
            place = rng.choice(list(plot.got))
            if place not in plot.closed:
                plot.closed.add(place)
                plot.book.remove(place)
    plot.settle()
    for place, (key, last) in began.items():
        expected = plot.expected(key, last)
        assert plot.got[place] == (expected[: len(plot.got[place])] if place in plot.closed else expected)


@pytest.mark.parametrize("is_queued", [False, True])
def test_what_was_announced_is_read_in_that_order_and_once_however_often_it_was(is_queued: bool) -> None:
    plot = Plot()
    for key in (b"a", b"b", b"c"):
        plot.subscribe(key)
    for read in [] if is_queued else plot.take():
        plot.reply(read)
    for number, key in enumerate(b"b c b a b".split()):
        plot.add(key, number + 1)
    assert plot.book.queued == (6 if is_queued else 3)
    assert [read.stream.key for read in plot.take()] == [b"b", b"c", b"a"]


def test_a_stream_that_nobody_listens_to_any_more_is_forgotten_also_while_it_is_queued_or_read() -> None:
    plot = Plot(in_turn=True)
    for when in ("queued", "read", "idle"):
        place = plot.subscribe(b"a")
        reads = plot.take() if when != "queued" else []
        if when == "idle":
            plot.reply(reads[0])
        plot.book.remove(place)
        if when == "read":
            plot.reply(reads[0])
        assert plot.take() == []
        assert not plot.book.streams, when


def test_a_check_says_nothing_about_places_that_came_or_moved_after_it_was_asked() -> None:
    plot = Plot()
    moved = plot.subscribe(b"a", b"4-0")
    [read] = plot.take()
    check = plot.reply(read)
    assert check is not None
    came = plot.subscribe(b"a", b"6-0")
    moved.last = b"5-0"
    assert plot.book.checked(check, b"3-0") == []
    assert came.resets == moved.resets == 0


def test_a_place_above_what_was_found_is_checked_once_there_is_nothing_more_to_find() -> None:
    plot = Plot()
    plot.subscribe(b"a", b"9-0")
    low = plot.subscribe(b"a")
    [read] = plot.take()
    assert plot.book.to_check(read, b"3-0", more=True) is None
    low.last = b"3-0"
    plot.book.finish(read, more=True)
    [read] = plot.take()
    assert read.check
    check = plot.book.to_check(read, b"4-0")
    assert check is not None
    assert [last for _, last in check.places] == [b"9-0"]


def test_in_turn_what_is_to_be_checked_is_checked_once_when_its_turn_comes() -> None:
    plot = Plot(in_turn=True)
    plot.subscribe(b"a", b"5-0")
    plot.reply(*plot.take())
    plot.book.check_all()
    for expected in (True, False):
        [read] = plot.take()
        assert read.check is expected
        plot.reply(read)


def test_a_sweep_comes_to_every_stream() -> None:
    plot = Plot()
    for number in range(5):
        plot.subscribe(b"%d" % number)
    for read in plot.take():
        plot.reply(read)
    plot.book.check_all()
    for _ in range(3):
        plot.book.sweep(2)
    reads = plot.take()
    assert {read.stream.key for read in reads} == {b"%d" % number for number in range(5)}
    assert all(read.swept and read.check for read in reads)


def test_what_is_announced_behind_the_sweep_counts_as_announced() -> None:
    plot = Plot()
    plot.subscribe(b"a")
    for read in plot.take():
        plot.reply(read)
    plot.book.sweep(1)
    plot.add(b"a", 1)
    [read] = plot.take()
    assert not read.swept
    plot.reply(read)
    plot.book.sweep(1)
    [read] = plot.take()
    assert read.swept and not plot.book.heard_of(read)
    plot.add(b"a", 2)
    assert plot.book.heard_of(read)
