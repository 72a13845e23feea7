"""The feed of those who follow tickets, turn by turn, on a real server whose answers get lost."""

from __future__ import annotations

import contextlib
import socket

import pytest

from tests.integration.routers import until
from tests.proxy import Proxy
from usher.common.base.errors import RedisTrouble, ReplyUnknown
from usher.common.http.server.push_sockets import LiveSockets
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.common.redis.embedded import free_port
from usher.common.router.router import StreamRouter
from usher.master.insight.ticket_feed import TicketFeed

KEYS = Keys("tickets", "usher")


def test_the_state_of_an_idle_ticket_is_told_though_a_reply_about_another_one_got_lost(redis_url: str) -> None:
    """The records were read and the attempts were not: what was read has to be told by the next look all the same."""
    lost = []

    def lose_once(chunk: bytes) -> bytes | None:
        if b"3 3 0 0" in chunk and not lost:
            lost.append(chunk)
            return None
        return chunk

    direct, sockets = Link(redis_url, "test"), LiveSockets(10)
    direct.call("HSET", KEYS.tickets, "busy", "worker:1 5 1-1")
    direct.call("HSET", KEYS.attempts, "1-1", "3 3 0 0")
    sockets.start()
    with contextlib.ExitStack() as stack, Proxy(redis_url, lose_once) as proxy:
        feed = TicketFeed(Link(proxy.url, "test:feed"), KEYS, "ticket_id", sockets, lambda: StreamRouter(redis_url))
        stack.callback(sockets.stop)
        stack.callback(feed.on_end)
        ends = [socket.socketpair() for _ in range(2)]
        for ticket, (ours, theirs) in zip((b"busy", b"idle"), ends, strict=True):
            stack.callback(theirs.close)
            theirs.setblocking(False)
            feed.follow(ours, "", ticket, None, with_fields=True)
        with pytest.raises(ReplyUnknown):
            feed.run_once()
        assert lost
        told = [b"", b""]

        def all_are_greeted() -> bool:
            feed.run_once()
            for number, (_, theirs) in enumerate(ends):
                with contextlib.suppress(BlockingIOError):
                    told[number] += theirs.recv(65_536)
            return all(b"event: state" in one for one in told)

        until(all_are_greeted)
    direct.close()


def test_those_who_came_and_left_while_redis_was_away_are_not_remembered() -> None:
    """They come again every few seconds, for as long as that lasts."""
    sockets = LiveSockets(10)
    sockets.start()
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    feed = TicketFeed(Link(nowhere, "test:feed"), KEYS, "ticket_id", sockets, lambda: StreamRouter(nowhere))
    with contextlib.ExitStack() as stack:
        stack.callback(sockets.stop)
        stack.callback(feed.on_end)
        stays, its_end = socket.socketpair()
        stack.callback(its_end.close)
        feed.follow(stays, "", b"stays", [b"1-1"] * 3, with_fields=True)
        for _ in range(5):
            ours, theirs = socket.socketpair()
            feed.follow(ours, "", b"leaves", [b"1-1"] * 3, with_fields=True)
            theirs.close()
            with pytest.raises(RedisTrouble):
                feed.run_once()

        def only_who_stays_is_known() -> bool:
            """Once the sockets' thread has seen that the others are closed."""
            with pytest.raises(RedisTrouble):
                feed.run_once()
            return (list(feed._followers), len(feed._behind), len(feed._mailbox)) == ([b"stays"], 1, 0)

        until(only_who_stays_is_known)
