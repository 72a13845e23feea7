"""The Spark job against a real Redis: everything that is wrong is found, with the right example, and nothing that is
allowed."""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.audit import seeding
from tests.audit.seeding import CAP, EXPECTED, GROUP, LIMITS, STREAMS, Seeder
from tests.proxy import Proxy
from usher.common.base.errors import StartRefused
from usher.common.redis.client import Link
from usher.common.redis.embedded import EmbeddedRedis
from usher.master.audit.findings import CHECKS, AuditFinding
from usher.master.audit.settings import AuditChoices

if TYPE_CHECKING:
    from usher.master.audit.engine import SparkEngine
    from usher.master.audit.report import AuditReport

#: Findings that are about an owner or about a ticket, not about an entry.
_OF_OWNERS = ("owner_dead", "stranger_owns", "consumer_leaked", "key_leaked", "clock_wrong")
_OF_TICKETS = ("ticket_owned_twice", "index_unreadable")


def plan(url: str, *streams: str, **more: Any) -> AuditChoices:
    named = ",".join(streams or STREAMS)
    return AuditChoices(
        redis_url=url, chosen_streams=named, group=GROUP, limits=LIMITS, run_log_length=CAP, ticket_stream="s", **more
    )


def audit(session: Any, made: AuditChoices) -> AuditReport:
    from usher.master.audit.job import AuditRun

    with tempfile.TemporaryDirectory() as folder:
        return AuditRun(session, made, Path(folder)).run()


def about(found: AuditFinding) -> set[tuple[str, str]]:
    """(stream, what each example is about)."""
    name = "owner" if found.check.name in _OF_OWNERS else "ticket" if found.check.name in _OF_TICKETS else "id"
    return {(found.stream, getattr(example, name)) for example in found.examples}


@pytest.fixture(scope="module")
def reports(local: Any, spark: SparkEngine, redis_server: EmbeddedRedis) -> tuple[Any, ...]:
    """Audits, by each engine, of a system with everything wrong."""
    link = Link(redis_server.url, "test")
    try:
        link.call("FLUSHALL")
        seeding.seed(link)
        time.sleep(2 * LIMITS.reaped_ms / 1000)
        one, other = (audit(session, plan(redis_server.url)) for session in (local, spark))
        return one, other
    finally:
        link.close()


@pytest.fixture(scope="module", params=[0, 1], ids=["local", "spark"])
def seeded(request: pytest.FixtureRequest, reports: tuple[Any, ...]) -> tuple[AuditReport, None]:
    """An audit of a system with everything wrong."""
    return reports[request.param], None


def _said(report: AuditReport) -> list[Any]:
    """All that does not depend on when the audit ran."""
    found = [
        (
            one.check.name,
            one.stream,
            one.count,
            one.suspects,
            sorted(re.sub(r"\d+ (ms|s)\b", "", str(each)) for each in one.examples),
        )
        for one in report.found
    ]
    times = ("oldest_age_ms", "reading_seconds", "engine")
    figures = {name: value for name, value in report.figures.items() if name not in times}
    plots = {name: sorted(report.plots[name]) for name in ("owners", "recoveries")}
    return [sorted(found), report.unproven, figures, plots]


def test_the_two_engines_say_the_same(reports: tuple[Any, ...]) -> None:
    assert _said(reports[0]) == _said(reports[1])
    assert len(reports[0].found) > 10


@pytest.mark.slow
def test_the_two_engines_say_the_same_of_a_random_history(
    local: Any, spark: SparkEngine, redis_server: EmbeddedRedis
) -> None:
    link = Link(redis_server.url, "test")
    try:
        link.call("FLUSHALL")
        seeding.seed_random(link)
        one, other = (audit(session, plan(redis_server.url, seeding.RANDOM)) for session in (local, spark))
    finally:
        link.close()
    assert _said(one) == _said(other)
    assert len(one.found) > 10


@pytest.mark.parametrize("check", EXPECTED)
def test_what_is_wrong_is_found_with_the_right_example(seeded: tuple[AuditReport, None], check: str) -> None:
    report, _ = seeded
    found = [one for one in report.found if one.check.name == check]
    assert set().union(*map(about, found)) == EXPECTED[check]
    assert sum(one.count for one in found) == len(EXPECTED[check])


