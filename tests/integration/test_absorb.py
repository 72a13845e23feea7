"""Runs that absorb what waits of their ticket, settle, are interrupted, and tickets that are cleared."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from usher import Link, Message, RetryLater, handler
from usher.common.protocol.keys import Keys
from usher.common.protocol.run_log import decode
from usher.common.redis.replies import Order
from usher.consumer.incarnation import Orders
from usher.testing import Kit

Make = Callable[..., Kit]


def _numbers(*messages: Message) -> list[int]:
    return [int(one.fields["n"]) for one in messages]


def _send(kit: Kit, numbers: Iterable[int], ticket: str = "A") -> list[str]:
    return [kit.send(ticket, n=number) for number in numbers]


def _log(url: str) -> dict[str, list[tuple[str, str]]]:
    link, found = Link(url, "test"), dict[str, list[tuple[str, str]]]()
    for _, fields in link.call("XRANGE", Keys("ticket_stream", "concurrency_stream_group").runs, "-", "+"):
        for one in decode(fields[1]):
            found.setdefault(one.id, []).append((one.outcome, one.into))
    link.close()
    return found


@pytest.mark.parametrize("ack_mode", ["pipelined", "strict"])
def test_what_waits_is_merged_and_acknowledged_with_the_run(usher_kit: Make, usher_redis: str, ack_mode: str) -> None:
    runs: list[list[int]] = []

    def merge(message: Message) -> None:
        runs.append(_numbers(message, *message.absorb(2), *message.absorb()))

    kit = usher_kit(merge, ack_mode=ack_mode)
    ids, others = _send(kit, range(6)), _send(kit, range(2), "B")
    kit.run()
    assert sorted(runs) == [[0, 1], [0, 1, 2, 3, 4, 5]]
    assert not kit.pending
    assert kit.acknowledged == [*ids, *others]
    merged = {one: [("merged", ids[0])] for one in ids[1:]} | {others[1]: [("merged", others[0])]}
    assert _log(usher_redis) == {ids[0]: [("done", "")], others[0]: [("done", "")]} | merged


def test_a_failure_brings_all_back_in_order_and_each_runs_alone_uncharged(usher_kit: Make) -> None:
    runs: list[tuple[list[int], int]] = []

    @handler(max_attempts=1)
    def merge(message: Message) -> None:
        taken = _numbers(message, *message.absorb())
        runs.append((taken, message.failures))
        if 2 in taken:
            raise ValueError("2 is wrong")

    kit = usher_kit(merge)
    _send(kit, range(4))
    kit.run()
    assert runs == [([0, 1, 2, 3], 0), ([0], 0), ([1], 0), ([2], 0), ([3], 0)]
    assert [letter.error for letter in kit.given_up] == ["ValueError: 2 is wrong"]
    assert not kit.pending


def test_a_run_that_asks_for_later_gives_all_back_and_may_absorb_again(usher_kit: Make) -> None:
    runs: list[list[int]] = []

    def merge(message: Message) -> None:
        runs.append(_numbers(message, *message.absorb(None if runs else 1)))
        if len(runs) == 1:
            raise RetryLater(5)

    kit = usher_kit(merge)
    _send(kit, range(3))
    kit.run()
    assert runs == [[0, 1], [0, 1, 2]]
    assert kit.now_s == 5
    assert not kit.pending


def test_nothing_is_absorbed_by_a_message_that_does_not_run(usher_kit: Make) -> None:
    kept: list[Message] = []
    late: list[list[Message]] = []

    def keep(message: Message) -> None:
        late.extend(one.absorb() for one in kept)
        kept.append(message)

    kit = usher_kit(keep)
    _send(kit, range(3))
    kit.run()
    assert len(kept) == 3
    assert late == [[], [], []]
    assert kept[0].absorb() == []


def test_a_message_that_failed_before_is_absorbed_by_none(usher_kit: Make) -> None:
    runs: list[list[int]] = []

    def merge(message: Message) -> None:
        runs.append(_numbers(message, *message.absorb()))
        if runs == [[0]]:
            _send(kit, [1])
            raise ValueError("once")

    kit = usher_kit(merge)
    _send(kit, [0])
    kit.run()
    assert runs == [[0], [0], [1]]


def test_a_ticket_begins_when_nothing_has_come_for_a_while(usher_kit: Make) -> None:
    runs: list[tuple[float, list[int]]] = []

    @handler(settle_s=0.5, settle_max_s=2)
    def index(message: Message) -> None:
        runs.append((kit.now_s, _numbers(message, *message.absorb())))

    kit = usher_kit(index)
    _send(kit, range(2))
    kit.run(0.2)
    assert runs == []
    _send(kit, [2])
    kit.run()
    [(at_s, taken)] = runs
    assert 0.5 <= at_s <= 1.0
    assert taken == [0, 1, 2]


def test_what_has_settled_does_not_settle_again(usher_kit: Make) -> None:
    began: list[float] = []
    kit = usher_kit(handler(settle_s=0.5)(lambda message: began.append(kit.now_s)))
    _send(kit, range(5))
    kit.run()
    assert len(began) == 5
    assert began[-1] < 1.0


def test_an_interrupted_run_is_given_up_and_what_it_had_absorbed_runs_next(usher_kit: Make) -> None:
    runs: list[list[int]] = []

    def talk(message: Message) -> None:
        runs.append(_numbers(message, *message.absorb(1)))
        if len(runs) == 1:
            message.cancelled.set()
            raise asyncio.CancelledError

    kit = usher_kit(talk)
    _send(kit, range(3))
    kit.run()
    assert runs == [[0, 1], [1, 2]]
    assert [letter.error for letter in kit.given_up] == ["GiveUp: interrupted"]


def test_what_is_cleared_begins_no_more_while_redis_is_told(usher_kit: Make) -> None:
    """Else it ran, and if it failed it was a letter nobody had asked for: `operator`."""
    runs: list[list[int]] = []

    def talk(message: Message) -> None:
        steps = SimpleNamespace(charge=lambda _: runs.append(_numbers(message, *message.absorb())))
        order = Order("clear", message.ticket, message.stream_id)
        Orders(kit._executor, None, None, steps).obey(order)  # type: ignore[arg-type]
        raise ValueError("all that ran comes again")

    kit = usher_kit(handler(max_attempts=1)(talk))
    _send(kit, range(3))
    kit.run()
    assert runs == [[0]]
    assert [letter.reason for letter in kit.given_up] == ["attempts_exhausted", "cleared", "cleared"]


def test_a_run_that_ends_as_it_is_interrupted_gives_back_what_it_had_absorbed(usher_kit: Make) -> None:
    """The order finds that it runs, and a moment later that it does not: who ends it has what it absorbed."""
    runs: list[list[int]] = []

    def talk(message: Message) -> None:
        runs.append(_numbers(message, *message.absorb(1)))
        if len(runs) == 1:
            found = iter([[SimpleNamespace(stream_id=message.stream_id, is_apart=False, start_us=1)], []])
            journal = SimpleNamespace(running=lambda ticket: next(found))
            order = Order("interrupt", message.ticket, b"")
            Orders(kit._executor, journal, None, None).obey(order)  # type: ignore[arg-type]
            raise RetryLater(0)

    kit = usher_kit(talk)
    ids = _send(kit, range(3))
    kit.run()
    assert runs == [[0, 1], [0, 1], [2]]
    assert kit.acknowledged == ids


def test_who_absorbs_from_another_thread_while_the_run_ends_loses_nothing(usher_kit: Make) -> None:
    """Threads that the handler leaves behind go on absorbing when it has returned."""
    runs: list[list[int]] = []
    late: list[Message] = []
    threads: list[threading.Thread] = []

    def leave(message: Message) -> None:
        runs.append(_numbers(message))
        threads.append(threading.Thread(target=lambda: [late.extend(message.absorb(1)) for _ in range(50)]))
        threads[-1].start()

    kit = usher_kit(leave)
    ids = _send(kit, range(60))
    kit.run()
    for thread in threads:
        thread.join()
    taken = [number for run in runs for number in run] + _numbers(*late)
    assert sorted(taken) == [*range(60)]
    assert sorted(kit.acknowledged, key=ids.index) == ids
    assert not kit._executor.besides


@pytest.mark.parametrize("wrong", [{"settle_s": -1}, {"settle_s": "1"}, {"settle_max_s": float("nan")}])
def test_a_settling_time_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="settle"):
        handler(**wrong)
