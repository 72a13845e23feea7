"""Typed handlers: each kind of event has its own form, and one handler.

::

    usher up --handler examples.orders:events
    usher send --ticket 42 kind=paid 'body={"order": 42, "amount": "12.50"}'
    usher send --ticket 42 kind=paid 'body={"order": 42}'        # a dead letter: invalid, amount: Field required
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from pydantic import BaseModel, PositiveInt

from usher import Message, RetryLater, Router, around, handler

log = logging.getLogger(__name__)


class Paid(BaseModel):
    """An order was paid. In the field ``body``, as JSON."""

    order: PositiveInt
    amount: Decimal


@dataclass
class Cancelled:
    """An order was cancelled. In the message's own fields, which are text."""

    order: int
    reason: str = ""


def timed(message: Message) -> Iterator[None]:
    """Log how long each handler takes, however it ends."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        log.info("%s took %.3f s", message.fields.get("kind"), time.monotonic() - began_s)


events = around(timed)(handler(max_attempts=3, backoff_s=10)(Router()))
booked: dict[int, Decimal] = {}


@events.on("kind", "paid")
def paid(event: Paid, message: Message) -> None:
    """Book a payment."""
    booked[event.order] = event.amount


@events.on("kind", "cancelled")
def cancelled(event: Cancelled, message: Message) -> None:
    """Take a payment back."""
    if event.order not in booked:
        raise RetryLater(after_s=60, reason="nothing was paid yet")
    del booked[event.order]
