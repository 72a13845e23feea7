"""A consumer holds so many bytes of messages as it is told, however many were handed over to it."""

from __future__ import annotations

from tests.integration.actors import ConsumerActor, Stage
from tests.integration.factories import FIELD, fetch, hand_over, plan, read
from usher.common.base.errors import RetryLater
from usher.consumer.execution.inbox_reader import FIRST_PAGE

_SIZE = 1_000_000
_MOST = 5 * _SIZE


def handed_over(stage: Stage, tickets: int, count: int) -> tuple[ConsumerActor, dict[bytes, list[bytes]]]:
    """A consumer to which ``count`` messages of 1 MB were handed over, of so many tickets by turns."""
    world, leader, consumer = stage.world, stage.world.elect(), stage.consumer("a")
    consumer.reader.most_bytes, consumer.reader.slots = _MOST, 2
    ids: dict[bytes, list[bytes]] = {}
    for n in range(1, count + 1):
        ticket = b"T%d" % (n % tickets)
        ids.setdefault(ticket, []).append(world.add(b"%d-1" % n, FIELD, ticket, "body", b"x" * _SIZE))
    while fetch(leader, 100):
        pass
    hand_over(leader, plan(consumer.incarnation, ids))
    return consumer, ids


def held(consumer: ConsumerActor) -> int:
    with consumer.lanes.lock:
        return len(consumer.lanes.held_ids)


def test_what_is_held_is_bounded_and_the_rest_comes_as_messages_end(stage: Stage) -> None:
    consumer, ids = handed_over(stage, 3, 40)
    most = 0
    for _ in range(200):
        consumer.read()
        most = max(most, held(consumer))
        run = consumer.start()
        if run is None and not held(consumer):
            break
        if run is not None:
            run.succeed()
        consumer.flush()
    assert most <= 5 + FIRST_PAGE, "the sizes of the first page were not known"
    for ticket, sent in ids.items():
        stage.check_done(ticket, sent)
        assert stage.history.ids(ticket) == sent


def test_tickets_that_wait_for_a_retry_do_not_hold_up_others(stage: Stage) -> None:
    consumer, ids = handed_over(stage, 30, 30)
    for _ in range(29):
        consumer.read()
        run = consumer.start()
        assert run is not None, "a handler is idle, and something could start"
        run.fail(RetryLater(3600))
        consumer.flush()
    consumer.read()
    run = consumer.start()
    assert run is not None
    assert run.message.ticket == [*ids][-1]
    run.succeed()


def test_what_comes_with_the_inbox_counts(stage: Stage) -> None:
    """While there is no room, one record is read and waits."""
    world, leader, consumer = stage.world, stage.world.elect(), stage.consumer("a")
    consumer.reader.most_bytes, consumer.reader.slots = 100_000, 2
    for n in range(1, 41):
        ids = [world.add(b"%d-%d" % (n, one), FIELD, b"T%d" % n, "body", b"x" * 5000) for one in range(5)]
        hand_over(leader, plan(consumer.incarnation, {b"T%d" % n: ids}), read(leader))
    most = 0
    while world.pending():
        consumer.read()
        most = max(most, held(consumer))
        runs = [consumer.start(), consumer.start()]
        consumer.read()
        assert len(consumer.reader._records or runs[:1]) == 1
        for run in filter(None, runs):
            run.succeed()
        consumer.flush()
    assert 20 <= most <= 20 + 16 * 5, "the sizes of the first records were not known"


def test_nothing_is_read_beyond_it_while_handlers_run(stage: Stage) -> None:
    consumer, _ = handed_over(stage, 30, 30)
    for _ in range(10):
        consumer.read()
    full = held(consumer)
    runs = [consumer.start(), consumer.start()]
    for _ in range(10):
        consumer.read()
    assert held(consumer) == full
    for run in runs:
        assert run is not None
        run.succeed()


def test_a_drain_reads_no_bodies_and_gives_all_back(stage: Stage) -> None:
    consumer, ids = handed_over(stage, 30, 30)
    consumer.read()
    sent: list[tuple[object, ...]] = []
    pipeline = consumer.read_link.pipeline
    consumer.read_link.pipeline = lambda commands, *more: sent.extend(commands) or pipeline(commands)  # type: ignore[method-assign,func-returns-value]
    consumer.begin_drain()
    assert consumer.give_back() == 30
    assert "XREADGROUP" not in {command[0] for command in sent}
    assert stage.world.pending() == {b"master": [entry_id for sent in ids.values() for entry_id in sent]}
