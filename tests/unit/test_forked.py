"""common/runtime/fork_guard.py: a child that a handler has forked ends where the handler ends in it, and runs no
message of its parent."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.test_pools import Accounts
from usher.common.base.clock import now_s
from usher.common.runtime.fork_guard import call_in_children
from usher.common.runtime.service import Service
from usher.consumer.execution.executor import Executor
from usher.consumer.execution.lanes import Lanes
from usher.consumer.execution.pools import AsyncPool, LaneWorker, make_pool
from usher.consumer.handlers.decorators import BatchOptions
from usher.consumer.handlers.loader import Handler
from usher.consumer.handlers.message import Message, OwnLease
from usher.consumer.lifecycle.journal import Journal
from usher.consumer.policy.outcome import RetryPolicy

Handle = Callable[[Any], None]


def _threads(executor: Executor, handle: Handle) -> Service:
    return LaneWorker(0, executor, handle)


def _loop(executor: Executor, handle: Handle) -> Service:
    async def handle_async(message: Message) -> None:
        handle(message)

    return AsyncPool(executor, handle_async, 1)


def _calls(executor: Executor, handle: Handle) -> Service:
    [service] = make_pool(Handler(handle, False, batch=BatchOptions(10, 0.0, 2)), executor, 1)
    return service


def _returns() -> None: ...


def _raises() -> None:
    raise ValueError("in the child")


@pytest.mark.parametrize("pool", [_threads, _loop, _calls])
@pytest.mark.parametrize(("end", "code"), [(_returns, 0), (sys.exit, 0), (lambda: sys.exit(3), 3), (_raises, 1)])
def test_a_forked_child_ends_with_its_handler(
    pool: Callable[[Executor, Handle], Service], end: Callable[[], None], code: int
) -> None:
    lanes, accounts, lease = Lanes(), Accounts(), OwnLease(60.0, now_s())
    executor = Executor(
        lanes, accounts, Journal(None, "", "", 0), lease, RetryPolicy(1, 0.0, 0.0), False, 0.0, pytest.fail
    )
    call_in_children(executor.end_in_child)
    children: list[int] = []

    def handle(_message: object) -> None:
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(2)  # who goes on instead
            end()
        else:
            children.append(pid)

    lanes.add([(b"T", [Message(b"T", b"1-1", 5, [], lease), Message(b"T", b"1-2", 5, [], lease)])])
    service = pool(executor, handle)
    service.start()
    try:
        until_s = time.monotonic() + 20
        while len(accounts.done) < 2 and time.monotonic() < until_s:
            time.sleep(0.001)
    finally:
        lanes.pause()
        service.stop()
        service.join(20)
    assert (accounts.done, accounts.buried) == ([b"1-1", b"1-2"], [])
    assert {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children} == {code}
