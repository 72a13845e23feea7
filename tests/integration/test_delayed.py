"""due_delayed.lua and send_delayed.lua, and the service around them: a delayed message comes into its stream when it is due, once."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from common.errors import Fenced, NotNow
from common.keys import LogKeys
from common.producer import Outgoing, Producer
from common.redis_client import CommandRefused, Link
from common.sources import Sources
from master.delayed import DelayedMessages
from master.delayed_view import DelayedView, member_of
from master.elector import Lead
from master.leader_steps import Due, LeaderSteps
from master.vitals import VitalsReader
from tests.abuse import check_contract
from tests.integration.factories import NASTY_TICKETS, World
from tests.proxy import Proxy

#: Long ago, and long after this test.
PAST, FUTURE = 1_000, 4_000_000_000_000


def _log(world: World) -> LogKeys:
    return LogKeys(world.keys.stream)


def _delay(world: World, ticket: bytes, due: object, *more: object, key: str = "") -> bytes:
    """Add a delayed message, as anybody can."""
    entry_id: bytes = world.link.call("XADD", key or _log(world).delayed, "*", "due_ms", due, "ticket_id", ticket, *more)
    return entry_id


def _now_ms(world: World) -> int:
    seconds, microseconds = world.link.call("TIME")
    return int(seconds) * 1000 + int(microseconds) // 1000


def _sent(world: World, stream: str = "") -> list[bytes]:
    """Tickets in the stream, in its order."""
    entries = world.link.call("XRANGE", stream or world.keys.stream, "-", "+")
    return [dict(zip(flat[::2], flat[1::2], strict=True))[b"ticket_id"] for _, flat in entries]


def _send_due(world: World, leader: LeaderSteps) -> list[bytes | str]:
    told: list[bytes | str] = []
    while (look := leader.due_delayed(100)).due or look.wait_ms == 0:
        told += leader.send_delayed([(one, world.keys.stream) for one in look.due], 60_000)
    return told


def _left(world: World) -> int:
    return int(world.link.call("XLEN", _log(world).delayed))


# ---- the scripts ---------------------------------------------------------------------------------------------------------------


def test_what_is_due_is_sent_with_all_its_fields_and_what_is_not_stays(world: World) -> None:
    leader = world.elect()
    _delay(world, b"A", PAST, "text", b"\xff\0", "text", "again")
    _delay(world, b"B", FUTURE)
    [new_id] = _send_due(world, leader)
    assert world.link.call("XRANGE", world.keys.stream, "-", "+") == [
        [new_id, [b"due_ms", b"%d" % PAST, b"ticket_id", b"A", b"text", b"\xff\0", b"text", b"again"]]
    ]
    assert _left(world) == world.link.call("ZCARD", _log(world).due) == 1


def test_messages_are_sent_in_the_order_of_their_times_and_those_of_one_time_in_that_of_their_ids(world: World) -> None:
    leader, log = world.elect(), _log(world)
    for sequence in range(1, 13):  # as text 10 comes before 9
        world.link.call("XADD", log.delayed, f"5-{sequence}", "due_ms", 700, "ticket_id", f"same {sequence}")
    for due in (900, 500, 800):
        _delay(world, b"%d" % due, due)
    _send_due(world, leader)
    assert _sent(world) == [b"500", *(b"same %d" % sequence for sequence in range(1, 13)), b"800", b"900"]


def test_the_next_one_is_told_by_the_clock_of_redis(world: World) -> None:
    leader = world.elect()
    assert leader.due_delayed(10) == (b"0-0", None, [])
    last = _delay(world, b"A", _now_ms(world) + 5000)
    _delay(world, b"B", FUTURE)
    look = leader.due_delayed(10)
    assert look.wait_ms is not None and 4000 < look.wait_ms <= 5000
    assert (look.until > last, look.due) == (True, [])


@pytest.mark.parametrize("due", ["", "soon", "-5", "1e300", "nan", "1" * 16, "12.5"])
def test_what_has_no_time_is_due_at_once(world: World, due: str) -> None:
    _delay(world, b"A", due)
    _send_due(world, world.elect())
    assert _sent(world) == [b"A"]


@pytest.mark.parametrize("due", ["", "soon", "0"])
def test_what_has_no_time_hides_nobody_who_is_late(world: World, due: str) -> None:
    leader = world.elect()
    _delay(world, b"late", _now_ms(world) - 100_000)
    _delay(world, b"A", due)
    leader.due_delayed(10)
    assert VitalsReader(world.link, world.keys).read().late_s > 90.0


def test_tickets_and_names_may_be_anything(world: World) -> None:
    for ticket in NASTY_TICKETS:
        _delay(world, ticket, PAST, ticket, ticket)
    _send_due(world, world.elect())
    assert _sent(world) == list(NASTY_TICKETS)


def test_more_than_a_page_of_them_are_all_put_in_order_before_the_first_is_sent(any_redis_url: str, world: World) -> None:
    """As after a time without a leader: of one ticket, what is due earlier may have been added later."""
    for number in range(450):
        _delay(world, b"%d" % number, 1000 - number)
    leader = world.elect()
    assert leader.due_delayed(5)[1:] == (0, []), "there is more to put in order"
    with _running(any_redis_url, world, _led(leader)):
        _until(lambda: _left(world) == 0)
    assert _sent(world) == [b"%d" % number for number in reversed(range(450))]


def test_large_ones_are_put_in_order_and_sent_a_few_at_a_time(world: World) -> None:
    for number in range(5):
        _delay(world, b"%d" % number, PAST, "body", b"x" * 5_000_000)
    leader = world.elect()
    for known in (2, 4):  # 8 MiB are reached: Redis does nothing else meanwhile
        assert leader.due_delayed(100)[1:] == (0, [])
        assert world.link.call("ZCARD", _log(world).due) == known
    assert len(leader.due_delayed(100).due) == 2, "8 MiB are reached"
    _send_due(world, leader)
    assert len(_sent(world)) == 5


def test_a_call_whose_reply_was_lost_is_repeated_without_harm(world: World) -> None:
    leader = world.elect()
    _delay(world, b"A", PAST)
    due = [(one, world.keys.stream) for one in leader.due_delayed(10).due]
    assert leader.send_delayed(due, 60_000) != [b""]
    assert leader.send_delayed(due, 60_000) == [b""]
    assert _sent(world) == [b"A"]


def test_a_deposed_leader_neither_looks_nor_sends(world: World, depose: Callable[[LeaderSteps], None]) -> None:
    leader = world.elect()
    _delay(world, b"A", PAST)
    due = leader.due_delayed(10).due
    depose(leader)
    with world.unchanged():
        with pytest.raises(Fenced):
            leader.due_delayed(10)
        with pytest.raises(Fenced):
            leader.send_delayed([(one, world.keys.stream) for one in due], 60_000)
    assert _left(world) == 1


def test_what_is_deleted_by_hand_is_not_sent_and_not_looked_at_again(world: World) -> None:
    leader, log = world.elect(), _log(world)
    first, second = _delay(world, b"A", PAST), _delay(world, b"B", PAST)
    due = leader.due_delayed(10).due
    world.link.call("XDEL", log.delayed, first)
    assert [told != b"" for told in leader.send_delayed([(one, world.keys.stream) for one in due], 60_000)] == [False, True]
    world.link.call("XDEL", log.delayed, _delay(world, b"C", PAST), second)
    assert leader.due_delayed(10).due == []
    assert (_sent(world), world.link.call("EXISTS", log.due)) == ([b"B"], 0)


def test_a_stream_that_was_deleted_and_came_back_with_lower_ids_is_put_in_order_anew(world: World) -> None:
    leader, log = world.elect(), _log(world)
    world.link.call("XADD", log.delayed, "900-1", "due_ms", FUTURE, "ticket_id", "old")
    leader.due_delayed(10)
    world.link.call("DEL", log.delayed)
    world.link.call("XADD", log.delayed, "5-1", "due_ms", PAST, "ticket_id", "new")
    _send_due(world, leader)
    assert _sent(world) == [b"new"]
    assert world.link.call("EXISTS", log.due) == 0


def test_one_that_lies_before_what_was_put_in_order_is_sent_all_the_same(world: World) -> None:
    """The stream came back and has grown beyond its former end before anybody looked; or it was restored; or its order was deleted."""
    leader, log = world.elect(), _log(world)
    world.link.call("XADD", log.delayed, "900-1", "due_ms", FUTURE, "ticket_id", "old")
    leader.due_delayed(10)
    world.link.call("DEL", log.delayed)
    for entry_id, ticket in (("5-1", "A"), ("1000-1", "B")):
        world.link.call("XADD", log.delayed, entry_id, "due_ms", PAST, "ticket_id", ticket)
    copy = world.link.call("DUMP", log.delayed)
    _send_due(world, leader)
    assert _sent(world) == [b"A", b"B"]
    world.link.call("RESTORE", log.delayed, 0, copy, "REPLACE")
    leader.due_delayed(10)
    world.link.call("DEL", log.due)
    _send_due(world, leader)
    assert (_sent(world), _left(world)) == ([b"A", b"B", b"A", b"B"], 0)


def test_behind_one_with_the_highest_id_of_all_everything_is_still_sent(world: World) -> None:
    leader, log = world.elect(), _log(world)
    _delay(world, b"A", PAST)
    world.link.call("XADD", log.delayed, "18446744073709551615-18446744073709551615", "due_ms", PAST, "ticket_id", "B")
    _send_due(world, leader)
    assert _sent(world) == [b"A", b"B"]
    assert leader.due_delayed(10).wait_ms is None


def test_one_that_cannot_be_sent_holds_up_no_other_and_is_tried_again(world: World) -> None:
    leader, log = world.elect(), _log(world)
    world.link.call("SET", "text", "no stream")
    many = [part for number in range(3600) for part in (f"n{number}", "v")]
    for ticket, more in ((b"A", ()), (b"B", ()), (b"C", tuple(many)), (b"D", ())):
        _delay(world, ticket, PAST, *more)
    streams = ["text", None, world.keys.stream, world.keys.stream]
    told = leader.send_delayed(list(zip(leader.due_delayed(10).due, streams, strict=True)), 50_000)
    assert [isinstance(one, str) for one in told] == [True, True, True, False]
    assert "WRONGTYPE" in str(told[0])
    assert told[1:3] == ["its field stream names none that is taken in", "it has more than 3500 fields"]
    assert _sent(world) == [b"D"]
    look = leader.due_delayed(10)
    assert look.due == []
    assert look.wait_ms is not None and 40_000 < look.wait_ms <= 50_000
    assert world.link.call("XLEN", log.delayed) == 3, "none is lost"


def test_at_full_memory_nothing_is_sent_and_nothing_is_lost(world: World) -> None:
    leader = world.elect()
    _delay(world, b"A", PAST)
    due = leader.due_delayed(10).due
    world.link.call("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(NotNow, match="OOM|maxmemory"):
            leader.send_delayed([(one, world.keys.stream) for one in due], 60_000)
    finally:
        world.link.call("CONFIG", "SET", "maxmemory", 0)
    _send_due(world, leader)
    assert _sent(world) == [b"A"]


@pytest.mark.parametrize("key", ["delayed", "due", "due_until"])
def test_a_key_of_another_type_is_refused_before_anything_has_changed(world: World, key: str) -> None:
    leader, log = world.elect(), _log(world)
    due = Due(member_of("5-1").encode(), b"")
    if key != "delayed":
        world.link.call("XADD", log.delayed, "5-1", "due_ms", PAST, "ticket_id", "A")
    world.link.call("HSET", getattr(log, key), "a", "b")
    with world.unchanged():
        with pytest.raises(CommandRefused, match="WRONGTYPE"):
            leader.due_delayed(10)
        if key != "due_until":
            with contextlib.suppress(CommandRefused):
                assert leader.send_delayed([(due, world.keys.stream)], 60_000) == [b""]
    assert _sent(world) == []


# ---- the producer --------------------------------------------------------------------------------------------------------------


def test_a_producer_sends_for_later_and_a_repeat_is_added_once(world: World) -> None:
    producer = Producer(world.link, world.keys.stream, dedup_s=60)
    due_ms = producer.ms_from_now(3600)
    first = producer.send("42", {"text": "hello"}, uid="order-7", due_ms=due_ms)
    assert producer.send("42", {"text": "hello"}, uid="order-7", due_ms=due_ms) == first
    assert producer.send("42", {"text": "hello"}, uid="order-7") == first, "nor now"
    assert _sent(world) == []
    world.elect().due_delayed(10)
    [row] = DelayedView(world.link, world.keys, "ticket_id").all()
    assert row == (first, due_ms, "42", {"due_ms": str(due_ms), "ticket_id": "42", "text": "hello", "uid": "order-7"})


def test_a_producer_refuses_what_is_no_time(world: World) -> None:
    producer = Producer(world.link, world.keys.stream)
    for wrong in (-1, 10**15):
        with pytest.raises(ValueError, match="milliseconds since the epoch"):
            producer.send("42", {"text": "hello"}, due_ms=wrong)
    with pytest.raises(ValueError, match="give it as due_ms"):
        producer.send_many([Outgoing("42", {"due_ms": "5"})], due_ms=5)
    assert _left(world) == 0


# ---- the service ---------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _running(url: str, world: World, lead: Lead, sources: Sources | None = None) -> Iterator[DelayedMessages]:
    service = DelayedMessages(Link(url, "test:delayed"), world.keys, lead, sources)
    service.start()
    try:
        yield service
    finally:
        service.stop()
        assert service.join(5.0)


def _led(leader: LeaderSteps) -> Lead:
    lead = Lead()
    lead._set(leader.epoch, "http://one")
    return lead


def _until(true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 10.0
    while not true():
        assert time.monotonic() < until_s, "not in 10 s"
        time.sleep(0.005)


def test_the_leading_master_sends_when_the_time_has_come_and_hears_of_earlier_ones(any_redis_url: str, world: World) -> None:
    leader = world.elect()
    with _running(any_redis_url, world, _led(leader)) as service:
        _delay(world, b"never", FUTURE)
        due_ms = _now_ms(world) + 400
        _delay(world, b"A", due_ms)
        _delay(world, b"at once", PAST)  # although somebody waits for a later one
        _until(lambda: _sent(world) == [b"at once"] and service.sent == 1)
        assert _now_ms(world) < due_ms
        _until(lambda: _sent(world) == [b"at once", b"A"])
        [_, (entry_id, _)] = world.link.call("XRANGE", world.keys.stream, "-", "+")
        assert int(entry_id.partition(b"-")[0]) >= due_ms, "never early"


def test_a_standby_sends_nothing(any_redis_url: str, world: World) -> None:
    _delay(world, b"A", PAST)
    service = DelayedMessages(Link(any_redis_url, "test:delayed"), world.keys, Lead())
    assert service.run_once() == 1.0
    assert _left(world) == 1
    service.on_end()


def test_one_that_leads_no_more_says_so(any_redis_url: str, world: World) -> None:
    lead = _led(world.elect())
    world.link.call("DEL", world.keys.leader)
    service = DelayedMessages(Link(any_redis_url, "test:delayed"), world.keys, lead)
    service.run_once()
    assert lead.epoch is None
    service.on_end()


def test_of_several_streams_a_message_names_the_one_that_it_is_for(any_redis_url: str, world: World, caplog: pytest.LogCaptureFixture) -> None:
    leader = world.elect()
    with caplog.at_level(logging.ERROR), _running(any_redis_url, world, _led(leader), Sources.parse("orders,tenant:*")) as service:
        for ticket, named in ((b"A", b"tenant:a"), (b"B", b"orders"), (b"C", b"elsewhere"), (b"D", b"")):
            _delay(world, ticket, PAST, "stream", named)
        _until(lambda: service.sent == 2 and "delayed_not_sent" in caplog.text)
    assert (_sent(world, "tenant:a"), _sent(world, "orders"), _left(world)) == ([b"A"], [b"B"], 2)


def test_two_leaders_who_both_believe_it_send_each_message_once(any_redis_url: str, world: World) -> None:
    """One of them does not know yet that it is deposed."""
    former = world.elect()
    leader = world.elect(succeed=str(former.epoch))
    with _running(any_redis_url, world, _led(former)), _running(any_redis_url, world, _led(leader)):
        for number in range(300):
            _delay(world, b"%d" % number, PAST)
        _until(lambda: _left(world) == 0)
    assert sorted(_sent(world)) == sorted(b"%d" % number for number in range(300))


def test_replies_that_get_lost_neither_lose_nor_double_a_message(redis_url: str, link: Link) -> None:
    world, replies = World(link), itertools.count()
    leader = world.elect()
    with Proxy(redis_url, lambda chunk: chunk if next(replies) % 17 else None) as proxy, _running(proxy.url, world, _led(leader)) as service:
        for number in range(100):
            _delay(world, b"%d" % number, PAST)
            time.sleep(0.003)  # so that they are sent in many calls
        _until(lambda: _left(world) == 0)
    assert sorted(_sent(world)) == sorted(b"%d" % number for number in range(100))
    assert service.failed_turns > 0, "no reply was lost"


def test_what_redis_refuses_is_told_and_the_master_is_well(any_redis_url: str, world: World, caplog: pytest.LogCaptureFixture) -> None:
    leader = world.elect()
    world.link.call("SET", _log(world).due, "spoilt")
    _delay(world, b"A", PAST)
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
    def calls() -> int:
        lines = world.link.call("INFO", "commandstats").decode().splitlines()
        return sum(int(line.partition("calls=")[2].partition(",")[0]) for line in lines if line.startswith(("cmdstat_evalsha:", "cmdstat_xread:")))

    leader = world.elect()
    with _running(any_redis_url, world, _led(leader)):
        _delay(world, b"A", FUTURE)
        _until(lambda: world.link.call("ZCARD", _log(world).due) == 1)
        threading.Event().wait(0.3)
        before = calls()
        threading.Event().wait(1.5)
        assert calls() - before <= 1
