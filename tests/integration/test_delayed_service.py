"""The service that sends delayed messages while its master leads."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.abuse import check_contract
from tests.integration.delays import FUTURE, PAST, delay, left, log_keys, now_ms, sent
from tests.integration.factories import World, spent
from tests.integration.routers import until
from tests.proxy import Proxy
from usher.common.base.clock import now_s
from usher.common.base.errors import ReplyUnknown
from usher.common.protocol.sources import SourceSelection
from usher.common.redis.client import Link
from usher.master.leader.elector import Lead
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.operations.delayed_sender import DelayedMessages


@contextlib.contextmanager
def _running(url: str, world: World, lead: Lead, sources: SourceSelection | None = None) -> Iterator[DelayedMessages]:
    service = DelayedMessages(Link(url, "test:delayed"), world.keys, lead, sources)
    service.start()
    try:
        yield service
    finally:
        service.stop()
        assert service.join(5.0)


def _led(leader: LeaderScripts) -> Lead:
    lead = Lead()
    lead._set(leader.epoch, "http://one")
    return lead


def test_the_leading_master_sends_when_the_time_has_come_and_hears_of_earlier_ones(
    any_redis_url: str, world: World
) -> None:
    leader = world.elect()
    with _running(any_redis_url, world, _led(leader)) as service:
        delay(world, b"never", FUTURE)
        due_ms = now_ms(world) + 400
        delay(world, b"A", due_ms)
        delay(world, b"at once", PAST)  # although somebody waits for a later one
        until(lambda: sent(world) == [b"at once"] and service.sent == 1)
        assert now_ms(world) < due_ms
        until(lambda: sent(world) == [b"at once", b"A"])
        [_, (entry_id, _)] = world.link.call("XRANGE", world.keys.stream, "-", "+")
        assert int(entry_id.partition(b"-")[0]) >= due_ms, "never early"


def test_what_somebody_deletes_before_it_is_due_is_told(
    any_redis_url: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    gone = delay(world, b"A", now_ms(world) + 300)
    with _running(any_redis_url, world, _led(world.elect())):
        until(lambda: world.link.call("ZCARD", log_keys(world).due) == 1)
        world.link.call("XDEL", log_keys(world).delayed, gone)
        until(lambda: "delayed_messages_deleted" in caplog.messages)
    assert [vars(record)["facts"]["first"] for record in caplog.records] == [gone]


def test_more_than_a_page_of_them_are_all_put_in_order_before_the_first_is_sent(
    any_redis_url: str, world: World
) -> None:
    """As after a time without a leader: of one ticket, what is due earlier may have been added later."""
    for number in range(1200):
        delay(world, b"%d" % number, 5000 - number)
    leader = world.elect()
    assert leader.due_delayed(5)[1:] == (0, [], []), "there is more to put in order"
    with _running(any_redis_url, world, _led(leader)):
        until(lambda: left(world) == 0)
    assert sent(world) == [b"%d" % number for number in reversed(range(1200))]


def test_what_is_due_is_sent_also_while_many_more_are_added_than_are_sent(any_redis_url: str, world: World) -> None:
    """More than the 200 of a call come between any two looks; the first is not sent before all are in order."""
    leader = world.elect()
    delay(world, b"A", PAST)
    add = ("XADD", log_keys(world).delayed, "*", "due_ms", FUTURE, "ticket_id", "later")
    for _ in range(10):
        world.link.all_of([add] * 600)
        if due := leader.due_delayed(200).due:
            leader.send_delayed([(one, world.keys.stream) for one in due], 60_000)
    assert sent(world) == [b"A"]


def test_a_wait_for_the_next_one_is_no_stall(any_redis_url: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a minute in which Redis refused it a turn may wait for another one: as long as health has patience."""
    monkeypatch.setattr("usher.master.operations.delayed_sender._BLOCK_S", 0.05)
    delay(world, b"never", FUTURE)
    with _running(any_redis_url, world, _led(world.elect())) as service:
        until(lambda: world.link.call("ZCARD", log_keys(world).due) == 1)
        began_s = now_s()
        until(lambda: (service.last_turn_s or 0.0) - began_s > 0.2)


def test_trouble_that_is_over_is_not_told_for_as_long_as_nothing_is_due(any_redis_url: str, world: World) -> None:
    """After a failover, or a slot that moved, the leader called itself unwell (503) for a minute, while all worked
    again."""
    delay(world, b"never", FUTURE)
    with _running(any_redis_url, world, _led(world.elect())) as service:
        until(
            lambda: (
                b"name=test:delayed " in world.link.call("CLIENT", "LIST")
                and world.link.call("ZCARD", log_keys(world).due) == 1
            )
        )
        service._link.interrupt()  # as the server would end it
        until(lambda: service.failed_turns == 1)
        until(lambda: service.trouble is None)


