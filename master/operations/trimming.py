"""Trimming: asks Redis which entries each reader needs, lets policy/trim.py decide, and cuts with a script that checks
again: from time to time in masters (``Trimmer``), by hand with `usher trim`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from usher.common.base.clock import now_s
from usher.common.base.durations import duration_s
from usher.common.base.errors import GroupMissing, RedisTrouble
from usher.common.base.log import ERROR, event
from usher.common.doctor.collector import look_at_memory
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.stream_id import ZERO
from usher.common.redis.client import Arg, CommandRefused, Link, checked
from usher.common.redis.replies import found_entries, pairs, parse_span
from usher.common.runtime.service import Service
from usher.master.policy.trim import Cut, Refused, Retention, RetentionFacts, decide
from usher.master.settings import MasterSettings

#: Most entries that one call of the script cuts: that takes some milliseconds. Where what is wished gives way to
#: memory, it is as many until memory is looked at again.
AT_ONCE, AT_ONCE_FOR_MEMORY = 20_000, 1_000
#: Most entries that are counted to say how many would go.
COUNTED = 1_000_000
_PAGE = 1_000
#: Seconds between two turns, at most: a page at a time, so that Redis answers others in between.
TRIM_S = 10.0
#: Share of Redis' memory (of maxmemory, else of the machine) above which entries go earlier than they should: half is
#: left for a rewrite of the append-only file.
MEMORY_SHARE = 0.5
#: Seconds between lines of the log about what was cut.
_TELL_EVERY_S = 3_600
#: Seconds between two turns of a trimmer that trims nothing; and so many times longer is a turn's wait where nobody has
#: sent or read anything since the last one.
_IDLE_S, _AT_REST = 60.0, 3
#: Streams that are looked at together: of each, Redis sends the first and the last entry.
_STREAMS = 50
#: Shortest time in seconds of a round, and rounds in the time for which entries are kept.
_ROUND_S, _ROUNDS = 60.0, 24
#: Fewest entries that a call cuts: several nodes of a stream, of which it cuts only whole ones.
_LEAST_AT_ONCE = 400
#: Most troubles that are remembered.
_MOST_TROUBLES = 1000

_ID = re.compile(rb"[0-9]+-[0-9]+")


class StillNeeded(RedisTrouble):
    """A reader has begun to need what was to be cut; nothing of it was cut. Decide again."""


class Trimming:
    """The steps of trimming one stream, over a link of the caller's thread."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link, self._keys = link, keys

    def facts(self) -> RetentionFacts:
        """Return what each reader needs now. Raises CommandRefused, GroupMissing, and what ``Link.call`` raises."""
        [facts] = look_at(self._link, [self._keys.stream])
        if isinstance(facts, Exception):
            raise facts
        return facts

    def cut(self, floor: bytes, *, archived_only: bool = False) -> Iterator[int]:
        """Cut below ``floor``, page by page; yield the number of entries cut. Raises StillNeeded; no reader needed what
        was cut before that."""
        for page in cut_each(self._link, {self._keys.stream: floor}, AT_ONCE, archived_only):
            [cut] = checked([*page.values()])
            if cut:
                yield cut

    def count_below(self, floor: bytes) -> int:
        total = 0
        for count, *_ in found_entries(self._link, "XRANGE", self._keys.stream, "-", b"(" + floor, _PAGE, ""):
            total += count
            if total >= COUNTED:
                break
        return total


