"""`usher log`: by id, by time, by ticket, following, for people and for programs."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from tests.outboxes import STREAM
from usher import Link
from usher.cli import run


def _log(capsys: pytest.CaptureFixture[str], redis_url: str, *words: str) -> list[str]:
    assert run(["log", STREAM, "--redis-url", redis_url, *words]) == 0
    return capsys.readouterr().out.splitlines()


def _add(link: Link, entry_id: str, ticket: str | bytes, text: str | bytes = "x") -> None:
    link.call("XADD", STREAM, entry_id, "ticket_id", ticket, "text", text)


def _ids(lines: list[str]) -> list[str]:
    return [json.loads(line)["id"] for line in lines]


def test_parts_of_the_log_by_id_time_and_ticket(redis_url: str, link: Link, capsys: pytest.CaptureFixture[str]) -> None:
    base_ms = 1_700_000_000_000  # 2023-11-14T22:13:20Z
    for n in range(1200):
        _add(link, f"{base_ms + n * 1000}-0", f"T{n % 3}")
    assert len(_log(capsys, redis_url)) == 1200, "more than a page"
    assert _ids(_log(capsys, redis_url, "--json", "--since", f"{base_ms + 1_198_000}-0")) == [
        f"{base_ms + n * 1000}-0" for n in (1198, 1199)
    ]
    between = _log(
        capsys,
        redis_url,
        "--json",
        "--since",
        "2023-11-14T22:13:25Z",
        "--until",
        "2023-11-14T22:13:30+00:00",
        "--ticket",
        "T0",
    )
    assert _ids(between) == [f"{base_ms + n * 1000}-0" for n in (6, 9)]
    assert len(_log(capsys, redis_url, "--limit", "7")) == 7
    assert _log(capsys, redis_url, "--since", "1h") == []
    [line] = _log(capsys, redis_url, "--json", "--limit", "1")
    told = json.loads(line)
    assert (told["ticket_id"], told["fields"], told["uid"]) == ("T0", {"ticket_id": "T0", "text": "x"}, f"{base_ms}-0")


def test_pages_are_short_where_messages_are_large(
    redis_url: str, link: Link, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 messages of 16 MiB would be 1.6 GB at once, here and in the buffers of Redis."""
    for n in range(1, 31):
        _add(link, f"{n}-1", "T", b"x" * 1_000_000)
    pages: list[int] = []
    call = Link.call

    def heard(self: Link, *command: Any, **more: Any) -> Any:
        reply = call(self, *command, **more)
        if command[0] == "XRANGE":
            pages.append(len(reply))
        return reply

    monkeypatch.setattr(Link, "call", heard)
    assert len(_log(capsys, redis_url)) == 30
    assert max(pages) == 4
    assert sum(pages) == 30


def test_what_is_older_than_every_id_is_the_beginning(
    redis_url: str, link: Link, capsys: pytest.CaptureFixture[str]
) -> None:
    """East of Greenwich also 1970-01-01, without a zone, is before the first millisecond."""
    _add(link, "0-1", "T")
    for since in ("1970-01-01T00:00+01:00", "1960-01-01"):
        assert len(_log(capsys, redis_url, "--since", since)) == 1


def test_what_messages_hold_does_not_reach_the_terminal(
    redis_url: str, link: Link, capsys: pytest.CaptureFixture[str]
) -> None:
    _add(link, "1-1", b"\x1b[31mred\n", b"\xff\x07" + b"y" * 500)
    [line] = _log(capsys, redis_url)
    assert "\\x1b[31mred\\x0a" in line
    assert len(line) <= 160
    [line] = _log(capsys, redis_url, "--json")
    assert json.loads(line)["fields"]["text"].startswith("\\xff")


def test_following_waits_for_what_comes(redis_url: str, link: Link, capsys: pytest.CaptureFixture[str]) -> None:
    _add(link, "1-1", "T")

    def later() -> None:
        with Link(redis_url, "test:later") as mine:
            for n in (2, 3):
                time.sleep(0.2)
                mine.call("XADD", STREAM, f"{n}-1", "ticket_id", "T")

    thread = threading.Thread(target=later)
    thread.start()
    assert _ids(_log(capsys, redis_url, "--json", "--follow", "--limit", "3")) == ["1-1", "2-1", "3-1"]
    thread.join()


def test_following_from_now_on_begins_behind_the_last_one(
    redis_url: str, link: Link, capsys: pytest.CaptureFixture[str]
) -> None:
    _add(link, "1-1", "T")
    thread = threading.Timer(0.3, lambda: _later(redis_url))
    thread.start()
    [line] = _log(capsys, redis_url, "--json", "--follow", "--since", "1m", "--limit", "1")
    assert json.loads(line)["fields"] == {"ticket_id": "new"}
    thread.join()


def _later(redis_url: str) -> None:
    with Link(redis_url, "test:later") as link:
        link.call("XADD", STREAM, "*", "ticket_id", "new")


@pytest.mark.parametrize("words", [("--since", "yesterday"), ("--until", "12:61"), ("--follow", "--until", "1h")])
def test_a_time_that_is_none_is_refused(
    redis_url: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert run(["log", STREAM, "--redis-url", redis_url, *words]) == 2
    assert "Error" in capsys.readouterr().err


def test_a_key_that_is_no_stream_is_refused(redis_url: str, link: Link, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["log", STREAM, "--redis-url", redis_url]) == 0
    assert capsys.readouterr().err.endswith(f"none in stream {STREAM}\n")
    link.call("SET", STREAM, "x")
    assert run(["log", STREAM, "--redis-url", redis_url]) == 2
    assert "USHER_TICKET_STREAM" in capsys.readouterr().err
