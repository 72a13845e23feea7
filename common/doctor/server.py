"""Judge one redis-server: what is on disk, what may be deleted, its version, and our rights there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from usher.common.doctor.facts import DoctorFacts, DoctorFinding, DoctorSeverity
from usher.common.doctor.growth import NEARLY_FULL, info_of
from usher.common.doctor.topology import judge_replicas

OK, UNKNOWN, WARN, BAD = DoctorSeverity.OK, DoctorSeverity.UNKNOWN, DoctorSeverity.WARN, DoctorSeverity.BAD
#: Redis' default of busy-reply-threshold, in ms.
_BUSY_MS = 5000
#: The commands whose replies ``write_trouble`` reads. One section each: only Redis 7 takes several in one command.
INFO_COMMANDS = (("INFO", "persistence"), ("INFO", "memory"), ("INFO", "replication"))


class WriteTrouble(NamedTuple):
    """A reason against writing. ``is_certain``: Redis refuses writes; else it does so only with a setting that INFO
    does not show."""

    text: str
    is_certain: bool


def judge_server(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    yield from _version(facts)
    yield from _append_only_file(facts)
    yield from _disk(facts)
    yield from _eviction(facts)
    yield from _memory(facts)
    yield from _rights(facts)
    yield from _times(facts)


def refused_writes(facts: DoctorFacts) -> DoctorFinding | None:
    """Return the check that says why Redis takes no writes, BAD, or may take none, WARN; None when none does."""
    checks = (*_disk(facts), *_memory(facts), *judge_replicas(facts))
    stops = (finding for finding in checks if finding.severity is BAD or finding.seen.startswith("rdb_last_bgsave"))
    return next(stops, None)


def write_trouble(*replies: Any) -> WriteTrouble | None:
    """Return what the replies of ``INFO_COMMANDS`` say against writing; None when they say nothing, or Redis does not
    tell this user."""
    told = info_of(*replies)
    found = refused_writes(DoctorFacts(info=told)) if told else None
    return (
        WriteTrouble(f"Redis, {found.check}: {found.means}; {found.do}", found.severity is BAD)
        if found is not None
        else None
    )


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


def _version(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    """Judge by the lowest version that Usher works with; known holes are for those who operate Redis
    (docs/operate.md)."""
    found = version_of(facts.info or {})
    if found is None:
        why = facts.why_not("INFO") if facts.info is None else "INFO does not tell"
        yield DoctorFinding(
            "version", UNKNOWN, why, "old versions lose entries of consumer groups", "allow INFO to this user"
        )
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
    yield DoctorFinding("version", severity, version_text(facts.info or {}), means, do)


def _append_only_file(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    enabled = facts.told("aof_enabled") or {"yes": "1", "no": "0"}.get(facts.setting("appendonly") or "")
    if enabled is None:
        why = facts.why_not("INFO")
        yield DoctorFinding(
            "append-only file",
            UNKNOWN,
            why,
            "without one a restart of Redis loses messages",
            "ask the operators of this Redis",
        )
        return
    if enabled == "0":
        saves = facts.setting("save")
        means = (
            "a restart of Redis loses everything"
            if saves == ""
            else "a restart of Redis loses everything since its last snapshot, acknowledged or not"
        )
        if facts.number("connected_slaves"):
            means += "; with replicas, an automatic restart wipes them too"
        yield DoctorFinding("append-only file", BAD, "appendonly no", means, "set appendonly yes")
        return
    yield DoctorFinding("append-only file", OK, "appendonly yes", "Redis comes back with what it had")
    yield _fsync(facts)
    if facts.setting("no-appendfsync-on-rewrite") == "yes":
        means = "while the file is rewritten nothing is brought to disk: a power loss may then take up to half a minute"
        yield DoctorFinding(
            "fsync while rewriting", WARN, "no-appendfsync-on-rewrite yes", means, "set no-appendfsync-on-rewrite no"
        )
    delayed = facts.number("aof_delayed_fsync")
    if delayed:
        means = "the disk is too slow for one fsync a second: a power loss may take more than a second"
        yield DoctorFinding(
            "fsync delays",
            WARN,
            f"{delayed:,} delayed since the start",
            means,
            "give Redis a faster disk, or fewer neighbours on it",
        )


def _fsync(facts: DoctorFacts) -> DoctorFinding:
    mode = facts.setting("appendfsync")
    if mode == "always":
        return DoctorFinding(
            "fsync",
            OK,
            "appendfsync always",
            "a power loss loses nothing that was acknowledged, as far as the disk keeps its word",
        )
    if mode == "everysec":
        means = (
            "a killed redis-server loses nothing; a power loss of its host up to about a second of sends and"
            " acknowledgements: resend those"
        )
        return DoctorFinding("fsync", OK, "appendfsync everysec", means)
    if mode is None:
        return DoctorFinding(
            "fsync",
            UNKNOWN,
            facts.why_not("CONFIG GET"),
            "how much a power loss loses is not known",
            "ask the operators of this Redis for appendfsync",
        )
    means = "a power loss loses what the kernel has not written yet: half a minute or more"
    return DoctorFinding("fsync", WARN, f"appendfsync {mode}", means, "set appendfsync everysec")


def _disk(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    """Yield failed writes: with an append-only file, or with snapshots, Redis then refuses all further ones
    (MISCONF)."""
    if facts.info is None:
        return
    saves = facts.setting("save")
    troubles = {
        "aof_last_write_status": (
            BAD,
            "Redis refuses writes: nothing can be sent, handed over or acknowledged until the disk works again",
        ),
        "aof_last_bgrewrite_status": (
            WARN,
            "the append-only file could not be rewritten: it grows, and the disk may be full",
        ),
        "rdb_last_bgsave_status": (
            (BAD, "the last snapshot failed, and Redis refuses writes for it")
            if saves and facts.setting("stop-writes-on-bgsave-error") != "no"
            else (WARN, "the last snapshot failed; where snapshots are scheduled Redis refuses writes for it")
        ),
    }
    # An old failure of what is switched off means nothing.
    unused = {
        "aof_last_write_status": facts.told("aof_enabled") == "0",
        "rdb_last_bgsave_status": saves == "",
    }
    failed = [name for name in troubles if (facts.told(name) or "ok") != "ok" and not unused.get(name)]
    for name in failed:
        severity, means = troubles[name]
        yield DoctorFinding(
            "disk", severity, f"{name} {facts.told(name)}", means, "look at the disk of Redis and at its log"
        )
    if not failed:
        yield DoctorFinding("disk", OK, "the last writes succeeded", "Redis accepts writes")


def _eviction(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    policy = facts.told("maxmemory_policy") or facts.setting("maxmemory-policy")
    if policy is None:
        means = "with any policy but noeviction Redis deletes keys of its own accord"
        yield DoctorFinding(
            "eviction", UNKNOWN, facts.why_not("INFO"), means, "ask the operators of this Redis for maxmemory-policy"
        )
        return
    evicted = facts.number("evicted_keys") or 0
    if policy != "noeviction":
        what = "leases and the leader key" if policy.startswith("volatile") else "the stream, the index or leases"
        means = f"at full memory Redis deletes {what}: messages are lost, or run twice at the same time"
        yield DoctorFinding(
            "eviction",
            BAD,
            f"maxmemory-policy {policy}, {evicted:,} keys deleted so far",
            means,
            "set maxmemory-policy noeviction",
        )
    elif evicted:
        means = "keys were deleted before the policy was changed; they may have been ours"
        seen = f"noeviction, but {evicted:,} keys deleted since the start"
        yield DoctorFinding("eviction", WARN, seen, means, "compare what was sent with what was handled")
    else:
        yield DoctorFinding("eviction", OK, "maxmemory-policy noeviction", "Redis deletes nothing of its own accord")


def _memory(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    used = facts.number("used_memory")
    if used is None:
        yield DoctorFinding(
            "memory", UNKNOWN, facts.why_not("INFO"), "at full memory nothing can be sent", "allow INFO to this user"
        )
        return
    used -= facts.number("mem_not_counted_for_evict") or 0
    limit = facts.number("maxmemory") or 0
    of = "maxmemory" if limit else "the machine"
    total = limit or facts.number("total_system_memory") or 0
    seen = f"{_mib(used)} of {_mib(total)} ({of})" if total else _mib(used)
    if limit and used >= limit and (facts.told("maxmemory_policy") or "noeviction") == "noeviction":
        means = "nothing can be sent or handed over; what is in processing is still acknowledged, and nothing is lost"
        yield DoctorFinding("memory", BAD, seen, means, "trim what is done, or raise maxmemory")
    elif total and used >= NEARLY_FULL * total:
        means = "soon nothing can be sent any more" if limit else "soon the kernel may kill redis-server"
        yield DoctorFinding("memory", WARN, seen, means, "trim what is done, or give Redis more memory")
    else:
        yield DoctorFinding("memory", OK, seen, "there is room")


def _mib(size: int) -> str:
    return f"{size / 1_048_576:,.1f} MiB"


def _rights(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    rights = facts.rights
    who, missing = f"user {rights.user}" if rights.user else "this user", rights.missing
    if missing is None:
        means = f"whether {who} may run all that Usher needs shows only at work"
        do = "allow ACL DRYRUN to this user (Redis 7 or later)"
        yield DoctorFinding("rights", UNKNOWN, rights.why or "not asked", means, do)
        return
    fit = [name for name, commands in missing.items() if not commands]
    # A user that is named after a program is for that program; any other may be meant for a master or a consumer.
    own = rights.user if rights.user in missing else None
    lacks = missing[own] if own else missing.get("master", ())
    few = ", ".join(lacks[:8]) + (f" and {len(lacks) - 8} more" if len(lacks) > 8 else "")
    if len(fit) == len(missing):
        means = "masters, consumers and all other programs can work under it"
        yield DoctorFinding("rights", OK, f"{who} may run all that Usher needs", means)
    elif own and own not in fit:
        seen = f"{who} may not run {few} on all keys that {_a([own])} of this version uses"
        means = f"parts of the work of {_a([own])} do not get done"
        yield DoctorFinding("rights", BAD, seen, means, "give it the line that `usher acl` prints for it")
    elif suits := [own] if own else [name for name in fit if name in ("master", "consumer")]:
        seen = f"{who} may run all that {_a(suits)} needs, and not all that others need"
        yield DoctorFinding(
            "rights", OK, seen, f"{_a(suits)} can work under it; other programs have users of their own"
        )
    else:
        means = "no master and no consumer can do all of its work under it" + (f"; {_a(fit)} can" if fit else "")
        do = "give it the line that `usher acl` prints for its program, and that program's name"
        yield DoctorFinding("rights", BAD, f"{who} may not run: {few}", means, do)


def _a(programs: Iterable[str]) -> str:
    return " or ".join(f"{'an' if name.startswith('a') else 'a'} {name}" for name in programs)


def _times(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    busy = facts.setting("busy-reply-threshold") or facts.setting("lua-time-limit")
    busy_ms = int(busy) if busy and busy.isdecimal() and int(busy) else _BUSY_MS
    if facts.lease_ms * 2 / 3 <= busy_ms:
        seen = (
            f"USHER_LEASE_SECONDS {facts.lease_ms / 1000:g}; a script may run for {busy_ms / 1000:g} s before Redis"
            " says BUSY"
        )
        means = "one slow script of any client ends all leases at once: everything is taken back and handed over again"
        yield DoctorFinding(
            "lease",
            WARN,
            seen,
            means,
            f"set USHER_LEASE_SECONDS above {busy_ms * 3 / 2000:g}, or lower busy-reply-threshold",
        )
    else:
        yield DoctorFinding(
            "lease",
            OK,
            f"USHER_LEASE_SECONDS {facts.lease_ms / 1000:g}",
            f"it outlives a Redis that is busy for {busy_ms / 1000:g} s",
        )
    idle = facts.setting("timeout")
    if idle and idle != "0":
        means = (
            "connections that wait are cut; each cut costs the leader a new epoch, or a consumer a repeated"
            " acknowledgement"
        )
        yield DoctorFinding(
            "idle connections", WARN, f"timeout {idle} s", means, "set timeout 0 (tcp-keepalive finds dead peers)"
        )
    clients, most = (
        facts.number("connected_clients"),
        facts.number("maxclients") or int(facts.setting("maxclients") or 0),
    )
    if clients is not None and most and clients >= NEARLY_FULL * most:
        means = (
            "a program that starts, or comes back after a break, may find no room; a consumer needs five connections, a"
            " master eight"
        )
        yield DoctorFinding("connections", WARN, f"{clients:,} of maxclients {most:,}", means, "raise maxclients")