def cut_each(
    link: Link, floors: Mapping[str, bytes], at_once: int, archived_only: bool, gathered_by: str = ""
) -> Iterator[dict[str, int | StillNeeded | CommandRefused]]:
    """Cut each of these streams below its floor, at most ``at_once`` entries of each with each flight of calls. Yield
    of each how many went with a flight, or why it is not cut any more. Only whole nodes of a stream go: up to some
    hundred entries stay. ``gathered_by``: the gather group, for sources."""
    most = dict.fromkeys(floors, at_once)
    while most:
        calls = [cut_call(one, floors[one], count, archived_only, gathered_by) for one, count in most.items()]
        cut: dict[str, Any] = dict(zip(most, link.try_each("trim", calls), strict=True))
        for stream, reply in cut.items():
            if isinstance(reply, Exception) and not isinstance(reply, CommandRefused):
                raise reply
            if isinstance(reply, list) and reply[0] == b"CUT":
                cut[stream] = int(reply[1])
            elif isinstance(reply, list):
                who, below = reply[1].decode("utf-8", "backslashreplace"), floors[stream].decode()
                cut[stream] = StillNeeded(f"{who} needs entries below {below} by now; nothing more was cut")
        nothing = [stream for stream, count in cut.items() if count == 0]
        lengths = dict(zip(nothing, link.all_of([("XLEN", one) for one in nothing]), strict=True))
        yield cut
        # A node of a longer stream may hold more than one call cuts (stream-node-max-entries): it goes as a whole or
        # not at all.
        most = {
            stream: count if cut[stream] else 10 * count
            for stream, count in most.items()
            if isinstance(cut[stream], int) and (cut[stream] or lengths[stream] > count)
        }


def look_at(link: Link, streams: Sequence[str]) -> list[RetentionFacts | CommandRefused | GroupMissing]:
    """Return what each reader needs of these streams now, in two round trips; for a stream that cannot be read, the
    reason."""
    questions: list[tuple[str, ...]] = []
    for stream, log_keys in ((stream, LogKeys(stream)) for stream in streams):
        questions += [("XINFO", "STREAM", stream), ("XINFO", "GROUPS", stream)]
        questions += [("HGETALL", log_keys.checkpoints), ("HGETALL", log_keys.groups), ("GET", log_keys.archived)]
    flat = link.pipeline(questions)
    looks = [_answers(flat[at : at + 5]) for at in range(0, len(flat), 5)]
    groups = [[] if isinstance(look, Exception) else [pairs(one) for one in look[1] or ()] for look in looks]
    names = [(stream, one[b"name"]) for stream, found in zip(streams, groups, strict=True) for one in found]
    oldest = iter(link.pipeline([("XPENDING", stream, name, "-", "+", 1) for stream, name in names]))
    return [
        _facts(look, found, _answers([next(oldest) for _ in found])) for look, found in zip(looks, groups, strict=True)
    ]


def _answers(replies: list[Any]) -> list[Any] | CommandRefused | GroupMissing:
    for at, reply in enumerate(replies):
        if isinstance(reply, (CommandRefused, GroupMissing)):
            if "no such key" not in str(reply):
                return reply
            replies[at] = None
        elif isinstance(reply, Exception):
            raise reply
    return replies


def _facts(
    look: list[Any] | CommandRefused | GroupMissing,
    found: list[dict[bytes, Any]],
    oldest: list[Any] | CommandRefused | GroupMissing,
) -> RetentionFacts | CommandRefused | GroupMissing:
    if isinstance(look, Exception):
        return look
    if isinstance(oldest, Exception):
        return oldest
    span, _, noted, kept, archived = look
    groups = [
        (_decode_reader_name(facts[b"name"]), facts[b"last-delivered-id"], first[0][0] if first else None)
        for facts, first in zip(found, oldest, strict=True)
    ]
    checkpoints = [(_decode_reader_name(name), *_checkpoint(value)) for name, value in sorted(pairs(noted).items())]
    saved = [
        (_decode_reader_name(name), value if _ID.fullmatch(value) else ZERO)
        for name, value in sorted(pairs(kept).items())
    ]
    return RetentionFacts(None if span is None else parse_span(pairs(span)), groups, checkpoints, archived, saved)


def turn_s(trim_keep: str) -> float:
    return 0.0 if trim_keep == "forever" else max(0.1, min(TRIM_S, duration_s(trim_keep.split()[0]) / 10))


