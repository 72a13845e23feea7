"""Source trimmer: cuts gathered entries off the sources of our shards, where nobody else needs them (policy/trim.py,
lua/operations/trim.lua).

It needs no lead and no fence: trim.lua checks in Redis what may go, in the step that cuts. So a call whose reply was
lost is simply made again, and two masters that believe they have the same shard, or one that has lost it, cut nothing
that is needed.

A quiet source costs nothing: a source has its turn when something was gathered from it, or when it is new to this
master. Only sources of which another reader keeps a part (a slow group, a checkpoint, the archive) are asked again
without that, a page of them in each round; and those of which a part is kept for its age, when that is over.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

from usher.common.base.errors import GroupMissing
from usher.common.base.log import event
from usher.common.doctor.collector import look_at_memory
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.scripts import ScriptRunner
from usher.common.runtime.service import Service
from usher.master.operations.trimming import AT_ONCE, cut_call, look_at
from usher.master.policy.trim import Cut, Refused, Retention, decide_gathered, is_held_back
from usher.master.sources.gatherer import Gatherer

log = logging.getLogger(__name__)

#: Sources per turn: of each, Redis sends the first and the last entry.
_PAGE = 50
#: Fewest entries that a call cuts: several nodes of a stream, of which it cuts only whole ones.
_LEAST_AT_ONCE = 400
#: Most troubles that are remembered.
_MOST_TROUBLES = 1000


class SourceTrimmer(Service):
    name = "trim-sources"

    def __init__(self, link: Link, group: str, gatherer: Gatherer, every_s: float, retention: Retention) -> None:
        super().__init__()
        self._link = link
        self._scripts = ScriptRunner(link)
        self._group = group
        self._gatherer = gatherer
        self._every_s = every_s
        self._retention = retention
        self._archived_only = retention.archived_only
        self._now_ms = 0  # Redis' time in this turn
        self._gives_way = False  # so much memory is used that only what is needed is kept
        self._gave_way = False  # since the last line
        self._due: dict[bytes, None] = {}  # left to do in this round
        self._held_back: dict[bytes, None] = {}
        self._ageing: dict[bytes, int] = {}  # kept for its age -> Redis' time from which on enough of it is over
        self._troubles: dict[bytes, str] = {}
        self._went: Counter[bytes] = Counter()  # entries of each source that were cut in this round
        self.stalls_after_s = max(10.0, 4 * every_s)

    def troubles(self) -> list[tuple[bytes, str]]:
        """Return the sources of our shards of which nothing is cut until somebody has looked, and why. Any thread may
        ask."""
        return [(source, why) for source, why in list(self._troubles.items()) if self._gatherer.holds(source)]

    def run_once(self) -> float:
        if not self._due:
            grown = [source for source in self._gatherer.grown() if source not in self._ageing]
            self._due = dict.fromkeys((*grown, *islice(self._held_back, _PAGE)))
        if self._due or self._ageing:
            self._look_at_memory()
        page = list(islice(self._due, _PAGE))  # a source is due until it is done: a turn that fails is made again
        for source in page:
            self._held_back.pop(source, None)
            if not self._gatherer.holds(source):
                self._troubles.pop(source, None)
        self._cut(self._floors([source for source in page if self._gatherer.holds(source)]))
        for source in page:
            del self._due[source]
        if self._due:
            return 0.0
        if self._went:
            count, entries = len(self._went), self._went.total()
            event(log, "sources_trimmed", count=count, entries=entries, gives_way=self._gave_way)
            self._went.clear()
            self._gave_way = False
        return self._every_s

    def _look_at_memory(self) -> None:
        self._now_ms, memory = look_at_memory(self._link)
        self._gives_way = self._retention.gives_way(memory)
        self._gave_way |= self._gives_way
        for source in [one for one, at_ms in self._ageing.items() if self._gives_way or at_ms <= self._now_ms]:
            del self._ageing[source]
            self._due[source] = None

    def _floors(self, sources: Sequence[bytes]) -> dict[bytes, bytes]:
        floors: dict[bytes, bytes] = {}
        for source, facts in zip(sources, look_at(self._link, [source.decode() for source in sources]), strict=True):
            if isinstance(facts, CommandRefused):
                self._tell(source, str(facts))
                continue
            if isinstance(facts, GroupMissing):  # destroyed just now
                self._held_back[source] = None
                continue
            wished = [] if self._gives_way else self._retention.wishes(facts, self._now_ms)
            decision = decide_gathered(facts, self._group, archived_only=self._archived_only, wished=wished)
            if isinstance(decision, Refused):
                self._tell(source, decision.problems[0])
                continue
            kind = decision.because.kind if decision.because is not None else ""
            if kind == "age" and facts.span is not None and facts.span.first is not None:
                self._ageing[source] = self._retention.over_ms(facts.span.first, self._now_ms)
            elif kind == "archive" or is_held_back(facts, self._group, archived_only=self._archived_only):
                self._held_back[source] = None
            if isinstance(decision, Cut):
                floors[source] = decision.floor
            else:
                self._troubles.pop(source, None)
        return floors

    def _cut(self, floors: dict[bytes, bytes]) -> None:
        """Cut these sources below their floors. The calls of one flight together cut about as much as one of
        ``Trimming.cut``: Redis does all of them before it does anything else."""
        most = dict.fromkeys(floors, max(_LEAST_AT_ONCE, AT_ONCE // max(1, len(floors))))
        while most and not self.stopping:
            calls = [
                cut_call(source.decode(), floors[source], at_once, self._archived_only, self._group)
                for source, at_once in most.items()
            ]
            counts = dict(zip(most, map(self._count, most, self._scripts.try_on_each("trim", calls)), strict=True))
            nothing = [source for source, count in counts.items() if count == 0]
            lengths = dict(zip(nothing, self._link.all_of([("XLEN", source) for source in nothing]), strict=True))
            self.made_progress()
            # A node of a longer stream may hold more than one call cuts (stream-node-max-entries): it goes as a whole
            # or not at all.
            most = {
                source: at_once if counts[source] else 10 * at_once
                for source, at_once in most.items()
                if counts[source] is not None and (counts[source] or lengths[source] > at_once)
            }

    def _count(self, source: bytes, reply: Any) -> int | None:
        if isinstance(reply, CommandRefused):
            if "no such key" not in str(reply):
                self._tell(source, str(reply))
            return None
        if isinstance(reply, Exception):
            raise reply
        self._troubles.pop(source, None)
        verdict, told = reply
        if verdict != b"CUT":  # a reader has begun to need it, or it is another stream by now
            self._held_back[source] = None
            return None
        if told:
            self._went[source] += told
        return int(told)

    def _tell(self, source: bytes, why: str) -> None:
        self._held_back[source] = None
        if self._troubles.get(source) == why or (
            source not in self._troubles and len(self._troubles) >= _MOST_TROUBLES
        ):
            return
        self._troubles[source] = why
        event(log, "trim_refused", level=logging.ERROR, stream=source.decode(errors="replace"), problem=why)