def test_what_cannot_be_proven_is_said(seeded: tuple[AuditReport, None]) -> None:
    said = "\n".join(seeded[0].unproven)
    assert "pending-side: the run log is empty" in said
    assert "capped: the run log was capped; executions recorded before 5-1 are not in it" in said
    assert "capped: 1 executions may be repeats" in said
    assert "runs-side: 1 entries are not later than the first one that was handled (that was added at 1 ms)" in said


def test_figures_count_what_was_looked_at(seeded: tuple[AuditReport, None]) -> None:
    figures = seeded[0].figures
    assert figures["pending"] == 21
    assert figures["crashed"] == 3
    assert figures["unsuccessful"] == 11  # crashed three times, failed five times, gave up, was refused twice
    assert figures["slowest_recovery_ms"] == 9500.4  # 42-1, after its group was set back
    assert figures["succeeded_again"] == 3  # 10-1, 11-1 and 25-1: their former owner was noted behind its successor
    assert seeded[0].exit_code == 1
    assert seeded[0].verdict == "bad"


def test_a_suspect_that_is_well_at_the_second_look_is_no_finding(
    session: Any, link: Link, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An acknowledgement between the two looks: what a running system does all the time."""
    seeder = Seeder(link, "s")
    seeder.add(("1-1", "a"), ("2-1", "b"))
    seeder.read()
    seeder.live("c1:1")
    seeder.own("c1:1", "1-1", "2-1")

    from usher.master.audit.job import AuditRun

    running = AuditRun(session, plan(redis_url, "s"), tmp_path)
    first_look = running._second_look

    def moved() -> list[AuditFinding]:
        assert {place: count for place, (count, _) in running.suspects.items()} == {("pending_without_index", "s"): 2}
        seeder.over("1-1")
        seeder.index("b", "c1:1 5 2-1")
        return first_look()

    monkeypatch.setattr(running, "_second_look", moved)
    report = running.run()
    assert report.found == ()
    assert report.exit_code == 0


def test_an_empty_stream_is_clean(session: Any, link: Link, redis_url: str) -> None:
    Seeder(link, "s")
    report = audit(session, plan(redis_url, "s"))
    assert (report.verdict, report.unproven) == ("clean", ())


def test_a_group_that_does_not_exist_is_refused_with_the_settings_to_look_at(
    session: Any, link: Link, redis_url: str
) -> None:
    link.call("XADD", "s", "*", "ticket_id", "1")
    with pytest.raises(StartRefused, match=r"USHER_TICKET_STREAM, USHER_GROUP: stream s has no group g"):
        audit(session, plan(redis_url, "s"))
    with pytest.raises(StartRefused, match="USHER_GROUP"):
        audit(session, plan(redis_url, "nothing"))


@pytest.mark.parametrize("engine", ["local", "spark"])
def test_redis_gone_in_the_middle_says_nothing_about_the_system(
    engine: str, request: pytest.FixtureRequest, short_tmp: object
) -> None:
    from pathlib import Path

    session = request.getfixturevalue(engine)
    with EmbeddedRedis(Path(str(short_tmp)) / "gone", durable=False) as server:
        link = Link(server.url, "test")
        seeder = Seeder(link, "s")
        seeder.add(*((f"{n}-1", "a") for n in range(1, 2000)))
        seeder.read()
        link.close()
        calls = 0

        def cut(chunk: bytes) -> bytes | None:
            nonlocal calls
            calls += b"999-1" in chunk
            return None if calls else chunk

        with (
            Proxy(server.url, cut) as proxy,
            pytest.raises(StartRefused, match=r"not finished, so it proves nothing: .*Redis.* (went away|closed)"),
        ):
            audit(session, plan(proxy.url, "s"))


def test_what_reads_empty_tables_of_suspects_alone_finds_nothing(
    local: Any, link: Link, redis_url: str, tmp_path: Path
) -> None:
    """So it is not asked: most of these tables are empty where all is well."""
    from usher.master.audit.job import AuditRun

    Seeder(link, "s")
    AuditRun(local, plan(redis_url, "s"), tmp_path).run()
    left = [one.name for one in CHECKS.values() if one.select and local._finds_nothing(one.select)]
    assert len(left) > 20 and not {"lost", "overlap", "attempts_wrong", "dead_and_done"} - {*left}
    assert [local.rows(CHECKS[name].select) for name in left] == [[]] * len(left)
