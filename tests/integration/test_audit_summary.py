"""What the last audit found, as the master tells it: from Redis alone, and at any time, whatever lies there."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from usher.common.doctor.collector import collect
from usher.common.doctor.judgements import DoctorFinding
from usher.common.observability.metrics import Metrics
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.master.insight.metrics import AuditMetrics
from usher.master.insight.status import StatusReader

KEYS = Keys("s", "g")
FOUND: dict[str, Any] = {
    "started_ms": 1_700_000_000_500,
    "seconds": 12.5,
    "unproven": 2,
    "severities": {"bad": 3, "warn": 1},
}


def told(link: Link) -> dict[str, float]:
    """The gauges of an audit at a scrape."""
    metrics, status = Metrics(), StatusReader(link, KEYS)
    metrics.add(AuditMetrics(status.proofs))
    lines = [line for line in metrics.page()[0].decode().splitlines() if line.startswith("usher_audit")]
    return {
        name.removeprefix("usher_audit_"): float(value) for name, _, value in (line.rpartition(" ") for line in lines)
    }


def test_the_last_audit_becomes_gauges_without_any_id(link: Link) -> None:
    link.call("SET", KEYS.audit, orjson.dumps(FOUND))
    assert told(link) == {
        "last_run_timestamp_seconds": 1_700_000_000.5,
        "duration_seconds": 12.5,
        "unproven": 2,
        'findings{severity="bad"}': 3,
        'findings{severity="warn"}': 1,
    }


@pytest.mark.parametrize("stored", [None, b"", b"{", b"[1]", b"null", b"\xff"])
def test_without_an_audit_nothing_is_told(link: Link, stored: bytes | None) -> None:
    """An alert on the age of the last run must not see a 0 as 1970."""
    if stored is not None:
        link.call("SET", KEYS.audit, stored)
    assert StatusReader(link, KEYS).proofs()["audit"] is None
    assert told(link) == {}


def test_a_key_of_another_kind_and_a_redis_that_is_away_do_not_spoil_the_scrape(link: Link) -> None:
    link.call("LPUSH", KEYS.audit, "x")
    assert told(link) == {}
    assert told(Link("redis://127.0.0.1:1", "test")) == {}


def test_until_when_history_is_proven_is_told_also_without_an_audit(link: Link) -> None:
    link.call("HSET", KEYS.archived, "proven_until_ms", 1_700_000_000_500)
    gauges = told(link)
    assert gauges["proven_until"] == 1_700_000_000.5
    assert gauges["unproven_seconds"] > 80_000_000
    assert len(gauges) == 2


def proof(link: Link) -> DoctorFinding | None:
    return next((one for one in collect(link, KEYS, 10_000).stream or () if one.check == "proof"), None)


def test_the_doctor_knows_how_far_the_log_reaches_back_once_it_was_cut(link: Link) -> None:
    for n in range(1, 4):
        link.call("XADD", KEYS.runs, f"{n}000-0", "batch", "{}")
    link.call(
        "HSET", KEYS.archived, "runs", "1000-0", "proven_until_ms", 1000, "proven_every_ms", 500, "proven_took_ms", 70
    )
    assert proof(link) is None
    link.call("XTRIM", KEYS.runs, "MAXLEN", 2)
    found = proof(link)
    assert found is not None and found.severity.value == "warn"
    assert found.seen.startswith("the run log holds 1 s, and the last proof is ")


def test_the_doctor_says_that_audits_alone_prove_what_the_log_holds(link: Link) -> None:
    for n in range(1, 4):
        link.call("XADD", KEYS.runs, f"{n}000-0", "batch", "{}")
    link.call("XTRIM", KEYS.runs, "MAXLEN", 2)
    link.call("HSET", KEYS.archived, "runs", "1000-0")
    assert proof(link) is None, "nobody audits"
    link.call("SET", KEYS.audit, b"{}")
    told = proof(link)
    assert told is not None
    assert (told.severity.value, told.seen) == (
        "warn",
        "the run log holds 1 s, which is all that `usher audit` looks at",
    )


def test_numbers_that_are_none_are_0(link: Link) -> None:
    link.call("SET", KEYS.audit, b'{"started_ms": "x", "severities": [], "unproven": null}')
    assert set(told(link).values()) == {0}
