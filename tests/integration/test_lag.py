"""Redis >= 7 tells how far a group is behind (XINFO GROUPS: ``entries-read`` and ``lag``). The leader's group tells the
same as one that somebody reads: what a hand-over takes, the group has read, neither less nor more."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.integration.conftest import SYSTEM_SERVER
from tests.integration.factories import World, hand_over, plan, read
from usher.common.redis.embedded import SERVER_VARIABLE
from usher.common.redis.replies import pairs
from usher.master.leader.entries import NewEntries
from usher.master.leader.leader_scripts import LeaderScripts
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

    def send(self, count: int) -> list[bytes]:
        return self.world.send_many([b"T"] * count)

    def take(
        self,
        count: int,
        make: Callable[[NewEntries], HandOverPlan] = lambda news: NOTHING,
        since: Callable[[], object] = lambda: None,
    ) -> int:
        """Up to ``count`` entries, by both groups; ``since`` happens between the leader's look and its hand-over."""
        news = read(self.leader, count)
        since()
        if news.found:
            hand_over(self.leader, make(news), news)
            self._read(len(news.found), news.found[-1][0])
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
    caught_up.take(5, lambda news: plan(owner, {b"T": [found[0] for found in news.found[:planned]]} if planned else {}))
    assert caught_up.same() == (8, 4)


def test_old_entries_in_the_same_call_do_not_count(caught_up: Twins) -> None:
    owner, old = caught_up.world.join("a"), [b"1-1", b"2-1", b"3-1"]
    caught_up.send(9)
    caught_up.take(5, lambda news: plan(owner, {b"T": [*old, *(found[0] for found in news.found[:3])]}))
    assert caught_up.same() == (8, 4)


@pytest.mark.slow
def test_thousands_count(caught_up: Twins) -> None:
    owner = caught_up.world.join("a")
    caught_up.send(9500)
    caught_up.take(9001, lambda news: plan(owner, {b"T": [found[0] for found in news.found[:4500]]}))
    assert caught_up.same() == (9004, 499)
