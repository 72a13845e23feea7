"""Intake over many ticket streams: the services that a master runs in addition when USHER_TICKET_STREAM names several
streams, or a pattern.

Each source has the same group as the work stream. Masters share the sources, find new ones, learn of new entries
(``ChangeEar``), and move them (``gatherer``) to the end of the work stream, which is the ticket stream for everything
that follows: one leader, one board, and consumers that read one inbox and one stream with one batched read, woken by
Redis, whether there is one source or a hundred thousand. The leader cuts finished entries off the work stream; the
master that gathers a source cuts it too, if asked to (``SourceTrimmer``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice

import orjson

from usher.common.base.errors import GroupMissing
from usher.common.base.log import ERROR, WARNING, event
from usher.common.doctor.collector import look_at_memory
from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SourceSelection
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.scripts import ScriptRunner
from usher.common.redis.tracking import ChangeEar
from usher.common.runtime.service import Service
from usher.master.leader.limits import BATCH
from usher.master.operations.trimming import AT_ONCE, cut_each, look_at, retention_of, turn_s
from usher.master.policy.trim import Cut, Refused, Retention, decide_gathered
from usher.master.settings import MasterSettings
from usher.master.sources.gatherer import Gatherer

#: Seconds between two SCANs for streams that match a pattern, beside what Redis notifies of.
DISCOVER_S = 30.0
#: Most troubles that a master reports to the others.
_SHOWN = 20

#: Sources that are looked at together: of each, Redis sends the first and the last entry.
_PAGE = 50
#: Shortest time in seconds of a round, and rounds in the time for which entries are kept.
_ROUND_S, _ROUNDS = 60.0, 24
#: Fewest entries that a call cuts: several nodes of a stream, of which it cuts only whole ones.
_LEAST_AT_ONCE = 400
#: Most troubles with trimming that are remembered.
_MOST_TROUBLES = 1000


class SourceTrimmer(Service):
    """Service that cuts gathered entries off the sources of our shards, where nobody else needs them (policy/trim.py,
    lua/operations/trim.lua).

    It needs no lead and no fence: trim.lua checks in Redis what may go, in the step that cuts. So a call whose reply
    was lost is simply made again, and two masters that believe they have the same shard, or one that has lost it, cut
    nothing that is needed.

    It goes round: each source has its turn, a few of them at a time, 24 times in the time for which entries are kept,
    and once a minute at most.
    """

    name = "trim-sources"

    def __init__(self, link: Link, group: str, gatherer: Gatherer, every_s: float, retention: Retention) -> None:
        super().__init__()
        self._link = link
        self._scripts = ScriptRunner(link)
        self._group = group
        self._gatherer = gatherer
        self._every_s = every_s
        self._retention = retention
        self._now_ms = 0  # Redis' time in this turn
        self._gives_way = False  # so much memory is used that only what is needed is kept
        self._rest: list[bytes] = []  # left to look at in this round
        self._troubles: dict[bytes, str] = {}
        self._went: Counter[bytes] = Counter()  # entries of each source that were cut in this round
        self.stalls_after_s = max(10.0, 4 * every_s)

    def troubles(self) -> list[tuple[bytes, str]]:
        """Return the sources of our shards of which nothing is cut until somebody has looked, and why. Any thread may
        ask."""
        return [(source, why) for source, why in list(self._troubles.items()) if self._gatherer.rounds.holds(source)]

    def run_once(self) -> float:
        mine = self._gatherer.rounds.mine
        if not mine:
            return self._every_s
        self._rest = self._rest or mine
        self._now_ms, memory = look_at_memory(self._link)
        self._gives_way = self._retention.gives_way(memory)
        round_s = _ROUND_S if self._gives_way else max(_ROUND_S, self._retention.keep_s / _ROUNDS)
        left = len(self._rest) - math.ceil(len(mine) * min(1.0, self._every_s / round_s))
        while self._rest and len(self._rest) > left and not self.stopping:
            page = self._rest[: min(_PAGE, len(self._rest) - left)]
            self._cut(self._floors([source for source in page if self._gatherer.rounds.holds(source)]))
            del self._rest[: len(page)]  # a page that fails is looked at again
            self.made_progress()
        self._troubles = dict(self.troubles())
        if self._went and not self._rest:
            count, entries = len(self._went), self._went.total()
            event("sources_trimmed", count=count, entries=entries, gives_way=self._gives_way)
            self._went.clear()
        return self._every_s

    def _floors(self, sources: Sequence[bytes]) -> dict[bytes, bytes]:
        floors: dict[bytes, bytes] = {}
        for source, facts in zip(sources, look_at(self._link, [source.decode() for source in sources]), strict=True):
            if isinstance(facts, CommandRefused):
                self._tell(source, str(facts))
                continue
            if isinstance(facts, GroupMissing):  # destroyed just now
                continue
            wished = [] if self._gives_way else self._retention.wishes(facts, self._now_ms)
            decision = decide_gathered(facts, self._group, archived_only=self._retention.archived_only, wished=wished)
            if isinstance(decision, Refused):
                self._tell(source, decision.problems[0])
                continue
            if isinstance(decision, Cut):
                floors[source] = decision.floor
            else:
                self._troubles.pop(source, None)
        return floors

    def _cut(self, floors: dict[bytes, bytes]) -> None:
        """Cut these sources below their floors. The calls of one flight together cut about as much as one of
        ``Trimming.cut``: Redis does all of them before it does anything else."""
        names = {source.decode(): floor for source, floor in floors.items()}
        at_once = max(_LEAST_AT_ONCE, AT_ONCE // max(1, len(floors)))
        for page in cut_each(self._scripts, names, at_once, self._retention.archived_only, self._group):
            for source, cut in zip(map(str.encode, page), page.values(), strict=True):
                if isinstance(cut, CommandRefused):
                    if "no such key" not in str(cut):
                        self._tell(source, str(cut))
                    continue
                self._troubles.pop(source, None)
                if isinstance(cut, int) and cut:  # else a reader needs it by now, or it is another stream
                    self._went[source] += cut
            self.made_progress()
            if self.stopping:
                return

    def _tell(self, source: bytes, why: str) -> None:
        if self._troubles.get(source) == why or (
            source not in self._troubles and len(self._troubles) >= _MOST_TROUBLES
        ):
            return
        self._troubles[source] = why
        event("trim_refused", level=ERROR, stream=source.decode(errors="replace"), problem=why)


class SourceServices:
    """The services of gathering. ``url``: where people reach this master; it is known when the master listens."""

    def __init__(
        self,
        settings: MasterSettings,
        sources: SourceSelection,
        keys: Keys,
        redis_url: str,
        make_link: Callable[[str], Link],
    ) -> None:
        self.url = settings.advertise_url
        self._setting = f"{settings.ticket_stream} (tickets: {settings.ticket_field})"
        asked = (keys, sources, settings.ticket_field, BATCH, DISCOVER_S, int(settings.leader_lease_seconds * 1000))
        self._gatherer = gatherer = Gatherer(make_link("gather"), *asked)
        self._sources = sources
        self._watch = ChangeEar(redis_url, "master:watch", sources.prefixes(), self._heard, self._refused)
        gatherer.on_unsaid, gatherer.says = self._watch.unsaid, self.says
        self._trimmers = []
        if settings.trim_keep != "forever":
            trim = make_link("trim-sources")
            retention = retention_of(settings, work_stream=False)
            self._trimmers = [SourceTrimmer(trim, keys.group, gatherer, turn_s(settings.trim_keep), retention)]
        self.services: list[Service] = [gatherer, self._watch, *self._trimmers]

    def _heard(self, changed: list[bytes] | None) -> None:
        """Take changes: a stream that matches a pattern is a source from its first entry on."""
        if changed is None:
            self._gatherer.look_at_all()
        else:
            self._gatherer.changed([key for key in changed if self._sources.takes(key)])

    def _refused(self, why: str) -> None:
        event("source_notifications_unavailable", level=WARNING, why=why)
        self._gatherer.poll()

    def says(self) -> str:
        """Return this master's report in the shares, one JSON object; common/doctor/collector.py reads it."""
        rounds = self._gatherer.rounds
        found = {source: (told.outcome.value.lower(), told.words) for source, told in list(rounds.troubles.items())}
        for trimmer in self._trimmers:
            found = {source: ("not_trimmed", why) for source, why in trimmer.troubles()} | found
        shown = [(source.decode(errors="replace"), *told) for source, told in islice(found.items(), _SHOWN)]
        told = {"url": self.url, "setting": self._setting, "moved": self._gatherer.moved, "sources": rounds.known}
        told |= {"mode": "polling" if self._watch.why else "change-driven", "troubles": shown}
        return orjson.dumps(told).decode()
