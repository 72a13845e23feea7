"""Redis >= 7 tells how far a group is behind (XINFO GROUPS: ``entries-read`` and ``lag``). The group's position is set
here, not read up to; it must tell the same as a group that was read with XREADGROUP, as far as anything is told."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.integration.conftest import SYSTEM_SERVER
from tests.integration.factories import World, plan
from usher.common.protocol.stream_id import rank
from usher.common.redis.embedded import SERVER_VARIABLE
from usher.common.redis.replies import pairs
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.leader.peeked import NewEntries
from usher.master.policy.board.plans import NOTHING, HandOverPlan

_OTHER = "read"  # the group that is read with XREADGROUP
#: On the server that people get, or the one that USHER_REDIS_SERVER names: the oldest, on which other tests run, tells
#: no lag.
_FIRST = "embedded" if os.environ.get(SERVER_VARIABLE) else "shipped"
pytestmark = pytest.mark.parametrize("any_redis_url", [_FIRST, *(["system"] if SYSTEM_SERVER else [])], indirect=True)


class Told(NamedTuple):
    """What XINFO GROUPS tells of a group; None: it is not known."""

    read: int | None
    lag: int | None


_UNKNOWN = Told(None, None)


class Twins:
    """The group of the leader and one that reads the same entries with XREADGROUP."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.leader: LeaderScripts = world.elect()
        [group] = [pairs(one) for one in world.link.call("XINFO", "GROUPS", world.keys.stream)]
        if b"lag" not in group:
            pytest.skip("this Redis does not tell the lag of a group")
        self._call("XGROUP", "CREATE", world.keys.stream, _OTHER, "0")

    def _call(self, *command: object) -> object:
        return self.world.link.call(*command)  # type: ignore[arg-type]

    def begin_at(self, position: str) -> None:
        """Both groups are made anew, here."""
        for group in (self.world.keys.group, _OTHER):
            self._call("XGROUP", "DESTROY", self.world.keys.stream, group)
            self._call("XGROUP", "CREATE", self.world.keys.stream, group, position)

    def send(self, count: int) -> list[bytes]:
        return self.world.send_many([b"T"] * count)

    def take(
        self,
        count: int,
        make: Callable[[NewEntries], HandOverPlan] = lambda news: NOTHING,
        since: Callable[[], object] = lambda: None,
    ) -> int:
        """Up to ``count`` entries, by both groups; ``since`` happens between the leader's look and its hand-over."""
        news = self.leader.peek(count)
        since()
        if news.found:
            self.leader.hand_over(make(news), news)
            self._read(len(news.found), news.found[-1].id)
        return len(news.found)

    def _read(self, count: int, last: bytes) -> None:
        """One by one, not beyond ``last``: entries may have gone meanwhile."""
        for _ in range(count):
            left = self.world.link.call("XRANGE", self.world.keys.stream, b"(" + self.position(), last, "COUNT", 1)
            if left:
                self._call("XREADGROUP", "GROUP", _OTHER, "c", "COUNT", 1, "STREAMS", self.world.keys.stream, ">")

    def _groups(self) -> dict[str, dict[bytes, bytes]]:
        groups = [pairs(one) for one in self.world.link.call("XINFO", "GROUPS", self.world.keys.stream)]
        return {group[b"name"].decode(): group for group in groups}

    def position(self) -> bytes:
        return self._groups()[_OTHER][b"last-delivered-id"]

    def told(self) -> tuple[Told, Told]:
        """Of ours, and of the one that was read."""
        ours, theirs = (self._groups()[name] for name in (self.world.keys.group, _OTHER))
        return tuple(Told(*(group[name] for name in (b"entries-read", b"lag"))) for group in (ours, theirs))  # type: ignore[return-value,arg-type]

    def same(self) -> Told:
        """What both tell."""
        ours, theirs = self.told()
        assert ours == theirs
        return ours


@pytest.fixture
def twins(world: World) -> Twins:
    return Twins(world)


