"""Handlers of several messages: batch handlers of three kinds (what failed is named by a mapping, by PartialFailure,
or not at all), and those that absorb what waits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from tests.chaos.rig.handler import Poisoned, skip, steps
from usher import PartialFailure, batch

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


def absorbing(message: Any) -> None:
    """What waits joins the run as it begins, and at its end."""
    for few in ([message, *message.absorb(3)], message.absorb()):
        for one in few:
            for seconds in steps(one, "absorbing"):
                time.sleep(seconds)


async def absorbing_async(message: Any) -> None:
    """As it begins, and while it waits for more. Who interrupts it ends the wait, and nothing else."""
    few = [message, *message.absorb(3)]
    with contextlib.suppress(asyncio.CancelledError):
        few += filter(None, [await message.more(0.02)])
    for one in few:
        for seconds in steps(one, "absorbing_async"):
            end_s = time.monotonic() + seconds
            while (left_s := end_s - time.monotonic()) > 0:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(left_s)
