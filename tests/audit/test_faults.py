"""Faults one by one, each in a stream of its own that is well otherwise: each is found, and nothing else is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.audit.faults import FAULTS, Fault, plant
from tests.audit.seeding import LIMITS, Seeder
from tests.audit.test_job import plan
from usher.common.redis.client import Link
from usher.common.redis.embedded import EmbeddedRedis
from usher.master.audit.findings import CHECKS
from usher.master.audit.job import AuditRun

if TYPE_CHECKING:
    from usher.master.audit.job import AuditReport


@pytest.fixture(scope="module")
def server(short_tmp: Path) -> Iterator[EmbeddedRedis]:
    """A server that knows what was deleted from a stream."""
    with EmbeddedRedis(short_tmp / "faults", port=None, durable=False) as server:
        yield server


@pytest.fixture(scope="module", params=["local", "spark"])
def report(
    request: pytest.FixtureRequest, server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> AuditReport:
    """The findings of one audit over the streams of all tests that run; of Spark few do in a plain run (``conftest``)."""
    session, link = request.getfixturevalue(request.param), Link(server.url, "test")
    chosen = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and hasattr(item, "callspec")
    ]
    told = (one["fault"] for one in chosen if one.get("report") == request.param and "fault" in one)
    named = {one.name if isinstance(one, Fault) else one for one in told}
    faults = [one for one in FAULTS if one.name in named]
    try:
        link.call("FLUSHALL")
        for one in faults:
            plant(Seeder(link, one.name), link, one.seed)
        time.sleep(2 * LIMITS.reaped_ms / 1000)
        return AuditRun(session, plan(server.url, *(one.name for one in faults)), tmp_path_factory.mktemp("read")).run()
    finally:
        link.close()


@pytest.mark.parametrize("fault", FAULTS, ids=[one.name for one in FAULTS])
def test_a_fault_is_found_and_nothing_else(report: AuditReport, fault: Fault) -> None:
    found = [one for one in report.found if one.stream == fault.name]
    examples = {one.check.name: {each.id or each.owner or each.ticket for each in one.examples} for one in found}
    assert examples == fault.expected
    assert {one.check.name: one.count for one in found} == {check: len(ids) for check, ids in fault.expected.items()}


def test_there_are_62_faults_and_one_for_each_check() -> None:
    assert sum(bool(one.expected) for one in FAULTS) >= 62
    assert {check for one in FAULTS for check in one.expected} == {*CHECKS}


@pytest.mark.parametrize("fault", ["deleted_inside"])
def test_what_was_deleted_inside_is_said(report: AuditReport, fault: str) -> None:
    assert [one for one in report.unproven if one.startswith("deleted_inside: ")] == [
        "deleted_inside: entries were deleted inside it, the last one 3-1 (XDEL); whether they were handled was not"
        " looked at"
    ]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("a_clock_ahead", "its clock is ahead of Redis' by 4.991 to 5.001 s"),
        ("a_clock_back", "its clock is ahead of Redis' by -5.009 to -4.999 s"),
        (
            "a_clock_that_was_set_while_it_ran",
            "its clock was set while it ran: it was ahead of Redis' by at most -1.999 s, and by at least -0.001 s",
        ),
    ],
)
def test_how_far_a_clock_is_off_is_said(report: AuditReport, fault: str, said: str) -> None:
    [found] = [one for one in report.found if (one.stream, one.check.name) == (fault, "clock_wrong")]
    assert [one.detail for one in found.examples] == [said]
