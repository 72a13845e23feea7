"""The run log against what a SQL sink has stored: done means stored."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.audit.seeding import Seeder
from tests.audit.test_job import plan
from usher.common.base.errors import StartRefused
from usher.common.redis.client import Link

pytest.importorskip("sqlalchemy", reason="pip install -e '.[sql]' in Usher's folder")
from usher.consumer.sinks.sql import SqlSink

pa = pytest.importorskip("pyarrow", reason="pip install -e '.[audit]' in Usher's folder")
_LONG = "u" * 300


class Done(NamedTuple):
    """A message, as a sink looks at it."""

    ticket_id: str
    uid: str
    fence: int = 5


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[tuple[str, SqlSink]]:
    """A sink, and the URL of its database."""
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    sink = SqlSink(url)
    sink.create_tables()
    yield url, sink
    sink.engine.dispose()


def test_what_is_done_has_its_effect_or_is_found(
    session: Any, link: Link, redis_url: str, tmp_path: Path, shop: tuple[str, SqlSink]
) -> None:
    from usher.master.audit.job import AuditRun

    url, sink = shop
    for done in (Done("a", "1-1"), Done("a", "order-2"), Done("a", _LONG), Done("b", "order-4"), Done("d", "6-2")):
        with sink.transaction(done):
            pass
    with sqlite3.connect(tmp_path / "shop.db") as sql:
        sql.execute("UPDATE usher_uids SET at_s = at_s - 3600")
    sql.close()
    seeder = Seeder(link, "s")
    sent = (
        ("1-1", "a"),
        ("2-1", "a", "order-2"),
        ("3-1", "a", _LONG),
        ("4-1", "a", "order-4"),
        ("5-1", "a", "failed"),
        ("6-1", "c"),
    )
    for entry_id, ticket, *uid in (*sent, ("6-2", "d", ""), ("7-1", "old", "pruned")):  # an empty uid is none
        link.call("XADD", "s", entry_id, "ticket_id", ticket, *(["uid", *uid] if uid else []))
    seeder.read()
    seeder.over(*(f"{n}-1" for n in range(1, 8)), "6-2")
    two_hours_ago = int(time.time() - 7200) * 1000
    seeder.ran("c1:1", ("7-1", "old", 5, 1, 2), record=f"{two_hours_ago}-1")
    seeder.ran(
        "c1:1",
        *((f"{n}-1", "a", 5, n * 10, n * 10 + 5) for n in range(1, 5)),
        ("5-1", "a", 5, 60, 70, "gave_up"),
        ("6-1", "c", 5, 1, 2),
    )
    seeder.letter("5-1", "a")
    seeder.ran("c1:1", ("6-2", "d", 5, 1, 2))
    report = AuditRun(session, plan(redis_url, "s", audit_sink_url=url), tmp_path).run()
    assert [(one.check.name, one.count) for one in report.found] == [("effect_missing", 2)]
    assert [(one.id, one.ticket) for one in report.found[0].examples] == [("4-1", "a"), ("6-1", "c")], (
        "of another ticket; of none"
    )


def test_a_sink_that_has_nothing_or_cannot_be_read_is_named(local: Any, tmp_path: Path) -> None:
    from usher.master.audit.job import read_effects

    url = f"sqlite:///{tmp_path / 'shop.db'}"

    def told(url: str, sink: str = "default") -> str:
        return read_effects(local, plan("", "s", audit_sink_url=url, sink=sink), tmp_path)

    with pytest.raises(StartRefused, match="USHER_AUDIT_SINK_URL: .*no such table"):
        told(url)
    sink = SqlSink(url, "mine")
    sink.create_tables()
    with sink.transaction(Done("a", "1-1")):
        pass
    assert "the sink default has stored nothing" in told(url)
    assert told(url, "mine") == ""
    with pytest.raises(StartRefused, match="USHER_AUDIT_SINK_URL cannot be used"):
        told("nonsense")
    sink.engine.dispose()
