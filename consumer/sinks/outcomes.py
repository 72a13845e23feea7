"""What a sink answers when it does not simply store the effect. Named, so that a handler can tell them apart."""

from __future__ import annotations

from typing import Protocol

from usher.common.base.errors import OwnershipLost, RetryLater, UsherError


class Marked(Protocol):
    """What a sink needs of a message; a consumer's message has it, and so has what
    ``usher.consumer.sinks.http.received`` returns.

    What a handler makes for itself needs ``is_rehearsal`` of the message too: without it `usher rehearse` stores.
    """

    @property
    def ticket_id(self) -> str: ...

    @property
    def uid(self) -> str: ...

    @property
    def fence(self) -> int: ...


def fenced_ticket(message: Marked) -> str:
    """The ticket whose fences are compared with each other: where several streams are taken in, its stream is part of
    it. "" for a message without a ticket (USHER_UNKEYED=spread): it has no successor that it could overtake, so its
    fence is compared with none; its uid counts."""
    return str(getattr(message, "scoped_ticket_id", message.ticket_id))


def is_rehearsal(message: Marked) -> bool:
    """Whether nothing may come of it (`usher rehearse`)."""
    return bool(getattr(message, "is_rehearsal", False))


class Duplicate(UsherError):
    """The effect of this message is already stored: it counts as done."""


class StaleFence(OwnershipLost):
    """A higher fence was seen for this ticket: it has another owner, and nothing was stored.

    Let it out of the handler. In a consumer whose lease has ended nothing follows: its acknowledgements and dead
    letters are refused, and the message is its new owner's business. Where it comes again and again from a living
    owner, the sink has seen fences of another Redis.
    """

    def __init__(self, message: Marked) -> None:
        super().__init__(
            f"ticket {fenced_ticket(message)!r} has an owner with a higher fencing token than {message.fence}; nothing was"
            " stored"
        )


class SinkNotNow(RetryLater):
    """The sink could not do it for the moment, or nobody knows whether it did: the same message is tried again,
    uncharged.

    Nothing is lost and nothing doubled by that: if the effect was stored after all, the next try finds its uid.
    """

    def __init__(self, reason: str, after_s: float) -> None:
        super().__init__(after_s, reason)


class SinkMisused(UsherError):
    """The sink cannot keep its word with what it was given; the message says what to change."""
