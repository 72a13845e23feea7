"""Fair queue: decides which of the gathered sources have the next turn. Pure.

Every source that may have new entries has a turn, one after the other, and in a turn as many entries as all others: a
flood in one waits in its own stream. A source has news when Redis announced a change, or when its last turn did not
bring everything; it is only *looked at* when nothing was announced (it was just found, its shard was just taken over,
or it is time for a sweep).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from usher.common.protocol.sources import shard_of

#: Most sources of one call, and most entries of one source in a call, while few have news.
_MOST_SOURCES, _LARGEST_QUANTUM = 64, 500
#: Fewest entries of one source in a call: with fewer, a call would cost more than it moves.
_SMALLEST_QUANTUM = 8
#: Sources that are only looked at get at least this many places in a call, so that a flood does not keep them from
#: being seen.
_LOOKS = 8
#: Most troubles that are remembered.
_MOST_TROUBLES = 1000


class TurnOutcome(Enum):
    """Outcome of a source's turn (lua/sources/gather.lua)."""

    OVER = "OVER"
    MORE = "MORE"
    FULL = "FULL"
    GONE = "GONE"
    NOT_A_STREAM = "NOT_A_STREAM"
    BEFORE = "BEFORE"
    AHEAD = "AHEAD"
    REFUSED = "REFUSED"


#: Outcomes that a person must look at.
_TROUBLES = frozenset({TurnOutcome.NOT_A_STREAM, TurnOutcome.BEFORE, TurnOutcome.AHEAD, TurnOutcome.REFUSED})
#: Outcomes of a key that is not a source, unless it is listed.
_NO_SOURCE = frozenset({TurnOutcome.GONE, TurnOutcome.NOT_A_STREAM})


class TurnResult(NamedTuple):
    """The answer for one source: how many entries were moved, and what Redis had to say."""

    outcome: TurnOutcome
    moved: int
    words: str


@dataclass(frozen=True)
class Turn:
    """A call: these sources, and at most ``quantum`` entries of each. ``swept``: those in it without a reason."""

    sources: tuple[bytes, ...]
    quantum: int
    swept: frozenset[bytes] = frozenset()


#: Sources, first in, first out, none of them twice; True: without a reason.
_Queue = OrderedDict[bytes, bool]


def _pop(queue: _Queue, most: int) -> dict[bytes, bool]:
    return dict(queue.popitem(last=False) for _ in range(min(most, len(queue))))


class Rounds:
    """All known sources, and those of our shards that wait for a turn."""

    def __init__(self, batch: int, listed: frozenset[bytes] = frozenset()) -> None:
        """Make rounds. ``batch``: about this many entries are moved by one call. ``listed``: names that are sources
        whatever is there."""
        self._batch = batch
        self._listed = listed
        self._shards: frozenset[int] = frozenset()
        self._known: dict[bytes, int] = {}
        self._news = _Queue()
        self._looks = _Queue()
        self.troubles: dict[bytes, TurnResult] = {}
        self.found(listed)

    @property
    def known(self) -> int:
        return len(self._known)

    @property
    def mine(self) -> list[bytes]:
        return [source for source, shard in list(self._known.items()) if shard in self._shards]

    def holds(self, source: bytes) -> bool:
        return self._known.get(source) in self._shards

    def found(self, sources: Iterable[bytes]) -> int:
        """Add sources that exist. Return how many of them were not known."""
        before = len(self._known)
        for source in sources:
            if source not in self._known:
                self._known[source] = shard_of(source)
                self._look_at(source)
        return len(self._known) - before

    def changed(self, sources: Iterable[bytes]) -> None:
        for source in sources:
            if self._known.setdefault(source, shard_of(source)) in self._shards:
                self._news[source] = False

    def others(self) -> set[bytes]:
        """Return the sources of other shards: ours have turns, which tell when they are gone; of these only a search
        does."""
        return {source for source, shard in self._known.items() if shard not in self._shards} - self._listed

    def forget(self, sources: Iterable[bytes]) -> None:
        """Forget those of these sources, which a search did not find, that are not of our shards."""
        for source in sources:
            if not self.holds(source):
                self._known.pop(source, None)

    def hold(self, shards: frozenset[int]) -> None:
        """Take over these shards as ours; sources of new ones are looked at."""
        taken, self._shards = shards - self._shards, shards
        self.troubles = {source: told for source, told in self.troubles.items() if shard_of(source) in shards}
        for source, shard in self._known.items() if taken else ():
            if shard in taken:
                self._looks[source] = False

    def look_at_all(self) -> None:
        """Look at every source once: an announcement may have been missed."""
        for source in self._known:
            self._look_at(source)

    def sweep(self) -> None:
        """Look at every source once without a reason: changes that this finds were not announced."""
        for source in self.mine:
            self._looks.setdefault(source, True)

    def take(self) -> Turn | None:
        while self._news or self._looks:
            waiting = len(self._news) + len(self._looks)
            looks = _pop(self._looks, max(_MOST_SOURCES - len(self._news), _LOOKS))
            news = _pop(self._news, _MOST_SOURCES - len(looks))
            sources = tuple(filter(self.holds, news | looks))  # the others are another master's by now, or gone
            if sources:
                quantum = max(_SMALLEST_QUANTUM, min(_LARGEST_QUANTUM, self._batch // waiting))
                return Turn(sources, quantum, frozenset(one for one in looks if looks[one] and one not in news))
        return None

    def is_trouble(self, source: bytes, told: TurnResult) -> bool:
        """Return whether a person must look at the result. A key that matches a pattern and is not a stream is simply
        no source."""
        return told.outcome in _TROUBLES and (told.outcome is not TurnOutcome.NOT_A_STREAM or source in self._listed)

    def answered(self, turn: Turn, told: Sequence[TurnResult]) -> list[bytes]:
        """Note the results of a turn. Sources that were not served come first in the next one; those that are not (or
        no longer) streams are forgotten, unless they are listed. Return the sources in which a sweep found new entries
        that were not announced (yet)."""
        unserved = []
        unsaid = [
            source
            for source, one in zip(turn.sources, told, strict=True)
            if one.moved and source in turn.swept and source not in self._news and source not in self._looks
        ]
        for source, one in zip(turn.sources, told, strict=True):
            if self.is_trouble(source, one):
                if len(self.troubles) < _MOST_TROUBLES or source in self.troubles:
                    self.troubles[source] = one
            else:
                self.troubles.pop(source, None)
            if one.outcome is TurnOutcome.MORE:
                self._news[source] = False
            elif one.outcome is TurnOutcome.FULL:
                unserved.append(source)
            elif one.outcome in _NO_SOURCE and source not in self._listed and source not in self._news:
                self._known.pop(source, None)
        self._put_first(unserved)
        return unsaid

    def again(self, turn: Turn) -> None:
        """Put back a turn whose outcome is unknown: all of it is looked at again, before everything else."""
        self._put_first(turn.sources)

    def _put_first(self, sources: Sequence[bytes]) -> None:
        for source in reversed([one for one in sources if one not in self._news]):
            self._news[source] = False
            self._news.move_to_end(source, last=False)

    def _look_at(self, source: bytes) -> None:
        if self._known[source] in self._shards:
            self._looks[source] = False
