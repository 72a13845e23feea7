"""Act on forms of operators. Every form ends in a redirect to a page that reports the outcome, and in the action
log."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from flask import Blueprint, redirect, request
from werkzeug.wrappers import Response as AnyResponse

from usher.common.base.text import label, pluralize
from usher.common.http.app import read_model
from usher.common.http.auth import local_path, needs
from usher.common.http.credentials import Role
from usher.common.protocol.message import LONGEST_TICKET
from usher.master.insight.formatting import ticket_url, visible
from usher.master.operations.action_log import OperatorAction, chosen_letters, counted
from usher.master.operations.bulk_letters import DROP, PAUSE, REDRIVE
from usher.master.policy.letters import LetterFilter, also_for
from usher.master.policy.rules import Rule, alike
from usher.master.policy.ticket_filter import TicketFilter
from usher.master.policy.ticket_orders import TicketOrder
from usher.master.web.api import by_caller
from usher.master.web.operations import NewRule, change_rule, drained
from usher.master.web.pages.delayed_pages import add_delayed_actions
from usher.master.web.pages.forms import (
    FlashMessages,
    asked_filter,
    asked_tickets,
    in_words,
    read_form_text,
    read_why,
    refused,
)
from usher.master.web.pages.views import STREAM_ID, bulk_job, preview_page
from usher.master.web.parts import Parts

_MOST_CHOSEN = 200


def action_routes(parts: Parts, notes: FlashMessages) -> Blueprint:
    actions = Blueprint("actions", __name__)

    def go(path: str, said: str) -> AnyResponse:
        parts = urlsplit(local_path(path))
        kept = "&".join(part for part in parts.query.split("&") if part and not part.startswith("said="))
        return redirect(
            f"{parts.path}?{kept}&said={notes.put(said)}" if kept else f"{parts.path}?said={notes.put(said)}", 303
        )

    _add_consumers(actions, parts, go)
    _add_letters(actions, parts, go)
    _add_jobs(actions, parts, go)
    _add_rules(actions, parts, go)
    _add_orders(actions, parts, go)
    add_delayed_actions(actions, parts, go)
    return actions


Go = Callable[[str, str], AnyResponse]


def _add_consumers(actions: Blueprint, parts: Parts, go: Go) -> None:
    @actions.post("/consumers/drain")
    @needs(Role.OPERATOR)
    def drain() -> AnyResponse:
        name = read_form_text("name", 64)
        changed = drained(parts, name, read_why())
        if changed is None:
            return go("/consumers", f"No consumer named {visible(name)} is registered")
        return go(
            "/consumers",
            f"{name} is drained: it is handed nothing more and finishes its messages"
            f" ({pluralize(changed.handed_over, 'message')})",
        )

    @actions.post("/consumers/resume")
    @needs(Role.OPERATOR)
    def resume() -> AnyResponse:
        name = read_form_text("name", 64)
        changed = parts.rules.resume(name, by_caller(read_why()))
        return go("/consumers", f"{visible(name)} was not drained" if changed is None else f"{name} gets work again")


def _add_letters(actions: Blueprint, parts: Parts, go: Go) -> None:
    def change(what: str) -> AnyResponse:
        ids = [
            letter_id.encode()
            for letter_id in dict.fromkeys(request.form.getlist("id"))
            if STREAM_ID.fullmatch(letter_id)
        ][:_MOST_CHOSEN]
        back, by = request.form.get("back", "/dead-letters"), by_caller(read_why())
        if not ids:
            return go(back, "Nothing was chosen")
        others = parts.letters.other_groups() if what == REDRIVE else []
        action = OperatorAction(by, what, chosen_letters(ids))
        outcomes = parts.action_log.carry_out(action, parts.letters.change(what, ids))
        told = counted(one.word for one in outcomes)
        also = also_for(others) if any(one.word == "added" for one in outcomes) else ""
        return go(back, f"{'Redrive' if what == REDRIVE else 'Drop'}: {told}" + (f"; {also}" if also else ""))

    @actions.post("/dead-letters/redrive")
    @needs(Role.OPERATOR)
    def redrive() -> AnyResponse:
        return change(REDRIVE)

    @actions.post("/dead-letters/drop")
    @needs(Role.OPERATOR)
    def drop() -> AnyResponse:
        return change(DROP)


def _add_jobs(actions: Blueprint, parts: Parts, go: Go) -> None:
    @actions.post("/dead-letters/bulk")
    @needs(Role.OPERATOR)
    def bulk() -> AnyResponse | str:
        asked, wanted = asked_filter(request.form)
        return _bulk(parts, (REDRIVE, DROP), wanted, in_words(asked), asked)

    @actions.post("/tickets/bulk")
    @needs(Role.OPERATOR)
    def order_all() -> AnyResponse | str:
        asked, wanted = asked_tickets(request.form)
        if wanted == TicketFilter():
            raise refused("give a state, a consumer or an error")
        return _bulk(parts, (TicketOrder.RETRY.value, TicketOrder.GIVE_UP.value, PAUSE), wanted, wanted.told(), asked)

    @actions.post("/dead-letters/jobs/<job_id>/stop")
    @needs(Role.OPERATOR)
    def stop(job_id: str) -> AnyResponse:
        job, by = bulk_job(parts, job_id), by_caller(read_why())
        parts.bulk.stop_job(job)
        parts.action_log.note(OperatorAction(by, f"stop {job.what}", job.told), counted(job.outcomes.elements()))
        return go(f"/dead-letters/jobs/{job_id}", "Stopped; what was done stays done")


def _bulk(
    parts: Parts, known: Sequence[str], wanted: LetterFilter | TicketFilter, told: str, asked: Mapping[str, str]
) -> AnyResponse | str:
    """Say what a bulk action would touch (``dry``), or begin it. The form of the preview says again what was asked."""
    form, what = request.form, request.form.get("what", "")
    if what not in known:
        raise refused(f"the field what must be one of {', '.join(known)}")
    if form.get("dry"):
        return preview_page(parts, what, parts.bulk.dry_run(wanted, parts.delayed.now_ms()), told, asked)
    until, count = form.get("until", ""), form.get("count", "")
    if not STREAM_ID.fullmatch(until) or not re.fullmatch("[0-9]{1,12}", count):
        raise refused("see the preview first")
    job = parts.bulk.begin(what, wanted, told, by_caller(read_why()), until.encode(), int(count))
    return redirect(f"/dead-letters/jobs/{job.id}", 303)


def _add_rules(actions: Blueprint, parts: Parts, go: Go) -> None:
    @actions.post("/rules/set")
    @needs(Role.OPERATOR)
    def set_rule() -> AnyResponse:
        form = request.form
        target, value, action, rate = (
            form.get("target", ""),
            form.get("value", ""),
            form.get("action", ""),
            form.get("rate_per_second", "").strip(),
        )
        value = {"stream": parts.keys.stream, "everything": ""}.get(target, value)
        rule: dict[str, Any] = {"target": target, "value": value, "action": action, "reason": read_why()}
        if rate:
            try:
                rule["rate_per_second"] = float(rate)
            except ValueError:
                raise refused("the rate must be a number") from None
        changed = change_rule(parts, read_model(NewRule, rule))
        return go(form.get("back", "/rules"), changed.told)

    @actions.post("/rules/lift")
    @needs(Role.OPERATOR)
    def lift() -> AnyResponse:
        by, chosen, until = by_caller(read_why()), read_form_text("id", 64), request.form.get("until", "")
        if until and not re.fullmatch("[0-9]{1,16}", until):
            raise refused("the field until must be the version of a rule")
        if until:  # all that are alike, but those that were set after the page was made
            groups = alike(parts.rules.read().rules)
            some: list[Rule] = next((some for some in groups if chosen in {one.id for one in some}), [])
            lifted = [parts.rules.lift(one.id, by, version=one.version) for one in some if one.version <= int(until)]
            told = counted("gone already" if one is None else one.outcome for one in lifted)
            told = told if lifted else "These rules have changed since the page was made: look again"
        else:
            changed = parts.rules.lift(chosen, by)
            told = "That rule is gone already" if changed is None else changed.told
        return go(request.form.get("back", "/rules"), told)


def _add_orders(actions: Blueprint, parts: Parts, go: Go) -> None:
    @actions.post("/tickets/order")
    @needs(Role.OPERATOR)
    def order() -> AnyResponse:
        ticket_id = read_form_text("ticket_id", LONGEST_TICKET)
        asked = request.form.get("order", "")
        if asked not in [one.value for one in TicketOrder]:
            raise refused("the field order must be retry, give_up or cancel")
        result = parts.orders.give(TicketOrder(asked), ticket_id, by_caller(read_why()))
        return go(ticket_url(ticket_id), f"{label(asked)}: {result.outcome}: {result.note}")
