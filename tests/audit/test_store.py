"""The archive in an object store: moto's S3 over HTTP on loopback, with the file system that people bring (s3fs)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.audit.seeding import GROUP, Killed, Seeder, kill_at
from tests.audit.test_archive import archived, ids_of, states_of
from tests.audit.test_proof import fresh, prove
from tests.commands import usher
from usher.common.base.errors import StartRefused
from usher.common.protocol.keys import LogKeys
from usher.common.redis.client import Link
from usher.master.audit.archive import DataSet, locked


@pytest.mark.parametrize("commits", [1, 3])
def test_of_two_machines_at_once_one_commits_and_the_other_is_refused(
    bucket: Any, stored: Path, tmp_path: Path, link: Link, redis_url: str, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    """Also where the log that it would put is gone again. One whose answer was lost is told as it is."""
    seeder, keep, put = Seeder(link, "s"), DataSet._keep, bucket.pipe_file
    elsewhere, number = tmp_path / "elsewhere" / stored.relative_to(tmp_path), count(10)
    elsewhere, stored = elsewhere / str(commits), stored / str(commits)

    def meanwhile(data: DataSet, files: Sequence[Path]) -> list[Path]:
        for _ in range(commits if data.folder.is_relative_to(stored) else 0):
            archived(redis_url, elsewhere)
            seeder.add((f"{next(number)}-1", "a"))
        return keep(data, files)

    def unanswered(*given: Any, **named: Any) -> None:
        put(*given, **named)
        raise FileExistsError

    seeder.add((f"{next(number)}-1", "a"))
    with monkeypatch.context() as patched, pytest.raises(StartRefused, match="another run has written to the archive"):
        patched.setattr(DataSet, "_keep", meanwhile)
        archived(redis_url, stored)
    assert ids_of(stored) == [f"{n}-1" for n in range(10, 10 + commits)]
    assert link.call("GET", LogKeys("s").archived) == b"%d-1" % (9 + commits)
    monkeypatch.setattr(bucket, "pipe_file", unanswered)
    archived(redis_url, stored)
    assert ids_of(stored) == [f"{n}-1" for n in range(10, next(number))]


def test_a_proof_goes_on_whatever_is_killed(
    bucket: Any, stored: Path, session: Any, link: Link, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeder = Seeder(link, "s")
    for n in range(1, 7):
        seeder.add((f"{n}-1", "a"))
        seeder.read()
        seeder.ran("c1:1", (f"{max(1, n - n // 4)}-1", "a", 5, 100 * n, 100 * n + 50), record=f"{n}0-1")
        seeder.over(f"{n}-1")
        for step in (12 * n, 0):
            with monkeypatch.context() as patched, locked(stored), contextlib.suppress(Killed):
                if step:
                    kill_at(patched, step, bucket)
                proven = prove(session, redis_url, stored)
    assert (proven.span["executions"], proven.holes) == (6, 0)
    with locked(stored):
        whole = prove(session, redis_url, stored, again=True)
    assert fresh(whole) == {"effect_twice": {"3-1"}, "lost": {"6-1"}}
    assert {(row["check"], row["id"]) for row in whole.standing} == {("effect_twice", "3-1"), ("lost", "6-1")}


def test_the_commands_take_an_archive_in_a_store(
    bucket: Any, settings: dict[str, str], tmp_path: Path, link: Link, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    given = {"AUDIT_DIR": "s3://bucket/usher/", "STATE_DIR": str(tmp_path), "TICKET_STREAM": "s", "GROUP": GROUP}
    for name, value in given.items():
        monkeypatch.setenv(f"USHER_{name}", value)
    seeder = Seeder(link, "s")
    seeder.add(("1-1", "a"))
    seeder.read()
    seeder.ran("c1:1", ("1-1", "a", 5, 100, 150), record="10-1")
    seeder.over("1-1")

    def told(code: int, *words: str) -> str:
        assert usher(*words) == code
        return " ".join("".join(capsys.readouterr()).split())

    assert "s3://bucket/usher/archive" in told(0, "audit", "archive", "--bodies")
    assert "executions: 1, of them new: 1" in told(0, "audit", "prove")
    assert "executions: 1" in told(0, "audit", "prove", "--all")
    states = states_of(tmp_path / "s.db", ("c", "1-1", '{"total": 0}'))
    assert "c" in told(0, "audit", "reconcile", "--states-url", states, "--value", "n")
    assert "page" in told(0, "report", "--json")
    told(0, "replay", "--archive", "s3://bucket/usher/archive", "--since", "0", "--preview")
    [file] = bucket.find("bucket/usher/archive/stream-s/entries/date=1970-01-01")
    octets = bucket.cat_file(file)
    bucket.pipe_file(file, octets[:-9])
    assert f"s3://{file} is not as it was written" in told(2, "audit", "prove", "--all")
    bucket.rm_file(file)
    assert f"the archive lacks s3://{file}" in told(2, "audit", "prove", "--all")
    for url, why in (("s3://none/x", "does not exist"), ("nothing://x", "Protocol not known"), ("gs://x", "gcsfs")):
        monkeypatch.setenv("USHER_AUDIT_DIR", url)
        assert why in told(2, "audit", "prove")
