"""The page of the delayed messages: the list, the preview of an action, and the action. Nothing is remembered between
them: the form of the preview says again what was chosen."""

from __future__ import annotations

import datetime
import re
import zoneinfo
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

from flask import Blueprint, request
from werkzeug.wrappers import Response as AnyResponse

from usher.common.base.clock import now_s
from usher.common.base.durations import moment_ms
from usher.common.base.text import pluralize
from usher.common.http.app import Problem, unprocessable
from usher.common.http.auth import needs
from usher.common.http.credentials import Role
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.protocol.stream_id import is_id, rank
from usher.common.sending.producer import LATEST_MS
from usher.master.insight.formatting import moment, number, visible
from usher.master.operations.delayed_messages import DROP, MOVE, SEND_NOW, DelayedRow, DelayedView, check_due
from usher.master.verbs.verbs import DELAYED, MovedDelayed
from usher.master.web.operations import performed
from usher.master.web.pages.forms import read_why, refused
from usher.master.web.pages.views import render_page
from usher.master.web.parts import Parts
from usher.master.web.shelves import shown

#: Messages on a page, chosen by hand, shown by a preview, and changed by one action on all that match.
_ROWS, _MOST_CHOSEN, _PREVIEWED, _MOST_AT_A_TIME = 100, 200, 50, 5_000
#: Seconds that a search for all that match may take.
_FIND_S = 1.0
_NOT_FOUND = "None was found in the time for a search: look further, and choose by hand"
_WHAT = {verb.noted: verb for verb in DELAYED.verbs.values()}
_ZONE = re.compile(r"[A-Za-z0-9_+-]{1,40}(?:/[A-Za-z0-9_+-]{1,40}){0,2}")
#: The zone of a form that means the master's own.
LOCAL = "local"


class _Choice(NamedTuple):
    """The messages that a form is about. ``of``: what was chosen, for people; ``is_all``: False when more match."""

    ids: list[str]
    rows: list[DelayedRow]
    ticket: str
    is_of_filter: bool
    is_all: bool = True


def delayed_views(parts: Parts) -> Blueprint:
    views = Blueprint("delayed_views", __name__)

    @views.get("/delayed")
    def delayed() -> str:
        ticket, after = request.args.get("ticket", ""), request.args.get("after") or None
        try:
            page = parts.delayed.page(after, _ROWS, _checked_ticket(ticket), _FIND_S)
        except ValueError:
            raise refused("after is not one from a page") from None
        following = page.cursor and "?" + urlencode({"ticket": ticket, "after": page.cursor})
        facts: dict[str, Any] = {"rows": [shown(row) for row in page.rows], "following": following, "asked": ticket}
        facts |= {"waiting": parts.delayed.waiting().messages, "unsorted": parts.delayed.unsorted()}
        facts |= {"local_zone": _local_zone(), "has_streams": any(row.stream for row in page.rows)}
        return render_page("operations/delayed.html", "delayed", is_first=after is None, **facts)

    return views


def add_delayed_actions(actions: Blueprint, parts: Parts, go: Callable[[str, str], AnyResponse]) -> None:

    @actions.post("/delayed/run")
    @needs(Role.OPERATOR)
    def run_delayed() -> AnyResponse | str:
        until, is_dry = parts.delayed.ordered_until(), bool(request.form.get("dry"))
        what, choice = _asked(parts.delayed)
        due_ms = _checked_due(parts.delayed, _asked_moment() if is_dry else _number("due_ms")) if what == MOVE else None
        if is_dry:
            rows = [shown(row) for row in choice.rows[:_PREVIEWED]]
            facts: dict[str, Any] = {"what": what, "verb": _WHAT[what].label, "due_ms": due_ms}
            facts["choice"] = choice._asdict()
            facts |= {"gone": len(choice.ids) - len(choice.rows), "of": _of(choice.rows), "rows": rows, "until": until}
            return render_page("operations/delayed.html", "delayed", is_dry=True, count=len(choice.rows), **facts)
        back = "/delayed" + (f"?{urlencode({'ticket': choice.ticket})}" if choice.ticket else "")
        if not choice.ids:
            return go(back, "Nothing was chosen, or what was chosen is gone" if choice.is_all else _NOT_FOUND)
        chosen: dict[str, Any] = {
            "ids": choice.ids,
            "reason": read_why(),
            "due_ms": due_ms or 0,
        }  # more ids than a body may name
        args = MovedDelayed.model_construct(**chosen)
        outcome = performed(parts, _WHAT[what], args)
        words = [one["outcome"] for one in outcome.document["results"]]
        return go(back, _told(what, due_ms, words, choice.is_all))


