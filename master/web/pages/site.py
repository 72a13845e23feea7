"""Put the page together: show pages, act on forms, templates, files, headers, errors for people.

A page reads what its query asks for (filters, places), asks the parts, bounded in size and time, and renders one
template. What a form does is a verb (``usher.master.verbs``); it ends in a redirect to a page that reports the outcome,
and in the action log.
"""

from __future__ import annotations

import datetime
import re
import secrets
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import quote, urlencode, urlsplit

from flask import Blueprint, Flask, Response, current_app, g, redirect, render_template, request, send_from_directory
from itsdangerous import URLSafeSerializer
from jinja2 import TemplateError
from werkzeug.local import LocalProxy
from werkzeug.wrappers import Response as AnyResponse

from usher.common.base.clock import now_s, wall_ms
from usher.common.base.durations import moment_ms
from usher.common.http.app import Problem, read_model
from usher.common.http.auth import CSRF_FIELD, Doorman, csrf_token, doorman, local_path, needs
from usher.common.http.credentials import Role
from usher.common.protocol.message import ticket_value
from usher.common.protocol.stream_id import is_id
from usher.master.insight import charts as chart
from usher.master.insight import formatting
from usher.master.insight.status import BAR, ORDERS, stream_row
from usher.master.operations.action_log import OperatorAction, counted
from usher.master.operations.shelves import check_due
from usher.master.policy.explain import OK
from usher.master.policy.letters import HALT, LetterFilter, Preview, also_for
from usher.master.policy.rules import LONGEST_REASON, MOST_RULES, alike
from usher.master.policy.states import BY_NAME, LISTED
from usher.master.verbs import verbs
from usher.master.web import api

#: Most characters of a message about what was done.
_LONGEST = 1000
T = TypeVar("T", bound=verbs.Ask)
#: What was done stands in the addresses of pages, signed: else a link could make a page show any text.
_SAID = URLSafeSerializer(secrets.token_bytes(32))
pages = Blueprint("pages", __name__, template_folder="templates")
#: The parts of the application that answers.
parts = cast(api.Parts, LocalProxy(lambda: current_app.extensions["usher_parts"]))


def asked_of(ask: type[T], given: Mapping[str, str]) -> T:
    """Return the filter that a query or a form asks for. Raises Problem 422."""
    return read_model(ask, {name: text for name in ask.model_fields if (text := given.get(name, ""))}, False)


def asked_place(name: str, fits: Callable[[str], object] = is_id) -> str:
    """Return the place at which a page begins, "" for the first one. Raises Problem 422."""
    if (place := request.args.get(name, "")) and not fits(place):
        raise refused(f"{name} is not one from a page")
    return place


def read_why() -> str:
    """Raises Problem 422, so read it before anything is done."""
    return read_model(verbs.Args, {"reason": request.form.get("why", "").strip()[:LONGEST_REASON]}).reason


def refused(why: str) -> Problem:
    return Problem(422, "invalid_fields", why)


_NUMBER = re.compile(r"[0-9]{1,20}")
_ROWS, _CONSUMERS_ON_A_PAGE, _MOST_FINISHED, _ENTRIES = 100, 200, 500, 30
#: Letters shown on a page, and their kinds on the overview.
_LETTERS, _GROUPS_OF_OVERVIEW, _HOUR_MS = 50, 5, 3_600_000
#: Seconds after which the search for matching letters ends for this page.
_LOOK_S = 0.05
#: Seconds of a core that a search of all tickets may take, and of one of the delayed messages.
_FIND_S = 0.6
_LONGEST_ID = 256
_ATTENTION = {"lost": 0, "revoked": 1, "draining": 2, "paused": 3}
#: The fields of a summary; one of another version may lack some.
_AUDITED = ("run", "started_ms", "seconds", "verdict", "pending", "executions", "unproven", "unproven_said", "findings")
_ODD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError)
_SEVERITIES = ("bad", "warn", "unknown", "ok")


