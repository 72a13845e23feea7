"""The routes of the delayed messages. Any master answers, leader or standby: only what is due needs a leader."""

from __future__ import annotations

from typing import Annotated, Any

from flask import Blueprint, Response, g
from pydantic import BaseModel, ConfigDict, Field

from usher.common.http.app import answer, read_json, read_query, unprocessable
from usher.common.http.credentials import Role
from usher.common.http.fields import OneLine, PageLimit, StreamId, TicketId
from usher.common.http.openapi import tells
from usher.common.sending.producer import LATEST_MS
from usher.master.operations.action_log import ActionLog, OperatorAction
from usher.master.operations.delayed_messages import (
    DROP,
    MOVE,
    SEND_NOW,
    DelayedRow,
    DelayedView,
    check_due,
    chosen_delayed,
)
from usher.master.policy.rules import LONGEST_REASON
from usher.master.web.api import by_caller
from usher.master.web.documents import DelayedList, DelayedOutcomes

_BODY = 32 * 1024
_ON_A_PAGE, _MOST_ON_A_PAGE, _MOST_IDS = 100, 200, 500
#: Seconds that the search for the messages of one ticket may take.
_FIND_S = 0.5


class _DelayedQuery(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    ticket: TicketId | None = None
    cursor: Annotated[str, Field(max_length=80)] | None = None
    limit: PageLimit = _ON_A_PAGE


class _ChosenDelayed(BaseModel):
    """The body of send and drop: ids of delayed messages."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    ids: list[StreamId] = Field(min_length=1, max_length=_MOST_IDS)
    reason: OneLine = Field("", max_length=LONGEST_REASON)


class _MovedDelayed(_ChosenDelayed):
    """The body of move."""

    due_ms: int = Field(ge=0, lt=LATEST_MS)


def delayed_routes(delayed: DelayedView, action_log: ActionLog) -> Blueprint:
    api = Blueprint("delayed", __name__, url_prefix="/api/delayed")

    @api.get("")
    @tells("A page of delayed messages, the earliest first.", {200: DelayedList}, query=_DelayedQuery)
    def list_delayed() -> Response:
        asked = read_query(_DelayedQuery)
        try:
            page = delayed.page(asked.cursor, min(asked.limit, _MOST_ON_A_PAGE), asked.ticket or "", _FIND_S)
        except ValueError as wrong:
            raise unprocessable([{"field": "cursor", "problem": str(wrong)}]) from None
        counts = {"waiting": delayed.waiting().messages, "unsorted": delayed.unsorted(), "time_ms": delayed.now_ms()}
        return answer({"delayed": [shown(row) for row in page.rows], "cursor": page.cursor} | counts)

    @api.post("/send")
    @tells(
        "Send delayed messages now: the leading master adds them to their stream at once.",
        {200: DelayedOutcomes},
        body=_ChosenDelayed,
    )
    def send() -> Response:
        return _change(delayed, action_log, SEND_NOW, read_json(_ChosenDelayed, _BODY))

    @api.post("/move")
    @tells(
        "Move delayed messages to another time, which is not over and at most ten years ahead.",
        {200: DelayedOutcomes},
        body=_MovedDelayed,
    )
    def move() -> Response:
        asked = read_json(_MovedDelayed, _BODY)
        checked_due(delayed, asked.due_ms)
        return _change(delayed, action_log, MOVE, asked, asked.due_ms)

    @api.post("/drop")
    @tells("Throw delayed messages away, for every group of the stream.", {200: DelayedOutcomes}, body=_ChosenDelayed)
    def drop() -> Response:
        return _change(delayed, action_log, DROP, read_json(_ChosenDelayed, _BODY))

    return api


def _change(
    delayed: DelayedView, action_log: ActionLog, what: str, asked: _ChosenDelayed, due_ms: int | None = None
) -> Response:
    ids = list(dict.fromkeys(asked.ids))
    action = OperatorAction(by_caller(asked.reason), what, chosen_delayed(len(ids), ids[0], due_ms))
    results = action_log.carry_out(action, delayed.change(what, ids, due_ms))
    return answer({"results": [{"id": one.id, "outcome": one.word} for one in results]})


def checked_due(delayed: DelayedView, due_ms: int) -> int:
    """Return a time to which messages may be moved now, by Redis' clock. Raises Problem 422, with a sentence."""
    try:
        check_due(due_ms, delayed.now_ms())
    except ValueError as refused:
        raise unprocessable([{"field": "due_ms", "problem": str(refused)}]) from None
    return due_ms


def shown(row: DelayedRow) -> dict[str, Any]:
    """Return a row as the caller of the current request may see it: viewers do not see what messages say."""
    facts = row._asdict()
    del facts["cursor"]
    return facts | {"fields": [list(pair) for pair in row.fields] if g.role.may(Role.OPERATOR) else None}
