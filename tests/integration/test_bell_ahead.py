"""The doorbell is asked for what follows. Whatever becomes of news, nothing waits for the idle look."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.actors import ConsumerActor, MasterActor, Stage, Trouble
from tests.integration.factories import LEASE_MS
from tests.integration.routers import PATIENCE_S
from tests.integration.test_protocol_rules import T
from usher.common.base.clock import now_s
from usher.common.base.errors import NotNow, RedisTrouble
from usher.common.protocol.stream_id import rank
from usher.common.redis.client import Link
from usher.common.redis.embedded import EmbeddedRedis
from usher.common.redis.endpoints import server_of
from usher.master.dispatch import stream_cursor as reader_module
from usher.master.dispatch import stream_notifier as doorbell_module
from usher.master.dispatch.stream_notifier import StreamNotifier


@pytest.fixture(autouse=True)
def no_look_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be found by an idle look, or when the bell is asked again because its time is over, is not found at
    all."""
    monkeypatch.setattr(reader_module, "IDLE_READ_S", 1e9)
    monkeypatch.setattr(doorbell_module, "_BLOCK_S", 1e6)


@pytest.fixture
def bell(stage: Stage) -> Iterator[StreamNotifier]:
    made = StreamNotifier(Link(stage.url, "test:bell"), stage.keys.stream)
    yield made
    made.close()


def _rung(stage: Stage, bell: StreamNotifier, **settings: int) -> tuple[ConsumerActor, MasterActor]:
    """A consumer, and a leader that has nothing to do, and waits for a real doorbell."""
    a, m = stage.consumer("a"), stage.leader(**settings)
    m.settle()
    m.dispatcher._notifier = m.dispatcher._cursor._notifier = bell
    stage.send(b"first")
    m.dispatcher._cursor._may_have_more = True
    while m.dispatcher.run_once() == 0.0:
        pass
    assert a.read() == 1
    return a, m


def test_after_news_were_taken_the_bell_is_asked_for_what_follows_and_there_is_nothing_left_to_do(
    stage: Stage, bell: StreamNotifier
) -> None:
    a, m = _rung(stage, bell)
    [first] = stage.send(T)
    bell.wait(PATIENCE_S)
    assert m.dispatcher.run_once() > 0, "read, and handed over"
    assert bell._after == first
    more = stage.send(T)
    bell.wait(PATIENCE_S)
    news = bell.poll()
    assert news is not None
    assert (news.after, news.id) == (first, *more)
    assert a.read() == 1


@pytest.mark.parametrize("left", ["window", "batch"])
def test_what_is_left_of_the_news_has_a_turn_of_its_own(stage: Stage, bell: StreamNotifier, left: str) -> None:
    a, m = _rung(stage, bell, **{left: 2})
    for _ in range(3):
        stage.send(T)
    m.dispatcher._cursor._may_have_more = True
    assert [m.dispatcher.run_once() for _ in range(2)] == [0.0, 0.0]
    assert a.read() == 2
    while m.dispatcher.run_once() == 0.0:
        pass
    assert a.read() == (1 if left == "batch" else 0)