def render_page(body: str, page: str, **more: Any) -> str:
    """Return a page: ``body`` in the frame of all pages, whose macros it uses. ``page``: its place in the menu."""
    return framed(body, page, **{name: api.seen(part) for name, part in more.items()})


def framed(body: str, page: str, **facts: Any) -> str:
    listed = {name: label for some in _NAV.values() for name, _, label, _ in some}
    return render_template("layout/base.html", body=body, page=page, **({"title": listed.get(page)} | facts))


@pages.get("/")
def overview() -> str:
    pulse = parts.overview.snapshot()
    groups = api.with_fields(parts.fields.add_to_groups, pulse["groups"])
    given_up = [group for group in pulse["letters"] if group.policy != HALT]
    facts = {"pulse": pulse | {"groups": groups}, "kinds": len(given_up)}
    now_ms, points = _points("1h")
    of_all = [(chart.totals([one], chart.BY_CONSUMER, chart.ALL) or [{}])[0] for one in points]
    facts["points"] = [one | {"wait_99": told.get("wait_99")} for one, told in zip(points, of_all, strict=True)]
    facts["by_name"] = {row["name"]: row for row in chart.totals(points[-1:], chart.BY_CONSUMER)}
    facts |= {"speed": of_all[-1] if of_all else {}, "consumers": parts.overview.consumers()}
    drawn = chart.draw(points, chart.SPANS["1h"], now_ms)[0] | {"title": "Last hour, per second"}
    facts["chart"] = drawn if points else None
    facts |= {"width": chart.WIDTH, "given_up": given_up[:_GROUPS_OF_OVERVIEW]}
    return render_page("system/overview.html", "overview", **facts)


@pages.get("/consumers/<name>")
def consumer(name: str) -> str:
    rows = api.consumer_shown(parts, parts.overview.consumers(), name)
    now_ms, points = _points("24h", name)
    starts = [ms for one in points for ms, what, text in one["marks"] if (what, text) == ("start", name)]
    of_name = next((row for row in chart.totals(points, chart.BY_CONSUMER) if row["name"] == name), None)
    facts = {"name": name, "rows": rows, "starts": starts[::-1], "day": of_name}
    drawn = chart.draw(points, chart.SPANS["24h"], now_ms, consumer=name) if of_name else []
    return render_page("operations/consumer.html", "consumers", title=name, drawn=drawn, width=chart.WIDTH, **facts)


@pages.get("/consumers")
def consumers() -> str:
    rows, name = parts.overview.consumers(), request.args.get("name", "")
    fitting = [row for row in rows if name in row["name"]]
    fitting.sort(key=lambda row: (_ATTENTION.get(row["state"], len(_ATTENTION)), row["incarnation"]))
    after = request.args.get("after", "")
    start = next((at + 1 for at, row in enumerate(fitting) if row["incarnation"] == after), 0)
    shown_rows = fitting[start : start + _CONSUMERS_ON_A_PAGE]
    following = shown_rows[-1]["incarnation"] if start + len(shown_rows) < len(fitting) else None
    facts = {"rows": shown_rows, "total": len(rows), "name": name, "following": following}
    return render_page("operations/consumers.html", "consumers", **facts)


# -- tickets


