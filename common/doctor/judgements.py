"""The doctor's facts about a Redis and a ticket stream in it (None: "could not be asked"), and what they mean: one
redis-server, its replicas, failover and clock, the ticket stream, the gathering. Pure: facts in, findings out;
``promise`` says what holds here when something fails."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from usher.common.base.text import info_lines
from usher.common.protocol.mishaps import DeclaredLoss, Mishaps
from usher.common.protocol.stream_id import rank

#: Share of the memory from which it is time to act; when all of it is used, sends are refused.
NEARLY_FULL = 0.8
_DAY_S = 86_400
#: Shortest time over which a rate says anything.
_LEAST_MS = 60_000


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


@dataclass(frozen=True)
class Clock:
    """Redis' clock beside ours, how far it is ahead, and the round trip to Redis. Milliseconds."""

    redis_ms: int
    ahead_ms: int
    trip_ms: float = 0.0


@dataclass(frozen=True)
class Rights:
    """The rights of the URL's user. ``missing``: by program (common/redis/acl.py) the commands that it needs and this
    user may not run; None when they could not be tried, and ``why``."""

    user: str | None
    missing: Mapping[str, tuple[str, ...]] | None
    why: str = ""


@dataclass(frozen=True)
class NameInGroup:
    """A name in the group. ``state``: live, starting, draining, revoked, lost, reserved (``master``, ``halted``), or
    unknown (not registered)."""

    name: str
    state: str
    pending: int


@dataclass(frozen=True)
class ProofFacts:
    """The archived and proven part of a run log, which now holds records from ``first`` to ``last`` and was cut before
    them: ``archived`` is the last record in the archive. ``every_ms``: the time between the last two runs, 0 when it is
    not known. ``unproven_ms``: since the last one, None when there was none, only audits of what the log holds.
    ``took_ms``: the duration of the last run, 0 when it is not known."""

    archived: bytes
    unproven_ms: int | None
    every_ms: int
    first: bytes
    last: bytes
    took_ms: int = 0

    @property
    def held_ms(self) -> int:
        return (rank(self.last) - rank(self.first)) >> 64


@dataclass(frozen=True)
class TicketStreamFacts:
    """The ticket stream, its group and its index at one moment. ``last_generated`` is "" and ``entries`` 0 when the
    stream does not exist.

    ``has_group`` and ``position_saved``: a position without a group means that the group was lost. ``highest_number``
    is the highest epoch, fence or generation ever given; ``idle_ms`` the longest time that an entry of a name with a
    lease was idle. ``is_log``: a streamer writes it or a log consumer reads it. ``unread_cut``: entries that are gone
    unread at this moment and not among the ``mishaps`` yet; ``counts_added`` False: this server cannot tell. ``proof``
    is None without one. ``trims_after_s``: the age at which the leader cuts what nobody needs, None: it does not trim;
    ``trim_held_back``: who keeps it from that. ``losses``: the newest declared ones, each with
    its time in words.
    """

    name: str
    wrong_type: str = ""
    last_generated: str = ""
    entries: int = 0
    has_group: bool = False
    position_saved: bool = False
    lag: int | None = 0
    names: tuple[NameInGroup, ...] = ()
    leader: str = ""
    living: int = 0
    idle_ms: int = 0
    highest_number: int = 0
    dead_letters: int = 0
    is_log: bool = False
    mishaps: Mishaps = field(default_factory=Mishaps)
    unread_cut: int = 0
    counts_added: bool = True
    proof: ProofFacts | None = None
    grows: Growth | None = None
    trims_after_s: float | None = None
    trim_held_back: str = ""
    losses: tuple[tuple[str, DeclaredLoss], ...] = ()

    @property
    def pending(self) -> int:
        return sum(name.pending for name in self.names)


