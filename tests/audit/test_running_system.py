"""Audits of a real system while messages flow: no false alarm."""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.process.crew import KEYS, Crew, Producer, repeated
from usher.common.redis.client import Link
from usher.master.audit.settings import AuditChoices

_LEASE_MS = 3000
#: So long that the run log is never cut: then everything can be proven.
_RECORDS = 1_000_000


def _plan(redis_url: str) -> AuditChoices:
    # The machine may be busy with something else for a while: what is idle for a minute is.
    limits = {"owner_idle_ms": 20 * _LEASE_MS, "parked_ms": 60_000, "clocks_ms": 100, "reaped_ms": 60_000}
    given = {"ticket_stream": KEYS.stream, "group": KEYS.group, "run_log_length": _RECORDS}
    return AuditChoices(redis_url=redis_url, limits=limits, **given)


@pytest.mark.process
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("audits", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_a_system_at_work_has_no_findings(
    local: Any, request: pytest.FixtureRequest, tmp_path: Path, redis_url: str, audits: int
) -> None:
    """Every second one of ten is Spark's, which finds the same (``test_job``) and takes longer."""
    from usher.master.audit.job import AuditRun

    sessions = [local] if audits < 10 else [local, request.getfixturevalue("spark")]
    plan = _plan(redis_url)
    stop = threading.Event()
    reports = []
    suspects: dict[tuple[str, str], int] = {}
    with Crew(tmp_path, redis_url, USHER_DEMO_WORK_MS="20", USHER_RUN_LOG_LENGTH=str(_RECORDS)) as crew:
        crew.start(1, ["c1", "c2"])
        link = Link(redis_url, "producer")
        producer = Producer(link, tickets=50)

        def send() -> None:
            while not stop.is_set():
                producer.send(200, per_second=1000, within_s=60)

        sender = threading.Thread(target=send)
        sender.start()
        looking = Link(redis_url, "test")
        try:
            crew.until(lambda: looking.call("XLEN", KEYS.runs) > 5, 60, "messages flow")
            for session in itertools.islice(itertools.cycle(sessions), audits):
                running = AuditRun(session, plan, tmp_path)
                reports.append(running.run())
                suspects.update({(one.check.name, one.stream): one.count for one in running.suspects})
        finally:
            stop.set()
            sender.join()
            looking.close()
        crew.wait_until_settled(link, 60)
        reports.append(AuditRun(local, plan, tmp_path).run())
        link.close()
    told = [(one.check.name, one.count, one.examples[:2]) for report in reports for one in report.found]
    assert told == []
    # On a machine that stands still for minutes more moves between the two looks than is looked at again.
    open_ = [sentence for report in reports for sentence in report.unproven if "were looked at again" not in sentence]
    assert open_ == []
    assert reports[0].figures["pending"] + reports[0].figures["executions"] > 0
    # All were read, all are over, and of each the run log tells: nothing was left out.
    assert reports[-1].figures["pending"] == 0
    assert reports[-1].figures["executions"] >= len(producer.accepted) > 0
    assert audits < 10 or suspects, "the second look had nothing to drop: there was no load"
    sys.stdout.write(
        f"{len(producer.accepted)} messages, pending at the audits:"
        f" {[report.figures['pending'] for report in reports]}, suspects {suspects}"
    )


@pytest.mark.process
@pytest.mark.timeout(600)
def test_what_runs_again_after_a_declared_loss_is_no_broken_promise(local: Any, tmp_path: Path, redis_url: str) -> None:
    from usher.master.audit.job import AuditRun

    with Crew(tmp_path, redis_url, USHER_DEMO_WORK_MS="5", USHER_CAPACITY="200") as crew:
        crew.start(1, ["c1", "c2"])
        link = Link(redis_url, "test")
        producer, group = Producer(link, tickets=40), (KEYS.stream, KEYS.group)
        producer.send(3000, per_second=1e6)
        crew.until(lambda: len(crew.handled()) > 300 and link.call("XPENDING", *group)[0] > 100, 60, "some are done")
        link.call("XGROUP", "DESTROY", *group)
        crew.wait_until_handled(producer.accepted, within_s=60)
        crew.wait_until_settled(link, 60)
        again = repeated(crew.executions())
        link.close()
        report = AuditRun(local, _plan(redis_url), tmp_path).run()
    assert again, "there was nothing to tell"
    assert {one.check.name: one.count for one in report.found} == {"repeat_declared": len(again)}
    assert report.verdict == "warn"
