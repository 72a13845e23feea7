"""Ask Redis for all that the doctor judges, and how the gathering goes: which master has which share, what is behind,
and what needs a person. Nothing is written that stays; a refused question is noted with Redis' own words."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import orjson

from usher.common.base.clock import wall_ms
from usher.common.base.durations import moment_text
from usher.common.base.errors import GroupMissing, NotNow
from usher.common.base.text import info_lines
from usher.common.doctor.judgements import (
    BAD,
    OK,
    SOURCES,
    STREAM,
    WARN,
    Clock,
    DoctorFacts,
    DoctorFinding,
    Growth,
    MemoryUse,
    describe,
    examine_server,
    few,
    info_of,
    memory_of,
)
from usher.common.protocol.keys import HALTED, MASTER, Keys, LogKeys
from usher.common.protocol.mishaps import MISHAPS, losses_command, parse_losses, parse_mishaps
from usher.common.protocol.registration import parse
from usher.common.protocol.sources import SCOPED_TICKET_FIELD, SHARDS, SourceSelection, shard_of
from usher.common.protocol.stream_id import ZERO, Span, milliseconds, rank
from usher.common.redis.acl import AclProgram, programs
from usher.common.redis.client import Arg, CommandRefused, Link
from usher.common.redis.endpoints import CLUSTER, SENTINEL, mode
from usher.common.redis.replies import (
    TicketStream,
    cut_unread,
    facts_of,
    first_of,
    pairs,
    parse_leases,
    parse_span,
    redis_ms,
    scanned,
)

#: Most sources that are looked at; and of one call.
_MOST_LOOKED_AT, _PAGE = 5000, 100
#: Most entries of one source that are counted where Redis does not know their number.
_MOST_COUNTED = 100
_WORST = 5
#: A note that seems to hold for longer was made before Redis' clock was set back, and its master may be dead: no lease
#: is longer.
_LONGEST_NOTE_MS = 600_000
#: States that need a person. A listed stream that does not exist yet is none of them.
_BAD = frozenset({"not_a_stream", "ahead"})
#: Number of finished entries of the work stream that cannot be cut, because one below them is pending, from which on a
#: person must look.
_MOST_KEPT = 100_000


class SourcesReader:
    def __init__(self, link: Link, keys: Keys, sources: SourceSelection) -> None:
        self._link = link
        self._keys = keys
        self._sources = sources
        self._rows: list[dict[str, Any]] = []  # of the last overview; those that need a person first

    def overview(self) -> dict[str, Any]:
        """Return the number of sources that were gathered from or are listed, the entries not gathered yet (``lag``; of
        at most ``looked_at`` of them), the worst, the masters, and troubles by source."""
        masters, names = self._masters(), self._names()
        rows = [row for at in range(0, len(names), _PAGE) for row in self._look(names[at : at + _PAGE], masters)]
        troubles = {row["source"]: row["state"] for row in rows if row["state"] in _BAD}
        for source, outcome, words in (one for master in masters for one in master.pop("troubles")):
            troubles[source] = f"{outcome}: {words}" if words else outcome
        troubles |= self._held_back()
        looked_at, is_exact = {row["source"] for row in rows}, all(row["lag_is_exact"] for row in rows)
        rows += [_row(one.encode(), "not_gathered", 0, True, masters) for one in troubles if one not in looked_at]
        rows = [row | {"trouble": troubles.get(row["source"], "")} for row in rows]
        self._rows = sorted(rows, key=lambda row: (not row["trouble"], -row["lag"], row["source"]))
        listed_alone = len(set(self._sources.names) - looked_at)
        return {
            "sources": max(len(looked_at), self._link.call("HLEN", self._keys.gathered) - 1) + listed_alone,
            "looked_at": len(looked_at),
            "lag": sum(row["lag"] for row in rows),
            "lag_is_exact": is_exact and len(looked_at) < _MOST_LOOKED_AT,
            "worst": sorted((row for row in rows if row["lag"]), key=lambda row: -row["lag"])[:_WORST],
            "masters": masters,
            "troubles": troubles,
        }

    def rows(self, text: str, start: int, most: int) -> tuple[list[dict[str, Any]], int]:
        """Return ``most`` rows of the last overview with ``text`` in their name, from the ``start``-th on, and the
        number of all such rows. ``state``: ok, no_group (not looked at yet), gone, not_a_stream, ahead or not_gathered;
        ``trouble``: what needs a person, or ""."""
        fitting = [row for row in self._rows if text in row["source"]]
        return fitting[start : start + most], len(fitting)

    def _held_back(self) -> dict[str, str]:
        """Return the work stream when it grows because one entry stays pending: only what is below that entry is
        cut."""
        stream, group = self._keys.stream, self._keys.group
        length = self._link.call("XLEN", stream)
        if length < _MOST_KEPT:
            return {}
        try:
            oldest = self._link.call("XPENDING", stream, group, "-", "+", 1)
            # Few of these were not given to the group yet: gather.lua waits.
            kept = length - self._link.call("XPENDING", stream, group)[0]
        except GroupMissing:
            return {}
        if not oldest or kept < _MOST_KEPT:
            return {}
        entry_id, owner = oldest[0][:2]
        found = self._link.call("XRANGE", stream, entry_id, entry_id)
        ticket = found[0][1][3].decode(errors="replace") if found and found[0][1][2:3] == [SCOPED_TICKET_FIELD] else ""
        of_ticket = f" of ticket {ticket}" if ticket else ""
        why = f"{entry_id.decode()}{of_ticket} is pending under {owner.decode()}"
        return {stream: f"held_back: {kept:,} entries that are not pending are kept because {why}"}

    def _names(self) -> list[bytes]:
        names = dict.fromkeys(name.encode() for name in self._sources.names)
        pages = scanned(self._link, self._keys.gathered)
        gathered = (name for page in pages for name in page[::2] if name and name not in names)  # "" is gather.lua's
        return list(dict.fromkeys(itertools.islice(itertools.chain(names, gathered), _MOST_LOOKED_AT)))

    def _look(self, sources: Sequence[bytes], masters: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        flat = self._link.run("look_at_sources", sources, (self._keys.group, _MOST_COUNTED))
        for source, state, lag, more in zip(sources, flat[::3], flat[1::3], flat[2::3], strict=True):
            yield _row(source, state.decode(), lag, not more, masters)

    def _masters(self) -> list[dict[str, Any]]:
        """Return the masters that run, with the number of their shards, in the order in which they share them. A dead
        master stays noted until another one removes it."""
        notes = pairs(self._link.call("HGETALL", self._keys.shares))
        masters = []
        running = running_masters(notes, redis_ms(self._link))
        for at, holder in enumerate(running):
            says = orjson.loads(notes[holder].partition(b" ")[2])
            shown = {name: says[name] for name in ("url", "setting", "sources", "mode", "moved", "troubles")}
            masters.append({**shown, "shards": len(range(at, SHARDS, len(running)))})
        return masters


def _row(
    source: bytes, state: str, lag: int, lag_is_exact: bool, masters: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    master = masters[shard_of(source) % len(masters)]["url"] if masters else ""
    told = {"source": source.decode(errors="replace"), "lag": lag, "lag_is_exact": lag_is_exact}
    return told | {"master": master, "state": state}


def running_masters(notes: Mapping[bytes, bytes], now_ms: int) -> list[bytes]:
    """Return the masters that share the sources, in the order in which they do: those that noted so for a time to come
    (``<until when, in ms> <what it says>``). A shard belongs to the one at its number, modulo their number.

    >>> running_masters({b"b": b"2000 {}", b"a": b"2000 {}", b"dead": b"900 {}", b"odd": b"1a2b"}, 1000)
    [b'a', b'b']
    """
    heads = {master: note.partition(b" ")[0] for master, note in notes.items()}
    until_ms = {master: int(head) if head.isdigit() else 0 for master, head in heads.items()}  # 0: not one of ours
    return sorted(master for master, until in until_ms.items() if now_ms < until <= now_ms + _LONGEST_NOTE_MS)


T = TypeVar("T")

_SENTINEL_CHANNEL = "__sentinel__:hello"
#: Newest declared losses that are told; for so long they, and unread entries that were cut, are a reason to act.
_LOSSES, _RECENT_S = 5, 86_400
#: Milliseconds ahead of Redis' clock from which it went back, and from which an id was made by a sender.
_AHEAD_MS, _POISONED_MS = 1000, 3_600_000
#: Factor from milliseconds to epochs, fences and generations.
_NUMBERS_PER_MS = 1024
_LAST_RANK = (1 << 128) - 1
#: Shortest time over which a rate says anything, in ms.
_LEAST_MS = 60_000
#: Days of growth that Redis has room for, below which somebody must act if nothing is trimmed.
_SOON_DAYS = 7
#: So many times longer than the time between two runs the run log should hold.
_SPARE = 2
_SOONER = "prove more often (usher audit --every MINUTES prove), or raise USHER_RUN_LOG_LENGTH"
_FASTER = (
    "proving more often does not help: raise USHER_RUN_LOG_LENGTH, so that what each run costs, however little is new,"
    " is for more executions; if a run still takes longer than half of what the log holds, give it more cores, or Spark"
    " on a cluster (USHER_AUDIT_ENGINE=spark, USHER_AUDIT_SPARK_MASTER)"
)
#: Redis tries only a call of the right length: the first of these numbers of words behind it that it takes. They repeat
#: the key, for some commands take a second one.
_WORDS = (0, 1, 2, 4)


def collect(link: Link, keys: Keys, lease_ms: int, sources: SourceSelection | None = None) -> DoctorFacts:
    refused: dict[str, str] = {}
    rights = _allowed("ACL DRYRUN", refused, lambda: _rights(link, keys, sources)) or {}
    clock = _allowed("TIME", refused, lambda: _clock(link))
    facts = dataclasses.replace(_server(link, keys, refused), lease_ms=lease_ms, clock=clock, **rights)
    stream = _allowed(STREAM, refused, lambda: tuple(_Stream(link, keys, facts).findings()))
    if sources is None:
        return dataclasses.replace(facts, stream=stream)
    seen = _allowed(SOURCES, refused, SourcesReader(link, keys, sources).overview)
    return dataclasses.replace(facts, stream=stream, gathering=seen)


def _allowed(question: str, refused: dict[str, str], look: Callable[[], T]) -> T | None:
    try:
        return look()
    except CommandRefused as not_allowed:
        refused[question] = str(not_allowed).removeprefix("Redis: ")
        return None


def startup_findings(link: Link, keys: Keys) -> list[DoctorFinding]:
    """Return what is bad about the server behind ``link``; a program logs it when it starts, and goes on. Raises
    RedisTrouble."""
    return [found for found in examine_server(_server(link, keys, {})) if found.severity is BAD]


def _server(link: Link, keys: Keys, refused: dict[str, str]) -> DoctorFacts:
    info = _allowed("INFO", refused, lambda: link.call("INFO"))
    config = pairs(_allowed("CONFIG GET", refused, lambda: link.call("CONFIG", "GET", "*")) or [])
    told = {name.decode(): value.decode(errors="replace") for name, value in config.items()} | info_lines(info or b"")
    is_node = told.get("cluster_enabled") == "1"
    cluster = _allowed("CLUSTER INFO", refused, lambda: link.call("CLUSTER", "INFO")) if is_node else None
    [sentinels] = link.pipeline([("PUBSUB", "NUMSUB", _SENTINEL_CHANNEL)])
    return DoctorFacts(
        mode={SENTINEL: "sentinel", CLUSTER: "cluster"}.get(mode(link.url), "fixed"),
        told=told,
        sentinels=int(sentinels[1]) if isinstance(sentinels, list) else None,
        cluster=None if cluster is None else info_lines(cluster),
        unguarded=_unguarded(link, keys),
        refused=refused,
    )


def _unguarded(link: Link, keys: Keys) -> str | None:
    """Return why EXEC goes by no WATCH here, though leaders rely on it; "" when it does. None: this user may not try
    it, or nothing can be changed now."""
    key = keys.watched
    try:
        link.call("WATCH", key)
        connection = link.connections
        with Link(link.url, "usher:doctor") as other:
            changed = other.pipeline([("SET", key, "", "PX", 1000), ("DEL", key)])
        done, _ = link.transaction(connection, [])
    except (NotNow, CommandRefused) as refused:
        is_proxy = not isinstance(refused, NotNow) and "NOPERM" not in str(refused)
        return str(refused).removeprefix("Redis: ") if is_proxy else None
    if any(isinstance(reply, Exception) for reply in changed):
        return None
    return "" if done is None else "another connection changed a watched key, and EXEC ran"


def _clock(link: Link) -> Clock:
    before_s, before_ms = time.monotonic(), wall_ms()
    now_ms = redis_ms(link)
    trip_ms = (time.monotonic() - before_s) * 1000
    return Clock(now_ms, now_ms - before_ms - int(trip_ms / 2), trip_ms)


class _Stream:
    """The ticket stream, its group and its index at one moment, and what they mean: can the stream take messages, is it
    being read, are there leftovers."""

    def __init__(self, link: Link, keys: Keys, facts: DoctorFacts) -> None:
        self._link, self._keys, self._facts = link, keys, facts
        self._now_ms = facts.clock.redis_ms if facts.clock is not None else 0
        self._reader, self._group = TicketStream(link, keys), dict[bytes, Any]()
        self._pending: dict[str, list[str]] = {}  # state of a name in the group -> those with pending entries
        self._lag: int | None = 0  # None: some are unread, but their number is not known

    def findings(self) -> Iterator[DoctorFinding]:
        link, keys = self._link, self._keys
        try:
            self._entries = link.call("XLEN", keys.stream)
        except CommandRefused as refused:
            if "WRONGTYPE" not in str(refused):
                raise
            do = "set another USHER_TICKET_STREAM, or move that key away"
            yield BAD("stream", f"{keys.stream} is no stream", "producers and master get WRONGTYPE: nothing works", do)
            return
        self._of_stream, self._states = facts_of(link, keys.stream), _states(link, keys)
        self._counters = pairs(link.call("HGETALL", keys.counters))
        self._leader = bytes(link.call("GET", keys.leader) or b"").decode().rpartition(" ")[2]
        with contextlib.suppress(GroupMissing):
            self._read_group()
        if self._of_stream:
            lag = "unread not counted" if self._lag is None else f"{self._lag:,} unread"
            yield OK("stream", f"{keys.stream}: {self._entries:,} entries, {lag}", "producers can add to it")
        else:
            yield OK("stream", f"{keys.stream} does not exist yet", "the first message creates it")
        parts = (self._numbers, self._group_and_leader, self._consumers, self._log, self._mishaps, self._growth)
        yield from itertools.chain.from_iterable(part() for part in parts)
        yield from judge_proof(*_read_proof(link, keys))
        if letters := link.call("XLEN", keys.dead):
            yield WARN(
                "dead letters", f"{letters:,}", "messages that were given up, with their reasons", "usher dead list"
            )

    def _read_group(self) -> None:
        self._group = self._reader.group_facts()
        self._lag = self._group.get(b"lag")
        if self._lag is None:  # before 7.0, and after a trim in the middle, the number is not known unless it is 0
            unread = ("XRANGE", self._keys.stream, b"(" + self._group[b"last-delivered-id"], "+", "COUNT", 1)
            self._lag = None if self._link.call(*unread) else 0
        for name, pending in self._reader.pending_counts().items():
            if pending:
                text, state = name.decode(errors="replace"), "lost" if b":" in name else "unknown"
                state = "reserved" if name in (MASTER, HALTED) else self._states.get(text, state)
                self._pending.setdefault(state, []).append(f"{text} ({pending:,} pending)")

    def _numbers(self) -> Iterator[DoctorFinding]:
        """Judge ids, and the epochs, fences and generations that were given, by Redis' clock."""
        if self._facts.clock is None:
            return
        highest = max((int(number) for number in self._counters.values() if number.isdigit()), default=0)
        if (back_ms := highest // _NUMBERS_PER_MS - self._now_ms) > _AHEAD_MS:
            means = (
                "epochs and fencing tokens go on growing, and leases that were given before are shortened within"
                " seconds; new ids stay at the old time"
            )
            seen, do = f"by {back_ms / 1000:,.1f} s since the last number was given", "wait, or set the clock right"
            yield WARN("clock went back", seen, means, f"{do}; see that it is slewed, not set")
        if not self._of_stream:
            return
        last_id = self._of_stream[b"last-generated-id"]
        ahead_ms = (rank(last_id) >> 64) - self._now_ms
        seen = f"the last id is {last_id.decode()}"
        do = "stop the sender of such ids; then deploy/runbook.md, The stream takes no more ids"
        if rank(last_id) == _LAST_RANK:
            yield BAD("ids", seen, "no id is left: no message can ever be added again", do)
        elif ahead_ms > _POISONED_MS:
            means = "a sender chose an id of the future: all later ones are pinned to it, and times in them say nothing"
            yield BAD("ids", f"{seen}, {ahead_ms / 3_600_000:,.1f} hours ahead of Redis' clock", means, do)
        elif ahead_ms > _AHEAD_MS:
            seen = f"the last id is {ahead_ms / 1000:,.1f} s ahead of Redis' clock"
            means = "Redis' clock went back, or a sender chose this id; ids go on growing, so the order holds"
            yield WARN("ids", seen, means, "look at the clock of Redis' host")
        else:  # no right of Redis tells options of a command apart
            means = (
                "ids follow Redis' clock; whoever may XADD can end that with an id of their own, and cut with MAXLEN"
            )
            yield OK("ids", seen, means)

    def _waits(self) -> bool:
        return bool(self._pending) or self._lag != 0

    def _group_and_leader(self) -> Iterator[DoctorFinding]:
        if self._group:
            yield OK("group", f"{self._group[b'pending']:,} entries pending", "the group is there")
        elif self._reader.saved_position() is not None:
            means = (
                "the group or the stream was destroyed; a leader makes it again where it was and says what may repeat"
                " or is lost"
            )
            do = "see that a master runs, and look for `group_lost` in its log"
            yield (WARN if self._leader else BAD)("group", "the group is gone", means, do)
        elif self._entries:
            means = "no master has ever read this stream; the first one begins with its first entry"
            yield WARN(
                "group", "there is no group", means, "start a master; see that USHER_GROUP is the same everywhere"
            )
        if self._leader:
            yield OK("leader", self._leader, "a master reads and hands over")
        elif self._waits() or (self._entries and not self._group):
            yield BAD("leader", "none", "entries wait and are not handed over", "start a master")
        else:
            yield WARN("leader", "none", "nothing waits, but new entries would not be handed over", "start a master")

    def _consumers(self) -> Iterator[DoctorFinding]:
        if living := sum(state == "live" for state in self._states.values()):
            yield OK("consumers", f"{living} alive", "handlers can run")
        elif self._waits():
            yield BAD("consumers", "none is alive", "entries wait and cannot run; nothing is lost", "start consumers")
        else:
            yield WARN("consumers", "none is alive", "messages wait until one comes", "start consumers")
        if dead := self._pending.get("lost"):
            takes = "the leader takes" if self._leader else "no leader takes"
            means = f"their leases have ended; {takes} their entries back"
            do = "" if self._leader else "start a master"
            yield (WARN if self._leader else BAD)("dead consumers", few(dead), means, do)
        if strangers := self._pending.get("unknown"):
            means = (
                "another program has read from Usher's group; the sweep takes these entries back once they are idle"
                " (USHER_MIN_IDLE_SECONDS), and order may suffer"
            )
            yield WARN("strangers", few(strangers), means, "let other programs use a group of their own")

    def _log(self) -> Iterator[DoctorFinding]:
        """Judge the durability of an outbox, if a streamer writes the stream or a log consumer reads it: its rows go
        when Redis has answered, so what Redis loses after that exists nowhere else."""
        log, facts = LogKeys(self._keys.stream), self._facts
        if 1 not in self._link.pipeline([("EXISTS", log.checkpoints), ("EXISTS", log.counters)]):
            return
        fsync = facts.told.get("appendfsync") if facts.told.get("aof_enabled") != "0" else None
        seen = f"an outbox is streamed here, appendfsync {fsync or 'not known, or no append-only file'}"
        if fsync == "always":
            yield OK("log", seen, "what left the outbox is on disk")
            return
        means = "rows leave the outbox when Redis answers: a power loss may take messages that exist nowhere else"
        do = "set appendfsync always (deploy/redis.conf), or USHER_OUTBOX_WAIT_AOF with Redis 7.2 or later"
        yield WARN("log", seen, means, do)

    def _mishaps(self) -> Iterator[DoctorFinding]:
        """Judge what somebody did to the stream or its pending list by hand, and the newest declared losses: for a day
        they are a reason to act."""
        told = parse_mishaps([self._counters.get(name.encode()) for name in MISHAPS])
        counted, unread, now_s = self._counters.get(b"cut_at " + self._keys.stream.encode()), 0, self._now_ms / 1000
        if self._group:
            unread = cut_unread(self._group, self._of_stream, counted)
        if cut := told["unread_cut"] + unread:
            is_new = bool(unread) or now_s - told["unread_cut_s"] < _RECENT_S
            seen = f"{cut:,} were cut before they were read" + ("" if is_new else ", none of them in the last day")
            means = "these messages were sent and never handled, and they have no dead letter"
            do = "send them again; trim with `usher trim` alone: no MAXLEN or MINID in producers, no XTRIM"
            yield (BAD if is_new else OK)("unread entries", seen, means, do if is_new else "")
        elif self._of_stream and b"entries-added" not in self._of_stream:
            means = "entries that are cut before they are read leave no trace before Redis 7"
            yield OK("unread entries", "this server does not count added entries", means)
        for loss in parse_losses(*self._link.pipeline([losses_command(self._keys, _LOSSES)])):
            is_new = now_s - loss.ms / 1000 < _RECENT_S
            means = "the masters found it and wrote it down; the audit tells it from a promise that was broken"
            seen, do = f"{moment_text(loss.ms, 'seconds')}: {loss.describe()}", "see Lost group in the runbook"
            yield (WARN if is_new else OK)("declared loss", seen, means, do if is_new else "")

    def _growth(self) -> Iterator[DoctorFinding]:
        keep_s, held_back = self._link.call("HMGET", self._keys.position, "trim_keep_s", "trim_held_back")
        span = parse_span(self._of_stream) if self._of_stream else None
        grows = read_growth(self._link, self._keys.stream, self._entries, span, *look_at_memory(self._link))
        if grows is None and not held_back:
            return
        left = None if grows is None else grows.days_left
        seen = describe(grows) if grows is not None else "slowly"
        room = "" if left is None else f"; Redis has room for {left:,.1f} days of it"
        if keep_s is None:
            means, do = "no leader trims: finished entries stay", "set USHER_TRIM_KEEP of the masters, or `usher trim`"
        elif held_back:
            means, do = f"it is not trimmed: {held_back.decode(errors='replace')}", "`usher trim` shows who needs what"
        else:
            means, do = f"what nobody needs goes after {float(keep_s) / 3600:,.4g} h", ""
            means += ", and earlier when memory is needed"
        is_soon = bool(do) and left is not None and left < _SOON_DAYS
        yield (WARN if is_soon else OK)("growth", seen + room, means, do)


def _read_proof(link: Link, keys: Keys) -> list[dict[bytes, Any]]:
    """Return what is noted of the proof, and the facts of the run log; {} where nobody audits, or we may not look."""
    asked = [("HGETALL", keys.archived), ("XINFO", "STREAM", keys.runs), ("EXISTS", keys.audit)]
    *told, audited = link.pipeline(asked)
    noted, log = ({} if isinstance(one, Exception) else pairs(one) for one in told)
    return [noted, log if b"proven_until_ms" in noted or audited == 1 else {}]


def judge_proof(noted: Mapping[bytes, Any], log: Mapping[bytes, Any]) -> Iterator[DoctorFinding]:
    """Judge how much of the run log is not proven yet, if something was cut off it."""
    if not (first := first_of(log)):
        return
    archived, took_ms, every_ms = (
        noted.get(b"runs", ZERO),
        *(int(noted.get(name, 0)) for name in (b"proven_took_ms", b"proven_every_ms")),
    )
    is_behind = rank(archived) < rank(first)
    # Before Redis 7.0 Redis does not count: then the log was surely cut when what was archived last is gone.
    if not (log[b"entries-added"] > log[b"length"] if b"entries-added" in log else archived != ZERO and is_behind):
        return
    held_ms = (rank(log[b"last-generated-id"]) - rank(first)) >> 64
    held, is_slow = f"the run log holds {held_ms / 1000:,.0f} s", _SPARE * took_ms > held_ms
    took, do = f"took {took_ms / 1000:,.0f} s", _FASTER if is_slow else _SOONER
    if b"proven_until_ms" not in noted:
        means = "entries cut from the log between two audits cannot be proven"
        do = "let `usher audit --every 5 prove` run (the program proof), which proves all of history"
        yield WARN("proof", f"{held}, which is all that `usher audit` looks at", means, do)
        return
    ago = f"{max(0, wall_ms() - int(noted[b'proven_until_ms'])) / 1000:,.0f} s"
    if is_behind:
        seen = f"{held}, and the last proof is {ago} old" + (f"; it {took}" if is_slow else "")
        means = "executions since then may have been cut from the log before they were archived: they will not be"
        yield WARN("proof", seen, f"{means} proven", do)
    elif _SPARE * max(every_ms, took_ms) > held_ms:
        apart = f"{every_ms / 1000:,.0f} s apart"
        seen = f"{held}, and proofs are {apart}" + (f"; the last {took}" if is_slow else "")
        means = "with a little more traffic executions are cut from the log before they are archived: a hole in the"
        yield WARN("proof", seen, f"{means} proof", do)
    else:
        yield OK("proof", f"proven until {ago} ago; {held}", "no execution is cut before it is archived")


def look_at_memory(link: Link) -> tuple[int, MemoryUse | None]:
    [told] = link.pipeline([("INFO", "memory")])
    return redis_ms(link), memory_of(info_of(told))


def read_growth(
    link: Link, stream: str, entries: int, span: Span | None, now_ms: int, memory: MemoryUse | None
) -> Growth | None:
    """Return how fast a stream of so many ``entries`` grows; None when its first one is too young to tell."""
    age_ms = now_ms - milliseconds(span.first) if span is not None and span.first is not None else 0
    if age_ms < _LEAST_MS or not entries:
        return None
    [size] = link.pipeline([("MEMORY", "USAGE", stream)])
    told = Growth(1000 * entries / age_ms, size / entries if isinstance(size, int) else None, None)
    if memory is None or not told.bytes_per_day:
        return told
    return told._replace(days_left=max(0, memory.limit - memory.used) / told.bytes_per_day)


def _states(link: Link, keys: Keys) -> dict[str, str]:
    incarnations = []
    for name, stored in pairs(link.call("HGETALL", keys.consumers)).items():
        try:
            incarnations.append(parse(name, stored).incarnation)
        except ValueError:
            continue  # the registry reports it
    names = [*map(keys.lease, incarnations), *map(keys.unproven, incarnations)]
    found = [reply if isinstance(reply, bytes) else None for reply in link.pipeline([("GET", name) for name in names])]
    return {incarnation: state or "lost" for incarnation, state in zip(incarnations, parse_leases(found), strict=True)}


def _rights(link: Link, keys: Keys, sources: SourceSelection | None) -> dict[str, Any]:
    """Ask by ACL DRYRUN whether the user of this connection may run what the programs of common/redis/acl.py run.
    Nothing runs. Redis before 7.0 cannot be asked."""
    user = link.call("ACL", "WHOAMI").decode(errors="replace")
    link.call("ACL", "DRYRUN", user, "TIME")
    named = (*sources.names, *sources.patterns) if sources is not None else ()
    kinds = [program for program in programs(keys.stream, keys.group, named) if program.connects]
    calls = [(program.name, name, call) for program in kinds for name, call in _calls(program)]
    answers = link.pipeline(
        [("ACL", "DRYRUN", user, *call, *call[-1:] * more) for _, _, call in calls for more in _WORDS]
    )
    missing: dict[str, dict[str, None]] = {program.name: {} for program in kinds}
    for at, (program_name, command, _) in enumerate(calls):
        told = answers[at * len(_WORDS) : (at + 1) * len(_WORDS)]
        if next((one for one in told if isinstance(one, bytes)), b"OK") != b"OK":  # errors: the server does not know it
            missing[program_name][command] = None
    return {"user": user, "missing": {name: tuple(sorted(commands)) for name, commands in missing.items()}}


def _calls(program: AclProgram) -> Iterator[tuple[str, tuple[Arg, ...]]]:
    for name in program.sends:
        yield name.upper().replace("|", " "), tuple(name.upper().split("|"))
    for commands, patterns in program.grants:
        for at, pattern in enumerate(patterns):
            key = re.sub(r"\\(.)|[*?]", lambda found: found[1] or "1", pattern)
            for name in commands if at == 0 else commands[:1]:
                yield name.upper().replace("|", " "), _call(name, key)


def _call(name: str, key: str) -> tuple[Arg, ...]:
    words = tuple(name.upper().split("|"))
    if name in ("eval", "evalsha"):
        return (*words, "0" * 40, 1, key)
    if name in ("xread", "xreadgroup"):
        return (*words, *(("GROUP", "g", "c") if name == "xreadgroup" else ()), "STREAMS", key, "0")
    return (*words, key)