def _drive(m: MasterActor, bell: StreamNotifier, is_done: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
    """Turns and waits, as the service's thread has them, until it is done."""
    until_s = now_s() + within_s
    while not is_done() and now_s() < until_s:
        bell.clear()
        try:
            wait_s = m.dispatcher.run_once()
        except RedisTrouble:
            wait_s = 0.05
        if m.lead.epoch is None:
            m.elect()
        if wait_s > 0 and not is_done():
            bell.wait(min(wait_s, max(0.0, until_s - now_s())))
    return is_done()


@pytest.mark.parametrize("trouble", [None, *Trouble])
def test_a_hand_over_whose_reply_does_not_come_is_done_once_and_what_follows_is_heard(
    stage: Stage, bell: StreamNotifier, trouble: Trouble | None
) -> None:
    """Also by a server that has forgotten all scripts."""
    a, m = _rung(stage, bell)
    stage.link.call("SCRIPT", "FLUSH")
    [first] = stage.send(T)
    bell.wait(PATIENCE_S)
    if trouble is not None:
        m.link.troubles["hand_over"] = trouble
    for _ in range(2):  # read, and hand over
        m.dispatcher.run_once()
    m.elect()
    m.dispatcher.run_once()
    m.look()
    assert _drive(m, bell, lambda: a.lanes.load()[1] == 2 or a.read() > 0)
    if trouble is Trouble.LATE:
        m.link.arrive(stage.link)
    [second] = stage.send(T)
    assert _drive(m, bell, lambda: rank(m.dispatcher._cursor.taken) >= rank(second))
    a.read()
    a.work()
    assert stage.history.ids(T) == [first, second]
    assert stage.history.disorder() == []
    assert not stage.history.overlaps


def test_what_was_given_to_a_consumer_whose_lease_has_ended_goes_to_another_at_once(
    stage: Stage, bell: StreamNotifier
) -> None:
    a, m = _rung(stage, bell)
    a.work()
    m.turn(*a.reports())
    b = stage.consumer("b")
    stage.end_lease(a)
    stage.send(T)
    bell.wait(PATIENCE_S)
    m.look()
    assert _drive(m, bell, lambda: b.lanes.load()[1] > 0 or b.read() > 0)


class _Moving(Link):
    """As with Sentinel: when its connection is closed, the next one leads to the new server."""

    def __init__(self, old: str, new: str) -> None:
        super().__init__(old, "test:bell")
        self._new = new

    def close(self) -> None:
        super().close()
        if self.connections:
            self._connection = server_of(self._new).connection("test:bell", 0.5)


@pytest.mark.parametrize("told", ["9999999999999-1", "1-5"])
def test_a_bell_on_another_server_is_found_out_though_that_has_nothing_more_to_tell(
    stage: Stage, tmp_path_short: Path, told: str
) -> None:
    """A failover that it has not heard of, and neither has a producer. The new server is past what was ``told`` by
    then, or not."""
    with EmbeddedRedis(tmp_path_short / "other", port=None, durable=False) as other:
        bell, producer = (
            StreamNotifier(_Moving(other.url, stage.url), stage.keys.stream),
            Link(other.url, "test:producer"),
        )
        _, m = _rung(stage, bell)
        assert _drive(m, bell, lambda: bell._asked_until_s is not None)
        producer.call("XADD", stage.keys.stream, told, "ticket_id", "T")
        bell.wait(PATIENCE_S)
        stage.send(b"meanwhile")
        _drive(m, bell, lambda: False, 0.3)
        for ticket in (b"A", b"B", b"C"):
            [sent] = stage.send(ticket)
            assert _drive(m, bell, lambda sent=sent: rank(m.dispatcher._cursor.last_read) >= rank(sent))  # type: ignore[misc]
        bell.close()
        producer.close()


def test_news_that_redis_had_no_memory_for_and_then_none_for_a_look_are_taken_when_it_has(
    stage: Stage, bell: StreamNotifier
) -> None:
    _, m = _rung(stage, bell)
    [first] = stage.send(T)
    bell.wait(PATIENCE_S)

    def refuse(step: str) -> None:
        if step in ("hand_over", "read"):
            raise NotNow("OOM", "no memory")

    m.link.before = refuse
    for _ in range(2):
        with pytest.raises(NotNow):
            m.dispatcher.run_once()
    m.link.before = lambda step: None
    assert _drive(m, bell, lambda: m.dispatcher._cursor.last_read == first)


def test_a_stream_that_comes_back_with_lower_ids_after_it_has_rung_rings_again(
    stage: Stage, bell: StreamNotifier
) -> None:
    a, m = _rung(stage, bell)
    a.work()
    m.turn(*a.reports())
    stage.send(T, b"1000-1")
    bell.wait(PATIENCE_S)
    stage.link.call("DEL", stage.keys.stream)
    _drive(m, bell, lambda: False, 0.3)
    stage.consumer("b")  # the other one ends with the group
    m.look()
    _drive(m, bell, lambda: False, 0.1)
    stage.send(T, b"5-1")
    assert _drive(m, bell, lambda: m.dispatcher._cursor.last_read == b"5-1")


def test_a_recovery_that_a_record_asks_for_begins_at_once(stage: Stage, bell: StreamNotifier) -> None:
    _, m = _rung(stage, bell)
    [entry] = stage.send(b"U")
    assert _drive(m, bell, lambda: m.dispatcher._cursor.last_read == entry)
    stage.link.call("HSET", stage.keys.tickets, b"U", b"ghost:1 5 " + entry)
    m.dispatcher.post(stage.link.call("XADD", stage.keys.changed, "*", "ticket", b"U"))
    assert m.dispatcher.run_once() == 0.0


def test_what_the_sweep_has_found_is_not_taken_as_news(stage: Stage) -> None:
    a, m = stage.consumer("a"), stage.leader(window=1)
    m.settle()
    stage.send(T)
    m.settle()
    a.read()
    run = a.start()
    assert run
    [told] = stage.send(T)
    m.listen()
    stage.link.call("XREADGROUP", "GROUP", stage.keys.group, "stranger", "COUNT", 1, "STREAMS", stage.keys.stream, ">")
    stage.world.make_idle(b"stranger", 10 * LEASE_MS, told)
    m.dispatcher._idle_sweep._next_s, m.dispatcher._has_pending = 0.0, True
    m.turn()
    run.succeed()
    a.flush()
    m.settle(*a.reports())
    stage.finish(m, [a])
    assert stage.history.ids(T).count(told) == 1


def test_a_recall_that_was_refused_asks_for_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    a, m = stage.consumer("a"), stage.leader()
    m.settle()
    for number in range(20):
        stage.send(b"T%d" % number)
    m.settle()
    assert a.read() == 20
    stage.consumer("b")
    m.look()
    m.turn()
    time.sleep(0.06)
    tried: list[object] = []
    monkeypatch.setattr(m.dispatcher._steps, "recall", lambda *of: tried.append(of))
    for _ in range(50):  # who is asked for what it finished a moment ago is asked later
        m.turn()
        if tried:
            break
        time.sleep(0.02)
    assert tried
    assert not m.board.asked_back.asked