@pytest.fixture
def caught_up(twins: Twins) -> Twins:
    """Both groups were at the end of the stream once."""
    twins.send(3)
    twins.take(10)
    assert twins.same() == (3, 0)
    return twins


# ---- the same is told ----


def test_before_anything_was_taken_the_same_is_told(twins: Twins) -> None:
    assert twins.same() == (None, 0)
    twins.send(6)
    assert twins.same() == (None, 6)


@pytest.mark.parametrize("count", [1, 2, 5, 100])
def test_every_hand_over_counts_what_it_took(caught_up: Twins, count: int) -> None:
    for number in range(1, 4):
        caught_up.send(7)
        while caught_up.take(count):
            ours = caught_up.same()
            assert sum(ours) == 3 + 7 * number  # type: ignore[arg-type]
        assert caught_up.same() == (3 + 7 * number, 0)


@pytest.mark.parametrize("state", ["OK", "LOST"])
@pytest.mark.parametrize("planned", [0, 1, 4, 5])
def test_it_does_not_matter_who_gets_them(caught_up: Twins, planned: int, state: str) -> None:
    owner = caught_up.world.join("a")
    caught_up.send(9)
    if state == "LOST":
        caught_up.world.end_lease(owner)
    caught_up.take(5, lambda news: plan(owner, {b"T": [found.id for found in news.found[:planned]]} if planned else {}))
    assert caught_up.same() == (8, 4)


def test_old_entries_in_the_same_call_do_not_count(caught_up: Twins) -> None:
    owner, old = caught_up.world.join("a"), [b"1-1", b"2-1", b"3-1"]
    caught_up.send(9)
    caught_up.take(5, lambda news: plan(owner, {b"T": [*old, *(found.id for found in news.found[:3])]}))
    assert caught_up.same() == (8, 4)


def test_thousands_count(caught_up: Twins) -> None:
    owner = caught_up.world.join("a")
    caught_up.send(9500)
    caught_up.take(9001, lambda news: plan(owner, {b"T": [found.id for found in news.found[:4500]]}))
    assert caught_up.same() == (9004, 499)


def test_entries_that_were_deleted_below_the_position_do_not_matter(caught_up: Twins) -> None:
    caught_up.world.delete(b"1-1", b"2-1")
    assert caught_up.same() == (3, 0)
    caught_up.send(5)
    caught_up.take(2)
    assert caught_up.same() == (5, 3)
    caught_up.world.delete(b"4-1")
    caught_up.take(2)
    assert caught_up.same() == (7, 1)


@pytest.mark.parametrize("deleted", [1, 2, 3])
def test_entries_that_were_deleted_above_the_position_make_it_unknown_until_the_end(
    caught_up: Twins, deleted: int
) -> None:
    ids = caught_up.send(6)
    caught_up.take(1)
    caught_up.world.delete(ids[1 + deleted])
    assert caught_up.same() == (4, None)
    caught_up.take(3)
    assert caught_up.same() == _UNKNOWN
    caught_up.take(3)
    assert caught_up.same() == (9, 0)
    caught_up.send(2)
    caught_up.take(1)
    assert caught_up.same() == (10, 1)


@pytest.mark.parametrize("deleted", [0, 1, 2])
def test_entries_that_were_deleted_between_the_look_and_the_hand_over_make_it_unknown_until_the_end(
    caught_up: Twins, deleted: int
) -> None:
    ids = caught_up.send(5)
    caught_up.take(3, since=lambda: caught_up.world.delete(ids[deleted]))
    assert caught_up.told()[0] == _UNKNOWN
    caught_up.take(3)
    assert caught_up.told()[0] == (8, 0), "theirs is wrong if it was the first: see below"


def test_when_the_last_entry_was_deleted_between_the_look_and_the_hand_over_the_group_is_at_the_end(
    caught_up: Twins,
) -> None:
    """A group that is read never comes to where the last entry was; it tells the same lag, for that is none."""
    ids = caught_up.send(3)
    caught_up.take(3, since=lambda: caught_up.world.delete(ids[2]))
    assert caught_up.told()[0] == (6, 0)


