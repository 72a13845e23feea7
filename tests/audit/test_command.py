"""``usher audit`` as people and programs call it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import psutil
import pytest

from tests.audit.seeding import Seeder
from tests.commands import usher
from tests.process.machine import USHER, until
from tests.tuned import TUNED, tuned
from usher.common.protocol.keys import Keys
from usher.common.redis.acl import programs
from usher.common.redis.client import Link
from usher.master.audit.cli import is_filling
from usher.master.audit.engine import spark_engine
from usher.master.audit.settings import AuditChoices

if TYPE_CHECKING:
    from usher.master.audit.engine import SparkEngine

GROUP = "concurrency_stream_group"
_HOSTILE = "<script>alert(1)</script>\x1b[31m{{7*7}}"


@pytest.fixture
def seeder(link: Link, monkeypatch: pytest.MonkeyPatch) -> Seeder:
    monkeypatch.setattr("tests.audit.seeding.GROUP", GROUP)
    made = Seeder(link, "ticket_stream")
    made.add(("1-1", "a"), ("2-1", "b"))
    made.read()
    made.over("1-1", "2-1")
    made.ran("c1:1", ("1-1", "a", 5, 100, 200), ("2-1", "b", 5, 100, 200))
    return made


def test_a_clean_system_is_exit_code_0_and_everything_is_written(
    spark: SparkEngine, settings: dict[str, str], seeder: Seeder, link: Link, capsys: pytest.CaptureFixture[str]
) -> None:
    assert usher("audit", "--engine", "spark") == 0
    shown = capsys.readouterr().out
    assert "clean: the promise held" in shown
    stored = orjson.loads(link.call("GET", Keys("ticket_stream", GROUP).audit))
    assert (stored["verdict"], stored["findings"], stored["executions"]) == ("clean", [], 2)
    assert usher("audit", "--json") == 0
    told = orjson.loads(capsys.readouterr().out)
    assert (told["verdict"], told["findings"], told["unproven"]) == ("clean", [], [])
    assert told["figures"]["engine"] == "local"


def test_findings_are_exit_code_1_and_hostile_names_are_shown_literally(
    settings: dict[str, str], seeder: Seeder, link: Link, capsys: pytest.CaptureFixture[str]
) -> None:
    seeder.live("c1:1")
    seeder.add(("3-1", _HOSTILE))
    seeder.read()
    seeder.own("c1:1", "3-1")
    assert usher("audit") == 1
    shown = capsys.readouterr().out
    assert "Critical pending_without_index ticket_stream: 1" in shown
    assert "\x1b[31m" not in shown
    assert "<script>alert(1)</script>" in shown and "{{7*7}}" in shown


def test_what_is_to_be_looked_at_and_done_is_there_for_any_stream(
    settings: dict[str, str], link: Link, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.audit.seeding.GROUP", "shop")
    orders = Seeder(link, "orders")
    orders.add(("1-1", "it's"), ("2-1", "it's"))
    orders.read()
    orders.over("1-1", "2-1")
    began_us = 1_700_000_000_000_000
    orders.ran(
        "c1:1",
        ("1-1", "it's", 5, began_us, began_us + 1_500_000),
        ("2-1", "it's", 5, began_us + 1, began_us + 2_000_000),
    )
    assert usher("audit", "--streams", "orders", "--group", "shop") == 1
    shown = capsys.readouterr().out
    ran = "c1:1 ran it from 2023-11-14 22:13:20.000001 to 2023-11-14 22:13:22.000000 (UTC) under fencing token 5; 1-1 ran until"
    assert f"2-1 ticket it's owner c1:1: {ran}" in " ".join(shown.split())
    assert "This is a fault of Usher, or the consumer's clock was set back" in shown
    assert "What then: deploy/runbook.md, Audit" in shown


def _suspect(seeder: Seeder) -> None:
    """A pending entry of which the index does not know."""
    seeder.live("c1:1")
    seeder.add(("3-1", "c"))
    seeder.read()
    seeder.own("c1:1", "3-1")


def test_what_was_found_is_told_also_when_redis_is_full(
    settings: dict[str, str], seeder: Seeder, link: Link, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also what is looked at a second time: Redis takes no MULTI then."""
    seeder.ran("c2:2", ("1-1", "a", 5, 300, 400))
    _suspect(seeder)
    link.call("CONFIG", "SET", "maxmemory", 1)
    try:
        assert usher("audit", "--json") == 1
    finally:
        link.call("CONFIG", "SET", "maxmemory", 0)
    told = orjson.loads(capsys.readouterr().out)
    assert [found["check"] for found in told["findings"]] == ["effect_twice", "fence_shared", "pending_without_index"]
    assert "ticket_stream: the summary could not be stored" in told["unproven"][-1]


