"""Judge replicas, failover and clocks: which servers have the data, which takes over, whose clock counts. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from usher.common.doctor.facts import DoctorFacts, DoctorFinding, DoctorSeverity

OK, UNKNOWN, WARN, BAD = DoctorSeverity.OK, DoctorSeverity.UNKNOWN, DoctorSeverity.WARN, DoctorSeverity.BAD
#: Difference of two machines' clocks, in ms, from which displayed times are misleading.
_SKEW_MS = 2000
#: Difference in ms that two clocks may show while we watch: at most that of the two round trips.
_JUMP_MS = 200
_AHEAD_MS = 1000
#: What a failover on purpose costs, by whether the sentinels can coordinate it.
_ON_PURPOSE = {
    True: "one on purpose loses nothing if it is SENTINEL FAILOVER service COORDINATED",
    False: "one on purpose may lose a moment: these sentinels have no COORDINATED failover (Valkey 9 has)",
    None: "one on purpose may lose a moment, unless the sentinels know SENTINEL FAILOVER service COORDINATED",
}
#: Factor from milliseconds to epochs, fences and generations.
_NUMBERS_PER_MS = 1024


def judge_topology(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    yield from _role(facts)
    yield from judge_replicas(facts)
    yield from _failover(facts)
    yield from _clock(facts)


def _role(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    role = facts.told("role")
    if role is None:
        yield DoctorFinding(
            "role", UNKNOWN, facts.why_not("INFO"), "a replica would refuse every write", "allow INFO to this user"
        )
    elif role == "master":
        yield DoctorFinding("role", OK, "master", "it accepts writes")
    else:
        seen = f"replica of {facts.told('master_host')}:{facts.told('master_port')}"
        means = "it refuses every write: nothing can be sent, handed over or acknowledged"
        yield DoctorFinding("role", BAD, seen, means, "point USHER_REDIS_URL at the master")


def judge_replicas(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    """Yield findings on the copies, and on Redis asking for more of them than there are."""
    replicas = facts.number("connected_slaves")
    if replicas is None or facts.told("role") != "master":
        return
    needed_text = facts.setting("min-replicas-to-write")
    needed = int(needed_text) if needed_text and needed_text.isdecimal() else None
    good = facts.number("min_slaves_good_slaves")
    # Redis reports the number of good ones where some are needed.
    if good == 0 or (needed and (good if good is not None else replicas) < needed):
        means = "Redis refuses writes (NOREPLICAS) until replicas are back: nothing is lost, nothing moves"
        seen = f"{good if good is not None else replicas} good ones, {needed or 'some'} needed"
        yield DoctorFinding("replicas", BAD, seen, means, "bring the replicas back")
    elif not replicas:
        yield DoctorFinding("replicas", OK, "none", "nothing to fail over to; the data live on this host alone")
    elif needed:
        means = (
            "a failover may lose the last moment of sends and acknowledgements; a master that was cut off stops"
            " accepting writes"
        )
        yield DoctorFinding("replicas", OK, f"{replicas} connected, {needed} needed to write", means)
    else:
        unknown = needed_text is None
        seen = f"{replicas} connected, min-replicas-to-write {'not told' if unknown else '0'}"
        means = (
            "a failover loses what was not copied yet; a former master that has not heard of it goes on accepting"
            " writes that are thrown away"
        )
        do = (
            "set min-replicas-to-write 1 and min-replicas-max-lag to a few seconds; resend what was sent around a"
            " failover"
        )
        yield DoctorFinding("replicas", UNKNOWN if unknown else WARN, seen, means, do)


def _failover(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    in_cluster = facts.told("cluster_enabled") == "1"
    if in_cluster and facts.mode != "cluster":
        do = "use redis+cluster://host:port,host:port as USHER_REDIS_URL"
        yield DoctorFinding(
            "failover",
            BAD,
            "a cluster node behind a plain URL",
            "after a failover, or when a slot moves, nothing works any more",
            do,
        )
    elif facts.mode == "cluster":
        state = (facts.cluster or {}).get("cluster_state")
        if state is None:
            yield DoctorFinding(
                "failover", UNKNOWN, facts.why_not("CLUSTER INFO"), "it is not known whether the cluster is whole"
            )
        elif state == "ok":
            yield DoctorFinding(
                "failover",
                OK,
                "cluster, state ok",
                "Usher follows the slot of the stream; while it is being moved everything waits",
            )
        else:
            means = "Redis refuses commands (CLUSTERDOWN): nothing is lost, nothing moves"
            yield DoctorFinding("failover", BAD, f"cluster, state {state}", means, "mend the cluster")
    elif facts.mode == "sentinel":
        yield DoctorFinding(
            "failover",
            OK,
            "Sentinel names the master",
            "after a failover Usher goes on by itself with what the new master has; " + _ON_PURPOSE[facts.coordinates],
        )
    elif facts.sentinels:
        seen = f"{facts.sentinels} sentinels watch this server, but the URL is that of one server"
        do = "use redis+sentinel://host:port,host:port/service as USHER_REDIS_URL"
        yield DoctorFinding(
            "failover", WARN, seen, "after a failover Usher stays with the former master, which refuses writes", do
        )


def _clock(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    clock = facts.clock
    if clock is None:
        yield DoctorFinding(
            "clock", UNKNOWN, facts.why_not("TIME"), "leases and ids rest on Redis' clock", "allow TIME to this user"
        )
        return
    if abs(clock.drift_ms) > _JUMP_MS:
        seen = f"in {clock.watched_ms} ms Redis' clock went {clock.watched_ms + clock.drift_ms} ms"
        means = "leases end early or late; fencing tokens hold all the same"
        yield DoctorFinding("clock", WARN, seen, means, "let the clock of Redis' host be slewed, not set")
    elif abs(clock.ahead_ms) > _SKEW_MS:
        seen = (
            f"Redis is {abs(clock.ahead_ms) / 1000:,.1f} s {'ahead of' if clock.ahead_ms > 0 else 'behind'} this"
            " machine"
        )
        yield DoctorFinding(
            "clock",
            WARN,
            seen,
            "leases are Redis' own and hold; times that people see are off by as much",
            "synchronise the clocks",
        )
    else:
        yield DoctorFinding(
            "clock", OK, f"Redis and this machine differ by {abs(clock.ahead_ms)} ms", "leases and ids can be trusted"
        )
    means = (
        "a message takes two to four of these to its handler; with USHER_ACK_MODE=strict a ticket takes more than one"
        " per message"
    )
    yield DoctorFinding("round trip", OK, f"{clock.trip_ms:,.1f} ms from here to Redis", means)
    highest = facts.stream.highest_number if facts.stream is not None else 0
    back_ms = highest // _NUMBERS_PER_MS - clock.redis_ms
    if back_ms > _AHEAD_MS:
        means = (
            "epochs and fencing tokens go on growing, and leases that were given before are shortened within seconds;"
            " new ids stay at the old time"
        )
        do = "wait, or set the clock right; see that it is slewed, not set"
        yield DoctorFinding(
            "clock went back", WARN, f"by {back_ms / 1000:,.1f} s since the last number was given", means, do
        )
