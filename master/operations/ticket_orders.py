"""Orders about the first unfinished message of a ticket (master/policy/ticket_orders.py). Any master can give them, and
so can the commands: it needs no leader.

A consumer learns of an order from its inbox, in which it stands behind what was handed over before; it says in its log
what came of it. Doubt: after ReplyUnknown the order may be given again. If the ticket goes to somebody else meanwhile,
nothing happens, and the order is planned anew. An owner that ends with an order unread leaves a message that is given
up by who has it next, if that was the order: this stands in Redis. Else the order is lost: after a drain the message
waits for its time, which `retry` can cut short again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from usher.common.protocol.attempts import GIVEN_UP
from usher.common.protocol.keys import Keys
from usher.common.protocol.registration import name_of, parse
from usher.common.redis.client import Arg, Link
from usher.common.redis.replies import TicketStream
from usher.common.redis.scripts import ScriptRunner
from usher.master.operations.action_log import KEPT, By, OperatorAction
from usher.master.policy.ticket_orders import PlannedOrder, TicketOrder, plan_order

#: How often an order is planned anew when the ticket has just moved.
_TRIES = 3


class OrderResult(NamedTuple):
    """Result of an order. ``outcome``: planned (a preview), asked (its consumer was told), done, or refused: nothing
    happened, and ``note`` says why."""

    ticket_id: str
    order: str
    outcome: str
    note: str
    message_id: str = ""
    consumer: str = ""

    def shown(self) -> dict[str, Any]:
        """Return the result for programs."""
        return self._asdict() | {"message_id": self.message_id or None, "consumer": self.consumer or None}


#: Explains a ticket, as a document (``usher.master.policy.explain.facts``).
Explain = Callable[[str], dict[str, Any]]


class TicketOrders:
    """The orders about tickets of one stream. May be used by many threads, one at a time."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link  # guarded by self._lock
        self._keys = keys
        self._stream = TicketStream(link, keys)
        self._scripts = ScriptRunner(link)
        self._lock = threading.Lock()

    def preview(self, order: TicketOrder, ticket_id: str, explain: Explain) -> OrderResult:
        """Return what the order would do now. Raises what ``Link.call`` raises."""
        return _result(ticket_id, order, self._plan(order, ticket_id, explain), "planned")

    def give(self, order: TicketOrder, ticket_id: str, by: By, explain: Explain, head: str = "") -> OrderResult:
        """Give the order. ``head``: the message that it is about; "": whichever is the ticket's first unfinished one.
        Raises what ``Link.call`` raises."""
        planned = PlannedOrder()
        for _ in range(_TRIES):
            planned = self._plan(order, ticket_id, explain)
            if head and not planned.refused and planned.message_id.decode() != head:
                planned = planned._replace(refused=f"its first unfinished message is not {head} any more")
            if planned.refused:
                break
            answer = self._run(order, ticket_id, planned, by)
            if answer in ("ASKED", "DONE"):
                return _result(ticket_id, order, planned, answer.lower())
        refused = planned.refused or "the ticket moves from one owner to the next just now: ask again in a moment"
        return _result(ticket_id, order, planned._replace(refused=refused), "refused")

    def _plan(self, order: TicketOrder, ticket_id: str, explain: Explain) -> PlannedOrder:
        told = explain(ticket_id)
        with self._lock:
            [record] = self._stream.records_of([ticket_id.encode("utf-8", "surrogateescape")])
            planned = plan_order(order, record, told)
            if planned.owner and not self._takes_orders(planned.owner):
                return PlannedOrder(f"{name_of(planned.owner)} is of a former version, which takes no orders")
        return planned

    def _takes_orders(self, owner: str) -> bool:
        """Return whether an incarnation reads orders: one of a former version would stop at a record of that form."""
        stored = self._link.call("HGET", self._keys.consumers, name_of(owner))
        try:
            return stored is None or parse(b"", stored).gives_back
        except ValueError:
            return False

    def _run(self, order: TicketOrder, ticket_id: str, planned: PlannedOrder, by: By) -> str:
        keys, ticket = self._keys, ticket_id.encode("utf-8", "surrogateescape")
        script_keys = [keys.stream, keys.tickets, keys.attempts, keys.changed, keys.actions]
        if planned.owner:
            script_keys += [keys.lease(planned.owner), keys.inbox(planned.owner)]
        action = OperatorAction(by, order.value, f"ticket {ticket_id}, message {planned.message_id.decode()}")
        line: list[Arg] = [part.encode("utf-8", "surrogateescape") for part in action.line()]
        about: list[Arg] = [keys.group, order.value, ticket, planned.believed, planned.message_id, KEPT, GIVEN_UP]
        with self._lock:
            return bytes(self._scripts.run("order", script_keys, [*about, *line])).decode()

    def close(self) -> None:
        self._link.close()


def _result(ticket_id: str, order: TicketOrder, planned: PlannedOrder, outcome: str) -> OrderResult:
    if planned.refused:
        return OrderResult(ticket_id, order.value, "refused", planned.refused)
    consumer = planned.owner.rpartition(":")[0]
    return OrderResult(ticket_id, order.value, outcome, planned.does, planned.message_id.decode(), consumer)