@pages.get("/tickets")
def tickets() -> str:
    if (named := request.args.get("id")) is not None:
        return _ticket_page(named)
    asked = request.args.get("q", "").strip()
    cursor = asked_place("cursor", _NUMBER.fullmatch) or "0"
    if asked:
        return _search(asked, cursor, _by_field())
    given, sort = asked_of(verbs.TicketAsk, request.args), request.args.get("sort", "")
    if sort not in ("", *ORDERS):
        raise refused(f"sort is one of {', '.join(ORDERS)}")
    if given.given or sort:
        found = parts.status.find(given.meant(api.sees_texts()), sort or "age", _ROWS, _FIND_S)
        facts = found | {"rows": _told(found["rows"]), "told": given.told("all tickets")}
        return render_page("tickets/tickets.html", "tickets", q="", given=given.model_dump() | {"sort": sort}, **facts)
    page = parts.status.tickets(cursor, _ROWS)
    # They are not in the index, so they come first.
    parked, is_all = parts.status.parked(_ROWS, until_s=now_s() + _LOOK_S / 2) if cursor == "0" else ([], True)
    facts = {"rows": _told([*parked, *page["tickets"]]), "more_parked": not is_all}
    facts |= {"cursor": page["cursor"], "given": given.model_dump() | {"sort": sort}}
    return render_page("tickets/tickets.html", "tickets", q="", **facts)


@pages.get("/tickets/<rest:ticket_id>")
def ticket(ticket_id: str) -> str:
    return _ticket_page(api.fitting(ticket_id))


@pages.get("/finished")
def finished() -> str:
    asked = {name: request.args.get(name, "").strip()[:_LONGEST_ID] for name in ("ticket", "handler")}
    before = asked_place("before")
    rows, older = parts.history.finished(asked["ticket"], asked["handler"], before)
    following = older and "/finished?" + urlencode({**asked, "before": older})
    facts = {"rows": rows[:_MOST_FINISHED], "number": len(rows), "asked": asked, "following": following}
    return render_page("tickets/finished.html", "finished", **facts)


@pages.get("/messages/<stream_id:message_id>")
def message(message_id: str) -> str:
    facts = api.message_facts(parts, message_id, asked_place("after") or None)
    return render_page("tickets/message.html", "tickets", title=message_id, message_state=facts["state"], **facts)


def _by_field() -> dict[str, Any]:
    given, cursor = api.query_bytes("q"), request.args.get("at")
    name, equals, value = given.lstrip().partition(b"=")
    if not equals or not name.strip():
        return {}
    field, address = name.strip().decode("utf-8", "surrogateescape"), f"/tickets?q={quote(given, safe='')}"
    told = value.decode("utf-8", "backslashreplace")
    facts: dict[str, Any] = {"field": field, "value": told, "is_text": told.encode() == value, "goes_on": cursor}
    if api.sees_texts():
        found = api.find_messages(parts.fields, field, value, cursor)
        facts |= {"found": found, "further": found["cursor"] and f"{address}&at={found['cursor']}"}
    return facts


def _search(asked: str, cursor: str, by_field: dict[str, Any]) -> str:
    is_longer = len(asked.encode()) > _LONGEST_ID
    if is_longer and not by_field:
        raise refused(f"ids have at most {_LONGEST_ID} bytes")
    if is_longer or by_field.get("goes_on"):
        return render_page("tickets/tickets.html", "tickets", q=asked, by_field=by_field, only_field=True)
    found = parts.status.tickets(cursor, _ROWS, asked)
    letters, more = parts.letters.newest(LetterFilter(asked.encode()), None, 20, _LOOK_S)
    facts: dict[str, Any] = {"letters": [letter.row() for letter in letters], "more_letters": more is not None}
    if is_id(asked):
        letter = parts.letters.of_message(asked.encode())
        facts |= {"by_id": parts.history.message(asked), "letter": letter and letter.row(), "is_id": True}
    facts |= {"q": asked, "exact": parts.status.ticket(asked), "by_field": by_field}
    facts |= {"rows": _told(found["tickets"]), "cursor": found["cursor"]}
    return render_page("tickets/tickets.html", "tickets", **facts)


