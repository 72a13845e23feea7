"""Ask Redis for all that the doctor judges, and how the gathering goes: which master has which share, what is behind,
and what needs a person. Nothing is written that stays; a refused question is noted with Redis' own words."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import orjson

from usher.common.base.clock import wall_ms
from usher.common.base.durations import moment_text
from usher.common.base.errors import GroupMissing, NotNow
from usher.common.base.text import info_lines
from usher.common.doctor.judgements import (
    Clock,
    DoctorFacts,
    DoctorFinding,
    DoctorSeverity,
    Growth,
    MemoryUse,
    NameInGroup,
    ProofFacts,
    Rights,
    TicketStreamFacts,
    examine_server,
    growth,
    memory_of,
)
from usher.common.protocol.keys import HALTED, MASTER, Keys, LogKeys
from usher.common.protocol.mishaps import DeclaredLoss, Mishaps, losses_command, parse_losses, parse_mishaps
from usher.common.protocol.registration import parse
from usher.common.protocol.sources import SCOPED_TICKET_FIELD, SHARDS, SourceSelection, shard_of
from usher.common.protocol.stream_id import ZERO, Span, milliseconds, rank
from usher.common.redis.acl import AclProgram, programs
from usher.common.redis.client import Arg, CommandRefused, Link
from usher.common.redis.endpoints import CLUSTER, SENTINEL, mode
from usher.common.redis.replies import TicketStream, cut_unread, pairs, parse_leases, redis_ms, span_of

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


class _Look(NamedTuple):
    source: bytes
    state: str
    lag: int
    is_more: bool


class SourcesReader:
    def __init__(self, link: Link, keys: Keys, sources: SourceSelection) -> None:
        self._link = link
        self._keys = keys
        self._sources = sources
        self._rows: list[dict[str, Any]] = []  # of the last overview; those that need a person first

    def overview(self) -> dict[str, Any]:
        """Return the number of sources that were gathered from or are listed, the entries not gathered yet (``lag``; of
        at most ``looked_at`` of them), the worst, the masters, and troubles by source."""
        masters, urls = self._masters()
        names = self._names()
        looks = [look for at in range(0, len(names), _PAGE) for look in self._look(names[at : at + _PAGE])]
        worst = sorted((look for look in looks if look.lag), key=lambda look: -look.lag)[:_WORST]
        troubles = {_decode_source(look.source): look.state for look in looks if look.state in _BAD}
        for master in masters:
            troubles |= {
                source: f"{outcome}: {words}" if words else outcome for source, outcome, words in master.pop("troubles")
            }
        troubles |= self._held_back()
        looked_at = {_decode_source(look.source) for look in looks}
        others = [_Look(name.encode(), "not_gathered", 0, False) for name in troubles if name not in looked_at]
        rows = [
            self._row(look, urls) | {"state": look.state, "trouble": troubles.get(_decode_source(look.source), "")}
            for look in (*looks, *others)
        ]
        self._rows = sorted(rows, key=lambda row: (not row["trouble"], -row["lag"], row["source"]))
        listed_alone = len(set(self._sources.names) - looked_at)
        return {
            "sources": max(len(looks), self._link.call("HLEN", self._keys.gathered) - 1) + listed_alone,
            "looked_at": len(looks),
            "lag": sum(look.lag for look in looks),
            "lag_is_exact": not any(look.is_more for look in looks) and len(looks) < _MOST_LOOKED_AT,
            "worst": [self._row(look, urls) for look in worst],
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
        names = [name.encode() for name in self._sources.names]
        seen = dict.fromkeys(itertools.chain(names, self._gathered()))
        return list(itertools.islice(seen, _MOST_LOOKED_AT))

    def _gathered(self) -> Iterator[bytes]:
        cursor, count = b"0", 0
        while count < _MOST_LOOKED_AT:
            cursor, flat = self._link.call("HSCAN", self._keys.gathered, cursor, "COUNT", 1000)
            fields = [name for name in flat[::2] if name]  # "" is gather.lua's own
            count += len(fields)
            yield from fields
            if cursor == b"0":
                return

    def _look(self, sources: Sequence[bytes]) -> Iterator[_Look]:
        flat = self._link.run("look_at_sources", sources, (self._keys.group, _MOST_COUNTED))
        for source, state, lag, more in zip(sources, flat[::3], flat[1::3], flat[2::3], strict=True):
            yield _Look(source, state.decode(), lag, bool(more))

    def _masters(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the masters that run, with the number of their shards; and their URLs in the order in which they share
        the shards. A dead master stays noted until another one removes it."""
        notes = pairs(self._link.call("HGETALL", self._keys.shares))
        masters = []
        running = running_masters(notes, redis_ms(self._link))
        for at, holder in enumerate(running):
            says = orjson.loads(notes[holder].partition(b" ")[2])
            shown = {name: says[name] for name in ("url", "setting", "sources", "mode", "moved", "troubles")}
            masters.append({**shown, "shards": len(range(at, SHARDS, len(running)))})
        return masters, [master["url"] for master in masters]

    @staticmethod
    def _row(look: _Look, urls: list[str]) -> dict[str, Any]:
        return {
            "source": _decode_source(look.source),
            "lag": look.lag,
            "lag_is_exact": not look.is_more,
            "master": urls[shard_of(look.source) % len(urls)] if urls else "",
        }


