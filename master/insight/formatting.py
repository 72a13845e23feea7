"""Format values for pages: times, numbers, ids, and texts written by others. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from usher.common.base.clock import wall_ms
from usher.common.base.text import escape_control, label, span
from usher.common.protocol.attempts import attempts_told

#: Characters of a text on a page, unless the whole text is asked for.
_MOST = 2_000


def visible(text: object, most: int = _MOST) -> str:
    """Return a foreign text that can only be read: characters that act on a terminal or on the direction of text are
    spelt out.

    >>> visible("a\\u202eb\\0"), visible("x" * 10, 4)
    ('a\\\\u202eb\\\\x00', 'xxxx... (10 characters)')
    """
    whole = str(text)
    cut = whole[:most]
    shown = escape_control(cut, kept="\n\t")
    return shown if len(whole) <= most else f"{shown}... ({len(whole):,} characters)"


def number(value: float | None) -> str:
    """Return the number with its thousands apart; a dash for an unknown one.

    >>> number(1234567), number(3.26), number(None)
    ('1,234,567', '3.3', '-')
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 or value == int(value) else f"{value:,.1f}"


def moment(ms: int | None) -> str:
    """Return a point in time, in UTC.

    >>> moment(1_700_000_000_123), moment(None), moment(10**17)
    ('2023-11-14 22:13:20.123', '-', '-')
    """
    if not ms:
        return "-"
    try:
        when = datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)
    except (OverflowError, OSError, ValueError):
        return "-"
    return f"{when:%Y-%m-%d %H:%M:%S}.{ms % 1000:03d}"


def machine_moment(ms: int | None) -> str:
    return moment(ms).replace(" ", "T") + "Z" if ms else ""


def ticket_url(ticket_id: str, **query: str | None) -> str:
    """Return the page of a ticket. Browsers take ``.`` and ``..`` out of paths, so these two go into the query.

    >>> ticket_url("a/b ?"), ticket_url(".."), ticket_url("a", back="x")
    ('/tickets/a%2Fb%20%3F', '/tickets?id=..', '/tickets/a?back=x')
    """
    more = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items() if value is not None)
    if ticket_id in (".", "..", ""):
        return f"/tickets?id={ticket_id}" + (f"&{more}" if more else "")
    return f"/tickets/{quote(ticket_id, safe='', errors='replace')}" + (f"?{more}" if more else "")


def message_url(message_id: str) -> str:
    return f"/messages/{quote(message_id, safe='', errors='replace')}"


def spark(points: Sequence[Any], column: Any, width: int = 240, height: int = 40) -> str:
    """Return the ``points`` of a polyline through a column of these rows, from the right edge, one pixel step per
    point; "" without values."""
    values = [row[column] for row in points[-width // 2 :] if row[column] is not None]
    if len(values) < 2:
        return ""
    top = max(values) or 1
    step = width / (width // 2 - 1)
    start = width - (len(values) - 1) * step
    return " ".join(
        f"{start + at * step:.1f},{height - 2 - (height - 4) * value / top:.1f}" for at, value in enumerate(values)
    )


def sent_ms(row: Mapping[str, Any]) -> int:
    """Return when the first message of a ticket's row was sent; 0 where its id does not tell."""
    first = next(iter(row.get("message_ids") or ()), "").partition("-")[0]
    return int(first) if first.isascii() and first.isdigit() else 0


def _error(row: Mapping[str, Any]) -> str:
    error = row.get("last_error")
    return str(error["told"]) if error is not None else "not known" if row.get("charged") else ""


def tried(row: Mapping[str, Any]) -> str:
    most = row.get("max_attempts") or (row.get("last_error") or {}).get("most", 0)
    return attempts_told(row["attempts"], row["charged"], most) if row.get("attempts") else ""


#: Columns of lists of tickets, of commands and on the page, the first ones first where there is little room.
TICKET_COLUMNS: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "ticket": lambda row: row["ticket_id"] or "(none)",
    "state": lambda row: label(row["state"]),
    "messages": lambda row: len(row.get("message_ids") or ()),
    "first message": lambda row: next(iter(row.get("message_ids") or ()), ""),
    "consumer": lambda row: row.get("consumer_name", ""),
    "last error": _error,
    "attempts": tried,
    "age": lambda row: span(wall_ms() - ms) if (ms := sent_ms(row)) else "",
    "fence": lambda row: str(row.get("fence", "")),
}
FILTERS = {"label": label, "visible": visible, "number": number, "duration": span, "moment": moment}
FILTERS |= {"machine_moment": machine_moment}
