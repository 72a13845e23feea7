"""Turn rows of the outbox into messages, or name why a row cannot become one; values of applications into JSON, whole
or not at all; and read the .sql files of this folder: named queries, and the tables, a template. Needs no SQLAlchemy.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import re
from collections.abc import Iterable
from importlib import resources
from typing import Any, NamedTuple

import jinja2
import orjson

from usher.common.base.errors import MessageUndecodable
from usher.common.protocol.message import check_ticket

#: Longest uid: as long as a ticket id may be, because it travels as far.
LONGEST_UID = 256
#: Bytes after which a batch ends, with the row that goes beyond.
BATCH_BYTES = 4 * 1024 * 1024
#: Largest row, all its columns together: a larger one fails where it is written.
ROW_BYTES = 16 * 1024 * 1024
#: Fields of a message after the ticket's, whose name is a setting.
FIELDS = ("uid", "action", "object", "data")
_WAYS_OUT = (
    "give str(value) of a value with a text of its own, model.model_dump(mode='json') for a pydantic model, a dict or a"
    " list for the rest"
)


class Row(NamedTuple):
    """A staged record as the database gives it; in SQLite any type may turn up."""

    id: int
    uid: Any
    ticket_id: Any
    action: Any
    object: Any
    data: Any

    @property
    def size(self) -> int:
        return sum(len(value) if isinstance(value, (str, bytes)) else len(str(value)) for value in self)


class Refusal(NamedTuple):
    """A row that can become no message, and why. ``halts``: later rows of its ticket wait for it."""

    id: int
    reason: str
    halts: bool


class RefusedRow(NamedTuple):
    id: int
    reason: str
    at: str
    halts: bool


class TicketRows(NamedTuple):
    """A ticket's rows in the outbox: how many are staged, the first one and since when, and the refused ones."""

    staged: int
    first_id: int | None
    since: str
    refused: tuple[RefusedRow, ...]


class OutboxBatch(NamedTuple):
    """A batch of messages. ``values``: for each message ticket, uid, action, object, data. ``names``: id and uid of
    their rows."""

    names: list[tuple[int, str]]
    values: list[bytes]
    refused: list[Refusal]


def encode(rows: Iterable[Row], halts: bool = False) -> OutboxBatch:
    """Encode all rows of a batch, except those that wait behind a refused one of their ticket (``halts``). Reasons for
    a refusal: those of ``check_ticket``, ``empty_uid``, ``uid_too_long``, ``<column>_not_utf8``.

    >>> encode([Row(7, "u", "42", "create", "ride", "{}"), Row(8, "v", "", "create", "ride", "{}")]).refused
    [Refusal(id=8, reason='empty_ticket_id', halts=False)]
    """
    batch = OutboxBatch([], [], [])
    halted: set[Any] = set()
    for row in rows:
        if row.ticket_id in halted:
            continue
        holds = False
        try:
            ticket = check_ticket(_bytes("ticket_id", row.ticket_id))
            holds = halts
            uid = check_uid(_bytes("uid", row.uid))
            values = ticket, uid, *(_bytes(name, getattr(row, name)) for name in FIELDS[1:])
        except MessageUndecodable as why:
            batch.refused.append(Refusal(row.id, why.reason, holds))
            if holds:
                halted.add(row.ticket_id)
        else:
            batch.names.append((row.id, uid.decode()))
            batch.values.extend(values)
    return batch


def check_uid(uid: bytes) -> bytes:
    if not uid:
        raise MessageUndecodable("empty_uid")
    if len(uid) > LONGEST_UID:
        raise MessageUndecodable("uid_too_long")
    return uid


def _bytes(column: str, value: Any) -> bytes:
    """Encode a value as UTF-8. SQLite gives text that is not UTF-8 as surrogates (store.py), and numbers and blobs
    where a program wrote them."""
    try:
        if isinstance(value, bytes):
            value.decode()
            return value
        return str(value).encode()
    except UnicodeError:
        raise MessageUndecodable(f"{column}_not_utf8") from None


def as_json(name: str, value: Any) -> bytes:
    """Return ``value`` as orjson encodes it. Raises TypeError, with a way out, for what it cannot encode, and
    ValueError for NaN and Infinity: JSON has neither, and orjson would write null in silence.

    >>> as_json("data", {"total": 1.5, "note": None})
    b'{"total":1.5,"note":null}'
    """
    try:
        encoded = orjson.dumps(value)
    except TypeError as refused:
        if "serializable" not in str(refused):
            raise
        raise TypeError(f"{name}: {refused}: {_WAYS_OUT}") from refused
    if b"null" in encoded:
        try:
            json.dumps(value, allow_nan=False, default=_plain)
        except ValueError:
            raise ValueError(f"{name} has a NaN or an infinity, which JSON cannot say: give None, or a text") from None
    return encoded


def _plain(value: Any) -> Any:
    """Return what orjson encodes of a value that Python's encoder does not know."""
    if dataclasses.is_dataclass(value):
        names = getattr(value, "__dict__", None) or [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name, None) for name in names if not name.startswith("_")}
    return value.value if isinstance(value, enum.Enum) else str(value)


DIALECTS = ("sqlite", "postgresql", "mysql")

_NAME = re.compile(r"^-- name: (\w+)(?: \[([\w, ]+)\])?$")


@functools.cache
def queries(dialect: str) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in _read("queries.sql").splitlines():
        heading = _NAME.match(line)
        if heading:
            lines = []
            if heading[2] is None or dialect in heading[2].split(", "):
                found[heading[1]] = lines
        elif not line.startswith("--"):
            lines.append(line)
    return {name: "\n".join(lines).strip().rstrip(";") for name, lines in found.items()}


def schema(dialect: str) -> str:
    template = jinja2.Template(_read("schema.sql"), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return template.render(dialect=dialect, row_bytes=ROW_BYTES)


def _read(name: str) -> str:
    return (resources.files("usher.common") / "outbox" / name).read_text(encoding="utf-8")
