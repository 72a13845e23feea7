"""The feed of those who follow tickets, turn by turn, on a real server whose answers get lost."""

from __future__ import annotations

import contextlib

import pytest

from tests.integration.routers import until
from tests.proxy import Proxy
from usher.common.base.errors import RedisTrouble, ReplyUnknown
from usher.common.http.push import LiveStreams
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

    direct = Link(redis_url, "test")
    direct.call("HSET", KEYS.tickets, "busy", "worker:1 5 1-1")
    direct.call("HSET", KEYS.attempts, "1-1", "3 3 0 0")
    with contextlib.ExitStack() as stack, Proxy(redis_url, lose_once) as proxy:
        feed = TicketFeed(
            Link(proxy.url, "test:feed"), KEYS, "ticket_id", LiveStreams(10), lambda: StreamRouter(redis_url)
        )
        stack.callback(feed.on_end)
        followed = [feed.follow("", ticket, None, with_fields=True) for ticket in (b"busy", b"idle")]
        with pytest.raises(ReplyUnknown):
            feed.run_once()
        assert lost

        def all_are_greeted() -> bool:
            feed.run_once()
            return all(any(b"event: state" in one for one in live._waiting) for live in followed)

        until(all_are_greeted)
    direct.close()


def test_those_who_came_and_left_while_redis_was_away_are_not_remembered() -> None:
    """They come again every few seconds, for as long as that lasts."""
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    feed = TicketFeed(Link(nowhere, "test:feed"), KEYS, "ticket_id", LiveStreams(10), lambda: StreamRouter(nowhere))
    with contextlib.ExitStack() as stack:
        stack.callback(feed.on_end)
        feed.follow("", b"stays", [b"1-1"] * 3, with_fields=True)
        for _ in range(5):
            feed.follow("", b"leaves", [b"1-1"] * 3, with_fields=True).response.close()
            with pytest.raises(RedisTrouble):
                feed.run_once()
        assert (list(feed._followers), len(feed._behind), len(feed._mailbox)) == ([b"stays"], 1, 0)
