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
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.master.audit.cli import _matching, expand
from usher.master.audit.reconcile import read_states, total_of_query

ROOT = Path(__file__).parents[2]
GROUP = "concurrency_stream_group"


def _streams(link: Link, *names: str) -> None:
    for name in names:
        link.call("XGROUP", "CREATE", name, GROUP, "0", "MKSTREAM")
        keys = Keys(name, GROUP)
        for own in (keys.runs, keys.dead, keys.inbox("c1:1")):
            link.call("XADD", own, "*", "f", "v")


def test_a_pattern_is_every_stream_with_the_group_and_none_of_our_own(link: Link, redis_url: str) -> None:
    _streams(link, "orders", "t:b", "t:a", "t:{x}", "t*")
    link.call("XADD", "t:no group", "*", "f", "v")
    link.call("SET", "t:text", "v")
    assert expand(redis_url, ["orders", "t:*", "t:a", "gone"], GROUP) == ("orders", "t:a", "t:b", "t:{x}", "gone")
    assert expand(redis_url, ["t*"], GROUP) == ("t*",), "a stream of that very name"
    with pytest.raises(StartRefused, match=r"no stream with the group concurrency_stream_group matches 'x\*'"):
        expand(redis_url, ["orders", "x*"], GROUP)
    with pytest.raises(StartRefused, match="in a cluster"):
        _matching(link, "redis+cluster://127.0.0.1:1", "x*", GROUP)


def test_the_streams_of_a_run_are_named_at_the_command(
    link: Link, audit_environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert usher("audit", "--streams", "nothing:*") == 2
    assert "no stream with the group" in capsys.readouterr().err
    _streams(link, "t:a")
    assert usher("audit", "--streams", "t:*,other") == 2
    assert "stream other" in capsys.readouterr().err


def test_a_key_that_is_no_stream_is_named(
    link: Link, audit_environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    link.call("SET", "ticket_stream", "text")
    assert usher("audit") == 2
    assert "WRONGTYPE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "told"), [((), "USHER_AUDIT_DIR: the folder"), (("archive",), "the archive's folder")]
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
        "import sys; from usher.master.audit.cli import run_every; sys.argv = ['usher', 'audit', '--every', '1'];"
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
    with pytest.raises(StartRefused, match="--states-url: .*no such table: checkpoints"):
        read_states(url, "s", "total")
    with pytest.raises(StartRefused, match="--states-url cannot be used"):
        read_states("nonsense", "s", "total")
    with pytest.raises(StartRefused, match="must answer one number"):
        total_of_query("sqlite://", "SELECT 'many'")
    with pytest.raises(StartRefused, match="--source-url: .*no such table"):
        total_of_query("sqlite://", "SELECT sum(x) FROM rides")
    with sqlite3.connect(tmp_path / "s.db") as sql:
        sql.execute("CREATE TABLE checkpoints (name TEXT, stream TEXT, last_id TEXT, version INTEGER)")
        sql.execute("CREATE TABLE consumer_states (name TEXT, stream TEXT, state TEXT)")
        sql.execute("INSERT INTO checkpoints VALUES ('c', 's', '1-1', 0)")
        sql.execute("INSERT INTO consumer_states VALUES ('c', 's', '{')")
    sql.close()
    with pytest.raises(StartRefused, match="--states-url: the state of c"):
        read_states(f"sqlite:///{tmp_path / 's.db'}", "s", "total")


_SIX, _NINE = {b"first-entry": [b"6-1"]}, {b"first-entry": [b"9-1"]}
_COUNTED = _SIX | {b"entries-added": 5}


@pytest.mark.parametrize(
    ("floor", "is_there", "before", "now", "told"),
    [
        (b"5-1", True, _SIX, _SIX | {b"max-deleted-entry-id": b"5-1"}, ""),
        (b"5-1", True, _NINE, _NINE | {b"max-deleted-entry-id": b"8-1"}, "entries from 5-2 to 8-1 were deleted"),
        (b"5-1", True, _SIX, _SIX, ""),
        (
            b"5-1",
            False,
            _SIX,
            _NINE | {b"max-deleted-entry-id": b"0-0"},
            "entries from 5-2 to before 9-1 may be missing",
        ),
        (
            b"5-1",
            False,
            _SIX,
            {b"first-entry": None, b"last-generated-id": b"9-1"},
            "entries from 5-2 to before 9-2 may be missing",
        ),
        (b"5-1", False, _SIX, {}, "entries from 5-2 to before"),
        (b"0-0", False, _COUNTED, _COUNTED | {b"length": 5}, ""),
        (b"0-0", False, _COUNTED, _COUNTED | {b"length": 4}, "entries before 6-1 are missing"),
        (b"0-0", False, _SIX, _SIX, ""),
        (b"0-0", False, _SIX, _NINE, "entries before 9-1 are missing"),
        (b"0-0", False, _SIX, {b"first-entry": None, b"last-generated-id": b"9-1"}, "entries before 9-2 are missing"),
    ],
)
def test_what_was_cut_before_it_was_archived_is_a_gap(
    floor: bytes, is_there: bool, before: dict[bytes, object], now: dict[bytes, object], told: str
) -> None:
    """With Redis 7 and later, and with 6.2, which counts nothing. ``floor`` is what was archived last; trimming keeps
    it."""
    pytest.importorskip("pyspark", reason="pip install -e '.[audit]' in Usher's folder")
    from usher.master.audit.archive import _gap

    gap = _gap("entries", floor, before, now, is_there)
    assert gap.startswith(told)
    assert bool(gap) is bool(told)


def test_only_what_is_archived_is_cut_when_that_is_asked_for(
    link: Link, audit_environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    link.call("XADD", "ticket_stream", "1-1", "f", "v")
    link.call("XGROUP", "CREATE", "ticket_stream", GROUP, "1-1")
    assert usher("trim", "--archived-only", "--apply") == 0
    assert "nothing is archived yet" in capsys.readouterr().out
