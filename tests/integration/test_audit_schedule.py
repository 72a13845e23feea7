"""When a schedule runs: every so often, and sooner where the run log would be cut before it is archived."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.common.runtime.own_command import run_every
from usher.master.audit import cli
from usher.master.audit.settings import AuditChoices

KEYS = Keys("s", "g")


def settings(url: str) -> AuditChoices:
    return AuditChoices(redis_url=url, ticket_stream="s", group="g", run_log_length=4)


def test_a_run_log_fills_up_with_what_is_not_archived(link: Link, redis_url: str) -> None:
    seen = [cli.is_filling(settings(redis_url))]
    for n in range(1, 7):
        link.call("XADD", KEYS.runs, "MAXLEN", 4, f"{n}000-0", "batch", "{}")
        seen.append(cli.is_filling(settings(redis_url)))
    assert seen == [False, False, True, True, True, True, True]
    for archived in ("5000-0", "6000-0"):
        link.call("HSET", KEYS.archived, "runs", archived)
        seen.append(cli.is_filling(settings(redis_url)))
    assert seen[-2:] == [True, False], "a third of what it holds is new, then nothing"
    assert not cli.is_filling(settings("redis://127.0.0.1:1"))


def test_a_proof_comes_after_its_time_or_when_a_run_log_fills_up(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: Iterator[bool] = iter((False, True, False, False, True))
    ran: list[list[str]] = []

    def run(words: list[str], **_: object) -> SimpleNamespace:
        assert words[-4:-2] != ["audit", "report"], "there is no such command"
        ran.append(words[-2:])
        if len(ran) == 2:
            raise KeyboardInterrupt
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("sys.argv", ["usher", "audit", "--every", "5", "prove"])
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        run_every(4.0, lambda: next(looks))
    assert ran == [["audit", "prove"]] * 2
    assert list(looks) == []
    monkeypatch.setattr("sys.argv", ["usher", "report", "--days", "1", "--every=0.001"])
    ran.clear()
    with pytest.raises(KeyboardInterrupt):
        run_every(0.06)
    assert ran == [["--days", "1"]] * 2
