"""The lists of dead letters and of delayed messages. Any master answers, leader or standby; what is done with them are
verbs (``usher.master.verbs``)."""

from __future__ import annotations

from typing import Annotated, Any

from flask import Blueprint, Response, g
from pydantic import ConfigDict, Field

from usher.common.http.app import Problem, answer, read_query, unprocessable
from usher.common.http.credentials import Role
from usher.common.http.fields import PageLimit, StreamId
from usher.common.http.openapi import tells
from usher.master.operations.delayed_messages import DelayedRow
from usher.master.verbs.documents import DelayedList, Letters, WholeLetter
from usher.master.verbs.verbs import DelayedAsk, LetterAsk
from usher.master.web.parts import Parts
from usher.master.web.seen import seen, sees_texts, with_fields

_ON_A_PAGE, _MOST_ON_A_PAGE = 100, 200
#: Seconds that the search for the messages of one ticket may take.
_FIND_S = 0.5


class LetterQuery(LetterAsk):
    """The query of a list, in which every value is text."""

    model_config = ConfigDict(strict=False, frozen=True, extra="forbid")

    cursor: StreamId | None = None
    limit: PageLimit = _ON_A_PAGE


class _DelayedQuery(DelayedAsk):
    model_config = ConfigDict(strict=False, frozen=True, extra="forbid")

    cursor: Annotated[str, Field(max_length=80)] | None = None
    limit: PageLimit = _ON_A_PAGE


def shelf_routes(parts: Parts) -> Blueprint:
    api = Blueprint("shelves", __name__, url_prefix="/api")

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

    return api


def shown(row: DelayedRow) -> dict[str, Any]:
    """Return a row as the caller of the current request may see it: viewers do not see what messages say."""
    facts = row._asdict()
    del facts["cursor"]
    return facts | {"fields": [list(pair) for pair in row.fields] if g.role.may(Role.OPERATOR) else None}