def retention_of(settings: MasterSettings, *, work_stream: bool) -> Retention:
    """Return what is kept beside what readers need. A work stream is ours: nobody else looks at it, or archives it."""
    if work_stream or (keep := settings.trim_keep) == "forever":
        return Retention()
    return Retention(duration_s(keep.split()[0]), MEMORY_SHARE, keep.endswith(" archived"), heeds_archive=True)


def cut_call(
    stream: str, floor: bytes, at_once: int, archived_only: bool, gathered_by: str = ""
) -> tuple[tuple[str, ...], tuple[Arg, ...]]:
    """Return keys and arguments of trim.lua."""
    log_keys = LogKeys(stream)
    keys = (stream, log_keys.checkpoints, log_keys.archived, log_keys.groups)
    return keys, (floor, at_once, "1" if archived_only else "", gathered_by)


class Trimmer(Service):
    """Service that trims from time to time (``every_s`` 0: never): a leading master its stream, every master the
    sources of its shards. ``streams``: those that are ours now; ``gathered_by``: the gather group, for sources.

    It needs no lead and no fence: trim.lua checks in Redis what may go, in the step that cuts. So a call whose reply
    was lost is simply made again, and two masters that believe they have the same stream, or one that has lost it, cut
    nothing that is needed.

    It goes round: each stream has its turn, a few of them at a time, 24 times in the time for which entries are kept,
    and once a minute at most; one alone at each turn. Beside the position of a group (``keys``) it notes how long it
    keeps entries, and who holds it back."""

    def __init__(
        self,
        link: Link,
        streams: Callable[[], Sequence[bytes]],
        every_s: float,
        retention: Retention,
        keys: Keys | None = None,
        gathered_by: str = "",
    ) -> None:
        super().__init__()
        self.name = "trim-sources" if gathered_by else "trim"
        self._link, self._streams, self._retention = link, streams, retention
        self._every_s, self._wait_s, self._keys, self._group = every_s, every_s or _IDLE_S, keys, gathered_by
        self.stalls_after_s = max(10.0, 4 * _AT_REST * self._wait_s)
        self._now_ms = 0  # Redis' time in this turn
        self._gives_way = self._gave_way = False  # in this turn; since the last line
        self._rest: list[bytes] = []  # left to look at in this round
        self._troubles: dict[bytes, str] = {}
        self._went: Counter[bytes] = Counter()  # entries of each stream that were cut since the last line
        self._told_s = {False: -math.inf, True: -math.inf}  # when that was told; True: that it gives way
        self._facts: list[Any] = []  # of the last look
        self._noted: tuple[str, ...] = ()

    def troubles(self) -> list[tuple[bytes, str]]:
        """Return the streams that are ours of which nothing is cut until somebody has looked, and why. Any thread may
        ask."""
        found = list(self._troubles.items())
        ours = frozenset(self._streams() if found else ())
        return [(stream, why) for stream, why in found if stream in ours]

    def run_once(self) -> float:
        ours = self._streams()
        if not ours or not self._every_s:
            self._troubles, self._noted = {}, self._noted if ours else ()  # another leader notes what it finds
            self._note(("HDEL", "trim_keep_s", "trim_held_back") if ours else ())
            return self._wait_s
        self._rest, mine, before = self._rest or list(ours), frozenset(ours), self._facts
        self._now_ms, memory = look_at_memory(self._link)
        self._gives_way = self._retention.gives_way(memory)
        round_s = _ROUND_S if self._gives_way else max(_ROUND_S, self._retention.keep_s / _ROUNDS)
        left = len(self._rest) - math.ceil(len(ours) * min(1.0, self._every_s / round_s))
        has_cut = False
        while self._rest and len(self._rest) > left and not self.stopping:
            page = self._rest[: min(_STREAMS, len(self._rest) - left)]
            floors = self._floors([stream for stream in page if stream in mine])
            self._cut(floors)
            del self._rest[: len(page)]  # a page that fails is looked at again
            has_cut |= bool(floors)
            self.made_progress()
        self._troubles = dict(self.troubles())
        if self._went and now_s() - self._told_s[self._gave_way] >= _TELL_EVERY_S:
            facts: dict[str, Any] = {"streams": len(self._went), "entries": self._went.total()}
            event("stream_trimmed", first=min(self._went).decode(errors="replace"), **facts, gives_way=self._gave_way)
            self._told_s |= {False: now_s(), self._gave_way: now_s()}
            self._went, self._gave_way = Counter(), False
        is_at_rest = self._facts == before and not (self._gives_way or has_cut)
        return self._wait_s * (_AT_REST if is_at_rest else 1)

    def _floors(self, streams: Sequence[bytes]) -> dict[bytes, bytes]:
        floors: dict[bytes, bytes] = {}
        self._facts = look_at(self._link, [stream.decode() for stream in streams])
        for stream, facts in zip(streams, self._facts, strict=True):
            if isinstance(facts, CommandRefused):
                self._tell(stream, str(facts))
            if isinstance(facts, Exception):  # or it was destroyed just now
                continue
            only, wished = self._retention.archived_only, self._retention.wishes(facts, self._now_ms)
            wished = [] if self._gives_way else wished
            decision = decide(facts, archived_only=only, wished=wished, gathered_by=self._group)
            held_back = self._retention.held_back(facts, decision, self._now_ms)
            self._note(("HSET", "trim_keep_s", str(self._retention.keep_s), "trim_held_back", held_back))
            if isinstance(decision, Refused):
                self._tell(stream, decision.why)
            elif isinstance(decision, Cut):
                floors[stream] = decision.floor
            else:
                self._troubles.pop(stream, None)
        return floors

    def _cut(self, floors: Mapping[bytes, bytes]) -> None:
        """Cut these streams below their floors. The calls of one flight together cut about as much as one of
        ``Trimming.cut``: Redis does all of them before it does anything else."""
        names = {stream.decode(): floor for stream, floor in floors.items()}
        most = AT_ONCE_FOR_MEMORY if self._gives_way else AT_ONCE
        at_once = max(min(most, _LEAST_AT_ONCE), most // max(1, len(floors)))
        for page in cut_each(self._link, names, at_once, self._retention.archived_only, self._group):
            for stream, cut in zip(map(str.encode, page), page.values(), strict=True):
                if isinstance(cut, CommandRefused):
                    if "no such key" not in str(cut):
                        self._tell(stream, str(cut))
                    continue
                self._troubles.pop(stream, None)
                if isinstance(cut, int) and cut:  # else a reader needs it by now, or it is another stream
                    self._went[stream] += cut
                    self._gave_way |= self._gives_way
            self.made_progress()
            if self.stopping or (self._gives_way and not self._retention.gives_way(look_at_memory(self._link)[1])):
                return

    def _tell(self, stream: bytes, why: str) -> None:
        if self._troubles.get(stream) == why or (
            stream not in self._troubles and len(self._troubles) >= _MOST_TROUBLES
        ):
            return
        self._troubles[stream] = why
        event("trim_refused", level=ERROR, stream=stream.decode(errors="replace"), problem=why)

    def _note(self, note: tuple[str, ...]) -> None:
        """Note what the doctor tells. Full memory refuses it; what was cut counts."""
        if self._keys is not None and note and note != self._noted:
            [reply] = self._link.pipeline([(note[0], self._keys.position, *note[1:])])
            self._noted = () if isinstance(reply, Exception) else note


def _decode_reader_name(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _checkpoint(value: bytes) -> tuple[bytes | None, int]:
    words = value.split(b" ")
    try:
        int(words[0])
        milliseconds, _, sequence = words[1].partition(b"-")
        int(milliseconds), int(sequence)
        return words[1], int(words[2])
    except (IndexError, ValueError):
        return None, 0
