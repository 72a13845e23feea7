"""Batch handlers of three kinds: what failed is named by a mapping, by PartialFailure, or not at all."""

from __future__ import annotations

import asyncio
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
