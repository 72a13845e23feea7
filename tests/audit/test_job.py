"""The job against a real Redis: what is wrong is found, with the right example, and nothing that is allowed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.audit.seeding import CAP, GROUP, LIMITS, Seeder
from tests.proxy import Proxy
from usher.common.base.errors import StartRefused
from usher.common.redis.client import Link
from usher.common.redis.embedded import EmbeddedRedis
from usher.master.audit.findings import AuditFinding
from usher.master.audit.settings import AuditChoices

if TYPE_CHECKING:
    from usher.master.audit.job import AuditReport


def plan(url: str, *streams: str, **more: Any) -> AuditChoices:
    given = more | {"redis_url": url, "chosen_streams": ",".join(streams), "group": GROUP, "limits": vars(LIMITS)}
    return AuditChoices(run_log_length=CAP, ticket_stream="s", **given)


def audit(session: Any, made: AuditChoices) -> AuditReport:
    from usher.master.audit.job import AuditRun

    with tempfile.TemporaryDirectory() as folder:
        return AuditRun(session, made, Path(folder)).run()


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
        assert [(one.check.name, one.count) for one in running.suspects] == [("pending_without_index", 2)]
        seeder.over("1-1")
        seeder.index("b", "c1:1 5 2-1")
        return first_look()

    monkeypatch.setattr(running, "_second_look", moved)
    report = running.run()
    assert report.found == ()


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


@pytest.mark.parametrize("engine", ["local", pytest.param("spark", marks=pytest.mark.slow)])
def test_redis_gone_in_the_middle_says_nothing_about_the_system(
    engine: str, request: pytest.FixtureRequest, short_tmp: Path
) -> None:
    session = request.getfixturevalue(engine)
    with EmbeddedRedis(short_tmp / "gone", durable=False) as server:
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