def test_where_no_wait_succeeds_the_looks_get_rarer(
    any_redis_url: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a proxy that ends every command that blocks: 25 looks a second, each over a new connection, because
    every other turn went well."""
    monkeypatch.setattr(DelayedMessages, "_await", mock.Mock(side_effect=ReplyUnknown("the proxy has ended it")))
    with _running(any_redis_url, world, _led(world.elect())) as service:
        time.sleep(1.5)
        assert 1 <= service.failed_turns <= 8
        assert service.trouble is not None


def test_a_standby_sends_nothing(any_redis_url: str, world: World) -> None:
    delay(world, b"A", PAST)
    service = DelayedMessages(Link(any_redis_url, "test:delayed"), world.keys, Lead())
    assert 1.0 < service.run_once() < service.stalls_after_s
    assert left(world) == 1
    service.on_end()


def test_one_that_leads_no_more_says_so(any_redis_url: str, world: World) -> None:
    lead = _led(world.elect())
    world.link.call("DEL", world.keys.leader)
    service = DelayedMessages(Link(any_redis_url, "test:delayed"), world.keys, lead)
    service.run_once()
    assert lead.epoch is None
    service.on_end()


def test_of_several_streams_a_message_names_the_one_that_it_is_for(
    any_redis_url: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    leader = world.elect()
    with (
        caplog.at_level(logging.ERROR),
        _running(any_redis_url, world, _led(leader), SourceSelection.parse("orders,tenant:*")) as service,
    ):
        for ticket, named in ((b"A", b"tenant:a"), (b"B", b"orders"), (b"C", b"elsewhere"), (b"D", b"")):
            delay(world, ticket, PAST, "stream", named)
        until(lambda: service.sent == 2 and "delayed_messages_not_sent" in caplog.text)
    assert (sent(world, "tenant:a"), sent(world, "orders"), left(world)) == ([b"A"], [b"B"], 2)


def test_thousands_that_cannot_be_sent_for_one_reason_are_one_line(
    any_redis_url: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.link.call("SET", "orders", "no stream")
    for number in range(1000):
        delay(world, b"%d" % number, PAST, "stream", "orders" if number == 7 else "nowhere")
    with (
        caplog.at_level(logging.ERROR),
        _running(any_redis_url, world, _led(world.elect()), SourceSelection.parse("orders,tenant:*")),
    ):
        until(lambda: world.link.call("ZCOUNT", log_keys(world).due, PAST + 1, "+inf") == 1000)
    told = [vars(record)["facts"] for record in caplog.records]
    assert sorted((facts["count"], facts["first"], "WRONGTYPE" in facts["why"]) for facts in told) == [
        (1, mock.ANY, True),
        (199, mock.ANY, False),
    ]


def test_a_stream_that_we_may_not_write_to_holds_up_no_other(
    any_redis_url: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis refuses the whole script when it may not be given one of its keys; so it does in a cluster for one that
    lies elsewhere."""
    world.link.call(
        "ACL", "SETUSER", "few", "on", "nopass", "+@all", "~tenant:a", "~ticket_stream", "~{ticket_stream}:*"
    )
    leader = world.elect()
    for ticket, named in ((b"A", b"tenant:b"), (b"B", b"tenant:a"), (b"C", b"tenant:b"), (b"D", b"tenant:a")):
        delay(world, ticket, PAST, "stream", named)
    link = Link(any_redis_url, "test:delayed")
    service = DelayedMessages(link, world.keys, _led(leader), SourceSelection.parse("tenant:*"))
    try:
        link.call("AUTH", "few", "")
        with caplog.at_level(logging.ERROR):
            assert service.run_once() == 0.0
    finally:
        world.link.call("ACL", "DELUSER", "few")
        service.on_end()
    assert (sent(world, "tenant:a"), left(world), service.sent) == ([b"B", b"D"], 2, 2)
    [told] = [record for record in caplog.records if record.getMessage() == "delayed_messages_not_sent"]
    assert "NOPERM" in str(vars(told))
    look = leader.due_delayed(10)
    assert look.due == []
    assert look.wait_ms is not None and 50_000 < look.wait_ms <= 60_000


def test_two_leaders_who_both_believe_it_send_each_message_once(any_redis_url: str, world: World) -> None:
    """One of them does not know yet that it is deposed."""
    former = world.elect()
    leader = world.elect(succeed=str(former.epoch))
    with _running(any_redis_url, world, _led(former)), _running(any_redis_url, world, _led(leader)):
        for number in range(300):
            delay(world, b"%d" % number, PAST)
        until(lambda: left(world) == 0)
    assert sorted(sent(world)) == sorted(b"%d" % number for number in range(300))


def test_replies_that_get_lost_neither_lose_nor_double_a_message(redis_url: str, link: Link) -> None:
    world, replies = World(link), itertools.count()
    leader = world.elect()
    with (
        Proxy(redis_url, lambda chunk: chunk if next(replies) % 17 else None) as proxy,
        _running(proxy.url, world, _led(leader)) as service,
    ):
        for number in range(100):
            delay(world, b"%d" % number, PAST)
            time.sleep(0.003)  # so that they are sent in many calls
        until(lambda: left(world) == 0)
    assert sorted(sent(world)) == sorted(b"%d" % number for number in range(100))
    assert service.failed_turns > 0, "no reply was lost"


def test_what_redis_refuses_is_told_and_the_master_is_well(
    any_redis_url: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    leader = world.elect()
    world.link.call("SET", log_keys(world).due, "spoilt")
    delay(world, b"A", PAST)
    service = DelayedMessages(Link(any_redis_url, "test:delayed"), world.keys, _led(leader))
    with caplog.at_level(logging.ERROR):
        assert service.run_once() == 60.0
    assert "delayed_messages_refused" in caplog.text
    assert service.trouble is None
    service.on_end()


def test_the_service_keeps_its_contract(redis_url: str) -> None:
    world = World(Link(redis_url, "test"))
    leader = world.elect()
    check_contract(lambda: DelayedMessages(Link(redis_url, "test:delayed"), world.keys, _led(leader)))


def test_an_idle_leader_asks_rarely(any_redis_url: str, world: World) -> None:
    leader = world.elect()
    with _running(any_redis_url, world, _led(leader)):
        delay(world, b"A", FUTURE)
        until(lambda: world.link.call("ZCARD", log_keys(world).due) == 1)
        threading.Event().wait(0.3)
        asked = spent(world.link, lambda: threading.Event().wait(1.5))
        assert asked["evalsha"] + asked["xread"] <= 1
