"""Whether Redis refuses writes is seen from INFO, by page and command, on servers that really do."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.integration.factories import FIELD, LEASE_MS, World
from tests.integration.memory import full_memory
from tests.integration.routers import until
from usher.common.base.errors import NotNow
from usher.common.doctor.judgements import INFO_COMMANDS, WriteTrouble, write_trouble
from usher.common.protocol.keys import Keys
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.embedded import EmbeddedRedis
from usher.common.runtime.settings import CommonSettings, load
from usher.master.cli.commands import drawn, look
from usher.master.insight.live import LiveOverview
from usher.master.insight.status import StatusReader

_KEYS = Keys("tickets", "g")


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    with EmbeddedRedis(tmp_path / "redis", port=None, durable=False) as server:
        made = Link(server.url, "test")
        yield made
        made.call(
            "CONFIG", "SET", "save", ""
        )  # else a server that cannot save refuses to end, and is killed after 10 s
        made.close()


def seen(link: Link) -> WriteTrouble | None:
    return write_trouble(*link.pipeline(INFO_COMMANDS))


def alarm_texts(link: Link) -> list[str]:
    pulse = LiveOverview(link, _KEYS, FIELD, LEASE_MS, lambda ticket: None)
    pulse.snapshot(0)
    pulse.run_once()
    return [alarm["text"] for alarm in pulse.last["alarms"]]


def status_text(link: Link) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(
        drawn(look(StatusReader(link, _KEYS), None, load(CommonSettings, {"USHER_STATE_DIR": "/nowhere"})))
    )
    return out.getvalue()


def test_a_server_that_takes_writes_is_in_no_trouble(link: Link) -> None:
    assert seen(link) is None
    assert "refuses" not in "".join(alarm_texts(link)) + status_text(link)


def test_a_snapshot_that_failed(link: Link, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    for name, value in (("save", "3600 1"), ("stop-writes-on-bgsave-error", "yes")):
        link.call("CONFIG", "SET", name, value)
    try:
        link.call("CONFIG", "SET", "dir", str(gone))
    except CommandRefused as refused:
        pytest.skip(str(refused))  # from Redis 7 on nobody may change it
    shutil.rmtree(gone)
    link.call("BGSAVE")
    until(lambda: seen(link) is not None)
    with pytest.raises(NotNow, match="MISCONF"):
        link.call("SET", "a", "b")
    told = "Redis, disk: the last snapshot failed; where snapshots are scheduled Redis refuses writes for it"
    assert alarm_texts(link)[0].startswith(told)
    assert told in status_text(link)


def test_full_memory(link: Link) -> None:
    link.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
    with full_memory(link):
        told = "Redis, memory: nothing can be sent or handed over"
        assert alarm_texts(link)[0].startswith(told)
        assert told in status_text(link)
    assert seen(link) is None


def test_missing_replicas(link: Link) -> None:
    """As `usher doctor` advises to have Redis set up. The page said that nobody leads, and `usher status` nothing at
    all."""
    link.call("CONFIG", "SET", "min-replicas-to-write", "1")
    told = "Redis, replicas: Redis refuses writes (NOREPLICAS) until replicas are back"
    assert seen(link) == WriteTrouble(f"{told}: nothing is lost, nothing moves; bring the replicas back", True)
    assert alarm_texts(link)[0].startswith(told)
    assert told in status_text(link)
    link.call("CONFIG", "SET", "min-replicas-to-write", "0")
    assert seen(link) is None


@pytest.mark.parametrize(
    ("persistence", "refuses"),
    [
        (b"aof_enabled:1\r\naof_last_write_status:err\r\n", True),
        (b"aof_enabled:1\r\naof_last_write_status:ok\r\n", False),
        (b"aof_enabled:0\r\naof_last_write_status:err\r\n", False),  # switched off after it
    ],
)
def test_an_append_only_file_that_cannot_be_written(persistence: bytes, refuses: bool) -> None:
    found = write_trouble(persistence, b"maxmemory:0\r\n")
    assert (found is not None and found.is_certain) == refuses


def test_who_may_not_ask_is_told_nothing() -> None:
    assert write_trouble(CommandRefused("NOPERM"), CommandRefused("NOPERM")) is None


@pytest.mark.parametrize(
    "refuse",
    [("CONFIG", "SET", "min-replicas-to-write", "1"), ("REPLICAOF", "127.0.0.1", "1")],
    ids=["NOREPLICAS", "READONLY"],
)
@pytest.mark.parametrize(
    ("name", "keys", "args"),
    [
        ("count_letters", ("s", "i"), (1, 2)),
        ("find_entries", ("s",), ("XREVRANGE", "+", "-", 10, "f", "v")),
        ("look_again", ("s", "t", "a"), ("g", "v", "1-1")),
        ("look_at_sources", ("s",), ("g", 10)),
        ("read_fields", ("s",), (9, "", 1, "f", "1-1")),
        ("read_letters", ("s", "i"), ("-", "+", 10, "", "")),
    ],
)
def test_what_is_only_read_is_told_while_writes_are_refused(
    world: World, name: str, keys: tuple[str, ...], args: tuple[str | int, ...], refuse: tuple[str, ...]
) -> None:
    """Where many streams are gathered, `usher doctor` and `usher status` ended with exit code 2, and tickets had no
    story."""
    link = world.link
    link.all_of([("XADD", "s", "1-1", "f", "v"), ("XGROUP", "CREATE", "s", "g", "0")])
    told = world.scripts.run(name, keys, args)
    try:
        link.call(*refuse)
        with pytest.raises(NotNow):
            link.call("SET", "k", "v")
        assert world.scripts.run(name, keys, args) == told
    finally:
        link.call("REPLICAOF", "NO", "ONE")
        link.call("CONFIG", "SET", "min-replicas-to-write", "0")
