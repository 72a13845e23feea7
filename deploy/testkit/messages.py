"""Messages for unit tests of handlers, which need no Redis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson

from usher.common.base.clock import now_s
from usher.common.protocol.attempts import Attempts
from usher.common.protocol.message import check_ticket
from usher.consumer.handlers.message import Message, OwnLease, message_type


def message(
    ticket_id: str,
    fields: Mapping[str, Any] | None = None,
    *,
    attempt: int = 1,
    fence: int = 1,
    id: str = "1700000000000-0",
    mine: bool = True,
    rehearsal: bool = False,
    stream: str = "ticket_stream",
    **more: Any,
) -> Message:
    """Return a message as a handler gets it, for a test that calls the handler itself.

    ``fields`` and ``more`` are its fields: text, bytes and numbers as ``Producer`` takes them, anything else as JSON.
    ``mine`` False: ``still_mine()`` says that the lease has ended. ``rehearsal``: as in ``usher rehearse``.
    """
    flat = [b"ticket_id", check_ticket(ticket_id.encode())]
    for name, value in {**(fields or {}), **more}.items():
        flat += (name.encode(), encoded(value))
    lease = OwnLease(math.inf if mine else 0.0, now_s())
    made = message_type(stream, is_gathered=False, is_rehearsal=rehearsal)(
        ticket_id.encode(), id.encode(), fence, flat, lease, Attempts(attempt, attempt - 1, 0, 0)
    )
    made.deadline = None
    return made


def encoded(value: Any) -> bytes:
    """Return a field's value as bytes.

    >>> encoded("a"), encoded(1.5), encoded({"n": 1})
    (b'a', b'1.5', b'{"n":1}')
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    return str(value).encode() if isinstance(value, (int, float)) else orjson.dumps(value)
