"""Adapt the running master to operators (``usher.master.web.operations.OperationsPort``): explain, rules, drain and
resume, orders about a ticket, the action log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from usher.master.insight.explainer import Explainer
from usher.master.operations.action_log import ActionLog, By, OperatorAction
from usher.master.operations.live_rules import LiveRules, RuleSetChange
from usher.master.operations.ticket_orders import OrderResult, TicketOrders
from usher.master.policy import rules
from usher.master.policy.rules import Rule, Rulebook, Target, rule_id
from usher.master.policy.ticket_orders import TicketOrder


class Operations:
    """The operations of one master. Safe for many threads."""

    def __init__(
        self,
        stream: str,
        live_rules: LiveRules,
        action_log: ActionLog,
        explainer: Explainer,
        orders: TicketOrders,
        consumers: Callable[[], list[dict[str, Any]]] = list,
        ask_process: Callable[[str], dict[str, Any] | None] = lambda health_url: None,
    ) -> None:
        """Keep the parts. ``ask_process``: asks the consumer with a health URL what it runs."""
        self.stream = stream
        self._rules = live_rules
        self._log = action_log
        self._explainer = explainer
        self._orders = orders
        self._consumers = consumers
        self._ask_process = ask_process

    def consumer(self, name: str) -> list[dict[str, Any]]:
        rows = [row for row in self._consumers() if row["name"] == name]
        return [row | {"process": self._ask_process(str(row.get("health_url", "")))} for row in rows]

    def explain(self, ticket_id: str) -> dict[str, Any]:
        return self._explainer.explain(ticket_id).document()

    def rules(self) -> Rulebook:
        return self._rules.read()

    def set_rule(self, rule: Rule, by: By) -> RuleSetChange:
        return self._rules.set(rule, by)

    def lift_rule(self, chosen: str, by: By, version: int | None = None) -> RuleSetChange | None:
        return self._rules.lift(chosen, by, version=version)

    def drain(self, name: str, by: By) -> RuleSetChange | None:
        """Hand nothing more to the consumer ``name``, whatever its incarnation. It finishes the messages that it has;
        new ones go to others. Raises TooManyRules."""
        if not self._explainer.is_registered(name):
            return None
        return self._rules.set(Rule(Target.CONSUMER, name, rules.RuleAction.PAUSE, None, by.why, by.who), by, "drain")

    def resume(self, name: str, by: By) -> RuleSetChange | None:
        """End an operator's drain. A consumer that drains because it shuts down goes on with that."""
        return self._rules.lift(rule_id(Target.CONSUMER, name), by, "resume")

    def order(self, order: TicketOrder, ticket_id: str, by: By | None, head: str = "") -> OrderResult:
        if by is None:
            return self._orders.preview(order, ticket_id, self.explain)
        return self._orders.give(order, ticket_id, by, self.explain, head)

    def offers(self, explained: dict[str, Any]) -> list[OrderResult]:
        asked = (
            self._orders.preview(order, explained["ticket_id"], lambda ticket_id: explained) for order in TicketOrder
        )
        return [one for one in asked if one.outcome != "refused"]

    def actions(self, before: bytes | None, limit: int) -> tuple[list[dict[str, Any]], str | None]:
        return self._log.page(before, limit)

    def note(self, action: OperatorAction, outcome: str) -> None:
        """Log an action whose steps do not log themselves."""
        self._log.note(action, outcome)

    def close(self) -> None:
        self._rules.close()
        self._log.close()
        self._explainer.close()
        self._orders.close()
