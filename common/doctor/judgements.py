"""The doctor's facts about a Redis and a ticket stream in it (None: "could not be asked"), and what they mean: one
redis-server, its replicas, failover and clock, the gathering. Pure: facts in, findings out;
``promise`` says what holds here when something fails."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from usher.common.base.text import info_lines

#: Share of the memory from which it is time to act; when all of it is used, sends are refused.
NEARLY_FULL = 0.8
_DAY_S = 86_400


class DoctorSeverity(enum.Enum):
    """Severities. BAD: the promise does not hold, or work is stuck. WARN: it costs something, or soon will.
    UNKNOWN: the question is forbidden. From the mildest to the worst; calling one makes a finding of it."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARN = "warn"
    BAD = "bad"

    def __call__(self, check: str, seen: str, means: str, do: str = "") -> DoctorFinding:
        return DoctorFinding(check, self, seen, means, do)


@dataclass(frozen=True)
class DoctorFinding:
    """The result of a check: what was seen, what it means for the promise, and what to do about it ("" when there is
    nothing to do)."""

    check: str
    severity: DoctorSeverity
    seen: str
    means: str
    do: str = ""


class Clock(NamedTuple):
    """Redis' clock beside ours, how far it is ahead, and the round trip to Redis. Milliseconds."""

    redis_ms: int
    ahead_ms: int
    trip_ms: float = 0.0


@dataclass(frozen=True)
class DoctorFacts:
    """The facts about the server, and what was found of stream and gathering. ``told``: names and values of INFO and of
    CONFIG GET. ``refused``: the question, and Redis' words.

    ``mode`` is how the URL finds the server: fixed, sentinel or cluster. ``missing``: by program (common/redis/acl.py)
    the commands that it needs and the URL's ``user`` may not run. ``sentinels``: number of sentinels that listen at
    this server. ``unguarded``: why a change of a watched key keeps no EXEC from running, "" when it does. ``stream``:
    findings about the ticket stream. ``gathering``: as common/doctor/collector.py reports it; None when there is one
    ticket stream, or it could not be asked.
    """

    mode: str = "fixed"
    lease_ms: int = 10_000
    told: Mapping[str, str] = field(default_factory=dict)
    clock: Clock | None = None
    user: str = ""
    missing: Mapping[str, tuple[str, ...]] | None = None
    sentinels: int | None = None
    cluster: Mapping[str, str] | None = None
    unguarded: str | None = None
    stream: tuple[DoctorFinding, ...] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    gathering: Mapping[str, Any] | None = None

    def known(self, name: str) -> Any:
        """Return the fact of that name; None: it could not be asked."""
        found = getattr(self, name, None)
        return self.told.get(name) if found is None else found

    def number(self, name: str) -> int | None:
        value = self.told.get(name, "")
        return int(value) if value.lstrip("-").isdecimal() else None

    @property
    def memory(self) -> MemoryUse | None:
        return memory_of(self.told)


class MemoryUse(NamedTuple):
    """Bytes used, and the most there may be: maxmemory, else the memory of the machine (``is_set`` False)."""

    used: int
    limit: int
    is_set: bool

    @property
    def share(self) -> float:
        return self.used / self.limit


class Growth(NamedTuple):
    """Entries per second, bytes of each, and the days until memory is full if none of them goes; None: not known."""

    per_second: float
    entry_bytes: float | None
    days_left: float | None

    @property
    def bytes_per_day(self) -> float:
        return _DAY_S * self.per_second * (self.entry_bytes or 0.0)


def info_of(*replies: Any) -> dict[str, str]:
    return {name: value for reply in replies if isinstance(reply, bytes) for name, value in info_lines(reply).items()}


def memory_of(info: Mapping[str, str]) -> MemoryUse | None:
    used, uncounted, limit, machine = (
        int(info.get(name) or 0)
        for name in ("used_memory", "mem_not_counted_for_evict", "maxmemory", "total_system_memory")
    )
    return MemoryUse(used - uncounted, limit or machine, limit > 0) if used and (limit or machine) else None


def memory_share(*replies: Any) -> float | None:
    memory = memory_of(info_of(*replies))
    return None if memory is None else memory.share