def _ticket_page(ticket_id: str) -> str:
    if not 0 < len(ticket_id.encode()) <= _LONGEST_ID:
        raise refused(f"a ticket id has 1 to {_LONGEST_ID} bytes")
    try:
        explained = parts.explain(ticket_id)
        owner, known = explained["owner"], [entry["id"] for entry in explained["entries"]]
        held = (owner["incarnation"], explained["fence"]) if owner and explained["fence"] else None
        timeline = parts.history.timeline(ticket_id, request.args.get("back"), known, held)
    except ValueError:
        raise refused("back is not one from a page") from None
    entries = [one | {"sent_ms": formatting.sent_ms({"message_ids": [one["id"]]})} for one in explained["entries"]]
    shown = api.with_fields(lambda some: parts.fields.add(some, lambda row: row["id"]), entries[:_ENTRIES])
    facts: dict[str, Any] = {"entries": shown, "more_entries": max(0, len(entries) - _ENTRIES)}
    facts["orders"] = parts.offers(explained)
    letter = explained["dead_letter"] or explained["last_dead_letter"]
    facts["traces"] = parts.fields.traces([letter]) if letter and api.sees_texts() else {}
    facts |= {"bar": BAR, "timeline": timeline, "explained": explained}
    facts |= {"title": formatting.visible(ticket_id, 60), "ticket_id": ticket_id}
    return render_page("tickets/ticket.html", "tickets", **facts)


def _told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return api.with_fields(parts.fields.add_to_tickets, [row | {"sent_ms": formatting.sent_ms(row)} for row in rows])


# -- dead letters


@pages.get("/dead-letters")
def letters() -> str:
    asked = asked_of(verbs.LetterAsk, request.args)
    wanted, given = asked.meant(api.sees_texts()), asked.given
    cursor = asked_place("before") or None
    found = parts.letters.newest(wanted, cursor and cursor.encode(), _LETTERS, _LOOK_S)
    counts = parts.letters.counts(*range((now_ms := parts.delayed.now_ms()) - 24 * _HOUR_MS, now_ms, _HOUR_MS))
    groups = [group for group in counts.groups if wanted.meets(group)]
    hours = [(sum(some),) for some in zip(*(reversed(group.times) for group in groups), strict=True)]
    facts: dict[str, Any] = {"groups": groups, "wrong": counts.wrong, "hours": hours, "asked": given}
    facts |= {"told": asked.told(""), "jobs": parts.bulk.jobs[:5], "also": also_for(parts.letters.other_groups())}
    following = found.cursor and "/dead-letters?" + urlencode({**given, "before": found.cursor.decode()})
    rows = api.with_fields(parts.fields.add_to_letters, [one.row() for one in found.letters])
    facts["traces"] = parts.fields.traces(rows) if api.sees_texts() else {}
    return render_page("letters/letters.html", "dead-letters", rows=rows, next_page=following, **facts)


@pages.get("/dead-letters/<stream_id:letter_id>")
def letter(letter_id: str) -> str:
    if (found := parts.letters.get(letter_id.encode())) is None:
        raise Problem(404, "unknown_dead_letter", "no dead letter has that id; it may have been redriven or dropped")
    told = found[0].whole(found[1])
    fields = told["message_fields"] if g.role.may(Role.OPERATOR) else []
    flat, field, hidden = found[1], parts.letters.ticket_field, [b"uid", b"usher_from", b"usher_ticket"]
    hidden += [field] * (ticket_value(flat, field) == found[0].ticket)
    pairs = dict(zip(flat[-2::-2], flat[::-2], strict=True)) if fields else {}  # the first of a name counts
    shown = {name: value for name, value in reversed(pairs.items()) if name not in hidden}
    texts = [(verbs.editable(name), verbs.editable(value)) for name, value in shown.items()]
    facts: dict[str, Any] = {"texts": [pair for pair in texts if None not in pair]}
    facts |= {"letter": told, "fields": fields, "also": also_for(parts.letters.other_groups())}
    return render_page("letters/letter.html", "dead-letters", title=f"Dead letter {letter_id}", **facts)


@pages.get("/dead-letters/jobs/<job_id>")
def job(job_id: str) -> str:
    found = bulk_job(job_id)
    return job_page(found.verb, job=found)