def _asked(delayed: DelayedView) -> tuple[str, _Choice]:
    form, what = request.form, request.form.get("what", "")
    if what not in _WHAT:
        raise refused(f"the field what must be one of {', '.join(_WHAT)}")
    ticket = _checked_ticket(form.get("ticket", ""))
    if form.get("all"):
        until = form.get("until", "")
        choice = _all_of(delayed, ticket, until if is_id(until) else "")
        if what == MOVE and not choice.is_all:  # those that are left would come before them, or between them
            raise Problem(
                422, "too_many", "more match than can be moved at once: choose a ticket, or `usher delayed move`"
            )
        return what, choice
    ids = [one for one in dict.fromkeys(form.getlist("id")) if is_id(one)][:_MOST_CHOSEN]
    if not ids:
        raise refused("nothing was chosen: go back, and choose messages in the first column")
    return what, _Choice(ids, delayed.chosen(ids), ticket, is_of_filter=False)


def _all_of(delayed: DelayedView, ticket: str, until: str) -> _Choice:
    """Find all messages that are in order, of a ticket or of all, as many as one action changes. ``until``: an
    id below those that came after its preview."""
    rows, cursor, ends_s = list[DelayedRow](), None, now_s() + _FIND_S
    while True:
        page = delayed.page(cursor, 200, ticket, ends_s - now_s())
        rows += [row for row in page.rows if not until or rank(row.id.encode()) <= rank(until.encode())]
        cursor = page.cursor
        if cursor is None or len(rows) >= _MOST_AT_A_TIME or now_s() > ends_s:
            break
    is_all = cursor is None and len(rows) <= _MOST_AT_A_TIME
    rows = rows[:_MOST_AT_A_TIME]
    return _Choice([row.id for row in rows], rows, ticket, True, is_all)


def _checked_ticket(ticket: str) -> str:
    if len(ticket.encode()) > 3 * LONGEST_TICKET:
        raise refused("no ticket has an id of that length")
    return ticket


def _of(rows: Sequence[DelayedRow]) -> str:
    tickets = list(dict.fromkeys(row.ticket_id for row in rows))
    if len(tickets) > 3:
        return f"{number(len(tickets))} tickets"
    named = ", ".join(visible(one, 60) or "(none)" for one in tickets)
    return f"ticket {named}" if len(tickets) == 1 else f"tickets {named}"


def _told(what: str, due_ms: int | None, words: Sequence[str], is_all: bool) -> str:
    done = sum(word in DELAYED.good for word in words)
    told = {SEND_NOW: "to be sent now", MOVE: f"moved to {moment(due_ms)} UTC", DROP: "dropped"}[what]
    said = [f"{pluralize(done, 'message')} {told}"]
    left = [word for word in DELAYED.means if word not in DELAYED.good and word in words]
    said += [f"{words.count(word):,} {DELAYED.means[word]}" for word in left]
    return "; ".join(said + ([] if is_all else ["more match: ask again for the rest"]))


# -- times


def _checked_due(delayed: DelayedView, due_ms: int) -> int:
    """Return a time to which messages may be moved now, by Redis' clock. Raises Problem 422, with a sentence."""
    try:
        check_due(due_ms, delayed.now_ms())
    except ValueError as refused:
        raise _wrong(str(refused)) from None
    return due_ms


def _asked_moment() -> int:
    text, zone = request.form.get("at", "").strip(), request.form.get("zone", "")
    if not text:
        raise _wrong("say when they are to be sent: give a time beside the button")
    try:
        return moment_ms(text, None if zone == LOCAL else lambda: _zone(zone))
    except ValueError as wrong:
        raise _wrong(str(wrong).replace("write e.g.", "write the time as")) from None


def _zone(name: str) -> datetime.tzinfo:
    if name == "UTC":
        return datetime.UTC
    try:
        if not _ZONE.fullmatch(name):
            raise ValueError
        return zoneinfo.ZoneInfo(name)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        raise _wrong("this master does not know the zone of the time: choose UTC") from None


def _local_zone() -> str:
    here = datetime.datetime.now().astimezone()
    return f"{here:%Z} (now UTC{here:%:z})" if here.utcoffset() else ""


def _number(name: str) -> int:
    text = request.form.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(LATEST_MS))):
        raise _wrong("the time is missing: go back to the list")
    return int(text)


def _wrong(sentence: str) -> Problem:
    return unprocessable([{"field": "at", "problem": sentence}])