@dataclass(frozen=True)
class DoctorFacts:
    """All facts. ``info`` and ``config``: names and values as Redis has them. ``refused``: the question, and Redis'
    words.

    ``mode`` is how the URL finds the server: fixed, sentinel or cluster. ``sentinels``: number of sentinels that listen
    at this server. ``unguarded``: why a change of a watched key keeps no EXEC from running, "" when it does.
    ``gathering``: as common/doctor/collector.py reports it; None when there is one ticket stream, or it could not
    be asked.
    """

    mode: str = "fixed"
    lease_ms: int = 10_000
    info: Mapping[str, str] | None = None
    config: Mapping[str, str] | None = None
    clock: Clock | None = None
    rights: Rights = field(default_factory=lambda: Rights(None, None))
    sentinels: int | None = None
    cluster: Mapping[str, str] | None = None
    unguarded: str | None = None
    stream: TicketStreamFacts | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    gathering: Mapping[str, Any] | None = None

    def told(self, name: str) -> str | None:
        return None if self.info is None else self.info.get(name)

    def number(self, name: str) -> int | None:
        value = self.told(name)
        return int(value) if value is not None and value.lstrip("-").isdecimal() else None

    def setting(self, name: str) -> str | None:
        return None if self.config is None else self.config.get(name)

    def why_not(self, question: str) -> str:
        return self.refused.get(question, "not told")


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


def memory_of(*replies: Any) -> MemoryUse | None:
    info = info_of(*replies)
    used, uncounted, limit, machine = (
        int(info.get(name) or 0)
        for name in ("used_memory", "mem_not_counted_for_evict", "maxmemory", "total_system_memory")
    )
    return MemoryUse(used - uncounted, limit or machine, limit > 0) if used and (limit or machine) else None


def memory_share(*replies: Any) -> float | None:
    memory = memory_of(*replies)
    return None if memory is None else memory.share


def growth(
    entries: int, first_ms: int, now_ms: int, stream_bytes: int | None, memory: MemoryUse | None
) -> Growth | None:
    """Return how fast a stream grows that has ``entries`` since ``first_ms``; None when that is too short ago."""
    if not entries or now_ms - first_ms < _LEAST_MS:
        return None
    told = Growth(1000 * entries / (now_ms - first_ms), None if stream_bytes is None else stream_bytes / entries, None)
    if memory is None or not told.bytes_per_day:
        return told
    return told._replace(days_left=max(0, memory.limit - memory.used) / told.bytes_per_day)


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
#: Redis' default of busy-reply-threshold, in ms.
_BUSY_MS = 5000
#: The commands whose replies ``write_trouble`` reads. One section each: only Redis 7 takes several in one command.
INFO_COMMANDS = (("INFO", "persistence"), ("INFO", "memory"), ("INFO", "replication"))
#: Difference of two machines' clocks, in ms, from which displayed times are misleading.
_SKEW_MS = 2000
_AHEAD_MS = 1000
#: Factor from milliseconds to epochs, fences and generations.
_NUMBERS_PER_MS = 1024
_LAST_RANK = (1 << 128) - 1
#: Milliseconds ahead of Redis' clock from which an id was made by a sender, not by a clock that was set back a little.
_POISONED_MS = 3_600_000
_SHOWN = 5
_RECENT_S = 86_400
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
    return [*examine_server(facts), *judge_stream(facts), *_gathering(facts)]


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
    fsync, has_file = facts.setting("appendfsync") or "", facts.told("aof_enabled")
    killed = {"always": "nothing is lost"}.get(
        fsync, "no loss was seen in tests; a write that waits for a slow disk may be lost"
    )
    powerless = {
        "always": "nothing is lost, if the disk keeps its word",
        "everysec": "up to about a second of sends and acknowledgements is lost: resend; repeats are fenced",
        "no": "what the kernel had not written is lost, half a minute or more",
    }.get(fsync, "not known")
    if has_file == "0" and facts.setting("save") == "":
        killed = powerless = "all that Redis had is lost"
    elif has_file == "0":
        killed = powerless = "all since the last snapshot of Redis is lost, if it makes any"
    elif has_file is None:
        killed = powerless = "not known"
    held = "nothing is lost, the order holds, one effective execution at a time"
    rows = {"a program of Usher is killed, paused or cut off": held, "redis-server is killed": killed}
    rows["its host loses power"] = powerless
    if facts.number("connected_slaves") or facts.mode != "fixed":
        tail = "sends and acknowledgements that were not copied yet are lost: resend; repeats are fenced, order holds"
        rows["a replica is promoted"] = f"{tail} for the rest"
    return rows


