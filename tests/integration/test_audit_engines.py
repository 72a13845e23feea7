"""Which engine executes an audit: Spark, but for the steps of a proof, unless somebody says which."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest

from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.master.audit import cli, engine
from usher.master.audit.settings import AuditChoices


@pytest.mark.parametrize(
    ("given", "environ", "step", "expected"),
    [
        ({}, {}, False, "spark"),
        ({}, {}, True, "local"),
        ({"audit_engine": "local"}, {}, False, "local"),
        ({"audit_engine": "spark"}, {}, True, "spark"),
        ({"audit_spark_master": "spark://host:7077"}, {}, True, "spark"),
        ({"audit_spark_master": "spark://host:7077", "audit_engine": "local"}, {}, False, "local"),
        ({}, {"PYSPARK_GATEWAY_PORT": "1"}, True, "spark"),
    ],
)
def test_spark_executes_the_checks_but_for_the_steps_of_a_proof_unless_it_is_said(
    link: Link,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    environ: dict[str, str],
    step: bool,
    expected: str,
) -> None:
    begun: list[str] = []
    keys = Keys("s", "g")
    link.call("XGROUP", "CREATE", keys.stream, keys.group, "0", "MKSTREAM")
    for name in ("local", "spark"):
        begins = functools.partial(lambda name, *_: contextlib.nullcontext(begun.append(name)), name)
        monkeypatch.setattr(engine, f"{name}_engine", begins)
    monkeypatch.setattr("os.environ", environ)
    settings = AuditChoices(redis_url=redis_url, ticket_stream="s", group="g", audit_dir=str(tmp_path), **given)
    with cli.session(settings, redis_url, local=step):
        pass
    assert begun == [expected]
