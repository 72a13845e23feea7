"""What `usher audit` and its commands say before any Java is started: which streams are meant, and what cannot be
used."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import usher
from usher.common.base.errors import StartRefused
from usher.common.outbox.log_consumer import stored_states
from usher.common.outbox.store import OutboxStore
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link

ROOT = Path(__file__).parents[2]
GROUP = "concurrency_stream_group"


def _streams(link: Link, *names: str) -> None:
    for name in names:
        link.call("XGROUP", "CREATE", name, GROUP, "0", "MKSTREAM")
        keys = Keys(name, GROUP)
        for own in (keys.runs, keys.dead, keys.inbox("c1:1")):
            link.call("XADD", own, "*", "f", "v")


def test_a_key_that_is_no_stream_is_named(
    link: Link, audit_environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    link.call("SET", "ticket_stream", "text")
    assert usher("audit") == 2
    assert "WRONGTYPE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "told"), [((), "USHER_AUDIT_DIR: the folder"), (("archive",), "cannot be used: [Errno 20]")]
)
def test_a_folder_that_cannot_be_used_is_named(
    link: Link,
    audit_environ: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str],
    told: str,
) -> None:
    pytest.importorskip("pyspark", reason="pip install -e '.[audit]' in Usher's folder")
    _streams(link, "ticket_stream")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("USHER_AUDIT_DIR", str(tmp_path / "file" / "below"))
    assert usher("audit", *command) == 2
    assert told in capsys.readouterr().err


def test_a_schedule_goes_on_after_an_audit_that_could_not_be_done_and_ends_with_a_signal(
    audit_environ: dict[str, str],
) -> None:
    code = (
        "import sys; from usher.common.runtime.own_command import run_every; sys.argv = ['usher', 'audit', '--every', '1'];"
        " run_every(1.0)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **audit_environ}, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    told = []
    while len(told) < 2:
        line = process.stderr.readline()
        assert line, "it ended by itself"
        told += [line] if "ended with exit code" in line else []
    assert all(line.startswith("usher: audit ended with exit code 2; the next one in ") for line in told)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) != 0
    process.stderr.close()


def test_what_the_reconciler_cannot_read_is_named(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'empty.db'}"
    with pytest.raises(StartRefused, match="--states-url: it has no outbox"):
        stored_states(url, "--states-url", "s")
    with pytest.raises(StartRefused, match="--states-url cannot be used"):
        stored_states("nonsense", "--states-url", "s")
    OutboxStore(url).migrate()
    with sqlite3.connect(tmp_path / "empty.db") as sql:
        sql.execute("INSERT INTO checkpoints (name, stream, last_id) VALUES ('c', 's', '1-1')")
        sql.execute("INSERT INTO consumer_states (name, stream, state) VALUES ('c', 's', '{')")
    sql.close()
    with pytest.raises(StartRefused, match="--states-url: the state of c"):
        stored_states(url, "--states-url", "s")


def test_only_what_is_archived_is_cut_when_that_is_asked_for(
    link: Link, audit_environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    link.call("XADD", "ticket_stream", "1-1", "f", "v")
    link.call("XGROUP", "CREATE", "ticket_stream", GROUP, "1-1")
    assert usher("trim", "--archived-only", "--apply") == 0
    assert "nothing is archived yet" in capsys.readouterr().out
