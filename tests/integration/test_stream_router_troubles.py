"""The stream router when connections break, servers change, and what is in between loses messages: nothing missed,
nothing twice."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.routers import PATIENCE_S, Tally, add, add_many, running, taken, until
from tests.proxy import Proxy
from usher.common.redis import tracking
from usher.common.redis.client import Link
from usher.common.redis.embedded import EmbeddedRedis
from usher.common.router.router import NOW, Mode

_PUSH = re.compile(rb">2\r\n\$10\r\ninvalidate\r\n(?:_\r\n|\*(\d+)\r\n(?:\$\d+\r\n[^\r]*\r\n)*)")


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    with Proxy(redis_url) as standing:
        yield standing


def _kill_connections(link: Link) -> int:
    """CLIENT KILL of every connection of the router."""
    rows = link.call("CLIENT", "LIST").decode().splitlines()
    ids = [row.split()[0].removeprefix("id=") for row in rows if "name=test:router" in row]
    return sum(link.call("CLIENT", "KILL", "ID", one) for one in ids)


@pytest.mark.parametrize(("mode", "streams"), [(Mode.CHANGE_DRIVEN, 20_000), (Mode.PORTABLE, 4000)])
def test_connections_killed_in_the_middle_of_many_streams_lose_nothing_and_repeat_nothing(
    proxy: Proxy, link: Link, mode: Mode, streams: int
) -> None:
    rng = random.Random(1)
    names = [f"s{number}" for number in range(streams)]
    sent: dict[bytes, list[bytes]] = {}
    tally = Tally()

    def send(count: int) -> None:
        chosen = [rng.choice(names) for _ in range(count)]
        for name, reply in zip(chosen, link.pipeline([("XADD", name, "*", "f", "v") for name in chosen]), strict=True):
            sent.setdefault(name.encode(), []).append(reply)

    send(2000)
    with running(proxy.url, mode) as router:
        router.subscribe_all(names, on_entries=tally)
        for turn in range(30):
            send(200)
            if turn % 10 == 5:
                until(lambda: _kill_connections(link) > 0)
            elif turn % 10 == 9:
                proxy.break_all()
        until(lambda: tally.count >= 8000)
        send(100)
        until(lambda: tally.count >= 8100)
    assert tally.ids == sent


def test_what_happens_while_there_is_no_connection_is_found_afterwards(
    proxy: Proxy, link: Link, redis_url: str
) -> None:
    """Also that a stream was deleted and made again with lower ids, and that the server was emptied."""
    with running(proxy.url, Mode.CHANGE_DRIVEN) as router:
        kept, again, gone = router.subscribe("kept"), router.subscribe("again"), router.subscribe("gone")
        for name, subscription in (("kept", kept), ("again", again), ("gone", gone)):
            add(link, name, "5-1")
            assert taken(subscription, 1) == [b"5-1"]
        proxy.lead_to("redis://127.0.0.1:1")
        proxy.break_all()
        until(lambda: all(service.trouble for service in router.services[:1]))
        add(link, "kept", "6-1")
        link.call("DEL", "again", "gone")
        add(link, "again", "1-1", "2-1")
        proxy.lead_to(redis_url)
        assert taken(kept, 1) == [b"6-1"]
        assert taken(again, 2) == [b"1-1", b"2-1"]
        until(lambda: gone.resets == 1)
        add(link, "gone", "1-1")
        assert taken(gone, 1) == [b"1-1"]


@pytest.mark.parametrize("mode", [Mode.CHANGE_DRIVEN, Mode.PORTABLE])
def test_another_server_with_less_in_it_is_read_from_its_beginning(
    proxy: Proxy, link: Link, tmp_path_short: Path, mode: Mode
) -> None:
    """A failover to a copy that lacks the last entries: its later ids are below those we have."""
    with EmbeddedRedis(tmp_path_short, port=None, durable=False) as behind, running(proxy.url, mode) as router:
        add(link, "s", "1-1", "8-1", "9-1")
        subscription = router.subscribe("s", "1-1")
        assert taken(subscription, 2) == [b"8-1", b"9-1"]
        other = Link(behind.url, "test")
        add(other, "s", "1-1", "8-1")
        proxy.lead_to(behind.url)
        other.call(
            "CONFIG", "SET", "requirepass", link.url.partition("://:")[2].partition("@")[0]
        )  # as the one before it
        proxy.break_all()
        assert taken(subscription, 2) == [b"1-1", b"8-1"]  # history was lost, so it is told again rather than missed
        add(other, "s", "8-5")
        assert taken(subscription, 1) == [b"8-5"]
        assert subscription.resets == 1
        other.close()


def test_a_server_that_does_not_answer_any_more_is_left(
    proxy: Proxy, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_QUIET_S", 0.2)
    with running(proxy.url, Mode.CHANGE_DRIVEN) as router:
        subscription = router.subscribe("s", NOW)
        swallowed = threading.Event()

        def swallow(_chunk: bytes) -> bytes:
            swallowed.set()
            return b""

        proxy.on_reply = swallow
        add(link, "s", "1-1")
        assert swallowed.wait(PATIENCE_S)
        until(lambda: router.services[0].trouble)
        proxy.on_reply = lambda chunk: chunk
        assert taken(subscription, 1) == [b"1-1"]


def test_a_server_without_tracking_is_read_in_turn(
    redis_url: str, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    link.call("ACL", "SETUSER", "plain", "reset", "on", ">pw", "~*", "+@all", "-client", "+client|setname")
    scheme, _, rest = redis_url.partition("://")
    try:
        with running(f"{scheme}://plain:pw@{rest.rpartition('@')[2]}") as router:
            subscription = router.subscribe("s")
            add(link, "s", "1-1")
            assert taken(subscription, 1) == [b"1-1"]
            until(lambda: router.mode is Mode.PORTABLE)
            assert "CLIENT TRACKING" in router.why
    finally:
        link.call("ACL", "DELUSER", "plain")
    assert "router_fell_back_to_polling" in caplog.text


def test_what_hangs_up_at_the_question_is_read_in_turn(proxy: Proxy, link: Link) -> None:
    """As proxies do that know RESP2 only."""
    proxy.on_reply = lambda chunk: None if b"proto" in chunk else chunk
    with running(proxy.url) as router:
        subscription = router.subscribe("s")
        add(link, "s", "1-1")
        assert taken(subscription, 1) == [b"1-1"]
        until(lambda: router.mode is Mode.PORTABLE)
        add(link, "s", "2-1")
        assert taken(subscription, 1) == [b"2-1"]


def test_changes_that_something_in_between_does_not_tell_are_found_by_the_sweep_and_then_in_turn(
    proxy: Proxy, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    dropped: list[bytes] = []

    def drop(chunk: bytes) -> bytes:
        dropped.extend(match[0] for match in _PUSH.finditer(chunk))
        return _PUSH.sub(b"", chunk)

    proxy.on_reply = drop
    with running(proxy.url, sweep_seconds=0.3) as router:
        subscription = router.subscribe("s", NOW)
        number = 0
        while router.mode is not Mode.PORTABLE:
            number += 1
            add(link, "s", f"{number}-1")
            assert taken(subscription, 1) == [b"%d-1" % number]
        assert "not announced" in router.why
        add(link, "s", "99-1")
        assert taken(subscription, 1) == [b"99-1"]
    assert dropped
    assert "change_notification_missed" in caplog.text


def test_announced_changes_are_never_taken_for_lost_ones(
    redis_url: str, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    """A sweep that finds an entry before its announcement has come."""
    tally = Tally()
    names = [f"s{number}" for number in range(200)]
    with running(redis_url, sweep_seconds=0.1) as router:
        router.subscribe_all(names, on_entries=tally)
        for _ in range(20):
            add_many(link, [("XADD", name, "*", "f", "v") for name in names])
        until(lambda: tally.count == 4000)
        assert router.mode is Mode.CHANGE_DRIVEN
    assert "change_notification_missed" not in caplog.text


def test_reading_without_waiting_finds_entries_too(redis_url: str, link: Link) -> None:
    with running(redis_url, Mode.PORTABLE, xread_block_millis=None) as router:
        subscription = router.subscribe("s")
        add(link, "s", "1-1")
        assert taken(subscription, 1) == [b"1-1"]