@pytest.mark.parametrize("name", ["auditor", "master"])
def test_the_auditor_of_usher_acl_may_audit_and_report(
    name: str,
    settings: dict[str, str],
    seeder: Seeder,
    link: Link,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _suspect(seeder)
    [auditor] = [program for program in programs("ticket_stream", GROUP) if program.name == name]
    assert usher("acl", "--load") == 0
    link.call("ACL", "SETUSER", *auditor.line("pw", selectors=False).split(" ")[1:])
    capsys.readouterr()
    place = urllib.parse.urlsplit(settings["USHER_REDIS_URL"])
    monkeypatch.setenv(
        "USHER_REDIS_URL", place._replace(netloc=f"{name}:pw@{place.netloc.rpartition('@')[2]}").geturl()
    )
    try:
        assert usher("audit", "--json") == 1
        told = orjson.loads(capsys.readouterr().out)
        assert usher("report") == 0
    finally:
        link.call("ACL", "DELUSER", name)
    assert [(found["check"], found["count"]) for found in told["findings"]] == [("pending_without_index", 1)], (
        "looked at twice"
    )
    assert told["unproven"] == []


def test_what_its_user_may_not_do_is_named(
    settings: dict[str, str],
    seeder: Seeder,
    link: Link,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Refusals among the replies to several commands were taken for values."""
    for forbidden in ("type", "xinfo"):
        link.call("ACL", "SETUSER", "weak", "reset", "on", ">pw", "~*", "&*", "+@all", f"-{forbidden}")
        place = urllib.parse.urlsplit(settings["USHER_REDIS_URL"])
        url = place._replace(netloc=f"weak:pw@{place.netloc.rpartition('@')[2]}").geturl()
        monkeypatch.setenv("USHER_REDIS_URL", url)
        assert usher("audit") == 2
        assert "NOPERM" in capsys.readouterr().err
        assert not is_filling(AuditChoices(redis_url=url))
    link.call("ACL", "DELUSER", "weak")


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="another user is set by root's setpriv")
def test_a_user_without_an_entry_in_passwd_audits_with_spark(settings: dict[str, str], seeder: Seeder) -> None:
    rights = "+dac_override,+dac_read_search"
    user = ("setpriv", "--reuid", "10001", "--clear-groups", "--inh-caps", rights, "--ambient-caps", rights)
    words = [*user, *USHER, "audit", "--engine", "spark", "--json"]
    done = subprocess.run(words, env={**os.environ, **settings}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert orjson.loads(done.stdout)["figures"]["engine"] == "spark"


def test_without_pyspark_the_way_out_is_named(
    settings: dict[str, str], seeder: Seeder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("usher.master.audit.engine.spark_engine", spark_engine)  # the fixture of others has replaced it
    monkeypatch.setitem(sys.modules, "pyspark.errors", None)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    assert usher("audit", "--engine", "spark") == 2
    assert "which is not installed: pip install -e '.[spark]' in Usher's folder" in capsys.readouterr().err


@pytest.mark.process
def test_a_small_system_is_audited_and_proven_where_pyspark_cannot_be_imported(
    settings: dict[str, str], seeder: Seeder
) -> None:
    """Its import alone takes as long as such an audit."""
    program = """\
import sys
sys.modules["pyspark"] = None
from usher.cli import run
for word in ("", "prove", "archive"):
    try:
        code = run(["audit", *filter(None, [word]), "--json"])
    except SystemExit as ended:
        code = ended.code
    assert not code, word
"""
    words, environ = [sys.executable, "-c", program], {**os.environ, **settings}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [sorted(orjson.loads(line))[0] for line in done.stdout.splitlines()] == ["checks", "archive", "added"]


def test_what_cannot_be_audited_is_exit_code_2(
    settings: dict[str, str], link: Link, capsys: pytest.CaptureFixture[str]
) -> None:
    assert usher("audit") == 2
    assert "There is nothing to audit" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(300)
def test_an_audit_whose_java_is_killed_was_not_done(settings: dict[str, str], seeder: Seeder) -> None:
    pytest.importorskip("pyspark", reason="pip install -e '.[audit]' in Usher's folder")
    environ = {**os.environ, **settings, **tuned(SETTLE_S=30)}
    seeder.live("c1:1")
    seeder.own("c1:1", "1-1")  # a suspect: there is a second look, and what keeps it waiting
    audit = subprocess.Popen(
        [*TUNED, "audit", "--engine", "spark"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    reading = Path(settings["USHER_AUDIT_DIR"]) / "reading"
    until(lambda: [*reading.glob("*/letters.parquet")], 240, "Redis is read, and Spark judges")
    for child in psutil.Process(audit.pid).children(recursive=True):
        if child.name() == "java":
            child.kill()
    _, said = audit.communicate(timeout=60)
    assert audit.returncode == 2, said
    assert "usher: Spark ended in the middle" in said