def bulk_job(job_id: str) -> verbs.BulkJob:
    job = parts.bulk.job(job_id)
    if job is None:
        why = "this master does not know that bulk action; another one may run it, or this one has restarted since"
        raise Problem(404, "unknown_job", why)
    return job


def preview_page(verb: verbs.Verb, found: verbs.DryRun, told: str, hidden: list[tuple[str, Any]]) -> str:
    """``hidden``: what the form of the preview says again."""
    room = MOST_RULES - len(parts.rules.read().rules) if verb.word == "pause" else None
    facts = {"count": found.preview.count, "groups": found.preview.groups[:50], "is_all": found.is_all}
    facts |= {"until": found.until.decode(), "due_ms": dict(hidden).get("due_ms")}
    also = also_for(parts.letters.other_groups())
    return job_page(verb, told=told, hidden=hidden, room=room, also=also, **facts)


def job_page(verb: verbs.Verb, **facts: Any) -> str:
    assert verb.shelf is not None
    title, shelf = f"{verb.label}: {verb.shelf.noun}s", verb.shelf
    return render_page("letters/job.html", shelf.path[1:], title=title, verb=verb, shelf=shelf, **facts)


# -- delayed messages


@pages.get("/delayed")
def delayed() -> str:
    asked, after = asked_of(verbs.DelayedAsk, request.args), request.args.get("after") or None
    try:
        page = parts.delayed.page(after, _ROWS, asked.ticket or "", _FIND_S)
    except ValueError:
        raise refused("after is not one from a page") from None
    following = page.cursor and "?" + urlencode({**asked.given, "after": page.cursor})
    facts: dict[str, Any] = {"rows": [api.shown(row) for row in page.rows], "following": following}
    facts |= parts.delayed.counts()
    facts |= {"asked": asked.ticket or "", "is_first": after is None}
    facts["has_streams"] = any(row.stream for row in page.rows)
    return render_page("operations/delayed.html", "delayed", **facts)


# -- charts


@pages.get("/charts")
def charts() -> str:
    asked = request.args
    span, of = asked.get("span", "1h"), {name: asked.get(name, "") for name in ("consumer", "tenant", "source")}
    if span not in chart.SPANS or max(map(len, of.values())) > _LONGEST_ID:
        raise refused("the span must be 1h or 24h")
    now_ms, points = _points(span, of["consumer"])
    facts: dict[str, Any] = {"spans": chart.SPANS, "span": span, "of": of}
    facts |= {"drawn": chart.draw(points, chart.SPANS[span], now_ms, **of)}
    facts |= {
        "by": {"Consumer": chart.totals(points, chart.BY_CONSUMER), "Source": chart.totals(points, chart.BY_SOURCE)}
    }
    facts |= {"by_tenant": chart.turns(points), "names": chart.NAMES}
    facts |= {"in_part": sum(one["in_part"] for one in points), "points": len(points), "has_points": bool(points)}
    return render_page("system/charts.html", "charts", width=chart.WIDTH, **facts)


def _points(name: str, consumer: str = "") -> tuple[int, list[dict[str, Any]]]:
    """Return the end of the present step in ms, so that a chart changes once in a step, and the points up to then, with
    how many letters that are still there were written in each. ``consumer``: whose starts are told alone."""
    span = chart.SPANS[name]
    now_ms, points = chart.read_points(parts.link, parts.keys, span)
    now_ms += -now_ms % span.step_ms
    steps = range(now_ms - span.length_ms - span.step_ms, now_ms, span.step_ms)
    groups = parts.letters.counts(*steps).groups
    letters = dict(zip(reversed(steps), map(sum, zip(*(group.times for group in groups), strict=True)), strict=False))
    for point in points:
        point["letters"] = letters.get(point["t"], 0)
        point["marks"] = [one for one in point["marks"] if one[1] != "start" or consumer in ("", one[2])]
    return now_ms, points


# -- the system


