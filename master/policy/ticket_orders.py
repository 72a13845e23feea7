"""Orders of operators about the first unfinished message of a ticket: whether one makes sense now, and what it will do.
What each of them is for, ``usher.master.verbs`` says. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

from usher.common.protocol.keys import HALTED
from usher.common.protocol.stream_id import rank
from usher.common.protocol.ticket_states import TicketState, is_given_back, is_waiting

#: Code of a reason of a halted ticket: not all letters were searched for the one that it waits for.
LETTER_UNKNOWN = "letter_unknown"


class TicketOrder(enum.Enum):
    RETRY = "retry"
    GIVE_UP = "give_up"
    CANCEL = "cancel"
    INTERRUPT = "interrupt"
    CLEAR = "clear"


class PlannedOrder(NamedTuple):
    """Plan of an order. ``refused``: why it makes no sense now, or "". ``does``: what it does, for people.
    ``believed``: the head of the ticket's record, "" without one. ``owner``: the incarnation that carries it out, or
    ""."""

    refused: str = ""
    does: str = ""
    message_id: bytes = b""
    believed: bytes = b""
    owner: str = ""


def plan_order(order: TicketOrder, record: Any, told: Mapping[str, Any]) -> PlannedOrder:
    """Return what the order would do. ``told``: the explanation of the ticket, a moment older than its ``record`` in
    the index; None: it has none."""
    if record is None:
        return _of_parked(order, told)
    head = min(record.ids, key=rank)
    believed = b"%s %d" % (record.owner, record.fence)
    if b":" in record.owner:
        return _of_owned(order, head, believed, record.owner.decode(), told)
    if is_given_back(record.owner):
        if order in _OF_OWNERS or (order is TicketOrder.RETRY and not is_waiting(record.owner)):
            return _refuse(order, told)
        does = "is due now" if order is TicketOrder.RETRY else _NEXT_LETTER
        return PlannedOrder("", f"{head.decode()} {does}", head, believed)
    is_unknown = any(reason["code"] == LETTER_UNKNOWN for reason in told["reasons"])
    if order is TicketOrder.RETRY and record.owner == HALTED and told["dead_letter"] is None and not is_unknown:
        return PlannedOrder("", f"{head.decode()}, whose dead letter is not found, runs again", head, believed)
    return _refuse(order, told)


_OF_OWNERS = (TicketOrder.CANCEL, TicketOrder.INTERRUPT, TicketOrder.CLEAR)
_NEXT_LETTER = "becomes a dead letter as soon as a consumer gets it, and the ticket goes on"


def _of_owned(order: TicketOrder, head: bytes, believed: bytes, owner: str, told: Mapping[str, Any]) -> PlannedOrder:
    rows = {row["id"]: row["state"] for row in told["entries"]}
    has_answered = told["max_attempts"] is not None  # else nobody knows whether it runs
    state = rows.get(head.decode(), TicketState.HANDED_OVER)
    name, of = owner.rpartition(":")[0], head.decode()
    if order is TicketOrder.RETRY:
        if has_answered and state != TicketState.RETRYING:
            return _refuse(order, told)
        does = f"{of}, which waits on {name} for its next attempt, is due now"
    elif order is TicketOrder.CLEAR:
        does = f"what waits on {name} becomes dead letters, in order; what runs is left alone"
    elif order in (TicketOrder.CANCEL, TicketOrder.INTERRUPT):
        if has_answered and state != TicketState.RUNNING:
            return _refuse(order, told)
        does = f"the run of {of} on {name} is told to end" * (order is TicketOrder.INTERRUPT) or (
            f"the run of {of} on {name} is ended, and counts as a crash; it ends the process of {name}, so what else"
            " runs there is cut off and runs again"
        )
    elif state == TicketState.RUNNING:
        does = f"{of} becomes a dead letter if the run that is under way on {name} fails, and the ticket goes on"
    else:
        does = f"{of} becomes a dead letter on {name}, and the ticket goes on"
    unsure = "" if has_answered else f" ({name} did not say whether it runs or waits)"
    return PlannedOrder("", f"{does}{unsure}", head, believed, owner)


def _of_parked(order: TicketOrder, told: Mapping[str, Any]) -> PlannedOrder:
    parked = next((row["id"] for row in told["entries"] if row["state"] == TicketState.WAITING), "")
    if order is not TicketOrder.GIVE_UP or not parked:
        return _refuse(order, told)
    return PlannedOrder("", f"{parked} {_NEXT_LETTER}", parked.encode())


def _refuse(order: TicketOrder, told: Mapping[str, Any]) -> PlannedOrder:
    why = {
        TicketOrder.RETRY: "nothing of it waits for its next attempt",
        TicketOrder.GIVE_UP: "nothing of it can be given up",
        TicketOrder.CANCEL: "nothing of it runs",
        TicketOrder.INTERRUPT: "nothing of it runs",
        TicketOrder.CLEAR: "nothing of it waits at a consumer",
    }[order]
    return PlannedOrder(f"{why}: {told['summary']}")