@pytest.mark.parametrize("start", ["3-1", "5-1", "6-1", "$"])
def test_a_group_that_begins_in_the_middle_or_at_the_end_of_the_stream(twins: Twins, start: str) -> None:
    """Not at 0 or at the first entry: see below."""
    twins.send(6)
    twins.begin_at(start)
    twins.same()
    twins.take(1)
    twins.same()
    twins.send(3)
    while twins.take(2):
        twins.same()
    assert twins.same() == (9, 0)
    twins.send(3)
    twins.take(2)
    assert twins.same() == (11, 1)


@pytest.mark.parametrize("left", [4, 6])
def test_after_trimming_the_same_is_told(caught_up: Twins, left: int) -> None:
    caught_up.send(5)
    caught_up.take(2)
    caught_up.world.link.call("XTRIM", caught_up.world.keys.stream, "MAXLEN", left)
    caught_up.same()
    caught_up.take(2)
    caught_up.same()
    caught_up.send(2)
    caught_up.take(1)
    caught_up.same()
    caught_up.take(10)
    assert caught_up.same() == (10, 0)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_entries_that_were_trimmed_unread_do_not_count_any_more_when_the_group_is_at_the_end(
    caught_up: Twins, left: int
) -> None:
    """Redis 7.0 counts them for good in a group that is read, Valkey 9 and Redis 8 do not."""
    caught_up.send(5)
    caught_up.take(2)
    caught_up.world.link.call("XTRIM", caught_up.world.keys.stream, "MAXLEN", left)
    while caught_up.take(1):
        pass
    caught_up.send(2)
    caught_up.take(10)
    assert caught_up.told()[0] == (10, 0)
    caught_up.send(3)
    caught_up.take(2)
    assert caught_up.told()[0] == (12, 1)


@pytest.mark.parametrize(
    "gone",
    [("XTRIM", 3), ("XTRIM", 2), ("XTRIM", 0), ("XDEL", 1), ("XDEL", 2), ("XDEL", 3)],
    ids=["2 trimmed", "3 trimmed", "all trimmed", "first deleted", "second deleted", "last deleted"],
)
@pytest.mark.parametrize("older", ["kept", "trimmed"])
def test_what_goes_between_the_look_and_the_hand_over_never_makes_the_lag_too_low(
    caught_up: Twins, older: str, gone: tuple[str, int]
) -> None:
    """Redis 8 does not count what was trimmed unread, so it must not be taken off its lag either."""
    call, stream = caught_up.world.link.call, caught_up.world.keys.stream
    if older == "trimmed":
        call("XTRIM", stream, "MAXLEN", 0)
    ids = caught_up.send(5)
    what, number = gone
    caught_up.take(
        3,
        since=lambda: (
            call("XTRIM", stream, "MAXLEN", number) if what == "XTRIM" else call("XDEL", stream, ids[number - 1])
        ),
    )
    left = sum(rank(entry[0]) > rank(ids[2]) for entry in call("XRANGE", stream, "-", "+"))
    unread = 5 - number if what == "XTRIM" else 0
    for there in range(left, -1, -1):
        lag = caught_up.told()[0].lag
        assert lag is None or there <= lag <= there + unread
        caught_up.take(1)
    caught_up.send(1)
    caught_up.take(1)
    assert caught_up.told()[0] == (9, 0)


def test_while_the_group_keeps_up_no_body_is_copied_for_the_lag(caught_up: Twins) -> None:
    """XINFO STREAM tells the first and the last entry, however large they are."""
    caught_up.world.link.call("CONFIG", "RESETSTAT")
    for _ in range(5):
        caught_up.send(2)
        caught_up.take(10)
    told = caught_up.world.link.call("INFO", "commandstats")
    assert b"cmdstat_xgroup|setid" in told
    assert b"cmdstat_xinfo|stream" not in told
    assert caught_up.same() == (13, 0)