@pages.get("/streams")
def streams() -> str:
    asked, start = request.args.get("source", "")[:_LONGEST_ID], int(asked_place("from", _NUMBER.fullmatch) or 0)
    sources = parts.status.sources()
    rows, fitting = parts.status.source_rows(asked, start, _ROWS)
    end = start + len(rows)
    facts = {"rows": rows, "fitting": fitting, "start": start, "asked": asked, "sources": sources}
    facts |= {
        "following": end if end < fitting else None,
        "streams": [stream_row(parts.link, parts.keys, parts.retention)],
    }
    return render_page("operations/streams.html", "streams", pulse=parts.overview.snapshot(), **facts)


@pages.get("/audit")
def audit() -> str:
    odd, told = list[str](), parts.status.proofs()
    del told["until_ms"]
    told["audit"] = told["audit"] and dict.fromkeys(_AUDITED) | told["audit"]
    for name, one in told.items():
        try:
            render_page("system/audit.html", "audit", odd=odd, **dict.fromkeys(told) | {name: one})
        except _ODD:  # another version of Usher stored it
            odd.append(name)
    return render_page("system/audit.html", "audit", odd=odd, **told | dict.fromkeys(odd))


@pages.get("/doctor")
def doctor() -> str:
    found = parts.doctor()
    findings = sorted(found["findings"], key=lambda one: _SEVERITIES.index(one["severity"]))
    return render_page("system/doctor.html", "doctor", doctor=found | {"findings": findings})


@pages.get("/rules")
def rules() -> str:
    groups = [[rule.shown() | {"bounds": rule.bounds} for rule in some] for some in alike(parts.rules.read().rules)]
    facts = {"stream": parts.keys.stream, "tenant": request.args.get("tenant", "")[:_LONGEST_ID]}
    return render_page("operations/rules.html", "rules", alike=groups, **facts)


@pages.get("/actions")
def actions() -> str:
    rows, cursor = parts.action_log.page(asked_place("before").encode() or None, _ROWS)
    return render_page("operations/actions.html", "actions", rows=rows, cursor=cursor)


_MOST_CHOSEN = 200
#: Seconds of a core that a dry run may take.
_COUNT_S = 1.0


def go(path: str, said: str) -> AnyResponse:
    """Lead to a page that says what was done."""
    there = urlsplit(local_path(path))
    kept = "&".join(part for part in there.query.split("&") if part and not part.startswith("said="))
    return redirect(f"{there.path}?{kept}{'&' * bool(kept)}said={_SAID.dumps(said[:_LONGEST])}", 303)


def _add_form(app: Flask, verb: verbs.Verb) -> None:
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
        places = {name: form.get(name, "") for name in verb.places}
        if not all(places.values()):
            raise refused(f"the form must have {', '.join(places)}")
        outcome = api.performed(parts, verb, args, **places)
        return go(formatting.ticket_url(given["ticket_id"]) if "ticket_id" in given else back, outcome.text)

    app.add_url_rule(verb.form, f"form {verb.name}", act, methods=["POST"])


