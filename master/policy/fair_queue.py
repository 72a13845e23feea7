"""Whose turn it is among the sources that are gathered. Pure.

Every source that may have something new has a turn, one after the other, and in a turn as many entries as all others: a
flood in one waits in its own stream. A source has news when Redis said that it changed, or when its last turn did not
bring all; it is only *looked at* when nobody said anything (it was just found, its shard was just taken over, or it is
time for a sweep).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from usher.common.protocol.sources import shard_of

#: Most sources of one call, and most entries of one source in a call, while few have news.
_MOST_SOURCES, _LARGEST_QUANTUM = 64, 500
#: Fewest: of less, a call would cost more than it moves.
_SMALLEST_QUANTUM = 8
#: Sources that are only looked at have this part of a call, at least, so that a flood does not keep them from being
#: seen.
_LOOKS = 8
#: Troubles that are remembered.
_MOST_TROUBLES = 1000


class TurnOutcome(Enum):
    """What became of a source's turn (lua/sources/gather.lua)."""

    OVER = "OVER"
    MORE = "MORE"
    FULL = "FULL"
    NOT_MINE = "NOT_MINE"
    GONE = "GONE"
    NOT_A_STREAM = "NOT_A_STREAM"
    BEFORE = "BEFORE"
    AHEAD = "AHEAD"
    REFUSED = "REFUSED"


#: What a person must look at.
_TROUBLES = frozenset({TurnOutcome.NOT_A_STREAM, TurnOutcome.BEFORE, TurnOutcome.AHEAD, TurnOutcome.REFUSED})
#: What is no source, unless it is listed.
_NO_SOURCE = frozenset({TurnOutcome.GONE, TurnOutcome.NOT_A_STREAM})


class TurnResult(NamedTuple):
    """The answer for one source: how many entries were moved, and what Redis had to say."""

    outcome: TurnOutcome
    moved: int
    words: str


def is_trouble(source: bytes, told: TurnResult, listed: frozenset[bytes]) -> bool:
    """Whether a person must look at it. A key that a pattern meets, and that is no stream, is just no source."""
    return told.outcome in _TROUBLES and (told.outcome is not TurnOutcome.NOT_A_STREAM or source in listed)


@dataclass(frozen=True)
class Turn:
    """One call: these sources, and at most ``quantum`` entries of each."""

    sources: tuple[bytes, ...]
    quantum: int


class _Queue:
    """First in, first out, and nobody twice."""

    def __init__(self) -> None:
        self._order: deque[bytes] = deque()
        self._there: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, source: bytes) -> bool:
        return source in self._there

    def add(self, source: bytes) -> None:
        if source not in self._there:
            self._there.add(source)
            self._order.append(source)

    def add_first(self, sources: Sequence[bytes]) -> None:
        """In front of all that wait, in this order."""
        fresh = [source for source in sources if source not in self._there]
        self._there.update(fresh)
        self._order.extendleft(reversed(fresh))

    def pop(self, most: int) -> list[bytes]:
        popped = [self._order.popleft() for _ in range(min(most, len(self._order)))]
        self._there.difference_update(popped)
        return popped


