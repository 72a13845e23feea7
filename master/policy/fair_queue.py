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
    """A call: these sources, and at most ``quantum`` entries of each."""

    sources: tuple[bytes, ...]
    quantum: int


#: Sources, first in, first out, none of them twice.
_Queue = OrderedDict[bytes, None]


def _pop(queue: _Queue, most: int) -> list[bytes]:
    return [queue.popitem(last=False)[0] for _ in range(min(most, len(queue)))]


class Rounds:
    """All known sources, and those of our shards that wait for a turn."""

    def __init__(self, batch: int, listed: frozenset[bytes] = frozenset()) -> None:
        """Make rounds. ``batch``: about this many entries are moved by one call. ``listed``: names that are sources
        whatever is there."""
        self._batch = batch
        self._listed = listed
        self._shards: frozenset[int] = frozenset()
        self._known: dict[bytes, int] = {}
        self._doubted: set[bytes] = set()  # see ``doubt``
        self._news = _Queue()
        self._looks = _Queue()
        self._swept: set[bytes] = set()  # those in ``_looks`` only because of a sweep
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
            self._doubted.discard(source)
            if source not in self._known:
                self._known[source] = shard_of(source)
                self._look_at(source)
        return len(self._known) - before

    def changed(self, sources: Iterable[bytes]) -> None:
        for source in sources:
            self._doubted.discard(source)
            if self._known.setdefault(source, shard_of(source)) in self._shards:
                self._swept.discard(source)
                self._news.setdefault(source)

    def doubt(self) -> None:
        """Doubt the sources of other shards: all that exist are now reported to ``found``. Ours have turns, which tell
        when they are gone; of other shards nothing else would tell us."""
        others = {source for source, shard in self._known.items() if shard not in self._shards}
        self._doubted = others - self._listed

    def forget_doubted(self) -> None:
        """Forget the doubted sources that were neither found nor changed since: they are gone."""
        for source in self._doubted:
            if self._known[source] not in self._shards:
                del self._known[source]
        self._doubted.clear()

    def hold(self, shards: frozenset[int]) -> bool:
        """Take over these shards as ours; sources of new ones are looked at. Return whether there are new ones."""
        taken, self._shards = shards - self._shards, shards
        self.troubles = {source: told for source, told in self.troubles.items() if shard_of(source) in shards}
        if taken:
            for source, shard in self._known.items():
                if shard in taken:
                    self._swept.discard(source)
                    self._looks.setdefault(source)
        return bool(taken)

    def look_at_all(self) -> None:
        """Look at every source once: an announcement may have been missed."""
        self._swept.clear()
        for source in self._known:
            self._look_at(source)

    def sweep(self) -> None:
        """Look at every source once without a reason: changes that this finds were not announced."""
        swept = {source for source in self.mine if source not in self._looks and source not in self._news}
        swept |= self._swept
        self.look_at_all()
        self._swept = swept

    def take(self) -> Turn | None:
        while self._news or self._looks:
            waiting = len(self._news) + len(self._looks)
            looks = _pop(self._looks, max(_MOST_SOURCES - len(self._news), _LOOKS))
            news = _pop(self._news, _MOST_SOURCES - len(looks))
            popped = dict.fromkeys((*news, *looks))
            sources = [source for source in popped if self._known.get(source) in self._shards]
            self._swept.difference_update(popped.keys() - sources)  # these are another master's by now, or gone
            if sources:
                quantum = max(_SMALLEST_QUANTUM, min(_LARGEST_QUANTUM, self._batch // waiting))
                return Turn(tuple(sources), quantum)
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
        unsaid = [source for source, one in zip(turn.sources, told, strict=True) if one.moved and source in self._swept]
        self._swept.difference_update(turn.sources)
        for source, one in zip(turn.sources, told, strict=True):
            if self.is_trouble(source, one):
                if len(self.troubles) < _MOST_TROUBLES or source in self.troubles:
                    self.troubles[source] = one
            else:
                self.troubles.pop(source, None)
            if one.outcome is TurnOutcome.MORE:
                self._news.setdefault(source)
            elif one.outcome is TurnOutcome.FULL:
                unserved.append(source)
            elif one.outcome in _NO_SOURCE and source not in self._listed and source not in self._news:
                self._known.pop(source, None)
                self._doubted.discard(source)
        self._put_first(unserved)
        return unsaid

    def again(self, turn: Turn) -> None:
        """Put back a turn whose outcome is unknown: all of it is looked at again, before everything else."""
        self._swept.difference_update(turn.sources)
        self._put_first(turn.sources)

    def _put_first(self, sources: Sequence[bytes]) -> None:
        for source in reversed([one for one in sources if one not in self._news]):
            self._news[source] = None
            self._news.move_to_end(source, last=False)

    def _look_at(self, source: bytes) -> None:
        if self._known[source] in self._shards:
            self._looks.setdefault(source)
