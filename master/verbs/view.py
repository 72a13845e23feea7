"""A view of one ticket stream: all that looks at it, and acts on it, over one link. Commands have one, and a master has
one for its routes and pages."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self
from urllib.parse import quote

from usher.common.protocol.attempts import GIVEN_UP
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Arg, Link
from usher.common.redis.replies import TicketRecord, TicketStream
from usher.common.redis.scripts import ScriptRunner
from usher.common.runtime.settings import CommonSettings
from usher.common.sending.producer import Producer
from usher.master.insight.explainer import AskOwner, Explainer
from usher.master.insight.live_overview import LiveOverview
from usher.master.insight.stats import StreamStatsReader
from usher.master.insight.status import StatusReader
from usher.master.insight.ticket_history import TicketHistory
from usher.master.messages.fields import MessageFields
from usher.master.operations.action_log import KEPT, ActionLog, By, OperatorAction
from usher.master.operations.dead_letters import DeadLetters
from usher.master.operations.delayed_messages import DelayedView
from usher.master.operations.live_rules import LiveRules
from usher.master.policy.board.plans import BoardFacts
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


#: Explains a ticket, as a document (``usher.master.policy.explain.explain``).
Explain = Callable[[str], dict[str, Any]]


class TicketOrders:
    """Orders about the first unfinished message of a ticket (master/policy/ticket_orders.py). Any master can give them,
    and so can the commands: it needs no leader.

    A consumer learns of an order from its inbox, in which it stands behind what was handed over before; it says in its
    log what came of it. Doubt: after ReplyUnknown the order may be given again. If the ticket goes to somebody else
    meanwhile, nothing happens, and the order is planned anew. An owner that ends with an order unread leaves a message
    that is given up by who has it next, if that was the order: this stands in Redis. Else the order is lost: after a
    drain the message waits for its time, which `retry` can cut short again."""

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
        what = f"{order.value} {grace_s:g}" if grace_s else order.value
        about: list[Arg] = [keys.group, what, ticket, planned.believed, planned.message_id, KEPT, GIVEN_UP]
        return bytes(self._scripts.run("order", script_keys, [*about, *action.line()])).decode()


def _result(ticket_id: str, order: TicketOrder, planned: PlannedOrder, outcome: str) -> OrderResult:
    if planned.refused:
        return OrderResult(ticket_id, order.value, "refused", planned.refused)
    consumer = planned.owner.rpartition(":")[0]
    return OrderResult(ticket_id, order.value, outcome, planned.does, planned.message_id.decode(), consumer)


class View:
    """``by``: who acts with it; ``within_s``: the time for fields of messages; ``ask_owner``, ``board``, ``pulse``: see
    ``Explainer``; ``ask``: returns a master's answer, by its URL and a path. Safe for many threads if the link is."""

    def __init__(
        self,
        settings: CommonSettings,
        link: Link,
        keys: Keys,
        within_s: float = math.inf,
        ask_owner: AskOwner = lambda health_url, ticket_id: None,
        board: Callable[[bytes], BoardFacts | None] = lambda ticket: None,
        pulse: LiveOverview | None = None,
        ask: Callable[[str, str], dict[str, Any] | None] | None = None,
    ) -> None:
        self.settings, self.link, self.keys, self.by = settings, link, keys, By("", "")
        self._ask = ask
        field, lease_ms = settings.work_ticket_field, int(settings.lease_seconds * 1000)
        self.status = StatusReader(link, keys, settings.sources, field)
        self.stats = StreamStatsReader(link, keys, self.status.sources)
        self.fields = MessageFields(link, keys, field, settings.shown_names, within_s)
        self.letters = DeadLetters(link, keys, field)
        self.delayed = DelayedView(link, keys, settings.ticket_field, settings.by_stream)
        self.rules, self.action_log = LiveRules(link, keys), ActionLog(link, keys)
        self.history = TicketHistory(link, keys, field)
        known = (ask_owner, board, self.status.sources, settings.by_stream, pulse)
        self.explainer = Explainer(link, keys, field, lease_ms, *known)
        self.orders = TicketOrders(link, keys, self.explained, field)

    def explained(self, ticket_id: str) -> dict[str, Any]:
        """Return the leader's explanation of a ticket, which knows more; ours, from Redis alone, where it is silent."""
        asked = quote(ticket_id.encode("utf-8", "surrogateescape"), safe="")
        return self.ask_leader(f"/api/explain?id={asked}") or self.explainer.explain(ticket_id)

    def ask_leader(self, path: str) -> dict[str, Any] | None:
        """Return what the leader answers to a GET, if this view asks it; None where it does not."""
        url = self.explainer.leader_url() if self._ask is not None else ""
        return self._ask(url, path) if self._ask is not None and url else None

    def acting(self, by: By) -> Self:
        """Return the same view for the verbs of a caller."""
        mine = copy.copy(self)
        mine.by = by
        return mine
