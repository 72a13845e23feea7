"""Act on forms of operators. Every form ends in a redirect to a page that reports the outcome, and in the action log.
What a form does is a verb (``usher.master.verbs``); here is how its fields are read, and where it leads."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from flask import Blueprint, redirect, request
from werkzeug.wrappers import Response as AnyResponse

from usher.common.http.app import read_model
from usher.common.http.auth import local_path, needs
from usher.common.http.credentials import Role
from usher.common.protocol.stream_id import is_id
from usher.master.insight.formatting import ticket_url
from usher.master.operations.action_log import OperatorAction, counted
from usher.master.operations.delayed_messages import check_due
from usher.master.policy.letters import Preview
from usher.master.policy.rules import Rule, alike
from usher.master.verbs.verbs import DELAYED, LETTERS, TICKETS, VERBS, DryRun, MovedDelayed, Shelf, Verb
from usher.master.web.operators import acting_in, performed
from usher.master.web.pages.views import (
    STREAM_ID,
    FlashMessages,
    asked_moment,
    asked_of,
    bulk_job,
    preview_page,
    read_form_text,
    read_why,
    refused,
)
from usher.master.web.parts import Parts, sees_texts

_MOST_CHOSEN = 200
#: Seconds of a core that a dry run may take.
_COUNT_S = 1.0

Go = Callable[[str, str], AnyResponse]


def action_routes(parts: Parts, notes: FlashMessages) -> Blueprint:
    actions = Blueprint("actions", __name__)

    def go(path: str, said: str) -> AnyResponse:
        parts = urlsplit(local_path(path))
        kept = "&".join(part for part in parts.query.split("&") if part and not part.startswith("said="))
        return redirect(f"{parts.path}?{kept}{'&' * bool(kept)}said={notes.put(said)}", 303)

    for verb in VERBS.values():
        if verb.form:
            _add_form(actions, parts, go, verb)
    for shelf in (LETTERS, DELAYED, TICKETS):
        _add_bulk(actions, parts, go, shelf)
    _add_others(actions, parts, go)
    return actions


def _add_form(actions: Blueprint, parts: Parts, go: Go, verb: Verb) -> None:
    @needs(Role.OPERATOR)
    def act() -> AnyResponse:
        form = request.form
        given: dict[str, Any] = {name: form[name] for name in verb.args.model_fields if form.get(name)}
        given["reason"] = read_why()
        if verb.shelf is not None:
            given["ids"] = _chosen_ids()
        if "fields" in verb.args.model_fields:
            texts = {name.removeprefix("field."): form[name] for name in form if name.startswith("field.")}
            given["fields"] = {name: text.replace("\r\n", "\n") for name, text in texts.items()}
        if given.get("target") in ("stream", "everything"):
            given["value"] = parts.keys.stream * (given["target"] == "stream")
        back = form.get("back") or (verb.shelf.path if verb.shelf else verb.form.rpartition("/")[0])
        if given.get("ids") == []:
            return go(back, "Nothing was chosen")
        args = read_model(verb.args, given, strict=False)
        places = {name: read_form_text(name, 64) for name in verb.places}
        outcome = performed(parts, verb, args, **places)
        return go(ticket_url(given["ticket_id"]) if "ticket_id" in given else back, outcome.text)

    actions.add_url_rule(verb.form, verb.name.replace(" ", "_"), act, methods=["POST"])


def _add_bulk(actions: Blueprint, parts: Parts, go: Go, shelf: Shelf) -> None:
    @needs(Role.OPERATOR)
    def bulk() -> AnyResponse | str:
        """Say what a verb would touch (``dry``), or do it: to those that are chosen at once, to all that fit by a job.
        The form of the preview says again what was asked."""
        form, verb = request.form, shelf.verbs.get(request.form.get("what", "").replace("_", "-"))
        if verb is None:
            raise refused(f"the field what must be one of {', '.join(shelf.verbs)}")
        asked, ids = asked_of(shelf.ask, form), _chosen_ids()
        if shelf is TICKETS and not asked.given:
            raise refused("give a state, a consumer or an error")
        if not (ids or form.get("all")) and (shelf is DELAYED or form.get("chosen")):
            raise refused("nothing was chosen: go back, and choose messages in the first column")
        wanted, told = shelf.meant(asked, sees_texts()), asked.told(f"all {shelf.noun}s")
        more: dict[str, Any] = {"due_ms": _due_ms(parts)} if verb.args is MovedDelayed else {}
        if form.get("dry"):
            named, view = Preview(), acting_in(parts)
            named.add(shelf.named(view, ids))
            found = DryRun(named, b"", True) if ids else shelf.dry_run(view, wanted, _COUNT_S)
            again = [("id", one) for one in ids] or [("all", "1"), *asked.given.items()]
            return preview_page(parts, verb, found, told, [*again, *more.items()])
        why = read_why()
        if ids:
            outcome = performed(parts, verb, verb.args(ids=ids, reason=why, **more))  # type: ignore[call-arg]
            return go(shelf.path, outcome.text)
        until, count = form.get("until", ""), form.get("count", "")
        if not STREAM_ID.fullmatch(until) or not re.fullmatch("[0-9]{1,12}", count):
            raise refused("see the preview first")
        args = verb.args.model_construct(**more)
        job = parts.bulk.begin(verb, acting_in(parts, why), args, wanted, told, until.encode(), int(count))
        return redirect(f"/dead-letters/jobs/{job.id}", 303)

    actions.add_url_rule(f"{shelf.path}/bulk", f"bulk_{shelf.path[1:]}", bulk, methods=["POST"])


def _chosen_ids() -> list[str]:
    return [one for one in dict.fromkeys(request.form.getlist("id")) if is_id(one)][:_MOST_CHOSEN]


def _due_ms(parts: Parts) -> int:
    """Return the time to which messages are to be moved. Raises Problem 422, with a sentence."""
    given = request.form.get("due_ms", "")
    due_ms = int(given) if given.isascii() and given.isdigit() and len(given) < 19 else asked_moment()
    try:
        check_due(due_ms, parts.delayed.now_ms())
    except ValueError as wrong:
        raise refused(str(wrong)) from None
    return due_ms


def _add_others(actions: Blueprint, parts: Parts, go: Go) -> None:
    @actions.post("/dead-letters/jobs/<job_id>/stop")
    @needs(Role.OPERATOR)
    def stop(job_id: str) -> AnyResponse:
        job, by = bulk_job(parts, job_id), acting_in(parts, read_why()).by
        parts.bulk.stop_job(job)
        parts.action_log.note(OperatorAction(by, f"stop {job.what}", job.told), counted(job.outcomes.elements()))
        return go(f"/dead-letters/jobs/{job_id}", "Stopped; what was done stays done")

    @actions.post("/rules/lift")
    @needs(Role.OPERATOR)
    def lift() -> AnyResponse:
        by, chosen, until = acting_in(parts, read_why()).by, read_form_text("id", 64), request.form.get("until", "")
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
