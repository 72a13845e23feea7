"""Define ``usher log``: browse a stream by id or time; and ``usher find``: look for messages by a field. Both read page
by page; the stream is never held as a whole."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import click

from usher.common.base.clock import wall_ms
from usher.common.base.durations import duration_s, moment_ms, moment_text
from usher.common.base.text import escape_control, json_line, json_safe, label
from usher.common.protocol.message import UID_FIELD, as_mapping, check_field_name, first_value, ticket_value
from usher.common.protocol.stream_id import milliseconds
from usher.common.redis.client import Link
from usher.common.redis.replies import Entry
from usher.common.runtime.settings import CommonSettings, options, takes_json
from usher.common.sending.producer import SECONDS
from usher.master.cli.shared import configured, looks, show, shown_heads, shown_texts, table
from usher.master.messages.fields import FoundMessages, MessageFields

#: Entries of the first page, and of any page at most. The number follows from the weight of the entries read: about
#: _PAGE_BYTES each.
_FIRST_PAGE, _LONGEST_PAGE = 4, 100
_PAGE_BYTES = 4 * 1024 * 1024
_GROWTH = 4
_BLOCK_S = 1.0
_ID = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")
_SHOWN = 160


@click.command(
    help=(
        "Browse the ticket stream. STREAM defaults to USHER_TICKET_STREAM. TIME is a stream id (1700000000000-0), a"
        " time (2026-11-21T10:00, local unless it says otherwise), or an age (90s, 15m, 24h, 7d)."
    )
)
@click.argument("stream", required=False)
@click.option("--since", metavar="TIME", help="From here on. [default: the first entry]")
@click.option("--until", metavar="TIME", help="Up to here. [default: the last entry]")
@click.option("--ticket", metavar="ID", help="Only messages of this ticket.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="End after so many messages.")
@click.option("--follow", is_flag=True, help="Then wait for new ones; Ctrl-C ends it.")
@takes_json
@options(CommonSettings)
def log(
    flags: dict[str, Any], stream: str | None, limit: int | None, as_json: bool, follow: bool, **given: str | None
) -> None:
    if stream is not None:
        flags = flags | {"ticket_stream": stream}
    if follow and given["until"]:
        raise click.UsageError("--follow has no end, --until sets one: give only one of them")
    now_ms = wall_ms()
    start = "-" if given["since"] is None else place(given["since"], now_ms)
    end = "+" if given["until"] is None else place(given["until"], now_ms)
    wanted = None if given["ticket"] is None else given["ticket"].encode("utf-8", "surrogateescape")
    shown = 0
    with configured(flags, "log", timeout_s=30.0) as at, contextlib.suppress(KeyboardInterrupt):
        for entry in _entries(at.link, at.keys.stream, start, end, follow):
            if (
                wanted is not None
                and ticket_value(entry.fields or [], at.settings.work_ticket_field.encode()) != wanted
            ):
                continue
            click.echo(_line(entry, at.settings.work_ticket_field, as_json))
            shown += 1
            if limit is not None and shown >= limit:
                return


def place(text: str, now_ms: int) -> str:
    """Return a stream id or its time part for XRANGE. Raises click.BadParameter.

    >>> place("15m", 1_000_000_000_000)
    '999999100000'
    """
    text = text.strip()
    if text.isdigit() and int(text) in SECONDS:
        raise click.BadParameter(f"{text} is a time in seconds: an id begins with milliseconds")
    if text in ("-", "+") or (_ID.fullmatch(text) and (len(text) > 8 or "-" in text or text == "0")):
        return text
    if re.fullmatch(r"\d+(\.\d+)?[smhd]", text):
        return str(max(0, now_ms - int(duration_s(text) * 1000)))
    try:
        return str(max(0, moment_ms(text)))  # no id is older than 1970
    except ValueError as wrong:
        raise click.BadParameter(f"no stream id, no age like 15m, and {wrong}") from None


def _entries(link: Link, stream: str, start: str, end: str, follow: bool) -> Iterator[Entry]:
    last, count = b"", _FIRST_PAGE
    while True:
        since: str | bytes = b"(" + last if last else start
        page = [Entry(*entry) for entry in link.call("XRANGE", stream, since, end, "COUNT", count)]
        yield from page
        last = page[-1].id if page else last
        if page:
            weight = sum(len(part) for entry in page for part in entry.fields or ())
            count = max(1, min(_LONGEST_PAGE, _GROWTH * count, _PAGE_BYTES * len(page) // (weight + 1)))
            continue
        if not follow:
            return
        if not last:
            last = _start_of_following(link, stream, start)
        link.call("XREAD", "COUNT", 1, "BLOCK", int(_BLOCK_S * 1000), "STREAMS", stream, last, block_s=_BLOCK_S)


def _start_of_following(link: Link, stream: str, start: str) -> bytes:
    if start == "-":
        return b"0-0"
    found = link.call("XREVRANGE", stream, start, "-", "COUNT", 1)
    return bytes(found[0][0]) if found else b"0-0"


def _line(entry: Entry, ticket_field: str, as_json: bool) -> str:
    fields = as_mapping(entry.fields or [])
    named = ticket_value(entry.fields or [], ticket_field.encode())
    ticket = None if named is None else named.decode("utf-8", "surrogateescape")
    at_ms = milliseconds(entry.id)
    if as_json:
        uid = first_value(entry.fields or [], UID_FIELD) or entry.id
        safe = {json_safe(name): json_safe(value) for name, value in fields.items()}
        document: dict[str, Any] = {"id": entry.id.decode(), "time": moment_text(at_ms, "milliseconds")}
        document |= {"uid": uid.decode("utf-8", "backslashreplace")}
        return json_line(document | {"ticket_id": None if ticket is None else json_safe(ticket), "fields": safe})
    rest = " ".join(f"{name}={value}" for name, value in fields.items() if name != ticket_field)
    shown = "-" if ticket is None else ticket
    text = f"{moment_text(at_ms, 'milliseconds')}  {entry.id.decode():<22}  {shown:<16}  {rest}"
    # A message may hold anything: control characters must not reach the terminal.
    safe_text = escape_control(text)
    return safe_text if len(safe_text) <= _SHOWN else safe_text[: _SHOWN - 1] + "…"


@click.command(
    "find",
    help=(
        "Find messages with exactly this VALUE in a FIELD (or a path: payload.order.id), among the unfinished ones and"
        " the dead letters. Reads them a piece at a time, and says how many it looked at. Exit code 0, also when there"
        " are none."
    ),
)
@click.argument("what", metavar="FIELD=VALUE")
@click.option(
    "--limit", type=click.IntRange(min=1, max=100_000), default=100, show_default=True, help="About the most listed."
)
@looks
def find(flags: dict[str, Any], what: str, limit: int, as_json: bool) -> None:
    field, equals, value = what.partition("=")
    try:
        check_field_name(field)
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from None
    if not equals:
        raise click.UsageError(f"{what!r} has no value: give FIELD=VALUE, such as kind=paid")
    with configured(flags, "fields") as at:
        reader = at.fields
        found = _found(reader, field, os.fsencode(value), limit)
    cells = [
        (
            row["message_id"] or "",
            row["ticket_id"] or "(none)",
            *shown_texts(row, reader.names),
            f"{label(row['state'])} {row['letter_id'] or ''}".strip(),
            row["consumer_name"],
        )
        for row in found.rows
    ]
    columns = ("message", "ticket", *shown_heads(reader.names), "state", "consumer")
    rows = [row | {"ticket_id": row["ticket_id"] and json_safe(row["ticket_id"])} for row in found.rows]
    counts = {"looked_at": found.looked_at, "of": found.number, "of_is_exact": found.is_exact}
    document = {"messages": rows, **counts, "more": found.cursor is not None}
    of = f"{'' if found.is_exact else 'at least '}{found.number:,}"
    looked = f"  {len(rows):,} found; looked at {found.looked_at:,} of {of} that are unfinished or dead"
    further = "" if found.cursor is None else "  there may be more: --limit shows more"
    show(as_json, document, table("Messages", columns, cells, ids=("message", "state")), looked, further)


def _found(reader: MessageFields, field: str, value: bytes, limit: int) -> FoundMessages:
    found = reader.find(field, value, None, limit)
    rows = found.rows
    while found.cursor is not None and len(rows) < limit:
        found = reader.find(field, value, found.cursor, limit - len(rows))
        rows += found.rows
    return found._replace(rows=rows)
