"""The routes for operators: explain, rules, drain, orders about a ticket, the action log. Any master answers, leader or
standby.

The forms of rules, orders and actions are in ``usher.master.web.documents``, that of an explanation in
``usher.master.policy.explain.facts``. After a change of the rules is answered, nothing is handed over by the former
ones; ``handed_over`` messages had been before, and run to their end.
"""

from __future__ import annotations

import re
from typing import Annotated

from flask import Blueprint, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from usher.common.http.app import Problem, answer, read_json, read_query, unprocessable
from usher.common.http.fields import OneLine, PageLimit, StreamId, TicketId
from usher.common.http.openapi import tells
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.protocol.registration import NAME
from usher.master.operations.live_rules import RuleSetChange, TooManyRules
from usher.master.policy.rules import LONGEST_REASON, Rule, RuleAction, Target
from usher.master.policy.ticket_orders import TicketOrder
from usher.master.web.api import TicketQuery, by_caller, read_ticket_id
from usher.master.web.documents import (
    Actions,
    ConsumerRuleChange,
    ConsumerShown,
    Explanation,
    OrderAnswer,
    RuleChange,
    Rules,
)
from usher.master.web.parts import Parts
from usher.master.web.seen import seen

BODY = 8 * 1024
_ON_A_PAGE, _MOST_ON_A_PAGE = 100, 500
_RULE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_EXPLAIN = b"/explain"


_Reason = Annotated[OneLine, Field(max_length=LONGEST_REASON)]


