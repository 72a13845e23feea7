"""The routes of the dead letters. Any master answers, leader or standby: the steps behind them need no leader."""

from __future__ import annotations

import time
from typing import Annotated, Any

from flask import Blueprint, Response, g
from pydantic import BaseModel, ConfigDict, Field, model_validator

from usher.common.http.app import Problem, answer, read_json, read_query
from usher.common.http.credentials import Role
from usher.common.http.fields import OneLine, PageLimit, StreamId, TicketId
from usher.common.http.openapi import tells
from usher.master.messages.fields import MessageFields
from usher.master.operations.action_log import ActionLog, OperatorAction, chosen_letters
from usher.master.operations.dead_letters import AT_ONCE, DeadLetters, LetterResult
from usher.master.policy.letters import DeadLetter, LetterFilter
from usher.master.policy.rules import LONGEST_REASON
from usher.master.web.api import by_caller
from usher.master.web.documents import LetterOutcomes, Letters, WholeLetter
from usher.master.web.seen import seen, sees_texts, with_fields

BODY = 32 * 1024
_ON_A_PAGE, _MOST_ON_A_PAGE = 100, 200
_MOST_IDS = 500


_Age = Annotated[float, Field(ge=0, le=10**9, allow_inf_nan=False)]


class _Filter(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    ticket: TicketId | None = None
    reason: str = Field("", max_length=200)
    error: str = Field("", max_length=200)
    id: StreamId | None = None
    older_than_s: _Age | None = None
    younger_than_s: _Age | None = None
    policy: Annotated[str, Field(pattern="^(skip|halt)?$")] = ""
    group: Annotated[str, Field(pattern="^([0-9a-f]{12}|others)?$")] = ""

    def meant(self) -> LetterFilter:
        now_ms = time.time_ns() // 1_000_000
        return LetterFilter(
            None if self.ticket is None else self.ticket.encode(),
            self.reason,
            self.error,
            None if self.id is None else self.id.encode(),
            None if self.younger_than_s is None else now_ms - int(self.younger_than_s * 1000),
            None if self.older_than_s is None else now_ms - int(self.older_than_s * 1000),
            self.policy,
            sees_texts(),
            self.group,
        )


class LetterQuery(_Filter):
    """The query of a list, in which every value is text."""

    model_config = ConfigDict(strict=False, frozen=True, extra="forbid")

    cursor: StreamId | None = None
    limit: PageLimit = _ON_A_PAGE


class _Chosen(BaseModel):
    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        json_schema_extra={
            "oneOf": [
                {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in ("ids", "filter")
            ]
        },
    )

    ids: list[StreamId] | None = Field(None, min_length=1, max_length=_MOST_IDS)
    filter: _Filter | None = None
    limit: int = Field(AT_ONCE, ge=1, le=_MOST_IDS)
    cursor: StreamId | None = None
    reason: OneLine = Field("", max_length=LONGEST_REASON)

    @model_validator(mode="after")
    def _one_of_both(self) -> _Chosen:
        if (self.ids is None) == (self.filter is None):
            raise ValueError("give either ids or filter")
        return self


def letter_routes(letters: DeadLetters, action_log: ActionLog, fields: MessageFields | None = None) -> Blueprint:
    """Return ``/api/dead-letters`` and the routes below it. ``action_log``: takes each redrive and drop; ``fields``
    adds those of the messages."""
    api = Blueprint("dead_letters", __name__, url_prefix="/api/dead-letters")

    @api.get("")
    @tells("A page of dead letters, oldest first.", {200: Letters}, query=LetterQuery)
    def list_letters() -> Response:
        asked = read_query(LetterQuery)
        page = letters.page(asked.meant(), _bytes(asked.cursor), min(asked.limit, _MOST_ON_A_PAGE))
        rows = [letter.row() for letter in page.letters]
        rows = rows if fields is None else with_fields(fields.add_to_letters, rows)
        return answer({"dead_letters": seen(rows), "cursor": _decode_optional(page.cursor)})

    @api.get("/<stream_id:letter_id>")
    @tells(
        "One dead letter; for operators with the text of its error, traceback and fields.",
        {200: WholeLetter},
        problems={404: "unknown_dead_letter"},
    )
    def show(letter_id: str) -> Response:
        found = letters.get(letter_id.encode())
        if found is None:
            raise Problem(404, "unknown_dead_letter", "no dead letter has that id")
        return answer(_whole(*found))

    @api.post("/redrive")
    @tells(
        "Turn dead letters into messages again; what is added to the stream is new to its other groups too.",
        {200: LetterOutcomes},
        body=_Chosen,
    )
    def redrive() -> Response:
        return _change(letters, "redrive", action_log)

    @api.post("/drop")
    @tells(
        "Throw dead letters away; a ticket that waits for one goes on without it.", {200: LetterOutcomes}, body=_Chosen
    )
    def drop() -> Response:
        return _change(letters, "drop", action_log)

    return api


def _change(letters: DeadLetters, what: str, action_log: ActionLog) -> Response:
    chosen = read_json(_Chosen, BODY)
    cursor = None
    if chosen.ids is not None:
        ids = [letter_id.encode() for letter_id in dict.fromkeys(chosen.ids)]
    else:
        assert chosen.filter is not None
        # A message that is redriven and given up again meanwhile is not met: its new letter is above this last id.
        page = letters.page(chosen.filter.meant(), _bytes(chosen.cursor), chosen.limit, letters.last_id())
        ids, cursor = [letter.id for letter in page.letters], page.cursor
    others = letters.other_groups() if what == "redrive" else []  # before: an error here must not hide what was done
    action = OperatorAction(by_caller(chosen.reason), what, chosen_letters(ids))
    outcomes = action_log.carry_out(action, letters.change(what, ids))
    added = any(outcome.word == "added" for outcome in outcomes)
    return answer(
        {
            "results": [_letter_result_document(outcome) for outcome in outcomes],
            "cursor": _decode_optional(cursor),
            "other_groups": others if added else [],
        }
    )


def _whole(letter: DeadLetter, fields: list[bytes]) -> dict[str, Any]:
    told = letter.whole(fields)
    return told if g.role.may(Role.OPERATOR) else seen(told) | {"message_fields": None}


def _letter_result_document(outcome: LetterResult) -> dict[str, Any]:
    told = {"id": outcome.id.decode(), "outcome": outcome.word}
    return told | {"message_id": outcome.message_id.decode()} if outcome.message_id else told


def _bytes(value: str | None) -> bytes | None:
    return None if value is None else value.encode()


def _decode_optional(value: bytes | None) -> str | None:
    return None if value is None else value.decode()
