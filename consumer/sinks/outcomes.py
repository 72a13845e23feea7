"""The outcomes of a sink that does not simply store the effect, named so that a handler can tell them apart."""

from __future__ import annotations

from typing import Protocol

from usher.common.base.errors import OwnershipLost, RetryLater, UsherError


class Marked(Protocol):
    """The part of a message that a sink needs; a consumer's message has it, and so has the value that
    ``usher.consumer.sinks.http.received`` returns.

    An object that a handler makes for itself must take over the message's ``is_rehearsal`` too: without it `usher
    rehearse` stores.
    """

    @property
    def ticket_id(self) -> str: ...

    @property
    def uid(self) -> str: ...

    @property
    def fence(self) -> int: ...


def fenced_ticket(message: Marked) -> str:
    """Return the name of the ticket whose fences are compared with each other: where several streams are taken in, the
    stream is part of it."""
    return str(getattr(message, "scoped_ticket_id", message.ticket_id))


def is_rehearsal(message: Marked) -> bool:
    """Return whether this is a dry run (`usher rehearse`), in which no effect may stay."""
    return bool(getattr(message, "is_rehearsal", False))


class Duplicate(UsherError):
    """The effect of this message is already stored: the message counts as done."""


class StaleFence(OwnershipLost):
    """A higher fence was seen for this ticket: it has another owner, and nothing was stored.

    Let it out of the handler. In a consumer whose lease has ended it has no consequence: its acknowledgements and dead
    letters are refused, and the new owner handles the message. If it comes again and again from a living owner, the
    sink has seen fences of another Redis.
    """

    def __init__(self, message: Marked) -> None:
        super().__init__(
            f"ticket {fenced_ticket(message)!r} has an owner with a higher fencing token than {message.fence}; nothing"
            " was stored"
        )


class SinkNotNow(RetryLater):
    """The sink could not store the effect for the moment, or it is unknown whether it did: the same message is tried
    again, uncharged.

    Nothing is lost and nothing doubled by that: if the effect was stored after all, the next try finds its uid.
    """


class SinkMisused(UsherError):
    """The sink cannot keep its promise with what it was given; the text says what to change."""
