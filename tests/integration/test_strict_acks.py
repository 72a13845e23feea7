"""USHER_ACK_MODE=strict: what a ticket waits for is written at once when nothing else can run, however long
the wait before a flush is."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.integration.actors import Stage, Trouble
from tests.integration.factories import LEASE_MS, World
from tests.integration.routers import until
from usher.common.base.clock import now_s
from usher.common.base.errors import RetryLater
from usher.common.redis.client import Link
from usher.consumer.execution.acker import Acker
from usher.consumer.execution.lanes import Lanes
from usher.consumer.execution.pools import LaneWorker
from usher.consumer.execution.reporter import Reporter
from usher.consumer.handlers.message import Message, OwnLease
from usher.consumer.incarnation import Drain
from usher.consumer.lifecycle.master_client import MasterClient
from usher.consumer.lifecycle.owner_scripts import OwnerScripts

_NEVER_S = 3600.0
_PATIENCE_S = 20.0


@contextmanager
def _acker(world: World, lanes: Lanes, enough: int = 500, was_quiet: bool = False) -> Iterator[Acker]:
    """A running acker of consumer ``a`` that has just written something (unless it ``was_quiet``), and so waits for
    ever for more to finish, unless there is enough or something tells it not to."""
    owner = world.join("a")
    world.owned(world.elect(), owner, b"T", b"1-1", b"2-1")
    link = Link(world.link.url, "test:ack")
    steps = OwnerScripts(link, world.keys, owner.registration)
    reporter = Reporter(MasterClient(["http://127.0.0.1:1"], ""), owner.incarnation, 8, 1008, 512)
    acker = Acker(steps, lanes, reporter, (_NEVER_S, enough), 0, lambda why: None)
    acker._flushed_s = -math.inf if was_quiet else now_s()
    acker.start()
    try:
        yield acker
    finally:
        acker.stop()
        assert acker.join(_PATIENCE_S)
        reporter.on_end()


def _finish(lanes: Lanes, acker: Acker, strict: bool) -> None:
    """As Executor.succeeded does."""
    lane = lanes.take_now()
    assert lane is not None
    message = lane.queue.popleft()
    message.start_us, message.end_us, message.lane = 1, 2, lane if strict else None
    if strict:
        lanes.hold(lane)
    acker.finished(message)
    if not strict:
        lanes.release(lane, 1, 0.0)


def _lanes() -> Lanes:
    lanes = Lanes()
    lanes.add(
        [
            (
                b"T",
                [
                    Message(b"T", entry_id, 1, [b"ticket_id", b"T"], OwnLease(60.0, 0.0))
                    for entry_id in (b"1-1", b"2-1")
                ],
            )
        ]
    )
    return lanes


def test_a_ticket_by_itself_does_not_wait_for_others_to_finish(world: World) -> None:
    lanes = _lanes()
    with _acker(world, lanes) as acker:
        for count in (1, 2):
            _finish(lanes, acker, strict=True)
            until(lambda least=count: acker.counts.outcomes["done"] >= least)
    assert world.pending() == {}


def test_while_others_can_run_more_is_waited_for(world: World) -> None:
    lanes = _lanes()
    lanes.add([(b"U", [Message(b"U", b"3-1", 1, [b"ticket_id", b"U"], OwnLease(60.0, 0.0))])])
    with _acker(world, lanes) as acker:
        _finish(lanes, acker, strict=True)
        assert lanes.ready
        assert not acker._write_now.is_set()


def test_pipelined_messages_are_waited_for(world: World) -> None:
    lanes = _lanes()
    with _acker(world, lanes) as acker:
        _finish(lanes, acker, strict=False)
        assert not acker._write_now.is_set()
        assert acker.counts.outcomes["done"] == 0


def test_as_many_as_are_worth_a_call_wait_for_no_more(world: World) -> None:
    lanes = _lanes()
    with _acker(world, lanes, enough=2) as acker:
        _finish(lanes, acker, strict=False)
        until(lambda: acker._lingering)
        assert acker.counts.outcomes["done"] == 0
        _finish(lanes, acker, strict=False)
        until(lambda: acker.counts.outcomes["done"] >= 2)


def test_what_finishes_after_a_quiet_time_is_written_at_once_and_then_more_is_waited_for(world: World) -> None:
    lanes = _lanes()
    with _acker(world, lanes, was_quiet=True) as acker:
        _finish(lanes, acker, strict=False)
        until(lambda: acker.counts.outcomes["done"] >= 1)
        _finish(lanes, acker, strict=False)
        until(lambda: acker._lingering)
        assert not acker._write_now.is_set()
        assert acker.counts.outcomes["done"] == 1


def test_where_the_incarnation_ends_nothing_waits_for_more_to_finish(world: World) -> None:
    """Also what already waits, and what finishes later: a drain gives nothing back while something is
    unacknowledged."""
    lanes = _lanes()
    with _acker(world, lanes) as acker:
        _finish(lanes, acker, strict=False)
        until(lambda: acker._lingering)
        acker.hurry()
        until(lambda: acker.counts.outcomes["done"] >= 1)
        _finish(lanes, acker, strict=False)
        until(lambda: acker.counts.outcomes["done"] >= 2)


def test_a_drain_waits_for_no_more_to_finish(any_redis_url: str) -> None:
    with Stage(any_redis_url) as stage:
        a, m = stage.consumer("a"), stage.leader()
        stage.send(b"T")
        m.settle()
        a.read()
        a.acker._linger_s, a.acker._flushed_s = _NEVER_S, now_s()
        link = Link(stage.url, "test:drain")
        drain = Drain(OwnerScripts(link, stage.keys, a.registration), a.lanes, a.reader, a.acker, LEASE_MS)
        run = a.start()
        assert run is not None
        a.acker.start()
        run.succeed()
        until(lambda: a.acker._lingering)
        assert drain.run(_PATIENCE_S)
        link.close()
        a.acker.stop()
        assert a.acker.join(_PATIENCE_S)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_handlers_that_take_their_time_are_not_short_in_any_mode(any_redis_url: str, strict: bool, fails: bool) -> None:
    def handle(message: Message) -> None:
        time.sleep(0.02)
        if fails:
            raise ValueError

    with Stage(any_redis_url) as stage:
        a, m = stage.consumer("a", strict=strict), stage.leader()
        stage.send(b"T")
        m.settle()
        a.read()
        assert a.lanes._is_short()
        worker = LaneWorker(0, a.executor, handle)
        worker.start()
        until(lambda: not a.lanes._is_short())
        a.lanes.pause()
        worker.stop()
        assert worker.join(_PATIENCE_S)


def test_a_runner_writes_its_own_acknowledgement_and_leaves_what_may_take_long(any_redis_url: str) -> None:
    with Stage(any_redis_url) as stage:
        a, m = stage.consumer("a", strict=True), stage.leader()
        stage.send(b"U")
        m.settle()
        a.read()
        run = a.start()
        assert run is not None
        run.fail(RetryLater(100.0))
        stage.send(b"T")
        m.settle()
        a.read()
        worker = LaneWorker(0, a.executor, lambda message: None)
        worker.start()
        until(lambda: a.acker.counts.outcomes["done"] == 1)
        a.lanes.pause()
        worker.stop()
        assert worker.join(_PATIENCE_S)
        assert not a.acker.is_flushed, "U is not given back yet"
        a.flush()
        assert a.acker.is_flushed


@pytest.mark.parametrize("trouble", [Trouble.REPLY_LOST, Trouble.NEVER_SENT])
def test_what_a_runner_could_not_write_for_sure_the_acker_is_woken_to_write_before_the_ticket_goes_on(
    any_redis_url: str, trouble: Trouble
) -> None:
    begun: list[tuple[bytes, int]] = []
    with Stage(any_redis_url) as stage:
        a, m = stage.consumer("a", strict=True), stage.leader()
        one, other = stage.send(b"T", b"1-1", b"2-1")
        m.settle()
        a.read()
        a.link.troubles["ack"] = trouble
        a.acker._IDLE_S = 60.0  # type: ignore[misc]
        a.acker.start()
        worker = LaneWorker(
            0, a.executor, lambda message: begun.append((message.stream_id, a.acker.counts.outcomes["done"]))
        )
        worker.start()
        until(lambda: a.acker.counts.outcomes["done"] == 2)
        a.lanes.pause()
        for service in (worker, a.acker):
            service.stop()
            assert service.join(_PATIENCE_S)
        assert (begun, stage.world.pending()) == ([(one, 0), (other, 1)], {})