class Rounds:
    """All sources that are known, and those of our shards that wait for a turn."""

    def __init__(self, batch: int) -> None:
        """``batch``: about so many entries are moved by one call."""
        self._batch = batch
        self._shards: frozenset[int] = frozenset()
        self._known: dict[bytes, int] = {}
        self._doubted: set[bytes] = set()  # see ``doubt``
        self._news = _Queue()
        self._looks = _Queue()
        self._swept: set[bytes] = set()  # those in ``_looks`` that nobody had a reason to look at
        self._grown: set[bytes] = set()  # see ``grown``; only what is known
        self.troubles: dict[bytes, TurnResult] = {}

    @property
    def known(self) -> int:
        """Number of sources."""
        return len(self._known)

    @property
    def mine(self) -> list[bytes]:
        """The sources of our shards."""
        return [source for source, shard in self._known.items() if shard in self._shards]

    def holds(self, source: bytes) -> bool:
        """Whether it is a source of our shards."""
        return self._known.get(source) in self._shards

    def grown(self) -> list[bytes]:
        """Those of our shards from which something was moved since this was asked last, or may have been: also what was
        just found or taken over."""
        grown, self._grown = self._grown, set()
        return list(filter(self.holds, grown))

    def found(self, sources: Iterable[bytes]) -> int:
        """These are there. Returns how many of them were not known."""
        before = len(self._known)
        for source in sources:
            self._doubted.discard(source)
            if source not in self._known:
                self._known[source] = shard_of(source)
                self._grown.add(source)
                self._look_at(source)
        return len(self._known) - before

    def changed(self, sources: Iterable[bytes]) -> None:
        """Redis says that these have changed."""
        for source in sources:
            self._doubted.discard(source)
            if self._known.setdefault(source, shard_of(source)) in self._shards:
                self._swept.discard(source)
                self._news.add(source)

    def doubt(self, listed: frozenset[bytes]) -> None:
        """All that is there will now be ``found``. Ours have turns, which tell what is gone; of other shards nobody
        would ever tell us."""
        self._doubted = {
            source for source, shard in self._known.items() if shard not in self._shards and source not in listed
        }

    def forget_doubted(self) -> None:
        """It was: what was neither found nor changed since is gone."""
        for source in self._doubted:
            if self._known[source] not in self._shards:
                self._forget(source)
        self._doubted.clear()

    def hold(self, shards: frozenset[int]) -> bool:
        """These shards are ours now; what is in new ones is looked at. Whether there are any."""
        taken, self._shards = shards - self._shards, shards
        self.troubles = {source: told for source, told in self.troubles.items() if shard_of(source) in shards}
        if taken:
            for source, shard in self._known.items():
                if shard in taken:
                    self._grown.add(source)
                    self._swept.discard(source)
                    self._looks.add(source)
        return bool(taken)

    def look_at_all(self) -> None:
        """Look at everything once: something was said that we did not hear."""
        self._swept.clear()
        self._look_at_known()

    def sweep(self) -> None:
        """The same without any reason: what it finds was not said."""
        self._swept.update(source for source in self.mine if source not in self._looks and source not in self._news)
        self._look_at_known()

    def take(self) -> Turn | None:
        """The next call; None when nothing waits."""
        while self._news or self._looks:
            waiting = len(self._news) + len(self._looks)
            looks = self._looks.pop(max(_MOST_SOURCES - len(self._news), _LOOKS))
            news = self._news.pop(_MOST_SOURCES - len(looks))
            popped = dict.fromkeys((*news, *looks))
            sources = [source for source in popped if self._known.get(source) in self._shards]
            self._swept.difference_update(popped.keys() - sources)  # another master's by now, or gone
            if sources:
                quantum = max(_SMALLEST_QUANTUM, min(_LARGEST_QUANTUM, self._batch // waiting))
                return Turn(tuple(sources), quantum)
        return None

    def answered(self, turn: Turn, told: Sequence[TurnResult], listed: frozenset[bytes] = frozenset()) -> list[bytes]:
        """What came of it. Who did not get to its turn is the first in the next one; what is no stream (any more) is
        forgotten, unless it is listed. Returns those that had news, as a sweep found, of which nobody has said anything
        (yet)."""
        unserved = []
        unsaid = [source for source, one in zip(turn.sources, told, strict=True) if one.moved and source in self._swept]
        self._swept.difference_update(turn.sources)
        for source, one in zip(turn.sources, told, strict=True):
            if is_trouble(source, one, listed):
                if len(self.troubles) < _MOST_TROUBLES or source in self.troubles:
                    self.troubles[source] = one
            else:
                self.troubles.pop(source, None)
            if one.moved and source in self._known:
                self._grown.add(source)
            if one.outcome is TurnOutcome.MORE:
                self._news.add(source)
            elif one.outcome is TurnOutcome.FULL:
                unserved.append(source)
            elif one.outcome is TurnOutcome.NOT_MINE:
                self._shards -= {shard_of(source)}  # should we get it again, we look at what it has
            elif one.outcome in _NO_SOURCE and source not in listed and source not in self._news:
                self._forget(source)
                self._doubted.discard(source)
        self._news.add_first(unserved)
        return unsaid

    def again(self, turn: Turn) -> None:
        """Nobody knows what came of it: all of it is looked at again, first of all."""
        self._swept.difference_update(turn.sources)
        self._grown.update(
            source for source in turn.sources if source in self._known
        )  # the next call moves nothing of what this one has moved
        self._news.add_first(turn.sources)

    def _forget(self, source: bytes) -> None:
        self._known.pop(source, None)
        self._grown.discard(source)

    def _look_at_known(self) -> None:
        for source in self._known:
            self._look_at(source)

    def _look_at(self, source: bytes) -> None:
        if self._known[source] in self._shards:
            self._looks.add(source)
