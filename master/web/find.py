"""``GET /api/find``: the messages with a value in a field, among what is unfinished and the dead letters. Any master
answers, from Redis; for operators, as what messages say is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import unquote_to_bytes

from flask import Blueprint, Response, request
from pydantic import BaseModel, ConfigDict, Field

from usher.common.http.app import answer, read_model, unprocessable
from usher.common.http.credentials import Role
from usher.common.http.fields import PageLimit
from usher.common.http.openapi import tells
from usher.common.protocol.message import LONGEST_NAME, check_field_name
from usher.master.messages.fields import LONGEST_VALUE, ROWS, FoundMessages
from usher.master.web.documents import Found
from usher.master.web.seen import sees_texts

_MOST_ON_A_PAGE = 200

Rows = list[dict[str, Any]]


class FieldsPort(Protocol):
    """The fields of messages, seen from HTTP (``usher.master.messages.fields.MessageFields``). Safe for many
    threads. All methods may raise RedisTrouble (503)."""

    def add_to_tickets(self, rows: Sequence[dict[str, Any]]) -> Rows: ...

    def add_to_letters(self, rows: Sequence[dict[str, Any]]) -> Rows: ...

    def find(self, field: str, value: bytes, cursor: str | None = None, most: int = ROWS) -> FoundMessages: ...


class _FindQuery(BaseModel):
    """A field and its value; the value may have any bytes, percent-encoded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    field: str = Field(min_length=1, max_length=LONGEST_NAME)
    value: str = Field(max_length=LONGEST_VALUE)
    cursor: str | None = Field(None, max_length=120)
    limit: PageLimit = ROWS


def find_routes(fields: FieldsPort) -> Blueprint:
    """Return the route."""
    api = Blueprint("find", __name__, url_prefix="/api")

    @api.get("/find")
    @tells(
        "Messages with a value in a field, unfinished or dead: a page, and how far the search came.",
        {200: Found},
        query=_FindQuery,
        role=Role.OPERATOR,
    )
    def find() -> Response:
        asked = read_model(_FindQuery, request.args.to_dict())
        found = find_messages(
            fields, asked.field, query_bytes("value"), asked.cursor, min(asked.limit, _MOST_ON_A_PAGE)
        )
        document = {"messages": found.rows, "looked_at": found.looked_at, "of": found.number}
        return answer(document | {"of_is_exact": found.is_exact, "cursor": found.cursor})

    return api


def find_messages(fields: FieldsPort, field: str, value: bytes, cursor: str | None, most: int = ROWS) -> FoundMessages:
    """Search. Raises Problem 422 for what cannot be looked for."""
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


def with_fields(add: Any, rows: Sequence[dict[str, Any]]) -> Rows:
    """Return rows with fields of their messages, ``add``ed for who may see what messages say."""
    return add(rows) if sees_texts() else list(rows)
