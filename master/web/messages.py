"""``GET /api/messages/{id}``, and the facts of a message that its page shows too: from its entry and its executions to
its dead letter, and what is not known any more. ``GET /api/find``: the messages with a value in a field, among what is
unfinished and the dead letters; for operators, as what messages say is. Any master answers, from Redis."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote_to_bytes

from flask import Blueprint, Response, request
from pydantic import BaseModel, ConfigDict, Field

from usher.common.http.app import Problem, answer, read_query, unprocessable
from usher.common.http.credentials import Role
from usher.common.http.fields import PageLimit, StreamId
from usher.common.http.openapi import tells
from usher.common.protocol.message import LONGEST_NAME, check_field_name
from usher.master.messages.fields import LONGEST_VALUE, ROWS, FoundMessages, MessageFields
from usher.master.verbs.documents import ExecutionRow, Found, MessageShown
from usher.master.web.parts import Parts
from usher.master.web.seen import seen, sees_texts
from usher.master.web.shelves import shown

_MOST_ON_A_PAGE = 200
#: Of an execution, what belongs to the message that is asked for.
_OF_EXECUTIONS = tuple(ExecutionRow.__annotations__)


class _FindQuery(BaseModel):
    """A field and its value; the value may have any bytes, percent-encoded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    field: str = Field(min_length=1, max_length=LONGEST_NAME)
    value: str = Field(max_length=LONGEST_VALUE)
    cursor: str | None = Field(None, max_length=120)
    limit: PageLimit = ROWS


class _MessageQuery(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    cursor: StreamId | None = None


def message_routes(parts: Parts) -> Blueprint:
    api = Blueprint("messages", __name__, url_prefix="/api")

    @api.get("/find")
    @tells(
        "Messages with a value in a field, unfinished or dead: a page, and how far the search came.",
        {200: Found},
        query=_FindQuery,
        role=Role.OPERATOR,
    )
    def find() -> Response:
        asked = read_query(_FindQuery)
        most = min(asked.limit, _MOST_ON_A_PAGE)
        found = find_messages(parts.fields, asked.field, query_bytes("value"), asked.cursor, most)
        document = {"messages": found.rows, "looked_at": found.looked_at, "of": found.number}
        return answer(document | {"of_is_exact": found.is_exact, "cursor": found.cursor})

    @api.get("/messages/<stream_id:message_id>")
    @tells(
        "What is known of a message: where it is, its executions, error and dead letter; for operators what it says.",
        {200: MessageShown},
        query=_MessageQuery,
        problems={404: "unknown_message"},
    )
    def show(message_id: str) -> Response:
        cursor = read_query(_MessageQuery).cursor
        return answer(seen(_document(message_id, message_facts(parts, message_id, cursor))))

    return api


def find_messages(
    fields: MessageFields, field: str, value: bytes, cursor: str | None, most: int = ROWS
) -> FoundMessages:
    wrong = []
    try:
        check_field_name(field)
    except ValueError as why:
        wrong.append({"field": "field", "problem": str(why)})
    if len(value) > LONGEST_VALUE:
        wrong.append({"field": "value", "problem": f"at most {LONGEST_VALUE:,} bytes can be looked for"})
    if wrong:
        raise unprocessable(wrong)
    try:
        return fields.find(field, value, cursor, most)
    except ValueError:
        raise unprocessable([{"field": "cursor", "problem": "must be a cursor from an earlier answer"}]) from None


def query_bytes(name: str) -> bytes:
    """Return a value of the query as it was sent: Flask's own text has a question mark for bytes that are not UTF-8."""
    for part in request.query_string.split(b"&"):
        key, _, value = part.replace(b"+", b" ").partition(b"=")
        if unquote_to_bytes(key) == name.encode():
            return unquote_to_bytes(value)
    return b""


def message_facts(parts: Parts, message_id: str, after: str | None) -> dict[str, Any]:
    """Return what the caller may see of a message, but for the texts of errors (``seen``); of its executions those
    behind ``after``. Raises Problem 404 when nothing is known of it."""
    entry = parts.history.message(message_id)
    # Before the letters: what is given up is no longer pending in the step that writes its letter.
    standing = parts.history.standing(message_id, entry is not None)
    found_letter = parts.letters.of_message(message_id.encode())
    waiting = parts.delayed.chosen([message_id])
    runs = parts.history.executions(message_id, after, found_letter.runs if found_letter else ())
    letter = found_letter and found_letter.row()
    if not (entry or letter or waiting or standing or runs["runs"]) and runs["more"] is None:
        raise Problem(
            404,
            "unknown_message",
            "nothing is known of a message of that id: not in the stream, the delayed messages, the dead letters or the"
            " run log; it may have been trimmed",
        )
    delayed = shown(waiting[0]) if waiting else None
    found = [part.get("ticket_id") for part in (entry, letter, delayed, *runs["runs"][:1]) if part]
    ticket_id = next(filter(None, found), None)
    now = _now(parts, ticket_id, message_id) if entry and ticket_id else None
    fields = entry.pop("fields") if entry else None
    row = now and now["row"]
    state = "delayed" if delayed else row["state"] if row else "dead_letter" if letter else standing
    state = str(state or ("over" if entry else "gone"))
    facts = {"ticket_id": ticket_id, "entry": entry, "letter": letter}
    facts |= {"delayed": delayed, "runs": runs, "now": now, "fields": fields if sees_texts() else None}
    return facts | {"message_state": state} | parts.history.beside(message_id)


def _now(parts: Parts, ticket_id: str, message_id: str) -> dict[str, Any] | None:
    """Return what the explanation of its ticket says of an unfinished message, and the ticket's state; without one its
    ``state`` is "": it is done, or was given up."""
    try:
        explained = parts.explainer.explain(ticket_id).document()
    except ValueError:
        return None  # what is no ticket id
    row = next((one for one in explained["entries"] if one["id"] == message_id), None)
    facts = {"summary": explained["summary"], "owner": explained["owner"], "ticket_state": explained["state"]}
    is_first = bool(explained["entries"]) and explained["entries"][0]["id"] == message_id
    return facts | {"row": row, "is_first": is_first, "sentences": explained["sentences"]}


def _document(message_id: str, facts: dict[str, Any]) -> dict[str, Any]:
    entry, now, runs, noted = facts["entry"] or {}, facts["now"] or {}, facts["runs"], facts["noted"]
    told = {"message_id": message_id, "ticket_id": facts["ticket_id"], "state": facts["message_state"]}
    told |= {"bytes": entry.get("bytes"), "field_count": entry.get("field_count"), "fields": facts["fields"]}
    told |= {"sentences": now.get("sentences", []) if now.get("is_first") else [], "entry": now.get("row")}
    told |= {"delayed": facts["delayed"], "dead_letter": facts["letter"]}
    told |= {"executions": [{name: run[name] for name in _OF_EXECUTIONS if name in run} for run in runs["runs"]]}
    told |= {"cursor": runs["more"], "run_log_begins_ms": runs["begins_ms"], "executions_are_cut": runs["is_cut"]}
    told |= {"attempts": noted["attempts"]["starts"], "charged": noted["attempts"]["failures"]}
    told |= {"last_error": noted["last_error"], "traceback": noted["traceback"]}
    beside = ("sent_ms", "due_ms", "replay_of", "redriven_from", "again", "again_is_all")
    return told | {name: facts[name] for name in beside}