class NewRule(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    target: Annotated[str, Field(pattern="^(ticket|pattern|tenant|stream|everything|consumer)$")]
    value: str = ""
    action: Annotated[str, Field(pattern="^(pause|slow)$")]
    rate_per_second: Annotated[float, Field(ge=0.001, le=1_000_000, allow_inf_nan=False)] | None = None
    concurrency: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    weight: Annotated[int, Field(ge=1, le=1000)] | None = None
    reason: _Reason = ""

    @model_validator(mode="after")
    def _fits_together(self) -> NewRule:
        of_tenant = self.concurrency is not None or self.weight is not None
        if of_tenant and (self.target, self.action) != ("tenant", "slow"):
            raise ValueError("concurrency and weight are for a tenant that is slowed")
        if (self.action == "slow") != (of_tenant or self.rate_per_second is not None):
            raise ValueError("give rate_per_second with slow, and only then")
        if (self.target == "everything") != (self.value == ""):
            raise ValueError("give value, except with the target everything")
        if len(self.value.encode("utf-8", "surrogatepass")) > LONGEST_TICKET:
            raise ValueError(f"value must be text of at most {LONGEST_TICKET} bytes")
        if self.target == "consumer" and (self.action != "pause" or not NAME.fullmatch(self.value)):
            raise ValueError("a consumer can only be paused, and its name is 1 to 64 of A-Z a-z 0-9 . _ -")
        return self


class _Why(BaseModel):
    """The body of drain and resume."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    reason: _Reason = ""


class _NewOrder(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    ticket_id: TicketId
    order: Annotated[str, Field(pattern="^(retry|give_up|cancel)$")]
    reason: _Reason = ""
    preview: bool = False


class _Page(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    cursor: StreamId | None = None
    limit: PageLimit = _ON_A_PAGE


def operation_routes(parts: Parts) -> Blueprint:
    """Return ``/api/tickets/{id}/explain``, ``/api/explain``, ``/api/rules``, ``/api/orders``,
    ``/api/consumers/{name}/process``, ``/drain`` and ``/resume``, ``/api/actions``."""
    api = Blueprint("operations", __name__, url_prefix="/api")

    @api.get("/tickets/<rest:ticket_id>/explain")
    @tells(
        "The reason why a ticket waits, and until when.",
        {200: Explanation},
        problems={422: "ticket ids have 1 to 256 bytes"},
    )
    def explain(ticket_id: str) -> Response:
        return answer(seen(parts.explainer.explain(read_ticket_id(_EXPLAIN)).document()))

    @api.get("/explain")
    @tells(
        "The explanation of a ticket of any id: in a path, some ids may be taken for something else.",
        {200: Explanation},
        query=TicketQuery,
    )
    def explain_by_query() -> Response:
        return answer(seen(parts.explainer.explain(read_query(TicketQuery).id).document()))

    @api.get("/rules")
    @tells("The live rules.", {200: Rules})
    def rules() -> Response:
        book = parts.rules.read()
        return answer({"rules": [rule.shown() for rule in book.rules], "version": int(book.version or 0)})

    @api.post("/rules")
    @tells(
        "Set a rule: 201 new, 200 in place of the former one for that target.",
        {201: RuleChange, 200: RuleChange},
        body=NewRule,
        problems={409: "too_many_rules"},
    )
    def set_rule() -> Response:
        changed = change_rule(parts, read_json(NewRule, BODY))
        return answer(changed.shown(), 201 if changed.outcome == "set" else 200)

    @api.delete("/rules/<rule_id>")
    @tells("Lift a rule.", {200: RuleChange}, query=_Why, problems={404: "unknown_rule"})
    def lift_rule(rule_id: str) -> Response:
        by = by_caller(read_query(_Why).reason)
        if not _RULE_ID.fullmatch(rule_id) or (changed := parts.rules.lift(rule_id, by)) is None:
            raise Problem(404, "unknown_rule", "there is no rule with that id")
        return answer(changed.shown())

    @api.get("/actions")
    @tells("Actions of operators, newest first.", {200: Actions}, query=_Page)
    def actions() -> Response:
        asked = read_query(_Page)
        lines, cursor = parts.action_log.page(
            None if asked.cursor is None else asked.cursor.encode(), min(asked.limit, _MOST_ON_A_PAGE)
        )
        return answer({"actions": lines, "cursor": cursor})

    _add_orders(api, parts)
    _add_drain(api, parts)
    return api


def _add_orders(api: Blueprint, parts: Parts) -> None:
    @api.post("/orders")
    @tells(
        "Order something about the first unfinished message of a ticket: retry (due now), give_up (it becomes a dead"
        " letter, in order) or cancel (its run is ended). With preview nothing happens.",
        {200: OrderAnswer},
        body=_NewOrder,
        problems={409: "order_refused"},
    )
    def order() -> Response:
        asked = read_json(_NewOrder, BODY)
        about = (TicketOrder(asked.order), asked.ticket_id)
        orders = parts.orders
        result = orders.preview(*about) if asked.preview else orders.give(*about, by_caller(asked.reason))
        if result.outcome == "refused":
            raise Problem(409, "order_refused", result.note)
        return answer(result.shown())


def _add_drain(api: Blueprint, parts: Parts) -> None:
    @api.get("/consumers/<name>/process")
    @tells(
        "One consumer: where it runs, and what it runs at this moment, as it says itself.",
        {200: ConsumerShown},
        problems={404: "unknown_consumer"},
    )
    def consumer(name: str) -> Response:
        rows = [row for row in parts.status.consumers() if row["name"] == name]
        if not rows:
            raise Problem(404, "unknown_consumer", "no consumer of that name is registered")
        asked = [row | {"process": parts.ask_process(str(row.get("health_url", "")))} for row in rows]
        return answer({"consumers": asked})

    @api.post("/consumers/<name>/drain")
    @tells(
        "Hand nothing new to a consumer.",
        {200: ConsumerRuleChange},
        body=_Why,
        problems={404: "unknown_consumer", 409: "too_many_rules"},
    )
    def drain(name: str) -> Response:
        changed = drained(parts, name, read_json(_Why, BODY).reason)
        if changed is None:
            raise Problem(404, "unknown_consumer", "no consumer of that name is registered")
        return answer({"name": name} | changed.shown())

    @api.post("/consumers/<name>/resume")
    @tells("End a drain.", {200: ConsumerRuleChange}, body=_Why, problems={404: "not_drained"})
    def resume(name: str) -> Response:
        changed = parts.rules.resume(name, by_caller(read_json(_Why, BODY).reason))
        if changed is None:
            raise Problem(404, "not_drained", "no consumer of that name was drained")
        return answer({"name": name} | changed.shown())


def change_rule(parts: Parts, asked: NewRule) -> RuleSetChange:
    """Set the rule that a document asks for. Raises Problem 409, 422."""
    if asked.target == "stream" and asked.value != parts.keys.stream:
        raise unprocessable([{"field": "value", "problem": "must be the stream of this master"}])
    rule = Rule(
        Target(asked.target),
        asked.value,
        RuleAction(asked.action),
        asked.rate_per_second,
        asked.reason,
        by_caller().who,
        concurrency=asked.concurrency,
        weight=asked.weight,
    )
    try:
        return parts.rules.set(rule, by_caller(asked.reason))
    except TooManyRules as full:
        raise Problem(409, "too_many_rules", str(full)) from None


def drained(parts: Parts, name: str, why: str) -> RuleSetChange | None:
    """Drain a consumer; None: no consumer of that name is registered. Raises Problem 409."""
    try:
        return parts.rules.drain(name, by_caller(why))
    except TooManyRules as full:
        raise Problem(409, "too_many_rules", str(full)) from None