def describe(grows: Growth) -> str:
    """
    >>> describe(Growth(1000.0, 119.6, 0.5))
    '9.62 GiB a day: 1,000.0 messages per second, 120 bytes each'
    """
    if grows.entry_bytes is None:
        return f"{grows.per_second:,.1f} messages per second"
    day, unit = grows.bytes_per_day / 2**20, "MiB"
    if day >= 1024:
        day, unit = day / 1024, "GiB"
    return f"{day:,.2f} {unit} a day: {grows.per_second:,.1f} messages per second, {grows.entry_bytes:,.0f} bytes each"


OK, UNKNOWN, WARN, BAD = DoctorSeverity
#: Questions that are several.
STREAM, SOURCES = "XINFO and reading Usher's keys", "reading the sources"
#: Redis' default of busy-reply-threshold, in ms.
_BUSY_MS = 5000
#: The commands whose replies ``write_trouble`` reads. One section each: only Redis 7 takes several in one command.
INFO_COMMANDS = (("INFO", "persistence"), ("INFO", "memory"), ("INFO", "replication"))
#: Difference of two machines' clocks, in ms, from which displayed times are misleading.
_SKEW_MS = 2000
_SHOWN = 5
#: By check the question whose answer tells it, its name there, and what it means that nobody knows.
_ASKED: Mapping[str, tuple[str, str, str]] = {
    "version": ("INFO", "redis_version", "old versions lose entries of consumer groups"),
    "append-only file": ("INFO", "aof_enabled", "without one a restart of Redis loses messages"),
    "fsync": ("CONFIG GET", "appendfsync", "how much a power loss loses is not known"),
    "eviction": ("INFO", "maxmemory_policy", "with any policy but noeviction Redis deletes keys of its own accord"),
    "memory": ("INFO", "memory", "at full memory nothing can be sent"),
    "rights": ("ACL DRYRUN", "missing", "whether this user may run all that Usher needs shows only at work"),
    "role": ("INFO", "role", "a replica would refuse every write"),
    "clock": ("TIME", "clock", "leases and ids rest on Redis' clock"),
    "stream": (STREAM, "stream", "nothing is known of the ticket stream"),
    "sources": (SOURCES, "gathering", "nothing is known of the streams that are gathered"),
}
#: By appendfsync: what is lost when redis-server is killed, and when its host loses power.
_SLOW = "no loss was seen in tests; a write that waits for a slow disk may be lost"
_LOST = {
    "always": ("nothing is lost", "nothing is lost, if the disk keeps its word"),
    "everysec": (_SLOW, "up to about a second of sends and acknowledgements is lost: resend; repeats are fenced"),
    "no": (_SLOW, "what the kernel had not written is lost, half a minute or more"),
}
#: What troubles of sources mean, and what to do.
_OF_SOURCES: Mapping[str, tuple[str, str]] = {
    "not_a_stream": (
        "the key of this name is not a stream",
        "move that key away, or take the name out of USHER_TICKET_STREAM",
    ),
    "ahead": (
        "its group is beyond its last id, so none of its entries will arrive",
        "XGROUP SETID it back to the last id that was gathered (HGET <work stream>:<group>:gathered <source>)",
    ),
    "before": (
        "its group has pending entries of the time when it was a ticket stream of its own; they must be done first",
        "run a master and a consumer with USHER_TICKET_STREAM set to it alone until nothing is pending",
    ),
    "held_back": (
        "a ticket that is halted or paused for long keeps all that is done above its oldest message in the work stream,"
        " until Redis is full",
        "let that ticket go on: `usher dead redrive` or `usher dead drop` when it is halted, `usher resume` when it is"
        " paused",
    ),
    "not_trimmed": (
        "it is not trimmed until a person has looked, so it grows; it is still gathered",
        "do what its words say; `usher trim --ticket-stream SOURCE` shows who reads it, and takes --forget",
    ),
    "refused": ("Redis does not let its entries be moved", "allow the command that its words name to this user"),
}


class WriteTrouble(NamedTuple):
    """A reason against writing. ``is_certain``: Redis refuses writes; else it does so only with a setting that INFO
    does not show."""

    text: str
    is_certain: bool


def examine_server(facts: DoctorFacts) -> list[DoctorFinding]:
    of_server = (_version, _append_only_file, _disk, _eviction, _memory, _rights, _transactions, _times)
    return [found for judge in (*of_server, _role, _replicas, _failover, _clock) for found in judge(facts)]