def _add_bulk(app: Flask, shelf: verbs.Shelf) -> None:
    @needs(Role.OPERATOR)
    def bulk() -> AnyResponse | str:
        """Say what a verb would touch (``dry``), or do it: to those that are chosen at once, to all that fit by a job.
        The form of the preview says again what was asked."""
        form, verb = request.form, shelf.verbs.get(request.form.get("what", "").replace("_", "-"))
        if verb is None:
            raise refused(f"the field what must be one of {', '.join(shelf.verbs)}")
        asked, ids = asked_of(shelf.ask, form), _chosen_ids()
        if shelf is verbs.TICKETS and not asked.given:
            raise refused("give a state, a consumer or an error")
        if not (ids or form.get("all")) and (shelf is verbs.DELAYED or form.get("chosen")):
            raise refused("nothing was chosen: go back, and choose messages in the first column")
        wanted, told = shelf.meant(asked, api.sees_texts()), asked.told(f"all {shelf.noun}s")
        more: dict[str, Any] = {"due_ms": _due_ms()} if verb.args is verbs.MovedDelayed else {}
        if form.get("dry"):
            named, view = Preview(), api.acting_in(parts)
            named.add(shelf.named(view, ids))
            found = verbs.DryRun(named, b"", True) if ids else shelf.dry_run(view, wanted, _COUNT_S)
            again = [("id", one) for one in ids] or [("all", "1"), *asked.given.items()]
            return preview_page(verb, found, told, [*again, *more.items()])
        why = read_why()
        if ids:
            outcome = api.performed(parts, verb, verb.args(ids=ids, reason=why, **more))  # type: ignore[call-arg]
            return go(shelf.path, outcome.text)
        until, count = form.get("until", ""), form.get("count", "")
        if not is_id(until) or not re.fullmatch("[0-9]{1,12}", count):
            raise refused("see the preview first")
        args = verb.args.model_construct(**more)
        job = parts.bulk.begin(verb, api.acting_in(parts, why), args, wanted, told, until.encode(), int(count))
        return redirect(f"/dead-letters/jobs/{job.id}", 303)

    app.add_url_rule(f"{shelf.path}/bulk", f"bulk {shelf.path}", bulk, methods=["POST"])


def _chosen_ids() -> list[str]:
    return [one for one in dict.fromkeys(request.form.getlist("id")) if is_id(one)][:_MOST_CHOSEN]


def _due_ms() -> int:
    """Return the time to which messages are to be moved; without scripts its form gives it in UTC."""
    given, text = request.form.get("due_ms", ""), request.form.get("at", "").strip()
    if not (given or text):
        raise refused("say when they are to be sent: give a time beside the button")
    try:
        due_ms = int(given) if _NUMBER.fullmatch(given) else moment_ms(text, lambda: datetime.UTC)
        check_due(due_ms, parts.delayed.now_ms())
    except ValueError as wrong:
        raise refused(str(wrong).replace("write e.g.", "write the time as")) from None
    return due_ms


@pages.post("/dead-letters/jobs/<job_id>/stop")
@needs(Role.OPERATOR)
def stop(job_id: str) -> AnyResponse:
    job, by = bulk_job(job_id), api.acting_in(parts, read_why()).by
    parts.bulk.stop_job(job)
    parts.action_log.note(OperatorAction(by, f"stop {job.what}", job.told), counted(job.outcomes.elements()))
    return go(f"/dead-letters/jobs/{job_id}", "Stopped; what was done stays done")


_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'self'; frame-ancestors 'none'"
)
#: The pages by what they are for: name, address, label, and what of the snapshot is counted beside it.
_NAV = {
    "Now": (("overview", "/", "Overview", "troubles"), ("charts", "/charts", "Charts", "")),
    "Work": (
        ("tickets", "/tickets", "Tickets", "tickets"),
        ("finished", "/finished", "Finished", ""),
        ("dead-letters", "/dead-letters", "Dead letters", "dead_letters"),
        ("delayed", "/delayed", "Delayed", "delayed"),
    ),
    "Fleet": (("consumers", "/consumers", "Consumers", "living"), ("streams", "/streams", "Streams", "")),
    "Control": (("rules", "/rules", "Rules", "rules"), ("actions", "/actions", "Actions", "")),
    "Trust": (("audit", "/audit", "Audit", ""), ("doctor", "/doctor", "Doctor", "")),
}
_COUNTED = {key for some in _NAV.values() for *_, key in some}
_LOGIN = "/login"