def test_after_everything_was_deleted_or_trimmed_the_same_is_told(caught_up: Twins) -> None:
    caught_up.world.link.call("XTRIM", caught_up.world.keys.stream, "MAXLEN", 0)
    assert caught_up.same() == (3, 0)
    caught_up.send(3)
    caught_up.take(2)
    assert caught_up.same() == (5, 1)


# ---- where they differ ----


@pytest.mark.parametrize("start", ["0", "0-5"])
def test_a_group_that_begins_with_a_backlog_counts_from_its_first_hand_over_on(twins: Twins, start: str) -> None:
    """Its ``entries-read`` is not known before the first entry, but its lag is."""
    twins.send(6)
    twins.begin_at(start)
    assert twins.same() == (None, 6)
    for read in (2, 4, 6):
        twins.take(2)
        assert twins.same() == (read, 6 - read)


def test_a_group_that_begins_at_the_first_entry_counts_where_redis_does_not(twins: Twins) -> None:
    """Redis knows the lag of such a group, and forgets it with the next entry that is read."""
    twins.send(6)
    twins.begin_at("1-1")
    assert twins.same() == (None, 5)
    twins.take(2)
    assert twins.told()[0] == (3, 3)
    twins.take(10)
    assert twins.same() == (6, 0)


def test_when_the_entry_at_the_position_was_deleted_ours_is_not_known_until_the_end_while_redis_counts_on(
    caught_up: Twins,
) -> None:
    """Redis does not tell the lag while a deleted entry is at or above the position, and keeps its count; we take it
    for lost."""
    caught_up.world.delete(b"3-1")
    caught_up.send(5)
    assert caught_up.same() == (3, None)
    caught_up.take(2)
    ours, theirs = caught_up.told()
    assert ours == _UNKNOWN
    assert theirs in [(5, 3), _UNKNOWN], "which is what Valkey tells"
    caught_up.take(5)
    assert caught_up.same() == (8, 0)


@pytest.mark.parametrize("behind", [0, 3])
def test_when_the_next_entry_was_deleted_a_group_that_is_read_has_a_lag_of_one_for_ever_and_ours_not(
    caught_up: Twins, behind: int
) -> None:
    """REDIS 7.0 counts what it delivers, and there is no deleted entry above that."""
    gone = caught_up.send(1 + behind)[0]
    caught_up.world.delete(gone)
    caught_up.take(1)
    assert caught_up.told()[0] in (_UNKNOWN, (3, None))
    caught_up.send(2)
    caught_up.take(10)
    ours, theirs = caught_up.told()
    assert ours == (6 + behind, 0)
    assert theirs in [(5 + behind, 1), ours], "wrong, or a Redis that is right"


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_what_is_told_is_right_or_what_redis_tells_of_its_own(twins: Twins, seed: int) -> None:
    """Entries are added, taken, deleted anywhere, and trimmed below the position. Redis 7.0 is wrong of both once all
    deleted ones that nobody had read are below the first entry; and of its own where ours is not, as above."""
    rng, keys = random.Random(seed), twins.world.keys
    there: list[bytes] = []
    known = 0
    for _ in range(100):
        what = rng.choice(["send", "send", "take", "take", "delete", "trim", "all"])
        if what == "send":
            there += twins.send(rng.randint(1, 6))
        elif what in ("take", "all"):
            twins.take(rng.randint(1, 5) if what == "take" else 1000)
        elif what == "delete" and there:
            twins.world.delete(there.pop(rng.randrange(len(there))))
        elif what == "trim":
            twins.world.link.call("XTRIM", keys.stream, "MINID", twins.position())
            there = [entry_id for entry_id in there if rank(entry_id) >= rank(twins.position())]
        (ours, theirs), left = twins.told(), sum(rank(entry_id) > rank(twins.position()) for entry_id in there)
        assert ours.lag in (None, left, theirs.lag)
        assert ours == theirs or None in (ours.read, theirs.read) or theirs.lag != left
        known += ours.lag is not None
    assert known > 20, "as a rule it is known"
