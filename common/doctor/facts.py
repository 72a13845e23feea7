"""The doctor's facts about a Redis and a ticket stream in it, and the shape of the findings. None means "could not be
asked"."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from usher.common.protocol.mishaps import DeclaredLoss, Mishaps
from usher.common.protocol.stream_id import rank

#: Share of the memory from which it is time to act; when all of it is used, sends are refused.
NEARLY_FULL = 0.8
_DAY_S = 86_400
#: Shortest time over which a rate says anything.
_LEAST_MS = 60_000


class DoctorSeverity(enum.Enum):
    """Severities. BAD: the promise does not hold, or work stands still. WARN: it costs something, or soon will.
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
    """Redis' clock beside ours: how far it is ahead, and how much faster than time itself it went while we watched.
    Also the round trip to Redis. Milliseconds."""

    redis_ms: int
    ahead_ms: int
    drift_ms: int
    watched_ms: int
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
    at this server; ``coordinates``: whether those of the URL know a failover that loses nothing. ``gathering``: as
    common/doctor/source_status.py reports it; None when there is one ticket stream, or it could not be asked.
    """

    mode: str = "fixed"
    lease_ms: int = 10_000
    info: Mapping[str, str] | None = None
    config: Mapping[str, str] | None = None
    clock: Clock | None = None
    rights: Rights = field(default_factory=lambda: Rights(None, None))
    sentinels: int | None = None
    coordinates: bool | None = None
    cluster: Mapping[str, str] | None = None
    stream: TicketStreamFacts | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    gathering: Mapping[str, Any] | None = None

    def told(self, name: str) -> str | None:
        return None if self.info is None else self.info.get(name)

    def number(self, name: str) -> int | None:
        value = self.told(name)
        return int(value) if value is not None and value.lstrip("-").isdecimal() else None

    def setting(self, name: str) -> str | None:
        """Return a value of CONFIG; None when CONFIG is forbidden or the server does not have it."""
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


def info_lines(reply: bytes) -> dict[str, str]:
    """Return the ``name:value`` lines of INFO and CLUSTER INFO.

    >>> info_lines(b"# Memory\\r\\nmaxmemory:0\\r\\n")
    {'maxmemory': '0'}
    """
    return dict(line.split(":", 1) for line in reply.decode(errors="replace").splitlines() if ":" in line)


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
