"""The states of a ticket: one set of words for explanations, lists, pages, events and the API; and those that stand in
its record where its owner would (lua/includes/records.lua): nobody has it. Pure."""

from __future__ import annotations

import enum
import re

from usher.common.protocol.keys import HALTED, MASTER


class TicketState(enum.StrEnum):
    """State of a ticket, or of a message of it. A list does not ask the consumer whether a handler runs: there, such
    a ticket is ``handed_over``, or ``retrying`` once its first message has been tried. An event that comes as the index
    changes knows no attempts either."""

    IDLE = "idle"  # nothing of it is left to do
    NOT_FOUND = "not_found"  # nothing was found, as far as was searched
    IN_OUTBOX = "in_outbox"  # committed in a database, and not sent yet
    HALTED_IN_OUTBOX = "halted_in_outbox"  # the same, and its first row was refused
    DELAYED = "delayed"  # its messages are added to the stream later
    UNREAD = "unread"  # in the stream, and not read by the leader yet
    QUEUED = "queued"  # read, and others are handled meanwhile: it waits for its turn
    WAITING = "waiting"  # read, and no consumer has it
    PAUSED = "paused"  # a rule holds it
    HANDED_OVER = "handed_over"  # a consumer has it
    RUNNING = "running"  # its handler runs
    RETRYING = "retrying"  # its first message has failed, and waits for its next attempt
    RECOVERING = "recovering"  # its consumer is lost; it is taken back
    HALTED = "halted"  # by a dead letter, until an operator acts
    RETURNED = "returned"  # given back, by a drain, a recall or a redrive; waits for a new owner
    PUT_OFF = "put_off"  # given back until a time that its handler asked for; it has not failed
    UNREADABLE = "unreadable"  # its record in Redis is none


#: The state of a message by the name under which it is pending; under any other a consumer has it.
BY_OWNER = {MASTER: TicketState.WAITING, HALTED: TicketState.HALTED}
#: A drain or a recall gave the ticket back, or a dead letter of it was redriven: it is under ``master``.
RETURNED = b"returned"
_WAITS = re.compile(rb"waits@([0-9]{1,16})")


def due_ms_of(owner: bytes) -> int | None:
    """Return when a ticket goes on that was given back until then, by Redis' clock; None: the owner is no such word."""
    found = _WAITS.fullmatch(owner) if owner.startswith(b"waits@") else None
    return None if found is None else int(found[1])


def is_waiting(owner: bytes) -> bool:
    return due_ms_of(owner) is not None


def is_given_back(owner: bytes) -> bool:
    """Return whether all of its ids are under ``master``, and the next owner must begin with the lowest one."""
    return owner == RETURNED or is_waiting(owner)
