"""The doctor's judgement: facts in, findings out. No Redis."""

from __future__ import annotations

from dataclasses import replace

import pytest

from usher.common.doctor.collector import judge_proof
from usher.common.doctor.judgements import (
    Clock,
    DoctorFacts,
    DoctorFinding,
    DoctorSeverity,
    examine,
    promise,
    worst,
)

OK, UNKNOWN, WARN, BAD = DoctorSeverity.OK, DoctorSeverity.UNKNOWN, DoctorSeverity.WARN, DoctorSeverity.BAD
NOW_MS = 1_800_000_000_000

INFO = {
    "redis_version": "8.8.0",
    "role": "master",
    "connected_slaves": "0",
    "cluster_enabled": "0",
    "aof_enabled": "1",
    "aof_last_write_status": "ok",
    "aof_last_bgrewrite_status": "ok",
    "rdb_last_bgsave_status": "ok",
    "aof_delayed_fsync": "0",
    "maxmemory": "0",
    "maxmemory_policy": "noeviction",
    "used_memory": "1000000",
    "total_system_memory": "1000000000",
    "evicted_keys": "0",
    "connected_clients": "10",
}
CONFIG = {
    "appendonly": "yes",
    "appendfsync": "always",
    "no-appendfsync-on-rewrite": "no",
    "save": "",
    "stop-writes-on-bgsave-error": "yes",
    "maxmemory-policy": "noeviction",
    "maxclients": "10000",
    "min-replicas-to-write": "0",
    "busy-reply-threshold": "5000",
    "timeout": "0",
}


WELL = DoctorFacts(
    told=INFO | CONFIG,
    clock=Clock(NOW_MS, 3),
    user="default",
    missing={"master": (), "consumer": (), "auditor": ()},
    sentinels=0,
    stream=(),
)


def findings(facts: DoctorFacts) -> dict[str, DoctorFinding]:
    """By check; those that were there only when all was well are still there unless the facts are gone."""
    return {finding.check: finding for finding in examine(facts)}


def with_info(**changed: str) -> DoctorFacts:
    return replace(WELL, told=INFO | CONFIG | changed)


def with_config(**changed: str) -> DoctorFacts:
    return with_info(**{name.replace("_", "-"): value for name, value in changed.items()})


def test_where_all_is_well_every_finding_says_so() -> None:
    found = examine(WELL)
    assert {finding.severity for finding in found} == {OK}
    assert worst(found) is OK
    assert all(finding.seen and finding.means and not finding.do for finding in found)


@pytest.mark.parametrize("archived", [b"999999-9", b"1149000-0"])
def test_where_proofs_take_too_long_to_come_along_nobody_is_told_to_prove_more_often(archived: bytes) -> None:
    log = {b"first-entry": [b"1000000-0", []], b"last-generated-id": b"1150000-0", b"entries-added": 9, b"length": 5}
    noted = {b"runs": archived, b"proven_until_ms": b"1", b"proven_every_ms": b"140000"}
    [quick] = judge_proof(noted | {b"proven_took_ms": b"10000"}, log)
    [slow] = judge_proof(noted | {b"proven_took_ms": b"130000"}, log)
    assert "130 s" not in quick.seen and quick.do.startswith("prove more often")
    assert "took 130 s" in slow.seen and slow.do.startswith("proving more often does not help")
    assert "USHER_RUN_LOG_LENGTH" in slow.do and "USHER_AUDIT_SPARK_MASTER" in slow.do
    [well] = judge_proof(noted | {b"runs": b"1149000-0", b"proven_every_ms": b"60000"}, log)
    assert well.severity is OK