def write_trouble(*replies: Any) -> WriteTrouble | None:
    """Return what the replies of ``INFO_COMMANDS`` say against writing; None when they say nothing, or Redis does not
    tell this user."""
    told = info_of(*replies)
    facts = DoctorFacts(info=told)
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
    found = version_of(facts.info or {})
    if found is None:
        why = facts.why_not("INFO") if facts.info is None else "INFO does not tell"
        yield UNKNOWN("version", why, "old versions lose entries of consumer groups", "allow INFO to this user")
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
    yield severity("version", version_text(facts.info or {}), means, do)


def _append_only_file(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    enabled = facts.told("aof_enabled") or {"yes": "1", "no": "0"}.get(facts.setting("appendonly") or "")
    if enabled is None:
        means = "without one a restart of Redis loses messages"
        yield UNKNOWN("append-only file", facts.why_not("INFO"), means, "ask the operators of this Redis")
        return
    if enabled == "0":
        means = "a restart of Redis loses everything"
        if facts.setting("save") != "":
            means += " since its last snapshot, acknowledged or not"
        if facts.number("connected_slaves"):
            means += "; with replicas, an automatic restart wipes them too"
        yield BAD("append-only file", "appendonly no", means, "set appendonly yes")
        return
    yield OK("append-only file", "appendonly yes", "Redis comes back with what it had")
    fsync = facts.setting("appendfsync")
    if fsync is None:
        do = "ask the operators of this Redis for appendfsync"
        yield UNKNOWN("fsync", facts.why_not("CONFIG GET"), "how much a power loss loses is not known", do)
    elif fsync == "always":
        means = "a power loss loses nothing that was acknowledged, if the disk keeps its word"
        yield OK("fsync", "appendfsync always", means)
    elif fsync == "everysec":
        means = "a killed redis-server loses nothing; a power loss of its host up to about a second of sends and"
        yield OK("fsync", "appendfsync everysec", f"{means} acknowledgements: resend those")
    else:
        means = "a power loss loses what the kernel has not written yet: half a minute or more"
        yield WARN("fsync", f"appendfsync {fsync}", means, "set appendfsync everysec")
    if facts.setting("no-appendfsync-on-rewrite") == "yes":
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
    if facts.info is None:
        return
    saves, has_failed = facts.setting("save"), False
    stops = bool(saves) and facts.setting("stop-writes-on-bgsave-error") != "no"
    refuses = "Redis refuses writes: nothing can be sent, handed over or acknowledged until the disk works again"
    grows = "the append-only file could not be rewritten: it grows, and the disk may be full"
    failed = "the last snapshot failed, and" if stops else "the last snapshot failed; where snapshots are scheduled"
    for name, is_off, severity, means in (
        ("aof_last_write_status", facts.told("aof_enabled") == "0", BAD, refuses),
        ("aof_last_bgrewrite_status", False, WARN, grows),
        ("rdb_last_bgsave_status", saves == "", BAD if stops else WARN, f"{failed} Redis refuses writes for it"),
    ):
        if (facts.told(name) or "ok") != "ok" and not is_off:
            has_failed = True
            yield severity("disk", f"{name} {facts.told(name)}", means, "look at the disk of Redis and at its log")
    if not has_failed:
        yield OK("disk", "the last writes succeeded", "Redis accepts writes")


def _eviction(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    policy, evicted = facts.told("maxmemory_policy") or facts.setting("maxmemory-policy"), facts.number("evicted_keys")
    if policy is None:
        means = "with any policy but noeviction Redis deletes keys of its own accord"
        yield UNKNOWN("eviction", facts.why_not("INFO"), means, "ask the operators of this Redis for maxmemory-policy")
    elif policy != "noeviction":
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
    used = facts.number("used_memory")
    if used is None:
        means = "at full memory nothing can be sent"
        yield UNKNOWN("memory", facts.why_not("INFO"), means, "allow INFO to this user")
        return
    used -= facts.number("mem_not_counted_for_evict") or 0
    limit = facts.number("maxmemory") or 0
    total = limit or facts.number("total_system_memory") or 0
    seen = _mib(used) + (f" of {_mib(total)} ({'maxmemory' if limit else 'the machine'})" if total else "")
    if limit and used >= limit and (facts.told("maxmemory_policy") or "noeviction") == "noeviction":
        means = "nothing can be sent or handed over; messages in processing are still acknowledged; nothing is lost"
        yield BAD("memory", seen, means, "trim finished entries, or raise maxmemory")
    elif total and used >= NEARLY_FULL * total:
        means = "soon nothing can be sent any more" if limit else "soon the kernel may kill redis-server"
        yield WARN("memory", seen, means, "trim finished entries, or give Redis more memory")
    else:
        yield OK("memory", seen, "there is room")


def _mib(size: int) -> str:
    return f"{size / 1_048_576:,.1f} MiB"


def _rights(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    rights = facts.rights
    who, missing = f"user {rights.user}" if rights.user else "this user", rights.missing
    if missing is None:
        means = f"whether {who} may run all that Usher needs shows only at work"
        yield UNKNOWN("rights", rights.why or "not asked", means, "allow ACL DRYRUN to this user (Redis 7 or later)")
        return
    # A user that is named after a program is for that program; any other may be meant for a master or a consumer.
    meant = [rights.user] if rights.user and rights.user in missing else ["master", "consumer"]
    if suits := [name for name in meant if not missing[name]]:
        yield OK("rights", f"{who} may run all that {_a(suits)} needs", f"{_a(suits)} can work under it")
    else:
        few, program = _few(missing[meant[0]], 8), _a(meant[:1])
        seen = f"{who} may not run {few} on all keys that {program}"
        means = f"parts of the work of {program} do not get done"
        do = "give it the line that `usher acl` prints for its program, and that program's name"
        yield BAD("rights", f"{seen} of this version uses", means, do)


def _a(programs: Iterable[str]) -> str:
    return " or ".join(f"{'an' if name.startswith('a') else 'a'} {name}" for name in programs)


def _few(names: Sequence[str], most: int = _SHOWN) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def _transactions(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    if facts.unguarded:
        means = "a leader that was replaced may read messages, which then wait for the next change of leader"
        do = "give masters a way to Redis without the proxy or pool that keeps no WATCH"
        yield BAD("transactions", f"WATCH is not kept: {facts.unguarded}", means, do)
    elif facts.unguarded is not None:
        yield OK("transactions", "WATCH is kept", "a leader that was replaced reads no messages")


def _times(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    busy = facts.setting("busy-reply-threshold") or facts.setting("lua-time-limit")
    busy_ms = int(busy) if busy and busy.isdecimal() and int(busy) else _BUSY_MS
    seen = f"USHER_LEASE_SECONDS {facts.lease_ms / 1000:g}"
    if facts.lease_ms * 2 / 3 <= busy_ms:
        seen += f"; a script may run for {busy_ms / 1000:g} s before Redis says BUSY"
        means = "one slow script of any client ends all leases at once: everything is taken back and handed over again"
        do = f"set USHER_LEASE_SECONDS above {busy_ms * 3 / 2000:g}, or lower busy-reply-threshold"
        yield WARN("lease", seen, means, do)
    else:
        yield OK("lease", seen, f"it outlives a Redis that is busy for {busy_ms / 1000:g} s")
    if (idle := facts.setting("timeout") or "0") != "0":
        means = "connections that wait are cut; each cut costs the leader a new epoch, or a consumer a repeated"
        do = "set timeout 0 (tcp-keepalive finds dead peers)"
        yield WARN("idle connections", f"timeout {idle} s", f"{means} acknowledgement", do)
    clients = facts.number("connected_clients")
    most = facts.number("maxclients") or int(facts.setting("maxclients") or 0)
    if clients is not None and most and clients >= NEARLY_FULL * most:
        means = "a program that starts, or comes back after a break, may find no room; a consumer needs five"
        seen, means = f"{clients:,} of maxclients {most:,}", f"{means} connections, a master eight"
        yield WARN("connections", seen, means, "raise maxclients")


# ---- replicas, failover and clocks: which servers have the data, which takes over, whose clock counts ----


def _role(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    role = facts.told("role")
    if role is None:
        yield UNKNOWN("role", facts.why_not("INFO"), "a replica would refuse every write", "allow INFO to this user")
    elif role == "master":
        yield OK("role", "master", "it accepts writes")
    else:
        seen = f"replica of {facts.told('master_host')}:{facts.told('master_port')}"
        means = "it refuses every write: nothing can be sent, handed over or acknowledged"
        yield BAD("role", seen, means, "point USHER_REDIS_URL at the master")


def _replicas(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    replicas = facts.number("connected_slaves")
    if replicas is None or facts.told("role") != "master":
        return
    needed_text = facts.setting("min-replicas-to-write")
    needed = int(needed_text) if needed_text and needed_text.isdecimal() else None
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
        is_unknown = needed_text is None
        seen = f"{replicas} connected, min-replicas-to-write {'not told' if is_unknown else '0'}"
        means = (
            "a failover loses writes that were not copied yet; a replaced master that has not heard of it goes on"
            " accepting writes that are thrown away"
        )
        do = "set min-replicas-to-write 1, min-replicas-max-lag to some seconds; after a failover resend recent sends"
        yield (UNKNOWN if is_unknown else WARN)("replicas", seen, means, do)


def _failover(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    state = (facts.cluster or {}).get("cluster_state")
    if facts.told("cluster_enabled") == "1" and facts.mode != "cluster":
        means = "after a failover, or when a slot moves, nothing works any more"
        do = "use redis+cluster://host:port,host:port as USHER_REDIS_URL"
        yield BAD("failover", "a cluster node behind a plain URL", means, do)
    elif facts.mode == "cluster" and state is None:
        yield UNKNOWN("failover", facts.why_not("CLUSTER INFO"), "it is not known whether the cluster is whole")
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
        do = "allow TIME to this user"
        yield UNKNOWN("clock", facts.why_not("TIME"), "leases and ids rest on Redis' clock", do)
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
    highest = facts.stream.highest_number if facts.stream is not None else 0
    back_ms = highest // _NUMBERS_PER_MS - clock.redis_ms
    if back_ms > _AHEAD_MS:
        seen = f"by {back_ms / 1000:,.1f} s since the last number was given"
        means = (
            "epochs and fencing tokens go on growing, and leases that were given before are shortened within seconds;"
            " new ids stay at the old time"
        )
        yield WARN("clock went back", seen, means, "wait, or set the clock right; see that it is slewed, not set")


# ---- the ticket stream: can it take messages, is it being read, are there leftovers -----------------


def judge_stream(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    stream = facts.stream
    if stream is None:
        do = "allow XINFO and reading Usher's keys to this user"
        yield UNKNOWN("stream", facts.why_not("stream"), "nothing is known of the ticket stream", do)
        return
    if stream.wrong_type:
        means = "producers and master get WRONGTYPE: nothing works"
        do = "set another USHER_TICKET_STREAM, or move that key away"
        yield BAD("stream", f"{stream.name} is a {stream.wrong_type}", means, do)
        return
    if stream.last_generated:
        lag = "unread not counted" if stream.lag is None else f"{stream.lag:,} unread"
        yield OK("stream", f"{stream.name}: {stream.entries:,} entries, {lag}", "producers can add to it")
    else:
        yield OK("stream", f"{stream.name} does not exist yet", "the first message creates it")
    yield from _ids(facts, stream)
    yield from _group_and_leader(stream)
    yield from _consumers(facts, stream)
    if stream.is_log:
        yield _log(facts)
    yield from _mishaps(facts, stream)
    yield from _growth(stream)
    if stream.proof is not None:
        yield judge_proof(stream.proof)
    if stream.dead_letters:
        means = "messages that were given up, with their reasons"
        yield WARN("dead letters", f"{stream.dead_letters:,}", means, "usher dead list")


def _log(facts: DoctorFacts) -> DoctorFinding:
    """Judge the durability of an outbox: its rows go when Redis has answered, so what Redis loses after that exists
    nowhere else."""
    fsync = facts.setting("appendfsync") if facts.told("aof_enabled") != "0" else None
    seen = f"an outbox is streamed here, appendfsync {fsync or 'not known, or no append-only file'}"
    if fsync == "always":
        return OK("log", seen, "what left the outbox is on disk")
    means = "rows leave the outbox when Redis answers: a power loss may take messages that exist nowhere else"
    do = "set appendfsync always (deploy/redis.conf), or USHER_OUTBOX_WAIT_AOF with Redis 7.2 or later"
    return WARN("log", seen, means, do)


def _ids(facts: DoctorFacts, stream: TicketStreamFacts) -> Iterator[DoctorFinding]:
    if not stream.last_generated or facts.clock is None:
        return
    last = rank(stream.last_generated.encode())
    ahead_ms = (last >> 64) - facts.clock.redis_ms
    seen = f"the last id is {stream.last_generated}"
    do = "stop the sender of such ids; then deploy/runbook.md, The stream takes no more ids"
    if last == _LAST_RANK:
        yield BAD("ids", seen, "no id is left: no message can ever be added again", do)
    elif ahead_ms > _POISONED_MS:
        means = "a sender chose an id of the future: all later ones are pinned to it, and times in them say nothing"
        yield BAD("ids", f"{seen}, {ahead_ms / 3_600_000:,.1f} hours ahead of Redis' clock", means, do)
    elif ahead_ms > _AHEAD_MS:
        seen = f"the last id is {ahead_ms / 1000:,.1f} s ahead of Redis' clock"
        means = "Redis' clock went back, or a sender chose this id; ids go on growing, so the order holds"
        yield WARN("ids", seen, means, "look at the clock of Redis' host")
    else:  # no right of Redis tells options of a command apart
        means = "ids follow Redis' clock; whoever may XADD can end that with an id of their own, and cut with MAXLEN"
        yield OK("ids", seen, means)


def _waits(stream: TicketStreamFacts) -> bool:
    """Return True when entries wait. ``lag`` None: some are unread, but their number is not known."""
    return stream.pending > 0 or stream.lag is None or stream.lag > 0


def _group_and_leader(stream: TicketStreamFacts) -> Iterator[DoctorFinding]:
    if stream.has_group:
        yield OK("group", f"{stream.pending:,} entries pending", "the group is there")
    elif stream.position_saved:
        means = (
            "the group or the stream was destroyed; a leader makes it again where it was and says what may repeat or"
            " is lost"
        )
        do = "see that a master runs, and look for `group_lost` in its log"
        yield (WARN if stream.leader else BAD)("group", "the group is gone", means, do)
    elif stream.entries:
        means = "no master has ever read this stream; the first one begins with its first entry"
        yield WARN("group", "there is no group", means, "start a master; see that USHER_GROUP is the same everywhere")
    if stream.leader:
        yield OK("leader", stream.leader, "a master reads and hands over")
    elif _waits(stream) or (stream.entries and not stream.has_group):
        yield BAD("leader", "none", "entries wait and are not handed over", "start a master")
    else:
        yield WARN("leader", "none", "nothing waits, but new entries would not be handed over", "start a master")


def _consumers(facts: DoctorFacts, stream: TicketStreamFacts) -> Iterator[DoctorFinding]:
    if stream.living:
        yield OK("consumers", f"{stream.living} alive", "handlers can run")
    elif _waits(stream):
        yield BAD("consumers", "none is alive", "entries wait and cannot run; nothing is lost", "start consumers")
    else:
        yield WARN("consumers", "none is alive", "messages wait until one comes", "start consumers")
    if dead := _pending_of(stream, "lost"):
        takes = "the leader takes" if stream.leader else "no leader takes"
        means = f"their leases have ended; {takes} their entries back"
        do = "" if stream.leader else "start a master"
        yield (WARN if stream.leader else BAD)("dead consumers", _few(dead), means, do)
    if strangers := _pending_of(stream, "unknown"):
        means = (
            "another program has read from Usher's group; the sweep takes these entries back once they are idle"
            " (USHER_MIN_IDLE_SECONDS), and order may suffer"
        )
        yield WARN("strangers", _few(strangers), means, "let other programs use a group of their own")
    if stream.idle_ms > 2 * facts.lease_ms:
        seen = f"for {stream.idle_ms / 1000:,.1f} s, with leases of {facts.lease_ms / 1000:g} s"
        means = "a living consumer touches its messages with every renewal; is USHER_LEASE_SECONDS the same everywhere?"
        yield WARN("idle entries", seen, means, "compare USHER_LEASE_SECONDS of all, and USHER_MIN_IDLE_SECONDS")


def _pending_of(stream: TicketStreamFacts, state: str) -> list[str]:
    found: list[NameInGroup] = [name for name in stream.names if name.state == state and name.pending]
    return [f"{name.name} ({name.pending:,} pending)" for name in found]


def _mishaps(facts: DoctorFacts, stream: TicketStreamFacts) -> Iterator[DoctorFinding]:
    """Judge what somebody did to the stream or its pending list by hand, and the newest declared losses: for a day they
    are a reason to act."""
    told, now_s = stream.mishaps, facts.clock.redis_ms / 1000 if facts.clock is not None else 0
    if cut := told.unread_cut + stream.unread_cut:
        is_new = bool(stream.unread_cut) or now_s - told.unread_cut_s < _RECENT_S
        seen = f"{cut:,} were cut before they were read" + ("" if is_new else ", none of them in the last day")
        means = "these messages were sent and never handled, and they have no dead letter"
        do = "send them again; trim with `usher trim` alone: no MAXLEN or MINID in producers, no XTRIM"
        yield (BAD if is_new else OK)("unread entries", seen, means, do if is_new else "")
    elif not stream.counts_added:
        means = "entries that are cut before they are read leave no trace before Redis 7"
        yield OK("unread entries", "this server does not count added entries", means)
    for moment, loss in stream.losses:
        is_new = now_s - loss.ms / 1000 < _RECENT_S
        means = "the masters found it and wrote it down; the audit tells it from a promise that was broken"
        do = "see Lost group in the runbook" if is_new else ""
        yield (WARN if is_new else OK)("declared loss", f"{moment}: {loss.describe()}", means, do)


def _growth(stream: TicketStreamFacts) -> Iterator[DoctorFinding]:
    if stream.grows is None and not stream.trim_held_back:
        return
    left = None if stream.grows is None else stream.grows.days_left
    seen = describe(stream.grows) if stream.grows is not None else "slowly"
    room = "" if left is None else f"; Redis has room for {left:,.1f} days of it"
    if stream.trims_after_s is None:
        means, do = "no leader trims: finished entries stay", "set USHER_TRIM_KEEP of the masters, or `usher trim`"
    elif stream.trim_held_back:
        means, do = f"it is not trimmed: {stream.trim_held_back}", "`usher trim` shows who needs what"
    else:
        hours, do = stream.trims_after_s / 3600, ""
        means = f"what nobody needs goes after {hours:,.4g} h, and earlier when memory is needed"
    is_soon = bool(do) and left is not None and left < _SOON_DAYS
    yield (WARN if is_soon else OK)("growth", seen + room, means, do)


def judge_proof(facts: ProofFacts) -> DoctorFinding:
    held = f"the run log holds {facts.held_ms / 1000:,.0f} s"
    is_slow = _SPARE * facts.took_ms > facts.held_ms
    took, do = f"took {facts.took_ms / 1000:,.0f} s", _FASTER if is_slow else _SOONER
    if facts.unproven_ms is None:
        means = "entries cut from the log between two audits cannot be proven"
        do = "let `usher audit --every 5 prove` run (the program proof), which proves all of history"
        return WARN("proof", f"{held}, which is all that `usher audit` looks at", means, do)
    ago = f"{facts.unproven_ms / 1000:,.0f} s"
    if rank(facts.archived) < rank(facts.first):
        seen = f"{held}, and the last proof is {ago} old" + (f"; it {took}" if is_slow else "")
        means = "executions since then may have been cut from the log before they were archived: they will not be"
        return WARN("proof", seen, f"{means} proven", do)
    if _SPARE * max(facts.every_ms, facts.took_ms) > facts.held_ms:
        apart = f"{facts.every_ms / 1000:,.0f} s apart"
        seen = f"{held}, and proofs are {apart}" + (f"; the last {took}" if is_slow else "")
        means = "with a little more traffic executions are cut from the log before they are archived: a hole in the"
        return WARN("proof", seen, f"{means} proof", do)
    return OK("proof", f"proven until {ago} ago; {held}", "no execution is cut before it is archived")


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
        yield severity(f"source {kind}", _few(sources), means, do)
