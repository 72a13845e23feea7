"""Which engine executes an audit: by the number of rows, unless somebody says which, or where Spark runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.master.audit import sessions
from usher.master.audit.settings import AuditSettings


@pytest.mark.parametrize(
    ("rows", "given", "environ", "expected"),
    [
        (3, {}, {}, "local"),
        (4, {}, {}, "spark"),
        (4, {"audit_engine": "local"}, {}, "local"),
        (3, {"audit_engine": "spark"}, {}, "spark"),
        (3, {"audit_spark_master": "spark://host:7077"}, {}, "spark"),
        (3, {"audit_spark_master": "spark://host:7077", "audit_engine": "local"}, {}, "local"),
        (3, {}, {"PYSPARK_GATEWAY_PORT": "1"}, "spark"),
    ],
)
def test_the_engine_follows_from_the_number_of_rows_unless_it_is_said(
    link: Link,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    given: dict[str, Any],
    environ: dict[str, str],
    expected: str,
) -> None:
    begun: list[str] = []

    def begins(name: str) -> Any:
        @contextlib.contextmanager
        def session(*_: object) -> Iterator[None]:
            begun.append(name)
            yield

        return session

    keys = Keys("s", "g")
    link.call("XGROUP", "CREATE", keys.stream, keys.group, "0", "MKSTREAM")
    for n in range(1, rows + 1):
        link.call("XADD", keys.stream, f"{n}-1", "ticket_id", "a")
    link.call("XREADGROUP", "GROUP", keys.group, "master", "STREAMS", keys.stream, ">")
    monkeypatch.setattr(sessions, "_LOCAL_ROWS", 3)
    monkeypatch.setattr(sessions, "local_session", begins("local"))
    monkeypatch.setattr(sessions, "spark_session", begins("spark"))
    settings = AuditSettings(redis_url=redis_url, ticket_stream="s", group="g", audit_dir=str(tmp_path), **given)
    with sessions.session(settings, redis_url, environ, lambda _: None):
        pass
    assert begun == [expected]
