"""The feed on a real Redis: what a follower is told of what it has missed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from common.live_sockets import LiveSockets
from common.redis_client import Link
from common.run_log import encode
from common.stream_router import StreamRouter
from master import ticket_feed
from master.policy.ticket_events import parse_position
from master.ticket_feed import TicketFeed
from tests.integration.factories import FIELD, World
from tests.integration.routers import PATIENCE_S

_T = b"T"


class Done:
    """An execution of a message that was sent at ``ms``: it ended 5 ms later."""

    fence, attempt = 7, 1

    def __init__(self, ms: int) -> None:
        self.ticket, self.stream_id, self.start_us, self.end_us = _T, b"%d-1" % ms, 1000 * ms, 1000 * (ms + 5)


@pytest.fixture
def feed(world: World) -> Iterator[TicketFeed]:
    sockets = LiveSockets(10)
    sockets.start()
    made = TicketFeed(Link(world.link.url, "feed"), world.keys, FIELD, sockets, lambda: StreamRouter(world.link.url))
    made.start()
    yield made
    made.stop()
    assert made.join(PATIENCE_S)
    sockets.stop()
    assert sockets.join(PATIENCE_S)


def told(feed: TicketFeed, position: str, until: int) -> list[dict[str, Any]]:
    """The first ``until`` events that a follower gets which comes back with ``position``; each with its name as ``event``."""
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S)
    feed.follow(theirs, _T, parse_position(position))
    found: list[dict[str, Any]] = []
    with ours, ours.makefile("rb") as lines:
        name = b""
        for line in lines:
            field, _, value = line.rstrip(b"\n").partition(b": ")
            name = value if field == b"event" else name
            if field == b"data":
                found.append({"event": name.decode(), **orjson.loads(value)})
            if len(found) == until:
                break
    return found


def fill(world: World, count: int) -> None:
    """A message every 10 ms, and a message of another ticket; each is done 5 ms after it was sent, and acknowledged 1 ms later."""
    commands: list[Any] = []
    for ms in range(1000, 1000 + 10 * count, 10):
        commands.append(("XADD", world.keys.stream, b"%d-1" % ms, FIELD, _T))
        commands.append(("XADD", world.keys.stream, b"%d-2" % ms, FIELD, b"other"))
        commands.append(("XADD", world.keys.runs, b"%d-0" % (ms + 6), "batch", encode("c:1", [Done(ms)])))
    world.link.pipeline(commands)


@pytest.mark.parametrize("page", [3, 500])
def test_what_was_missed_is_told_in_the_order_of_time_with_its_times(
    feed: TicketFeed, world: World, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticket_feed, "_PAGE", page)
    fill(world, 20)
    letter = [b"usher-ticket", _T, b"usher-id", b"1-1", b"usher-reason", b"gave_up"]
    world.link.call("XADD", world.keys.dead, b"1101-0", *letter)
    *found, state = told(feed, "0", 42)
    assert [(one["event"], one["time_ms"]) for one in found if one["event"] != "dead_letter"] == [
        (name, ms + later) for ms in range(1000, 1200, 10) for name, later in (("entry", 0), ("completed", 5))
    ]
    assert [one["time_ms"] for one in found] == sorted(one["time_ms"] for one in found)
    assert found[21]["event"] == "dead_letter"
    assert state["event"] == "state", "and then the state, as of now"
    assert state["time_ms"] > 1_700_000_000_000


def test_who_comes_back_gets_each_once(feed: TicketFeed, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticket_feed, "_PAGE", 2)
    fill(world, 6)
    found = told(feed, "1020-1_1016-0_0-0", 8)
    each = [(name, f"{ms}-1") for ms in (1030, 1040, 1050) for name in ("entry", "completed")]
    assert [(one["event"], one.get("message_id")) for one in found] == [("completed", "1020-1"), *each, ("state", None)]


def test_a_gap_is_told_once_however_much_was_missed_elsewhere(feed: TicketFeed, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticket_feed, "_PAGE", 2)
    fill(world, 12)
    world.link.call("XTRIM", world.keys.runs, "MAXLEN", 2)
    found = told(feed, "1000-1_1006-0_0-0", 15)
    assert [(one["source"], one["after"], one["time_ms"]) for one in found if one["event"] == "gap"] == [("runs", "1006-0", 1006)]
    assert [one["event"] for one in found].count("entry") == 11
    assert [one["event"] for one in found].count("completed") == 2
    assert [one["time_ms"] for one in found] == sorted(one["time_ms"] for one in found)


def test_a_hand_over_that_was_not_seen_is_told_with_the_time_of_the_start(feed: TicketFeed, world: World) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S)
    feed.follow(theirs, _T, None)
    with ours, ours.makefile("rb") as lines:
        while b"event: state" not in next(lines):
            pass
        fill(world, 1)
        datas = (orjson.loads(line.partition(b" ")[2]) for line in lines if line.startswith(b"data: ") and b'"fence"' in line)
        handed, completed = next(datas), next(datas)
    assert handed["message_ids"] == [completed["message_id"]]
    assert (handed["time_ms"], completed["time_ms"]) == (1000, 1005)
