"""Audits beside one another, and such as somebody ends: nobody's log is lost, and no Java is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.audit.test_command import GROUP
from tests.process.machine import until
from tests.tuned import TUNED, tuned
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.master.audit.engine import own_folder

if TYPE_CHECKING:
    from usher.master.audit.engine import SparkEngine


def _audit(settings: dict[str, str], link: Link, place: Path) -> subprocess.Popen[str]:
    """One with a finding, so that there is a second look, and what keeps it waiting."""
    keys = Keys("ticket_stream", GROUP)
    link.call("XGROUP", "CREATE", keys.stream, GROUP, "0", "MKSTREAM")
    link.call("XADD", keys.stream, "1-1", "ticket_id", "a")
    link.call("XREADGROUP", "GROUP", GROUP, "c1:1", "STREAMS", keys.stream, ">")
    environ = {**os.environ, **settings, **tuned(SETTLE_S=60), "USHER_AUDIT_DIR": "an audit"}
    return subprocess.Popen(
        [*TUNED, "audit", "--engine", "spark"],
        env=environ,
        cwd=place,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _of_session(session: int) -> list[str]:
    """Names of the processes that are left of it."""
    found = []
    for process in psutil.process_iter(["name"]):
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
        except (OSError, psutil.Error):
            continue
    return found


def _starts_java(pid: int) -> bool:
    """Whether the Java that is to stay is there: others are started before it, and end."""
    try:
        return any(
            "org.apache.spark.deploy.SparkSubmit" in child.cmdline()[3:]
            for child in psutil.Process(pid).children(recursive=True)
        )
    except psutil.Error:
        return False


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("phase", ["Java starts", pytest.param("Spark has read Redis", marks=pytest.mark.slow)])
def test_ctrl_c_ends_an_audit_without_stacks_and_leaves_no_java(
    settings: dict[str, str], link: Link, tmp_path: Path, phase: str
) -> None:
    """Its folder is relative, and has a space in its name."""
    pytest.importorskip("pyspark", reason="pip install -e '.[audit]' in Usher's folder")
    audit = _audit(settings, link, tmp_path)
    try:
        until(lambda: _starts_java(audit.pid), 120, "Java starts")
        if phase != "Java starts":
            time.sleep(20)
        os.killpg(audit.pid, signal.SIGINT)
        _, said = audit.communicate(timeout=60)
        assert audit.returncode == 130
        assert "usher: interrupted" in said
        assert "Traceback" not in said
        until(lambda: not _of_session(audit.pid), 20, "nothing of it is left")
        assert (tmp_path / "an audit" / "reading" / "1.log").is_file()
    finally:
        if _of_session(audit.pid):
            os.killpg(audit.pid, signal.SIGKILL)
            audit.wait()


def test_what_the_user_has_set_for_spark_is_heeded(spark: SparkEngine) -> None:
    """Settings of spark-defaults (``conftest``) hold, and ours where it says nothing."""
    assert spark.spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch") == "5000"
    assert spark.spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert not spark.spark.sparkContext.getConf().contains("spark.task.maxFailures")


def test_audits_at_the_same_time_have_a_folder_each(tmp_path: Path) -> None:
    with own_folder(tmp_path) as one:
        (tmp_path / "1.log").write_bytes(b"said by one")
        (one / "spill").mkdir()
        with own_folder(tmp_path) as other:
            assert (one.name, other.name) == ("1", "2")
        assert (tmp_path / "1.log").read_bytes() == b"said by one"
        assert (one / "spill").exists()
    (tmp_path / "1" / "spilt").mkdir(parents=True)
    with own_folder(tmp_path) as again:
        assert again == one
        assert not [*again.iterdir()] and not (tmp_path / "1.log").stat().st_size, "what was left is gone"
