"""The routes for operators: explain, rules, the action log, and those of all verbs (``usher.master.verbs``). Any master
answers, leader or standby.

After a change of the rules is answered, nothing is handed over by the former ones; ``handed_over`` messages had been
before, and run to their end.
"""

from __future__ import annotations

from flask import Blueprint, Response, g
from pydantic import BaseModel, ConfigDict

from usher.common.http.app import Problem, answer, read_json, read_query, unprocessable
from usher.common.http.credentials import Role
from usher.common.http.fields import PageLimit, StreamId
from usher.common.http.openapi import tells
from usher.master.operations.action_log import By
from usher.master.operations.live_rules import TooManyRules
from usher.master.verbs.documents import Actions, ConsumerShown, Explanation, Rules
from usher.master.verbs.verbs import VERBS, Args, NewOrder, OrderArgs, Outcome, Tools, Unfit, Verb
from usher.master.web.api import TicketQuery, read_ticket_id
from usher.master.web.parts import Parts
from usher.master.web.seen import seen

#: The most bytes of a body: 500 ids of letters fit.
BODY = 32 * 1024
_ON_A_PAGE, _MOST_ON_A_PAGE = 100, 500
_EXPLAIN = b"/explain"


class _Page(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    cursor: StreamId | None = None
    limit: PageLimit = _ON_A_PAGE


def operation_routes(parts: Parts) -> Blueprint:
    """Return ``/api/tickets/{id}/explain``, ``/api/explain``, ``/api/rules``, ``/api/actions``,
    ``/api/consumers/{name}/process``, and the routes of the verbs."""
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

    @api.get("/actions")
    @tells("Actions of operators, newest first.", {200: Actions}, query=_Page)
    def actions() -> Response:
        asked = read_query(_Page)
        before = None if asked.cursor is None else asked.cursor.encode()
        lines, cursor = parts.action_log.page(before, min(asked.limit, _MOST_ON_A_PAGE))
        return answer({"actions": lines, "cursor": cursor})

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

    for word in ("interrupt", "clear"):
        _add_order(api, parts, word)
    for one in VERBS.values():
        if one.route:
            _add_verb(api, parts, one)
    return api


def _add_order(api: Blueprint, parts: Parts, word: str) -> None:
    verb = VERBS["tickets order"]

    def view(ticket_id: str) -> Response:
        about = {"ticket_id": read_ticket_id(f"/{word}".encode()), "order": word}
        outcome = performed(parts, verb, NewOrder(**about, **read_json(OrderArgs, BODY).model_dump()))  # type: ignore[arg-type]
        if outcome.problem:
            raise Problem(outcome.status, outcome.problem, outcome.text)
        return answer(outcome.document, outcome.status)

    told = VERBS[f"tickets {word}"].help
    tells(told, verb.answers, problems=verb.problems, body=OrderArgs, role=Role.PRODUCER)(view)
    api.add_url_rule(f"/tickets/<rest:ticket_id>/{word}", f"{word}_ticket", view, methods=["POST"])


def _add_verb(api: Blueprint, parts: Parts, verb: Verb) -> None:
    method, path = verb.route.split()
    is_query = method == "DELETE"

    def view(**places: str) -> Response:
        args = read_query(verb.args) if is_query else read_json(verb.args, BODY)
        outcome = performed(parts, verb, args, **places)
        if outcome.problem:
            raise Problem(outcome.status, outcome.problem, outcome.text)
        return answer(outcome.document, outcome.status)

    body, query = (None, verb.args) if is_query else (verb.args, None)
    tells(verb.help, verb.answers, problems=verb.problems, body=body, query=query)(view)
    api.add_url_rule(path, verb.name.replace(" ", "_"), view, methods=[method])


def performed(parts: Parts, verb: Verb, args: Args, /, **places: str) -> Outcome:
    """Do a verb for the caller of the current request. Raises Problem 409, 422."""
    try:
        return verb.perform(tools_of(parts, args.reason), args, **places)
    except Unfit as unfit:
        raise unprocessable([{"field": unfit.field, "problem": str(unfit)}]) from None
    except TooManyRules as full:
        raise Problem(409, "too_many_rules", str(full)) from None


def tools_of(parts: Parts, reason: str = "") -> Tools:
    """Return what verbs act with for the sender of this request: the authenticated credential, as the guard of the
    application has put it into ``flask.g.who``."""
    return parts.tools(By(str(g.get("who", "operator")), "http", reason))
