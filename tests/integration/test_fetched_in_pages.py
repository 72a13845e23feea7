"""Over a slow or broken network a consumer fetches bodies page by page, and keeps what has come."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace

import pytest

from tests.integration.actors import ConsumerActor, Stage, Trouble
from tests.integration.factories import forget_bodies, hand_over, plan, read
from tests.proxy import Proxy
from usher.common.base.clock import now_s
from usher.common.base.errors import ReplyUnknown
from usher.common.redis.client import Link
from usher.common.runtime.service import judge
from usher.consumer.execution.inbox_reader import FIRST_PAGE, InboxReader
from usher.consumer.lifecycle.owner_scripts import GiveBack
from usher.master.policy.board.plans import NOTHING

T = b"T"


def _handed_over(stage: Stage, count: int) -> tuple[ConsumerActor, list[bytes]]:
    """A consumer to which so many messages were handed over that come without their bodies."""
    leader, consumer = stage.world.elect(), stage.consumer("a")
    ids = stage.world.send(T, *(b"%d-1" % number for number in range(1, count + 1)))
    news = read(leader, 1000)
    hand_over(leader, plan(consumer.incarnation, {T: ids}, {T: stage.world.head(T)}), replace(news, bodies={}))
    return consumer, ids


def _held_ids(consumer: ConsumerActor) -> set[bytes]:
    with consumer.lanes.lock:
        return set(consumer.lanes.held_ids)


def _lose_reply(consumer: ConsumerActor, number: int) -> None:
    """Of the pipelines that the reader sends, the reply to that one is lost."""
    sent, pipeline = 0, consumer.read_link.pipeline

    def lossy(commands, block_s=0.0):  # type: ignore[no-untyped-def]
        nonlocal sent
        sent += 1
        if sent == number:
            consumer.read_link.troubles["PIPELINE"] = Trouble.REPLY_LOST
        return pipeline(commands)

    consumer.read_link.pipeline = lossy  # type: ignore[method-assign]


def test_what_has_come_is_run_although_the_rest_was_cut_off_and_only_the_rest_is_fetched_again(stage: Stage) -> None:
    consumer, ids = _handed_over(stage, 3 * FIRST_PAGE)
    _lose_reply(consumer, 3)
    with pytest.raises(ReplyUnknown):
        consumer.read()
    assert _held_ids(consumer) == set(ids[:FIRST_PAGE])
    run = consumer.start()
    assert run is not None
    assert consumer.read() == 2 * FIRST_PAGE, "also while a message of the same record runs, or is done"
    run.succeed()
    consumer.work()
    stage.check_done(T, ids)
    assert stage.history.ids(T) == ids
    assert consumer.read() == 0


def test_what_has_come_may_be_done_before_the_rest_comes(stage: Stage) -> None:
    consumer, ids = _handed_over(stage, 2 * FIRST_PAGE)
    _lose_reply(consumer, 3)
    with pytest.raises(ReplyUnknown):
        consumer.read()
    for _ in range(FIRST_PAGE):
        run = consumer.start()
        assert run is not None
        run.succeed()
        consumer.flush()
    assert consumer.read() == FIRST_PAGE
    consumer.work()
    stage.check_done(T, ids)


def test_a_drain_reads_the_rest_of_what_was_begun(stage: Stage) -> None:
    consumer, ids = _handed_over(stage, 2 * FIRST_PAGE)
    _lose_reply(consumer, 3)
    with pytest.raises(ReplyUnknown):
        consumer.read()
    run = consumer.start()
    assert run is not None
    run.succeed()
    consumer.lanes.pause()
    consumer.reader.read_rest()
    assert _held_ids(consumer) == set(ids)
    consumer.flush()
    assert consumer.give_back() == 1
    assert consumer.deregister()


def test_a_batch_that_is_cut_off_again_and_again_gets_smaller_until_it_comes(stage: Stage) -> None:
    """As over a network on which more than one message does not come through before it breaks."""
    consumer, ids = _handed_over(stage, 10)
    asked: list[int] = []
    pipeline = consumer.read_link.pipeline

    def narrow(commands, block_s=0.0):  # type: ignore[no-untyped-def]
        reads = [command for command in commands if command[0] == "XREADGROUP"]
        counts = [int(command[command.index("COUNT") + 1]) for command in reads]
        asked.append(sum(counts))
        if sum(counts) > 1:
            consumer.read_link.troubles["PIPELINE"] = Trouble.REPLY_LOST
        return pipeline(commands)

    consumer.read_link.pipeline = narrow  # type: ignore[method-assign]
    for _ in range(20):
        try:
            consumer.read()
        except ReplyUnknown:
            continue
        if _held_ids(consumer) == set(ids):
            break
    assert _held_ids(consumer) == set(ids), asked
    consumer.read_link.pipeline = pipeline  # type: ignore[method-assign]
    consumer.work()
    stage.check_done(T, ids)


def test_a_reader_to_which_a_reply_is_on_its_way_is_not_stalled(stage: Stage) -> None:
    """The lease is renewed only while the reader makes progress, and masters revoke that of a consumer that says that
    it is not well."""
    consumer, ids = _handed_over(stage, 3)
    gate = threading.Event()

    def slow(reply: bytes) -> bytes:
        if b"body of" in reply:
            gate.wait(20)
        return reply

    with Proxy(stage.url, slow) as proxy:
        link = Link(proxy.url, "test:slow", timeout_s=20.0)
        reader = InboxReader(link, stage.world.keys, consumer.incarnation, consumer.lanes, consumer.lease)
        reader.stalls_after_s = 0.2
        reader.start()
        time.sleep(1.0)
        assert not _held_ids(consumer)
        health = judge([reader], now_s())
        gate.set()
        until_s = now_s() + 10
        while not _held_ids(consumer) and now_s() < until_s:
            time.sleep(0.01)
        reader.stop()
        assert reader.join(5)
    assert health.ok, health.reasons
    consumer.read()
    consumer.work()
    stage.check_done(T, ids)


def test_to_redis_far_away_go_as_few_requests_as_its_bandwidth_allows(stage: Stage) -> None:
    """How long the first byte takes says nothing of how much comes after it in short time."""
    consumer, ids = _handed_over(stage, 400)
    requests: list[float] = []

    def far(reply: bytes) -> bytes:
        if b"body of" in reply:
            requests.append(now_s())
            time.sleep(0.25)
        return reply

    with Proxy(stage.url, far) as proxy:
        link = Link(proxy.url, "test:far")
        reader = InboxReader(link, stage.world.keys, consumer.incarnation, consumer.lanes, consumer.lease)
        assert reader.read(None) == len(ids)
        link.close()
    assert len(requests) <= 12  # of a hundred; a reply may come in several pieces
    consumer.work()
    stage.check_done(T, ids)


@pytest.mark.parametrize("is_gone", [False, True])
def test_what_the_planned_read_does_not_bring_comes_over_a_network_that_breaks(stage: Stage, is_gone: bool) -> None:
    """Entries of a record that comes meanwhile lie between those that are wanted; or one that is wanted is not pending
    any more. Many more are behind it, which need not come with it."""
    leader, consumer = stage.world.elect(), stage.consumer("a")
    sent = [
        stage.world.send(T if number in (1, 3, 9) else b"U", b"%d-1" % number)[0] for number in (1, 2, 3, *range(9, 60))
    ]
    first = [sent[0], *sent[2:4]]
    between = [entry_id for entry_id in sent if entry_id not in first]
    hand_over(leader, NOTHING, read(leader, 100))
    forget_bodies(leader)
    hand_over(leader, plan(consumer.incarnation, {T: first}))
    link, asked = consumer.read_link, []
    call, pipeline = link.call, link.pipeline

    def narrow(commands, block_s=0.0):  # type: ignore[no-untyped-def]
        asked.append(
            sum(int(command[command.index("COUNT") + 1]) for command in commands if command[0] == "XREADGROUP")
        )
        if len(asked) == 1:
            hand_over(leader, plan(consumer.incarnation, {b"U": between}))
            if is_gone:
                consumer.steps.ack(first[2:])
        if asked[-1] > 16:
            link.troubles["PIPELINE"] = Trouble.REPLY_LOST
        return pipeline(commands)

    def one(*command, **settings):  # type: ignore[no-untyped-def]
        return narrow([command])[0] if command[0] == "XREADGROUP" else call(*command, **settings)

    link.pipeline, link.call = narrow, one  # type: ignore[method-assign]
    for _ in range(10):
        with contextlib.suppress(ReplyUnknown):
            consumer.read()
    assert _held_ids(consumer) == {*first[: 2 if is_gone else 3], *between}, asked
    consumer.work()
    stage.check_done(b"U", between)


def test_a_message_without_a_body_anywhere_becomes_a_letter_and_never_runs(stage: Stage) -> None:
    consumer, ids = _handed_over(stage, 2)
    stage.world.delete(ids[0])
    consumer.work()
    assert stage.history.ids(T) == ids[1:]
    assert [letter[b"usher-reason"] for letter in stage.world.dead()] == [b"body_gone"]


def test_what_is_named_twice_runs_once_under_the_later_fence(stage: Stage) -> None:
    """It was given back and handed over again before the inbox was read."""
    leader, a = stage.leader(), stage.consumer("a")
    ids = stage.send(T, b"1-1", b"2-1")
    leader.settle()
    fence = int(stage.world.head(T).split()[1])
    a.steps.give_back([GiveBack(T, fence, ids)])
    leader.settle()
    a.work()
    stage.check_done(T, ids)
    assert all(run.fence > fence for run in stage.history.starts)