def running_masters(notes: Mapping[bytes, bytes], now_ms: int) -> list[bytes]:
    """Return the masters that share the sources, in the order in which they do: those that noted so for a time to come
    (``<until when, in ms> <what it says>``). A shard belongs to the one at its number, modulo their number.

    >>> running_masters({b"b": b"2000 {}", b"a": b"2000 {}", b"dead": b"900 {}", b"odd": b"1a2b"}, 1000)
    [b'a', b'b']
    """
    heads = {master: note.partition(b" ")[0] for master, note in notes.items()}
    until_ms = {master: int(head) if head.isdigit() else 0 for master, head in heads.items()}  # 0: not one of ours
    return sorted(master for master, until in until_ms.items() if now_ms < until <= now_ms + _LONGEST_NOTE_MS)


def _decode_source(source: bytes) -> str:
    return source.decode(errors="replace")


T = TypeVar("T")

_SETTINGS = (
    "appendonly",
    "appendfsync",
    "no-appendfsync-on-rewrite",
    "save",
    "stop-writes-on-bgsave-error",
    "maxmemory-policy",
    "maxclients",
    "min-replicas-to-write",
    "busy-reply-threshold",
    "lua-time-limit",
    "timeout",
)
_SENTINEL_CHANNEL = "__sentinel__:hello"
#: Number of pending entries among which the longest idle one is sought.
_MOST_IDLE = 100
#: Newest declared losses that are told.
_LOSSES = 5
#: Redis tries only a call of the right length: so many words follow the key. Of all other commands there may be more.
_WORDS = {
    **dict.fromkeys(("get", "pttl", "hgetall", "hlen", "zcard", "type", "xlen", "del", "exists", "mget", "watch"), 0),
    **dict.fromkeys(("xinfo|stream", "xinfo|groups", "memory|usage", "unlink"), 0),
    **dict.fromkeys(("hget", "hexists", "zscore", "xinfo|consumers"), 1),
    **dict.fromkeys(("hsetnx", "xgroup|create", "xgroup|setid", "xgroup|delconsumer"), 2),
}
_OTHER_WORDS = 4


def collect(link: Link, keys: Keys, lease_ms: int, sources: SourceSelection | None = None) -> DoctorFacts:
    refused: dict[str, str] = {}
    return dataclasses.replace(
        _server(link, keys, refused),
        lease_ms=lease_ms,
        rights=_rights(link, keys, sources),
        stream=_allowed("stream", refused, lambda: _stream(link, keys)),
        gathering=None
        if sources is None
        else _allowed("sources", refused, lambda: SourcesReader(link, keys, sources).overview()),
        clock=_clock(link, refused),
    )


def _allowed(question: str, refused: dict[str, str], look: Callable[[], T]) -> T | None:
    try:
        return look()
    except CommandRefused as not_allowed:
        refused[question] = str(not_allowed).removeprefix("Redis: ")
        return None


def startup_findings(link: Link, keys: Keys) -> list[DoctorFinding]:
    """Return what is bad about the server behind ``link``; a program logs it when it starts, and goes on. Raises
    RedisTrouble."""
    return [found for found in examine_server(_server(link, keys, {})) if found.severity is DoctorSeverity.BAD]


