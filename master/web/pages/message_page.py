"""The page of one message: what is known of it, from its entry and its executions to its dead letter, and what is not
known any more."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, g, request

from usher.common.http.app import Problem
from usher.common.http.credentials import Role
from usher.common.protocol.stream_id import is_id
from usher.master.web.delayed import shown
from usher.master.web.pages.port import PagePort
from usher.master.web.pages.views import render_page

#: Seconds that the search for its dead letter may take.
_LOOK_S = 0.05


def message_views(port: PagePort) -> Blueprint:
    """Return the page of a message."""
    views = Blueprint("message_views", __name__)

    @views.get("/messages/<message_id>")
    def message(message_id: str) -> str:
        if not is_id(message_id):
            raise Problem(404, "unknown_message", "no message has an id of that form")
        after = request.args.get("after") or None
        if after is not None and not is_id(after):
            raise Problem(422, "invalid_fields", "after is not one from a page")
        return _message_page(port, message_id, after)

    return views


def _message_page(port: PagePort, message_id: str, after: str | None) -> str:
    entry, letters = port.story.message(message_id), port.letters.where("id", message_id.encode(), 1, _LOOK_S)
    delayed, runs = port.delayed.chosen([message_id]), port.story.executions(message_id, after)
    letter = letters.letters[0].row() if letters.letters else None
    if entry is None and letter is None and not delayed and not runs.runs and runs.more is None:
        raise Problem(
            404,
            "unknown_message",
            "nothing is known of a message of that id: not in the stream, the delayed messages, the dead letters or the"
            " run log; it may have been trimmed",
        )
    tickets = [(entry or {}).get("ticket_id"), (letter or {}).get("ticket_id")]
    tickets += [*(row.ticket_id for row in delayed), *(run["ticket_id"] for run in runs.runs[:1])]
    ticket_id = next(filter(None, tickets), None)
    facts: dict[str, Any] = {"ticket_id": ticket_id, "entry": entry, "letter": letter, "runs": runs._asdict()}
    facts |= {"delayed": [shown(row) for row in delayed], "all_letters": letters.cursor is None}
    facts |= {"now": _now(port, ticket_id, message_id) if entry and ticket_id else None}
    facts |= port.story.beside(message_id)
    fields = entry["fields"] if entry is not None and g.role.may(Role.OPERATOR) else []
    return render_page("tickets/message.html", "tickets", message_id=message_id, fields=fields, **facts)


def _now(port: PagePort, ticket_id: str, message_id: str) -> dict[str, Any] | None:
    """Return what the explanation of its ticket says of an unfinished message, and the ticket's state; without one its
    ``state`` is "": it is done, or was given up."""
    try:
        explained = port.operations.explain(ticket_id)
    except ValueError:
        return None  # what is no ticket id
    row = next((one for one in explained["entries"] if one["id"] == message_id), None)
    facts = {"summary": explained["summary"], "owner": explained["owner"], "ticket_state": explained["state"]}
    is_first = bool(explained["entries"]) and explained["entries"][0]["id"] == message_id
    all_named = len(explained["entries"]) >= explained["in_processing"] + explained["parked"] + explained["unread"]
    is_exact = all_named and explained["parked_is_exact"] and explained["unread_is_exact"]
    return facts | {"row": row, "is_first": is_first, "is_exact": is_exact, "sentences": explained["sentences"]}