def examine(facts: DoctorFacts) -> list[DoctorFinding]:
    return [*examine_server(facts), *(facts.stream or ()), *_gathering(facts), *_not_told(facts)]


def _not_told(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    for check, (question, name, means) in _ASKED.items():
        if facts.known(name) is None and (name != "gathering" or question in facts.refused):
            do = f"allow {question} to this user, or ask the operators of this Redis"
            yield UNKNOWN(check, facts.refused.get(question, f"{question} does not tell it"), means, do)


def worst(findings: Iterable[DoctorFinding]) -> DoctorSeverity:
    return max((finding.severity for finding in findings), key=list(DoctorSeverity).index, default=OK)


def report(url: str, facts: DoctorFacts, findings: Iterable[DoctorFinding]) -> dict[str, Any]:
    """Return the document of the doctor about the Redis at ``url``, which has no password."""
    return {
        "redis": url,
        "verdict": worst(findings).value,
        "findings": [asdict(finding) | {"severity": finding.severity.value} for finding in findings],
        "promise": [{"when": fault, "what": holds} for fault, holds in promise(facts).items()],
    }


def promise(facts: DoctorFacts) -> dict[str, str]:
    """Return what holds with this Redis, by the fault that comes."""
    killed, powerless = _lost(facts)
    held = "nothing is lost, the order holds, one effective execution at a time"
    rows = {"a program of Usher is killed, paused or cut off": held, "redis-server is killed": killed}
    rows["its host loses power"] = powerless
    if facts.number("connected_slaves") or facts.mode != "fixed":
        tail = "sends and acknowledgements that were not copied yet are lost: resend; repeats are fenced, order holds"
        rows["a replica is promoted"] = f"{tail} for the rest"
    return rows


def _lost(facts: DoctorFacts) -> tuple[str, str]:
    """Return what is lost when redis-server is killed, and when its host loses power."""
    has_file = facts.told.get("aof_enabled")
    if has_file == "0":
        of_all = "all that Redis had is lost"
        return (of_all if facts.told.get("save") == "" else "all since the last snapshot of Redis is lost, if any",) * 2
    known = _LOST.get(facts.told.get("appendfsync") or "", (_LOST["no"][0], "not known"))
    return known if has_file else ("not known", "not known")


def write_trouble(*replies: Any) -> WriteTrouble | None:
    """Return what the replies of ``INFO_COMMANDS`` say against writing; None when they say nothing, or Redis does not
    tell this user."""
    told = info_of(*replies)
    facts = DoctorFacts(told=told)
    for found in (*_disk(facts), *_memory(facts), *_replicas(facts)) if told else ():
        if found.severity is BAD or found.seen.startswith("rdb_last_bgsave"):
            return WriteTrouble(f"Redis, {found.check}: {found.means}; {found.do}", found.severity is BAD)
    return None


def version_of(info: Mapping[str, str]) -> tuple[str, tuple[int, ...]] | None:
    """Return product and version in INFO. A Valkey also reports the Redis that it is compatible with; its own version
    counts.

    >>> version_of({"redis_version": "7.2.4", "valkey_version": "8.1.3"}), version_of({"redis_version": "8.0-rc1"})
    (('Valkey', (8, 1, 3)), ('Redis', (8, 0)))
    """
    for product in ("valkey", "redis"):
        if told := info.get(f"{product}_version"):
            return product.capitalize(), tuple(int(part) for part in told.split("-")[0].split(".") if part.isdecimal())
    return None


def version_text(info: Mapping[str, str]) -> str:
    product, number = version_of(info) or ("Redis", ())
    return f"{product} {'.'.join(map(str, number))}"


# ---- the server ------------------------------------------------------------------------------------


def _version(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    """Judge by the lowest version that Usher works with; known holes are for those who operate Redis
    (docs/operate.md)."""
    if (found := version_of(facts.told)) is None:
        return
    product, number = found
    severity, means = OK, "new enough"
    if product == "Redis" and number < (6, 2):
        severity, means = BAD, "it has no XAUTOCLAIM: Usher cannot work"
    elif product == "Redis" and number < (6, 2, 14):
        severity, means = WARN, "it has bugs in consumer groups and scripts, and Usher is not tried with it"
    elif product == "Redis" and (7, 0) <= number < (7, 0, 5):
        severity, means = BAD, "XAUTOCLAIM, which the sweep uses, can overflow the heap (CVE-2022-31144)"
    do = "" if severity is OK else "update Redis to at least 6.2.14 or 7.0.5"
    yield severity("version", version_text(facts.told), means, do)


def _append_only_file(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    enabled = facts.told.get("aof_enabled")
    if enabled is None:
        return
    if enabled == "0":
        wiped = "; with replicas, an automatic restart wipes them too" if facts.number("connected_slaves") else ""
        yield BAD(
            "append-only file", "appendonly no", f"when it restarts, {_lost(facts)[0]}{wiped}", "set appendonly yes"
        )
        return
    yield OK("append-only file", "appendonly yes", "Redis comes back with what it had")
    if (fsync := facts.told.get("appendfsync")) is not None:
        means, do = "killed: {}; its host without power: {}".format(*_lost(facts)), "set appendfsync everysec"
        is_bad = fsync == "no"
        yield (WARN if is_bad else OK)("fsync", f"appendfsync {fsync}", means, do if is_bad else "")
    if facts.told.get("no-appendfsync-on-rewrite") == "yes":
        means = "while the file is rewritten nothing is brought to disk: a power loss may then take up to half a minute"
        seen, do = "no-appendfsync-on-rewrite yes", "set no-appendfsync-on-rewrite no"
        yield WARN("fsync while rewriting", seen, means, do)
    if delayed := facts.number("aof_delayed_fsync"):
        means = "the disk is too slow for one fsync a second: a power loss may take more than a second"
        seen, do = f"{delayed:,} delayed since the start", "give Redis a faster disk, or fewer neighbours on it"
        yield WARN("fsync delays", seen, means, do)


def _disk(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    """Yield failed writes: with an append-only file, or with snapshots, Redis then refuses all further ones (MISCONF).
    An old failure of what is switched off means nothing."""
    saves, has_failed = facts.told.get("save"), False
    stops = bool(saves) and facts.told.get("stop-writes-on-bgsave-error") != "no"
    refuses = "Redis refuses writes: nothing can be sent, handed over or acknowledged until the disk works again"
    grows = "the append-only file could not be rewritten: it grows, and the disk may be full"
    failed = "the last snapshot failed, and" if stops else "the last snapshot failed; where snapshots are scheduled"
    for name, is_off, severity, means in (
        ("aof_last_write_status", facts.told.get("aof_enabled") == "0", BAD, refuses),
        ("aof_last_bgrewrite_status", False, WARN, grows),
        ("rdb_last_bgsave_status", saves == "", BAD if stops else WARN, f"{failed} Redis refuses writes for it"),
    ):
        if (facts.told.get(name) or "ok") != "ok" and not is_off:
            has_failed = True
            yield severity("disk", f"{name} {facts.told.get(name)}", means, "look at the disk of Redis and at its log")
    if not has_failed and "rdb_last_bgsave_status" in facts.told:
        yield OK("disk", "the last writes succeeded", "Redis accepts writes")


def _eviction(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    policy, evicted = facts.told.get("maxmemory_policy"), facts.number("evicted_keys")
    if policy is None:
        return
    if policy != "noeviction":
        what = "leases and the leader key" if policy.startswith("volatile") else "the stream, the index or leases"
        means = f"at full memory Redis deletes {what}: messages are lost, or run twice at the same time"
        seen = f"maxmemory-policy {policy}, {evicted or 0:,} keys deleted so far"
        yield BAD("eviction", seen, means, "set maxmemory-policy noeviction")
    elif evicted:
        means = "keys were deleted before the policy was changed; they may have been ours"
        seen = f"noeviction, but {evicted:,} keys deleted since the start"
        yield WARN("eviction", seen, means, "compare sent messages with handled ones")
    else:
        yield OK("eviction", "maxmemory-policy noeviction", "Redis deletes nothing of its own accord")


def _memory(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    if (memory := facts.memory) is None:
        return
    of = "maxmemory" if memory.is_set else "the machine"
    seen = f"{memory.used / 2**20:,.1f} MiB of {memory.limit / 2**20:,.1f} MiB ({of})"
    policy = facts.told.get("maxmemory_policy") or "noeviction"
    if memory.is_set and memory.share >= 1 and policy == "noeviction":
        means = "nothing can be sent or handed over; messages in processing are still acknowledged; nothing is lost"
        yield BAD("memory", seen, means, "trim finished entries, or raise maxmemory")
    elif memory.share >= NEARLY_FULL:
        means = "soon nothing can be sent any more" if memory.is_set else "soon the kernel may kill redis-server"
        yield WARN("memory", seen, means, "trim finished entries, or give Redis more memory")
    else:
        yield OK("memory", seen, "there is room")


def _rights(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    if (missing := facts.missing) is None:
        return
    who = f"user {facts.user}"
    # A user that is named after a program is for that program; any other may be meant for a master or a consumer.
    meant = [facts.user] if facts.user in missing else ["master", "consumer"]
    if suits := [name for name in meant if not missing[name]]:
        yield OK("rights", f"{who} may run all that {_a(suits)} needs", f"{_a(suits)} can work under it")
    else:
        lacking, program = few(missing[meant[0]], 8), _a(meant[:1])
        seen = f"{who} may not run {lacking} on all keys that {program}"
        means = f"parts of the work of {program} do not get done"
        do = "give it the line that `usher acl` prints for its program, and that program's name"
        yield BAD("rights", f"{seen} of this version uses", means, do)


def _a(programs: Iterable[str]) -> str:
    return " or ".join(f"{'an' if name.startswith('a') else 'a'} {name}" for name in programs)


def few(names: Sequence[str], most: int = _SHOWN) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def _transactions(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    if facts.unguarded:
        means = "a leader that was replaced may read messages, which then wait for the next change of leader"
        do = "give masters a way to Redis without the proxy or pool that keeps no WATCH"
        yield BAD("transactions", f"WATCH is not kept: {facts.unguarded}", means, do)
    elif facts.unguarded is not None:
        yield OK("transactions", "WATCH is kept", "a leader that was replaced reads no messages")


def _times(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    busy_ms = facts.number("busy-reply-threshold") or facts.number("lua-time-limit") or _BUSY_MS
    seen = f"USHER_LEASE_SECONDS {facts.lease_ms / 1000:g}"
    if facts.lease_ms * 2 / 3 <= busy_ms:
        seen += f"; a script may run for {busy_ms / 1000:g} s before Redis says BUSY"
        means = "one slow script of any client ends all leases at once: everything is taken back and handed over again"
        do = f"set USHER_LEASE_SECONDS above {busy_ms * 3 / 2000:g}, or lower busy-reply-threshold"
        yield WARN("lease", seen, means, do)
    else:
        yield OK("lease", seen, f"it outlives a Redis that is busy for {busy_ms / 1000:g} s")
    if (idle := facts.told.get("timeout") or "0") != "0":
        means = "connections that wait are cut; each cut costs the leader a new epoch, or a consumer a repeated"
        do = "set timeout 0 (tcp-keepalive finds dead peers)"
        yield WARN("idle connections", f"timeout {idle} s", f"{means} acknowledgement", do)
    clients = facts.number("connected_clients")
    most = facts.number("maxclients")
    if clients is not None and most and clients >= NEARLY_FULL * most:
        means = "a program that starts, or comes back after a break, may find no room; a consumer needs five"
        seen, means = f"{clients:,} of maxclients {most:,}", f"{means} connections, a master eight"
        yield WARN("connections", seen, means, "raise maxclients")


# ---- replicas, failover and clocks: which servers have the data, which takes over, whose clock counts ----


def _role(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    role = facts.told.get("role")
    if role == "master":
        yield OK("role", "master", "it accepts writes")
    elif role is not None:
        seen = f"replica of {facts.told.get('master_host')}:{facts.told.get('master_port')}"
        means = "it refuses every write: nothing can be sent, handed over or acknowledged"
        yield BAD("role", seen, means, "point USHER_REDIS_URL at the master")


def _replicas(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    replicas = facts.number("connected_slaves")
    if replicas is None or facts.told.get("role") != "master":
        return
    needed = facts.number("min-replicas-to-write")
    # Redis reports the number of good ones where some are needed.
    told_good = facts.number("min_slaves_good_slaves")
    good = replicas if told_good is None else told_good
    if told_good == 0 or (needed and good < needed):
        means = "Redis refuses writes (NOREPLICAS) until replicas are back: nothing is lost, nothing moves"
        yield BAD("replicas", f"{good} good ones, {needed or 'some'} needed", means, "bring the replicas back")
    elif not replicas:
        yield OK("replicas", "none", "nothing to fail over to; the data live on this host alone")
    elif needed:
        means = "a failover may lose the last moment of sends and acknowledgements; a master that was cut off stops"
        yield OK("replicas", f"{replicas} connected, {needed} needed to write", f"{means} accepting writes")
    else:
        is_unknown = needed is None
        seen = f"{replicas} connected, min-replicas-to-write {'not told' if is_unknown else '0'}"
        means = (
            "a failover loses writes that were not copied yet; a replaced master that has not heard of it goes on"
            " accepting writes that are thrown away"
        )
        do = "set min-replicas-to-write 1, min-replicas-max-lag to some seconds; after a failover resend recent sends"
        yield (UNKNOWN if is_unknown else WARN)("replicas", seen, means, do)


def _failover(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    state = (facts.cluster or {}).get("cluster_state")
    if facts.told.get("cluster_enabled") == "1" and facts.mode != "cluster":
        means = "after a failover, or when a slot moves, nothing works any more"
        do = "use redis+cluster://host:port,host:port as USHER_REDIS_URL"
        yield BAD("failover", "a cluster node behind a plain URL", means, do)
    elif facts.mode == "cluster" and state is None:
        why = facts.refused.get("CLUSTER INFO", "not told")
        yield UNKNOWN("failover", why, "it is not known whether the cluster is whole")
    elif facts.mode == "cluster" and state == "ok":
        means = "Usher follows the slot of the stream; while it is being moved everything waits"
        yield OK("failover", "cluster, state ok", means)
    elif facts.mode == "cluster":
        means = "Redis refuses commands (CLUSTERDOWN): nothing is lost, nothing moves"
        yield BAD("failover", f"cluster, state {state}", means, "mend the cluster")
    elif facts.mode == "sentinel":
        means = "after a failover Usher goes on by itself with what the new master has (docs/operate.md: on purpose)"
        yield OK("failover", "Sentinel names the master", means)
    elif facts.sentinels:
        seen = f"{facts.sentinels} sentinels watch this server, but the URL is that of one server"
        means = "after a failover Usher stays with the replaced master, which refuses writes"
        yield WARN("failover", seen, means, "use redis+sentinel://host:port,host:port/service as USHER_REDIS_URL")


def _clock(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    clock = facts.clock
    if clock is None:
        return
    if abs(clock.ahead_ms) > _SKEW_MS:
        where = "ahead of" if clock.ahead_ms > 0 else "behind"
        seen = f"Redis is {abs(clock.ahead_ms) / 1000:,.1f} s {where} this machine"
        means = "leases are Redis' own and hold; times that people see are off by as much"
        yield WARN("clock", seen, means, "synchronise the clocks")
    else:
        seen = f"Redis and this machine differ by {abs(clock.ahead_ms)} ms"
        yield OK("clock", seen, "leases and ids can be trusted")
    means = "a message takes two to four of these to its handler; with USHER_ACK_MODE=strict a ticket takes more than"
    yield OK("round trip", f"{clock.trip_ms:,.1f} ms from here to Redis", f"{means} one per message")


def _gathering(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    seen = facts.gathering
    if seen is None:
        return
    lag = f"{seen['lag']:,}" if seen["lag_is_exact"] else f"more than {seen['lag']:,}"
    told = f"{seen['sources']:,} streams, {lag} entries not gathered yet, {len(seen['masters'])} masters gather"
    if not seen["masters"]:
        do = "start `usher master` with this USHER_TICKET_STREAM"
        yield WARN("sources", told, "nothing is gathered: no master runs", do)
    elif len({master["setting"] for master in seen["masters"]}) > 1:
        means = (
            "masters of one group disagree on what to gather: streams that only some of them know wait where others"
            " have their shard"
        )
        do = "give all masters the same USHER_TICKET_STREAM and USHER_TICKET_FIELD, or another USHER_GROUP"
        yield BAD("sources", told, means, do)
    else:
        yield OK("sources", told, "they are gathered into the work stream")
    by_kind: dict[str, list[str]] = {}
    for source, why in seen["troubles"].items():
        by_kind.setdefault(str(why).partition(":")[0], []).append(f"{source}: {why}" if ":" in str(why) else source)
    for kind, sources in by_kind.items():
        means, do = _OF_SOURCES.get(kind, ("they are not gathered", "look at the masters' logs"))
        severity = WARN if kind in ("held_back", "not_trimmed") else BAD
        yield severity(f"source {kind}", few(sources), means, do)