def _server(link: Link, keys: Keys, refused: dict[str, str]) -> DoctorFacts:
    info, sentinels, *settings = link.pipeline(
        [("INFO",), ("PUBSUB", "NUMSUB", _SENTINEL_CHANNEL), *(("CONFIG", "GET", name) for name in _SETTINGS)]
    )
    told = info_lines(info) if _is_told(info, "INFO", refused) else None
    cluster = None
    if told is not None and told.get("cluster_enabled") == "1":
        [reply] = link.pipeline([("CLUSTER", "INFO")])
        cluster = info_lines(reply) if _is_told(reply, "CLUSTER INFO", refused) else None
    return DoctorFacts(
        mode={SENTINEL: "sentinel", CLUSTER: "cluster"}.get(mode(link.url), "fixed"),
        info=told,
        config=_settings(settings, refused),
        sentinels=int(sentinels[1]) if isinstance(sentinels, list) else None,
        cluster=cluster,
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


def _settings(replies: list[Any], refused: dict[str, str]) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for reply in replies:
        if not _is_told(reply, "CONFIG GET", refused):
            return None
        found.update({name.decode(): value.decode(errors="replace") for name, value in pairs(reply).items()})
    return found


def _is_told(reply: Any, question: str, refused: dict[str, str]) -> bool:
    if isinstance(reply, NotNow):
        raise reply
    if isinstance(reply, Exception):
        refused[question] = str(reply).removeprefix("Redis: ")
        return False
    return True


def _clock(link: Link, refused: dict[str, str]) -> Clock | None:
    before_s, before_ms = time.monotonic(), wall_ms()
    [reply] = link.pipeline([("TIME",)])
    trip_ms = (time.monotonic() - before_s) * 1000
    if not _is_told(reply, "TIME", refused):
        return None
    now_ms = int(reply[0]) * 1000 + int(reply[1]) // 1000
    return Clock(now_ms, now_ms - before_ms - int(trip_ms / 2), trip_ms)


def _stream(link: Link, keys: Keys) -> TicketStreamFacts:
    if wrong := _wrong_type(link, keys.stream):
        return TicketStreamFacts(keys.stream, wrong_type=wrong)
    reader = TicketStream(link, keys)
    span = span_of(link, keys.stream)
    log_keys = LogKeys(keys.stream)
    counters = pairs(link.call("HGETALL", keys.counters))
    leader = bytes(link.call("GET", keys.leader) or b"").decode().rpartition(" ")[2]
    states = _states(link, keys)
    names: tuple[NameInGroup, ...] = ()
    lag: int | None = 0
    idle_ms = cut = 0
    of_stream = pairs(link.call("XINFO", "STREAM", keys.stream)) if span else {}
    entries = link.call("XLEN", keys.stream)
    trims_after_s, held_back = link.call("HMGET", keys.position, "trim_keep_s", "trim_held_back")
    [told_losses] = link.pipeline([losses_command(keys, _LOSSES)])
    losses: list[DeclaredLoss] = parse_losses(told_losses)
    has_group = True
    try:
        facts = reader.group_facts()
        lag = facts.get(b"lag")
        if lag is None:  # before 7.0, and after a trim in the middle, the number is not known unless it is 0
            lag = None if link.call("XRANGE", keys.stream, b"(" + facts[b"last-delivered-id"], "+", "COUNT", 1) else 0
        names = tuple(
            NameInGroup(name.decode(errors="replace"), _state(name, states), pending)
            for name, pending in reader.group_consumers()
        )
        living = [name for name, state in states.items() if state != "lost"]
        pages = link.pipeline([("XPENDING", keys.stream, keys.group, "-", "+", _MOST_IDLE, name) for name in living])
        idle_ms = max((row[2] for page in pages if isinstance(page, list) for row in page), default=0)
        cut = cut_unread(facts, of_stream, counters.get(b"cut_at " + keys.stream.encode()))
    except GroupMissing:
        has_group = False
    return TicketStreamFacts(
        name=keys.stream,
        last_generated=span.last_generated.decode() if span else "",
        entries=entries,
        has_group=has_group,
        position_saved=reader.saved_position() is not None,
        lag=lag,
        names=names,
        leader=leader,
        living=sum(state == "live" for state in states.values()),
        idle_ms=idle_ms,
        highest_number=max((int(number) for number in counters.values() if number.isdigit()), default=0),
        dead_letters=link.call("XLEN", keys.dead),
        is_log=any(
            reply == 1
            for reply in link.pipeline([("EXISTS", key) for key in (log_keys.checkpoints, log_keys.counters)])
        ),
        mishaps=parse_mishaps([counters.get(name.encode()) for name in Mishaps._fields]),
        unread_cut=cut,
        counts_added=not of_stream or b"entries-added" in of_stream,
        proof=read_proof(link, keys),
        grows=read_growth(link, keys.stream, entries, span, *look_at_memory(link)),
        trims_after_s=None if trims_after_s is None else float(trims_after_s),
        trim_held_back=(held_back or b"").decode(errors="replace"),
        losses=tuple((moment_text(loss.ms, "seconds"), loss) for loss in losses),
    )


def read_proof(link: Link, keys: Keys) -> ProofFacts | None:
    """Return the facts; None when nobody audits, the log was never cut, or we may not look."""
    told, runs, audited = link.pipeline(
        [("HGETALL", keys.archived), ("XINFO", "STREAM", keys.runs), ("EXISTS", keys.audit)]
    )
    noted: dict[bytes, Any] = {} if isinstance(told, Exception) else pairs(told)
    log: dict[bytes, Any] = {} if isinstance(runs, Exception) else pairs(runs)
    until_ms = noted.get(b"proven_until_ms")
    if (until_ms is None and audited != 1) or not log.get(b"first-entry"):
        return None
    archived, first = noted.get(b"runs", ZERO), log[b"first-entry"][0]
    # Before Redis 7.0 Redis does not count: then the log was surely cut when what was archived last is gone.
    was_cut = (
        log[b"entries-added"] > log[b"length"]
        if b"entries-added" in log
        else archived != ZERO and rank(archived) < rank(first)
    )
    if not was_cut:
        return None
    return ProofFacts(
        archived,
        None if until_ms is None else max(0, wall_ms() - int(until_ms)),
        int(noted.get(b"proven_every_ms", 0)),
        first,
        log[b"last-generated-id"],
        int(noted.get(b"proven_took_ms", 0)),
    )


def look_at_memory(link: Link) -> tuple[int, MemoryUse | None]:
    moment, told = link.pipeline([("TIME",), ("INFO", "memory")])
    if isinstance(moment, Exception):
        raise moment
    return int(moment[0]) * 1000 + int(moment[1]) // 1000, memory_of(told)


def read_growth(
    link: Link, stream: str, entries: int, span: Span | None, now_ms: int, memory: MemoryUse | None
) -> Growth | None:
    if span is None or span.first is None:
        return None
    [size] = link.pipeline([("MEMORY", "USAGE", stream)])
    return growth(entries, milliseconds(span.first), now_ms, size if isinstance(size, int) else None, memory)


def _wrong_type(link: Link, stream: str) -> str:
    """Return the type of the key if it is no stream. Users with few rights may not ask for its TYPE, and need not."""
    try:
        link.call("XLEN", stream)
        return ""
    except CommandRefused as refused:
        if "WRONGTYPE" not in str(refused):
            raise
    [kind] = link.pipeline([("TYPE", stream)])
    return kind.decode() if isinstance(kind, bytes) else "key of another type"


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


def _state(name: bytes, states: dict[str, str]) -> str:
    if name in (MASTER, HALTED):
        return "reserved"
    return states.get(name.decode(errors="replace"), "lost" if b":" in name else "unknown")


def _rights(link: Link, keys: Keys, sources: SourceSelection | None) -> Rights:
    """Ask by ACL DRYRUN whether the user of this connection may run what the programs of common/redis/acl.py run.
    Nothing runs. Redis before 7.0 cannot be asked."""
    [who] = link.pipeline([("ACL", "WHOAMI")])
    if not isinstance(who, bytes):
        return Rights(None, None, str(who))
    user = who.decode(errors="replace")
    named = (*sources.names, *sources.patterns) if sources is not None else ()
    kinds = [program for program in programs(keys.stream, keys.group, named) if program.connects]
    calls = [(program.name, name, call) for program in kinds for name, call in _calls(program)]
    told, *answers = link.pipeline(
        [("ACL", "DRYRUN", user, *call) for call in (("TIME",), *(call[2] for call in calls))]
    )
    if isinstance(told, Exception):
        return Rights(user, None, str(told))
    missing: dict[str, dict[str, None]] = {program.name: {} for program in kinds}
    for (program_name, command, _), answer in zip(calls, answers, strict=True):
        if isinstance(answer, bytes) and answer != b"OK":  # an error: the server does not know it
            missing[program_name][command] = None
    return Rights(user, {name: tuple(sorted(commands)) for name, commands in missing.items()})


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
    return (*words, key, *("0",) * _WORDS.get(name, _OTHER_WORDS))
