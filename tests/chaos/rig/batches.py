"""Handlers of several messages: batch handlers of three kinds (what failed is named by a mapping, by PartialFailure,
or not at all), and those that absorb what waits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tests.chaos.rig.handler import Poisoned, skip, steps
from usher import GiveUp, PartialFailure, RetryLater, batch
from usher.common.base.errors import NotNow

_MOST = 6


def _one_by_one(messages: Sequence[Any]) -> dict[Any, Exception]:
    """Handle all; what failed, by message. What is behind a failed one of its ticket is left alone."""
    failed: dict[Any, Exception] = {}
    halted: set[str] = set()
    for message in messages:
        if message.ticket in halted:
            skip(message)
            continue
        try:
            for seconds in steps(message, "batch"):
                time.sleep(seconds)
        except Poisoned as problem:
            failed[message] = problem
            halted.add(message.ticket)
    return failed


@batch(most=_MOST)
def mapped(messages: Sequence[Any]) -> dict[Any, Exception]:
    return _one_by_one(messages)


@batch(most=_MOST, per_ticket=3)
def partial(messages: Sequence[Any]) -> None:
    """Several messages of a ticket in one call."""
    if failed := _one_by_one(messages):
        raise PartialFailure(failed)


@batch(most=_MOST)
async def whole(messages: Sequence[Any]) -> None:
    """All at once. If one fails the call has failed, and all come again."""

    async def one(message: Any) -> None:
        for seconds in steps(message, "batch_async"):
            await asyncio.sleep(seconds)

    ended = await asyncio.gather(*map(one, messages), return_exceptions=True)
    for problem in ended:
        if isinstance(problem, BaseException):
            raise problem


def _stages(message: Any) -> Iterator[list[Any]]:
    """Messages join the run as it begins, between its steps, and at its end."""
    yield [message, *message.absorb(3)]
    yield message.absorb(1)
    yield message.absorb()


class _Run:
    """Answers tell which run answers, under which fence, and what it took."""

    def __init__(self, message: Any) -> None:
        self.message, self.took = message, list[str]()

    def begins(self, one: Any) -> Any:
        self.took.append(one.id)
        with contextlib.suppress(NotNow):
            self.message.progress(len(self.took))
        return one

    def ends(self, is_interrupted: bool) -> Any:
        """Interrupted runs end at once: well, by RetryLater, or by GiveUp."""
        if is_interrupted and (way := int(self.message.id.partition("-")[0]) % 8) < 4:
            raise GiveUp("interrupted") if way == 0 else RetryLater(0.01)
        return {"run": self.message.id, "tok": self.message.fence, "attempt": self.message.attempt, "took": self.took}


def absorbing(message: Any) -> Any:
    run = _Run(message)
    for few in _stages(message):
        for one in few:
            for seconds in steps(run.begins(one), "absorbing"):
                message.cancelled.wait(seconds)
        if message.cancelled.is_set():
            break
    return run.ends(message.cancelled.is_set())


async def absorbing_async(message: Any) -> Any:
    """Interrupting it ends a wait, and nothing else, until it looks."""
    run, told = _Run(message), contextlib.suppress(asyncio.CancelledError)
    for few in _stages(message):
        if few and not message.cancelled.is_set():
            with told:
                few += filter(None, [await message.more(0.02)])
        for one in few:
            for seconds in steps(run.begins(one), "absorbing_async"):
                with told:
                    await asyncio.sleep(seconds)
        if message.cancelled.is_set():
            break
    return run.ends(message.cancelled.is_set())
