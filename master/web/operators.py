"""The routes for operators: what they look at, and all verbs (``usher.master.verbs``). Any master answers, leader or
standby, from Redis. What messages say is for operators alone.

After a change of the rules is answered, nothing is handed over by the former ones; ``handed_over`` messages had been
before, and run to their end.
"""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

from flask import Blueprint, Response, g, request
from pydantic import BaseModel, ConfigDict, Field

from usher.common.http.app import Problem, answer, read_json, read_query, unprocessable
from usher.common.http.credentials import Role
from usher.common.http.fields import PageLimit, StreamId
from usher.common.http.openapi import tells
from usher.common.protocol.message import LONGEST_NAME, check_field_name
from usher.master.messages.fields import LONGEST_VALUE, ROWS, FoundMessages, MessageFields
from usher.master.operations.action_log import By
from usher.master.operations.delayed_messages import DelayedRow
from usher.master.operations.live_rules import TooManyRules
from usher.master.verbs.documents import (
    Actions,
    ConsumerShown,
    DelayedList,
    ExecutionRow,
    Explanation,
    Found,
    Letters,
    MessageShown,
    Rules,
    WholeLetter,
)
from usher.master.verbs.verbs import VERBS, Args, DelayedAsk, LetterAsk, NewOrder, OrderArgs, Outcome, Unfit, Verb
from usher.master.web.api import TicketQuery, read_ticket_id
from usher.master.web.parts import Parts, seen, sees_texts, with_fields

#: The most bytes of a body: 500 ids of letters fit.
BODY = 32 * 1024
_ON_A_PAGE, _MOST_ON_A_PAGE = 100, 200
#: Seconds that the search for the delayed messages of one ticket may take.
_FIND_S = 0.5
_EXPLAIN = b"/explain"
#: Of an execution, what belongs to the message that is asked for.
_OF_EXECUTIONS = tuple(ExecutionRow.__annotations__)


class _Page(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    cursor: StreamId | None = None
    limit: PageLimit = _ON_A_PAGE


class LetterQuery(LetterAsk):
    """The query of a list, in which every value is text."""

    model_config = ConfigDict(strict=False, frozen=True, extra="forbid")

    cursor: StreamId | None = None
    limit: PageLimit = _ON_A_PAGE


class _DelayedQuery(DelayedAsk):
    model_config = ConfigDict(strict=False, frozen=True, extra="forbid")

    cursor: Annotated[str, Field(max_length=80)] | None = None
    limit: PageLimit = _ON_A_PAGE


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


def operator_routes(parts: Parts) -> Blueprint:
    api = Blueprint("operators", __name__, url_prefix="/api")
    _add_shelves(api, parts)
    _add_messages(api, parts)

    @api.get("/tickets/<rest:ticket_id>/explain")
    @tells(
        "The reason why a ticket waits, and until when.",
        {200: Explanation},
        problems={422: "ticket ids have 1 to 256 bytes"},
    )
    def explain(ticket_id: str) -> Response:
        return answer(seen(parts.explainer.explain(read_ticket_id(_EXPLAIN))))

    @api.get("/explain")
    @tells(
        "The explanation of a ticket of any id: in a path, some ids may be taken for something else.",
        {200: Explanation},
        query=TicketQuery,
    )
    def explain_by_query() -> Response:
        return answer(seen(parts.explainer.explain(read_query(TicketQuery).id)))

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


def _add_shelves(api: Blueprint, parts: Parts) -> None:
    @api.get("/dead-letters")
    @tells("A page of dead letters, oldest first.", {200: Letters}, query=LetterQuery)
    def list_letters() -> Response:
        asked = read_query(LetterQuery)
        after = None if asked.cursor is None else asked.cursor.encode()
        page = parts.letters.page(asked.meant(sees_texts()), after, min(asked.limit, _MOST_ON_A_PAGE))
        rows = with_fields(parts.fields.add_to_letters, [letter.row() for letter in page.letters])
        return answer({"dead_letters": seen(rows), "cursor": None if page.cursor is None else page.cursor.decode()})

    @api.get("/dead-letters/<stream_id:letter_id>")
    @tells(
        "One dead letter; for operators with the text of its error, traceback and fields.",
        {200: WholeLetter},
        problems={404: "unknown_dead_letter"},
    )
    def show_letter(letter_id: str) -> Response:
        found = parts.letters.get(letter_id.encode())
        if found is None:
            raise Problem(404, "unknown_dead_letter", "no dead letter has that id")
        told = found[0].whole(found[1])
        return answer(told if sees_texts() else seen(told) | {"message_fields": None})

    @api.get("/delayed")
    @tells("A page of delayed messages, the earliest first.", {200: DelayedList}, query=_DelayedQuery)
    def list_delayed() -> Response:
        asked, delayed = read_query(_DelayedQuery), parts.delayed
        try:
            page = delayed.page(asked.cursor, min(asked.limit, _MOST_ON_A_PAGE), asked.ticket or "", _FIND_S)
        except ValueError as wrong:
            raise unprocessable([{"field": "cursor", "problem": str(wrong)}]) from None
        counts = {"waiting": delayed.waiting().messages, "unsorted": delayed.unsorted(), "time_ms": delayed.now_ms()}
        return answer({"delayed": [shown(row) for row in page.rows], "cursor": page.cursor} | counts)


def shown(row: DelayedRow) -> dict[str, Any]:
    """Return a row as the caller of the current request may see it: viewers do not see what messages say."""
    facts = row._asdict()
    del facts["cursor"]
    return facts | {"fields": [list(pair) for pair in row.fields] if g.role.may(Role.OPERATOR) else None}


def _add_messages(api: Blueprint, parts: Parts) -> None:
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
        explained = parts.explainer.explain(ticket_id)
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
        return verb.perform(acting_in(parts, args.reason), args, **places)
    except Unfit as unfit:
        raise unprocessable([{"field": unfit.field, "problem": str(unfit)}]) from None
    except TooManyRules as full:
        raise Problem(409, "too_many_rules", str(full)) from None


def acting_in(parts: Parts, reason: str = "") -> Parts:
    """Return what verbs act with for the sender of this request: the authenticated credential, as the guard of the
    application has put it into ``flask.g.who``."""
    return parts.acting(By(str(g.get("who", "operator")), "http", reason))
