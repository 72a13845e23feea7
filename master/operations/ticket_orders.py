"""Orders about the first unfinished message of a ticket (master/policy/ticket_orders.py). Any master can give them, and
so can the commands: it needs no leader.

A consumer learns of an order from its inbox, in which it stands behind what was handed over before; it says in its log
what came of it. Doubt: after ReplyUnknown the order may be given again. If the ticket goes to somebody else meanwhile,
nothing happens, and the order is planned anew. An owner that ends with an order unread leaves a message that is given
up by who has it next, if that was the order: this stands in Redis. Else the order is lost: after a drain the message
waits for its time, which `retry` can cut short again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from usher.common.protocol.attempts import GIVEN_UP
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Arg, Link
from usher.common.redis.replies import TicketRecord, TicketStream
from usher.common.redis.scripts import ScriptRunner
from usher.common.sending.producer import Producer
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
        return self._asdict() | {"message_id": self.message_id or None, "consumer": self.consumer or None}


#: Explains a ticket, as a document (``usher.master.policy.explain.facts``).
Explain = Callable[[str], dict[str, Any]]


class TicketOrders:
    def __init__(self, link: Link, keys: Keys, explain: Explain, ticket_field: str = "ticket_id") -> None:
        self._explain, self._link, self._keys, self._stream = explain, link, keys, TicketStream(link, keys)
        self._scripts = ScriptRunner(link)
        self.producer = Producer(link, keys.stream, ticket_field)

    def preview(self, order: TicketOrder, ticket_id: str) -> OrderResult:
        """Return what the order would do now. Raises what ``Link.call`` raises."""
        planned = plan_order(order, self._record(ticket_id), self._explain(ticket_id))
        return _result(ticket_id, order, planned, "planned")

    def offers(self, explained: dict[str, Any]) -> list[OrderResult]:
        ticket_id = explained["ticket_id"]
        record = self._record(ticket_id)
        planned = [(order, plan_order(order, record, explained)) for order in TicketOrder]
        return [_result(ticket_id, order, plan, "planned") for order, plan in planned if not plan.refused]

    def give(self, order: TicketOrder, ticket_id: str, by: By, head: str = "", grace_s: float = 0.0) -> OrderResult:
        """Give the order. ``head``: the message that it is about; "": whichever is the ticket's first unfinished one.
        ``grace_s``: after so long what is interrupted is cancelled; 0: never. Raises what ``Link.call`` raises."""
        planned = PlannedOrder()
        for _ in range(_TRIES):
            planned = plan_order(order, self._record(ticket_id), self._explain(ticket_id))
            if head and not planned.refused and planned.message_id.decode() != head:
                planned = planned._replace(refused=f"its first unfinished message is not {head} any more")
            if planned.refused:
                break
            answer = self._run(order, ticket_id, planned, by, grace_s)
            if answer in ("ASKED", "DONE"):
                return _result(ticket_id, order, planned, answer.lower())
        refused = planned.refused or "the ticket moves from one owner to the next just now: ask again in a moment"
        return _result(ticket_id, order, planned._replace(refused=refused), "refused")

    def _record(self, ticket_id: str) -> TicketRecord | None:
        return self._stream.in_processing(self._stream.record_of(ticket_id.encode("utf-8", "surrogateescape")))

    def _run(self, order: TicketOrder, ticket_id: str, planned: PlannedOrder, by: By, grace_s: float = 0.0) -> str:
        keys, ticket = self._keys, ticket_id.encode("utf-8", "surrogateescape")
        script_keys = [keys.stream, keys.tickets, keys.attempts, keys.changed, keys.actions]
        if planned.owner:
            script_keys += [keys.lease(planned.owner), keys.inbox(planned.owner)]
        action = OperatorAction(by, order.value, f"ticket {ticket_id}, message {planned.message_id.decode()}")
        line: list[Arg] = [part.encode("utf-8", "surrogateescape") for part in action.line()]
        what = f"{order.value} {grace_s:g}" if grace_s else order.value
        about: list[Arg] = [keys.group, what, ticket, planned.believed, planned.message_id, KEPT, GIVEN_UP]
        return bytes(self._scripts.run("order", script_keys, [*about, *line])).decode()


def _result(ticket_id: str, order: TicketOrder, planned: PlannedOrder, outcome: str) -> OrderResult:
    if planned.refused:
        return OrderResult(ticket_id, order.value, "refused", planned.refused)
    consumer = planned.owner.rpartition(":")[0]
    return OrderResult(ticket_id, order.value, outcome, planned.does, planned.message_id.decode(), consumer)
