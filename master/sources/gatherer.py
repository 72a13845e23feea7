"""Intake over many ticket streams: the services that a master runs in addition when USHER_TICKET_STREAM names several
streams, or a pattern.

Each source has the same group as the work stream. Masters share the sources, find new ones, learn of new entries
(``ChangeEar``), and move them, turn by turn (policy/fair_queue.py, lua/sources/gather.lua), to the end of the work
stream, which is the ticket stream for everything that follows: one leader, one board, and consumers that read one inbox
and one stream with one batched read, woken by Redis, whether there is one source or a hundred thousand. The leader cuts
finished entries off the work stream; the master that gathers a source cuts it too, if asked to (``Trimmer``).

Each call of the gatherer is one atomic step that leaves each source's group where the moved entries end. So a call
whose reply was lost is simply made again, two masters that gather the same source move nothing twice, and a master that
dies in the middle leaves nothing half done.
"""

from __future__ import annotations

import contextlib
import math
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice

import orjson

from usher.common.base.clock import now_s
from usher.common.base.errors import RedisTrouble, ReplyUnknown
from usher.common.base.log import WARNING, event
from usher.common.doctor.collector import running_masters
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.protocol.sources import SHARDS, SourceSelection
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import pairs, redis_ms
from usher.common.redis.tracking import ChangeEar
from usher.common.runtime.service import Service
from usher.master.leader.leader_scripts import LossBook
from usher.master.leader.limits import BATCH
from usher.master.operations.trimming import Trimmer, retention_of, turn_s
from usher.master.policy.fair_queue import Rounds, Turn, TurnOutcome, TurnResult
from usher.master.settings import MasterSettings

#: How often every source is looked at although nothing was announced; and where Redis does not announce changes.
_SWEEP_S, _POLL_S = 30.0, 0.5
#: Pauses while the work stream is full and its group does not move. Each is about as long as the standstill so far, so
#: when the group moves again, which nothing announces, the standstill lasts at most twice as long.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 1.5
#: The work stream takes this many times what the leader reads at once: one part is read while the next one comes.
_BATCHES_AHEAD = 2
#: Names that a page of the search for streams looks at, roughly.
_SCAN_COUNT = 1000
#: Seconds between two SCANs for streams that match a pattern, beside what Redis notifies of.
DISCOVER_S = 30.0
#: Most troubles that a master reports to the others.
_SHOWN = 20
_LONGEST_BEAT_S = 1.0
_CUT = "cut "
_MADE = "made "
_UNREAD = "unread "