_LACKS: dict[str, tuple[str, ...]] = {"master": ("XCLAIM",), "consumer": (), "auditor": ()}
ONE_THING_WRONG: list[tuple[DoctorFacts, str, DoctorSeverity]] = [
    (with_info(aof_enabled="0"), "append-only file", BAD),
    (with_config(appendfsync="everysec"), "fsync", OK),
    (with_config(appendfsync="no"), "fsync", WARN),
    (with_config(no_appendfsync_on_rewrite="yes"), "fsync while rewriting", WARN),
    (with_info(aof_delayed_fsync="3"), "fsync delays", WARN),
    (with_info(aof_last_write_status="err"), "disk", BAD),
    (with_info(aof_last_write_status="err", aof_enabled="0"), "disk", OK),  # switched off after it: Redis writes on
    (with_info(aof_last_bgrewrite_status="err"), "disk", WARN),
    (with_info(rdb_last_bgsave_status="err", save="3600 1"), "disk", BAD),
    (replace(WELL, told=INFO | {"rdb_last_bgsave_status": "err"}), "disk", WARN),
    (with_info(rdb_last_bgsave_status="err"), "disk", OK),  # no snapshots are scheduled: nothing is refused for it
    (with_info(maxmemory_policy="allkeys-lru"), "eviction", BAD),
    (with_info(maxmemory_policy="volatile-ttl"), "eviction", BAD),
    (with_info(evicted_keys="7"), "eviction", WARN),
    (with_info(maxmemory="1000000"), "memory", BAD),
    (
        with_info(maxmemory="1000000", maxmemory_policy="allkeys-lru"),
        "memory",
        WARN,
    ),  # it deletes, which is told as eviction
    (with_info(maxmemory="1000000", mem_not_counted_for_evict="900000"), "memory", OK),
    (with_info(maxmemory="1100000"), "memory", WARN),
    (with_info(used_memory="900000000"), "memory", WARN),
    (replace(WELL, user="c", missing=_LACKS | {"consumer": ("XCLAIM",)}), "rights", BAD),
    (replace(WELL, missing=None), "rights", UNKNOWN),
    (replace(WELL, user="a", missing=_LACKS), "rights", OK),
    (replace(WELL, user="auditor", missing=_LACKS), "rights", OK),
    (replace(WELL, user="master", missing=_LACKS), "rights", BAD),
    (replace(WELL, lease_ms=7500), "lease", WARN),
    (replace(WELL, lease_ms=7600), "lease", OK),
    (replace(with_config(busy_reply_threshold="100"), lease_ms=1000), "lease", OK),
    (with_config(timeout="300"), "idle connections", WARN),
    (with_info(connected_clients="9000"), "connections", WARN),
    (with_info(redis_version="6.0.20"), "version", BAD),
    (with_info(redis_version="6.2.6"), "version", WARN),
    (with_info(redis_version="7.0.4"), "version", BAD),
    (with_info(role="slave", master_host="h", master_port="1"), "role", BAD),
    (with_info(connected_slaves="1"), "replicas", WARN),
    (
        with_info(connected_slaves="1", min_slaves_good_slaves="1", **{"min-replicas-to-write": "1"}),
        "replicas",
        OK,
    ),
    (
        with_info(connected_slaves="1", min_slaves_good_slaves="0", **{"min-replicas-to-write": "1"}),
        "replicas",
        BAD,
    ),
    (replace(WELL, told=INFO | {"connected_slaves": "1"}), "replicas", UNKNOWN),
    (with_info(cluster_enabled="1"), "failover", BAD),
    (replace(with_info(cluster_enabled="1"), mode="cluster", cluster={"cluster_state": "ok"}), "failover", OK),
    (replace(with_info(cluster_enabled="1"), mode="cluster", cluster={"cluster_state": "fail"}), "failover", BAD),
    (replace(with_info(cluster_enabled="1"), mode="cluster"), "failover", UNKNOWN),
    (replace(WELL, mode="sentinel", sentinels=3), "failover", OK),
    (replace(WELL, sentinels=3), "failover", WARN),
    (replace(WELL, clock=Clock(NOW_MS, 60_000)), "clock", WARN),
]


@pytest.mark.parametrize(
    ("facts", "check", "severity"),
    ONE_THING_WRONG,
    ids=[f"{n}-{row[1]}-{row[2].value}" for n, row in enumerate(ONE_THING_WRONG)],
)
def test_what_is_wrong_is_found_and_what_is_bad_says_what_to_do(
    facts: DoctorFacts, check: str, severity: DoctorSeverity
) -> None:
    finding = findings(facts)[check]
    assert finding.severity is severity
    assert finding.means
    assert finding.do or severity in (OK, UNKNOWN) or check == "dead consumers"


@pytest.mark.parametrize(
    ("facts", "check"),
    [
        (WELL, "failover"),
        (with_info(connected_clients="100"), "connections"),
    ],
)
def test_what_is_not_wrong_is_not_mentioned(facts: DoctorFacts, check: str) -> None:
    assert check not in findings(facts)


def test_what_could_not_be_asked_is_unknown_and_never_fine() -> None:
    """A managed Redis that forbids CONFIG, and one that forbids everything."""
    no_config = examine(replace(WELL, told=INFO, refused={"CONFIG GET": "NOPERM no config for you"}))
    by_check = {finding.check: finding for finding in no_config}
    assert (by_check["fsync"].severity, by_check["fsync"].seen) == (UNKNOWN, "NOPERM no config for you")
    assert by_check["append-only file"].severity is OK, "INFO tells that one"
    assert worst(no_config) is UNKNOWN
    nothing = {finding.check: finding.severity for finding in examine(DoctorFacts())}
    assert set(nothing.values()) == {UNKNOWN, OK}
    assert [check for check, severity in nothing.items() if severity is OK] == ["lease"], (
        "our own setting is all that is known"
    )
    assert {"version", "append-only file", "eviction", "memory", "rights", "role", "clock", "stream"} <= set(nothing)


def test_the_worst_counts() -> None:
    def of(*severities: DoctorSeverity) -> DoctorSeverity:
        return worst([DoctorFinding("", severity, "", "") for severity in severities])

    assert of() is OK
    assert of(OK, UNKNOWN) is UNKNOWN
    assert of(WARN, UNKNOWN, OK) is WARN
    assert of(WARN, BAD, OK) is BAD


@pytest.mark.parametrize(
    ("facts", "killed", "power"),
    [
        (WELL, "nothing is lost", "nothing is lost, if the disk"),
        (with_config(appendfsync="everysec"), "no loss was seen", "up to about a second"),
        (with_config(appendfsync="no"), "no loss was seen", "half a minute"),
        (replace(WELL, told=INFO), "no loss was seen", "not known"),
        (with_info(aof_enabled="0"), "all that Redis had is lost", "all that Redis had is lost"),
        (
            with_info(aof_enabled="0", save="60 1"),
            "since the last snapshot",
            "since the last snapshot",
        ),
        (DoctorFacts(), "not known", "not known"),
    ],
)
def test_the_promise_follows_from_the_files(facts: DoctorFacts, killed: str, power: str) -> None:
    rows = dict(promise(facts))
    assert killed in rows["redis-server is killed"]
    assert power in rows["its host loses power"]
    assert "nothing is lost" in rows["a program of Usher is killed, paused or cut off"]


def test_only_where_there_are_replicas_a_promotion_is_spoken_of() -> None:
    assert "a replica is promoted" not in dict(promise(WELL))
    for facts in (with_info(connected_slaves="1"), replace(WELL, mode="sentinel"), replace(WELL, mode="cluster")):
        assert "resend" in dict(promise(facts))["a replica is promoted"]
