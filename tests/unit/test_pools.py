"""Pools: what a handler's result says of whether it ran."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from usher.common.base.clock import now_s
from usher.common.base.errors import HandlerUnusable
from usher.common.runtime.service import Service
from usher.consumer.execution.executor import Executor
from usher.consumer.execution.lanes import Lane, Lanes
from usher.consumer.execution.pools import AsyncPool, LaneWorker
from usher.consumer.handlers.message import Message, OwnLease
from usher.consumer.lifecycle.journal import Journal
from usher.consumer.policy.outcome import Bury, Finished, RetryPolicy


class Accounts:
    """What an acker would write."""

    unnoted = frozenset[bytes]()

    def __init__(self) -> None:
        self.done: list[bytes] = []
        self.buried: list[Bury] = []

    def finished(self, item: Finished, here: bool = False) -> None:
        self.done.append(item.stream_id)

    def failed(self, failure: Finished) -> None: ...

    def put_off(self, lane: Lane, message: Message, due_s: float) -> None:
        raise AssertionError("no wait is that long")

    def give_up(self, lane: Lane, message: Message, bury: Bury) -> None:
        self.buried.append(bury)


def _run(pool: Callable[[Executor], Service]) -> Accounts:
    """Give one message to a pool of one slot, whose handler has one attempt."""
    lanes, accounts, lease = Lanes(), Accounts(), OwnLease(60.0, now_s())
    executor = Executor(
        lanes, accounts, Journal(None, "", "", 0), lease, RetryPolicy(1, 0.0, 0.0), False, 0.0, pytest.fail
    )
    lanes.add([(b"T", [Message(b"T", b"1-1", 5, [], lease)])])
    service = pool(executor)
    service.start()
    try:
        until_s = time.monotonic() + 20
        while not accounts.done and not accounts.buried and time.monotonic() < until_s:
            time.sleep(0.001)
    finally:
        lanes.pause()
        service.stop()
        service.join(20)
    return accounts


async def _nothing() -> None:
    pytest.fail("nobody awaits this")


def _generator() -> Iterator[int]:
    yield 1


async def _async_generator() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    "make", [_nothing, _generator, _async_generator], ids=["coroutine", "generator", "async generator"]
)
def test_a_plain_function_that_returns_what_nobody_runs_has_done_nothing(make: Callable[[], Any]) -> None:
    accounts = _run(lambda executor: LaneWorker(0, executor, lambda _message: make()))
    assert accounts.done == []
    [bury] = accounts.buried
    assert bury.error.startswith(HandlerUnusable.__name__)
    assert "async def" in bury.error


def test_so_has_an_async_one_that_returns_another_coroutine() -> None:
    async def handle(_message: Message) -> Any:
        return _nothing()

    accounts = _run(lambda executor: AsyncPool(executor, handle, 1))
    assert (accounts.done, len(accounts.buried)) == ([], 1)


def test_an_asyncio_future_is_awaited_by_nobody_either() -> None:
    loop = asyncio.new_event_loop()
    try:
        accounts = _run(lambda executor: LaneWorker(0, executor, lambda _message: loop.create_future()))
    finally:
        loop.close()
    assert (accounts.done, len(accounts.buried)) == ([], 1)


@pytest.mark.parametrize("result", [None, 0, "text", False, [], Future()])
def test_any_other_result_is_done(result: object) -> None:
    accounts = _run(lambda executor: LaneWorker(0, executor, lambda _message: result))
    assert (accounts.done, accounts.buried) == ([b"1-1"], [])