class Gatherer(Service):
    """Service that owns the rounds, which other threads change by ``changing``. ``batch`` is the number of entries that
    the leader reads at once; ``search_s``: so often it searches for streams that match the patterns, 0: never.

    It notes that this master runs, for ``lease_ms`` (0: it does not), with what it ``says``, and has an even part of
    the shards for each master that runs, whether it leads or stands by. Shares only spread the work: to gather a source
    twice moves nothing twice, so masters may disagree for a beat. Those of a master that dies go to the others when its
    note ends, those of one that stops at once."""

    name = "gather"

    def __init__(
        self,
        link: Link,
        keys: Keys,
        sources: SourceSelection,
        ticket_field: str,
        batch: int,
        search_s: float = 0.0,
        lease_ms: int = 0,
    ) -> None:
        super().__init__()
        self._link, self._sources, self._every_s = link, sources, search_s if sources.patterns else 0.0
        self._keys = keys
        self._losses = LossBook(link, keys)
        self._ticket_field = ticket_field
        self._most = _BATCHES_AHEAD * batch
        self._lock = threading.Lock()
        # Guarded by self._lock; one look at it needs no lock.
        self.rounds = Rounds(self._most, frozenset(name.encode() for name in sources.names))
        self._swept_s, self._sweep_s = now_s(), _SWEEP_S
        self._pause_s = 0.0
        self._given = b""
        # Called when a sweep found new entries that were not announced.
        self.on_unsaid: Callable[[list[bytes]], None] = lambda sources: None
        self._has_gap = True  # streams may have appeared unheard
        self._search: Iterator[None] | None = None  # that is under way
        self._search_s = 0.0  # when the next one begins
        self.moved = 0
        self._me, self._lease_ms = uuid.uuid4().hex[:12].encode(), lease_ms
        self._beat_s, self._shared_s = min(_LONGEST_BEAT_S, lease_ms / 3000) if lease_ms else math.inf, -math.inf
        self.says: Callable[[], str] = lambda: "{}"
        self.held: frozenset[int] = frozenset()

    # ---- from other threads ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self) -> Iterator[Rounds]:
        """Let a thread change the rounds, one at a time; the gatherer looks then what there is to do."""
        with self._lock:
            yield self.rounds
        self.wake()

    def changed(self, sources: Collection[bytes]) -> None:
        if sources:
            with self.changing() as rounds:
                rounds.changed(sources)

    def look_at_all(self) -> None:
        with self.changing() as rounds:
            rounds.look_at_all()
            self._has_gap = True

    def poll(self) -> None:
        """Look at every source again and again: nobody says which have changed."""
        self._sweep_s, self.on_unsaid = _POLL_S, lambda sources: None
        self.wake()

    def hold(self, shards: frozenset[int]) -> None:
        with self.changing() as rounds:
            rounds.hold(shards)
        self.held = shards

    # ---- the turn ----------------------------------------------------------------------------------------------------

    def run_once(self) -> float:
        if self._lease_ms and now_s() - self._shared_s >= self._beat_s:
            self._share()
        self._look_for_new()
        with self._lock:
            if now_s() - self._swept_s >= self._sweep_s:
                self._swept_s = now_s()
                self.rounds.sweep()
            turn = self.rounds.take()
        if turn is None:
            search_s = max(0.0, self._search_s - now_s()) if self._every_s else self._sweep_s
            return (
                0.0 if self._search is not None else min(self.stalls_after_s / 3, self._beat_s, self._sweep_s, search_s)
            )
        try:
            is_full, given, told = self._gather(turn)
        except BaseException as problem:
            self._has_gap |= isinstance(problem, ReplyUnknown) or getattr(problem, "kind", "") == "CONNECT"
            with self._lock:
                self.rounds.again(turn)
            raise
        with self._lock:
            troubles = dict(self.rounds.troubles)
            unsaid = self.rounds.answered(turn, told)
            if unsaid:
                self.on_unsaid(unsaid)  # here, so that after look_at_all() nothing older is reported
        self._say(dict(zip(turn.sources, told, strict=True)), troubles)
        self.moved += sum(one.moved for one in told)
        return self._next_pause_s(is_full, given)

    def _share(self) -> None:
        now_ms, key = redis_ms(self._link), self._keys.shares
        note = f"{now_ms + self._lease_ms} {self.says()}"
        _, flat = self._link.all_of([("HSET", key, self._me, note), ("HGETALL", key)])
        masters = running_masters(notes := pairs(flat), now_ms)
        if gone := notes.keys() - masters:
            self._link.call("HDEL", key, *gone)
        shards = frozenset(range(masters.index(self._me), SHARDS, len(masters)))
        if shards != self.held:
            event("shards_assigned", count=len(shards), before=len(self.held))
            self.hold(shards)
        self._shared_s = now_s()

    def on_end(self) -> None:
        self.hold(frozenset())
        with contextlib.suppress(RedisTrouble):  # the others find out when the note ends
            self._link.call("HDEL", self._keys.shares, self._me)
        self._link.close()

    def _look_for_new(self) -> None:
        """Search for streams from time to time, a page with each turn; and at once for all of them after a gap: else
        what new ones hold would come behind later messages."""
        has_gap, self._has_gap = self._has_gap, False  # before the look: a gap that is told meanwhile counts again
        search, self._search = None if has_gap else self._search, None
        if not self._every_s or not (has_gap or search or now_s() >= self._search_s):
            return
        search = search or self._pages()
        try:
            for _ in search:
                self.made_progress()
                if not has_gap:
                    self._search = search
                    return
        except RedisTrouble:
            self._has_gap = True
            raise
        finally:
            self._search_s = now_s() + self._every_s

    def _pages(self) -> Iterator[None]:
        """Find, page by page, the streams that match the patterns and were there before a change of them was heard, and
        forget those that are gone, also such as were deleted while nobody gathered (lua/sources/gather.lua)."""
        with self._lock:
            gone = self.rounds.others()
        for pattern in self._sources.patterns:
            cursor = b""
            while cursor != b"0" and not self.stopping:
                words = ("SCAN", cursor or b"0", "MATCH", pattern, "COUNT", _SCAN_COUNT, "TYPE", "stream")
                cursor, keys = self._link.call(*words)
                gone.difference_update(keys)
                self._found(keys)
                yield
        cursor = b""
        while cursor != b"0" and not self.stopping:
            cursor, flat = self._link.call("HSCAN", self._keys.gathered, cursor or b"0", "COUNT", _SCAN_COUNT)
            gone.difference_update(flat[::2])
            self._found(filter(None, flat[::2]))  # "" is gather.lua's own
            yield
        if not self.stopping:
            with self._lock:
                self.rounds.forget(gone)

    def _found(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self.rounds.found(key for key in keys if self._sources.takes(key))

    def _gather(self, turn: Turn) -> tuple[bool, bytes, list[TurnResult]]:
        """Gather a turn. One source that Redis refuses (ACL, another slot) refuses the whole call, so it is made again
        in halves, until that source is alone."""
        try:
            return self._call(turn)
        except CommandRefused as refused:
            if len(turn.sources) == 1:
                # If this is refused too, it is our own keys that Redis refuses.
                is_full, given, _ = self._call(Turn((), turn.quantum))
                return is_full, given, [TurnResult(TurnOutcome.REFUSED, 0, str(refused))]
        half = len(turn.sources) // 2
        _, _, first = self._gather(Turn(turn.sources[:half], turn.quantum))
        is_full, given, second = self._gather(Turn(turn.sources[half:], turn.quantum))
        return is_full, given, first + second

    def _call(self, turn: Turn) -> tuple[bool, bytes, list[TurnResult]]:
        keys = self._keys
        own, groups = (keys.gathered, keys.dead, keys.counters), (LogKeys(one.decode()).groups for one in turn.sources)
        script_keys: tuple[str | bytes, ...] = (keys.stream, *own, *turn.sources, *groups, keys.letters)
        args = (keys.group, self._ticket_field, LONGEST_TICKET, self._most, turn.quantum)
        is_full, given, *flat = self._link.run("gather", script_keys, args)
        told = [
            TurnResult(TurnOutcome(flat[at].decode()), flat[at + 1], flat[at + 2].decode(errors="replace"))
            for at in range(0, len(flat), 3)
        ]
        return bool(is_full), given, told

    def _next_pause_s(self, is_full: bool, given: bytes) -> float:
        """Pause after a full work stream: shortly while its group moves, and longer and longer when it stands still.
        Return 0, the wait until the next turn."""
        is_still, self._given = given == self._given, given
        if not is_full:
            self._pause_s = 0.0
        elif is_still:
            self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
        else:
            self._pause_s = _FIRST_PAUSE_S
        if self._pause_s:
            self._stop.wait(self._pause_s)  # not Service's wait: changes that come meanwhile must not cut it short
        return 0.0

    # ---- what people are told ----------------------------------------------------------------------------------------

    def _say(self, told: Mapping[bytes, TurnResult], known: Mapping[bytes, TurnResult]) -> None:
        """Tell of what is new. ``known``: the troubles that were told before."""
        for source, one in told.items():
            name, outcome = source.decode(errors="replace"), one.outcome.value.lower()
            if not self.rounds.is_trouble(source, one):
                for words in filter(None, one.words.split(", ")):
                    self._say_what(name, words)
            elif known.get(source) != one:
                event("source_failed", level=WARNING, source=name, outcome=outcome, words=one.words)

    def _say_what(self, source: str, words: str) -> None:
        if words.startswith(_MADE):
            after, _, before = words.removeprefix(_MADE).partition(" ")
            event("source_group_created", source=source, group=self._keys.group, after=after)
            if before:
                event("source_entries_lost", level=WARNING, source=source, after=after, before=before)
        elif words.startswith(_UNREAD):
            self._losses.cut(int(words.removeprefix(_UNREAD)), source=source)
        elif words.startswith(_CUT):
            count, reason = int(words.removeprefix(_CUT)), "too_many_fields"
            event("messages_rejected", level=WARNING, source=source, count=count, reason=reason)


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
            kept = turn_s(settings.trim_keep), retention_of(settings, work_stream=False)
            of_sources = make_link("trim-sources"), lambda: gatherer.rounds.mine
            self._trimmers = [Trimmer(*of_sources, *kept, gathered_by=keys.group)]
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