def add_pages(app: Flask, parts: api.Parts) -> None:
    app.extensions["usher_parts"] = parts
    app.register_blueprint(pages)
    for verb in verbs.VERBS.values():
        if verb.form:
            _add_form(app, verb)
    for shelf in (verbs.LETTERS, verbs.DELAYED, verbs.TICKETS):
        _add_bulk(app, shelf)
    guard: Doorman = app.extensions["usher_doorman"]
    guard.login_path = _LOGIN
    app.jinja_env.filters.update(formatting.FILTERS)
    known: dict[str, Any] = {"csrf_token": csrf_token, "csrf_name": CSRF_FIELD, "quoted": shlex.quote, "orders": ORDERS}
    known |= {name: getattr(formatting, name) for name in ("ticket_url", "message_url", "tried")}
    known |= {"spark_points": formatting.spark, "ticket_columns": formatting.TICKET_COLUMNS}
    known |= {"states": BY_NAME, "listed_states": LISTED}
    app.jinja_env.globals.update(known)
    app.jinja_env.globals["root"] = LocalProxy(lambda: request.script_root)
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True


@pages.after_app_request
def for_people(response: Response) -> Response:
    is_page = not request.path.startswith(("/api/", "/metrics", "/static/"))
    if response.mimetype == "application/problem+json" and is_page and "text/html" in request.headers.get("Accept", ""):
        problem = response.get_json()
        named = str(problem.get("title", "problem")).replace("_", " ").capitalize()
        facts = {"title": problem.get("status"), "problem": problem, "named": named}
        response.set_data(framed("layout/problem.html", "problem", **facts))
        response.mimetype = "text/html"
    if response.mimetype in ("text/html", "image/svg+xml"):
        response.headers["Content-Security-Policy"] = _POLICY
        # Not no-referrer: with that, browsers put null into Origin, by which auth.py recognizes our own forms.
        response.headers["Referrer-Policy"] = "same-origin"
        response.headers["X-Frame-Options"] = "DENY"
        response.headers["Cross-Origin-Opener-Policy"] = "same-origin"
    return response


@pages.get("/static/<name>")
@needs(Role.ANYBODY)
def file(name: str) -> Response:
    return send_from_directory(Path(__file__).parent / "static", name)  # by its digest, browsers know one again


@pages.route(_LOGIN, methods=["GET", "POST"])
@needs(Role.ANYBODY)
def login() -> AnyResponse | tuple[str, int]:
    wanted, is_sent = local_path(request.values.get("next", "/")), request.method == "POST"
    if not doorman().asks or (is_sent and doorman().sign_in(request.form.get("token", ""))):
        return redirect(wanted, 303)
    return framed("layout/login.html", "login", title="Sign in", next=wanted, wrong=is_sent), 403 if is_sent else 200


@pages.post("/logout")
@needs(Role.VIEWER)
def logout() -> AnyResponse:
    doorman().sign_out()
    return redirect(_LOGIN, 303)


@pages.app_context_processor
def _common() -> dict[str, Any]:
    role: Role = getattr(g, "role", Role.ANYBODY)
    may_look = role.may(Role.VIEWER)
    # Every page takes a snapshot, so that the counts beside the names of pages are up to date on all of them.
    pulse = parts.overview.snapshot() if may_look else {}
    found = [alarm for alarm in pulse.get("alarms", ()) if alarm["level"] != OK]
    number_of = len(found) + len(pulse.get("groups", ()))
    counted = {key: count for key, count in {**pulse, "troubles": number_of}.items() if key in _COUNTED and count}
    counts = {key: formatting.number(count) for key, count in counted.items()}
    is_ours, said = _SAID.loads_unsafe(request.args.get("said", ""))
    return {
        "may_look": may_look,
        "may_act": role.may(Role.OPERATOR),
        "shown_names": parts.fields.names if role.may(Role.OPERATOR) else (),
        "signed_in": may_look and bool(csrf_token()) and doorman().asks,
        "nav": [(group, [(*page, counts.get(key, "")) for *page, key in some]) for group, some in _NAV.items()],
        "troubles": number_of,
        "pulse": pulse,
        "now_ms": wall_ms(),
        "said": said if is_ours else "",
    }
