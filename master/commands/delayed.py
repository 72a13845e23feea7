"""``usher delayed``: the messages that wait for their time; see them, and drop some."""

from __future__ import annotations

import datetime
import sys
import time
from typing import Any

import click

from common.plural import many
from common.settings import CommonSettings, options
from common.stream_id import is_id
from master.actions import Action, ActionLog
from master.commands.looking import configured, console, print_json, table
from master.commands.operator import caller
from master.delayed_view import Delayed, DelayedView
from master.policy.explain import span

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_FIELDS_SHOWN = 60


@click.group(
    help="Delayed messages: sent for later (`usher send --after 10m`, or an XADD to {STREAM}:delayed with the field due_ms), they come into the "
    "stream when they are due, and get their place in the order of their ticket then."
)
def delayed() -> None:
    pass


@delayed.command("list", help="Show the messages that wait, the earliest first.")
@click.option("--ticket", metavar="ID", help="Only those of this ticket.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Most lines shown.")
@_JSON
@options(CommonSettings)
def list_delayed(flags: dict[str, Any], ticket: str | None, limit: int, as_json: bool) -> None:
    with configured(flags, "delayed") as (settings, link, keys):
        view = DelayedView(link, keys, settings.ticket_field)
        rows = [one for one, _ in zip(view.all(ticket), range(limit), strict=False)]
        waiting, unsorted = view.waiting(), view.unsorted()
    now_ms = time.time_ns() // 1_000_000
    if as_json:
        print_json({"waiting": waiting.messages, "first_ms": waiting.first_ms, "time_ms": now_ms, "messages": [_document(one) for one in rows]})
        return
    lines = [(one.id, _time(one.due_ms), _left(one.due_ms - now_ms), one.ticket, _short(one.fields, settings.ticket_field)) for one in rows]
    console().print(table("Delayed messages", ("message", "due", "in", "ticket", "fields"), lines, ids=("message", "due")))
    click.echo("  none" if not rows else f"  {len(rows):,} of {waiting.messages:,}")
    if unsorted:
        click.echo(f"  {many(unsorted, 'message')} more, which no leader has looked at yet")


@delayed.command("drop", help="Throw delayed messages away, before they are sent. Exit code 1 when some were not there any more.")
@click.argument("ids", nargs=-1, metavar="[MESSAGE]...")
@click.option("--all", "everything", is_flag=True, help="All that wait, or with --ticket all of that ticket.")
@click.option("--ticket", metavar="ID", help="With --all: only those of this ticket.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--reason", default="", metavar="TEXT", help="Why, for the action log.")
@_JSON
@options(CommonSettings)
def drop(flags: dict[str, Any], ids: tuple[str, ...], everything: bool, ticket: str | None, yes: bool, reason: str, as_json: bool) -> None:
    if bool(ids) == everything or (ticket is not None and not everything):
        raise click.UsageError("give ids of messages, or --all, with --ticket or without; see `usher delayed list`")
    if wrong := next((text for text in ids if not is_id(text)), None):
        raise click.UsageError(f"{wrong!r} is not the id of a message: it looks like 1526919030474-55, see `usher delayed list`")
    by = caller(reason)
    with configured(flags, "delayed") as (settings, link, keys):
        view = DelayedView(link, keys, settings.ticket_field)
        chosen = list(dict.fromkeys(ids)) or list(view.ids(ticket))
        if chosen and not yes:
            if as_json or not sys.stdin.isatty():
                raise click.UsageError("nobody can be asked here: give --yes")
            if not click.confirm(f"drop {many(len(chosen), 'delayed message')}?"):
                sys.exit(1)
        dropped = sum(view.drop(chosen[at : at + 1000]) for at in range(0, len(chosen), 1000))
        if chosen:
            on = "delayed messages" + (f" of {ticket}" if ticket is not None else f" {', '.join(ids[:5])}" if ids else "")
            ActionLog(link, keys).note(Action(by, "drop", on), f"dropped {dropped}, gone {len(chosen) - dropped}")
    if as_json:
        print_json({"dropped": dropped, "gone": len(chosen) - dropped})
    else:
        click.echo(f"{many(dropped, 'delayed message')} dropped" + (f", {len(chosen) - dropped:,} were not there" if dropped < len(chosen) else ""))
    sys.exit(1 if dropped < len(chosen) else 0)


def _document(one: Delayed) -> dict[str, Any]:
    safe = {_plain(name): _plain(value) for name, value in one.fields.items()}
    return {"id": one.id, "due_ms": one.due_ms, "ticket_id": _plain(one.ticket), "fields": safe}


def _plain(text: str) -> str:
    """Bytes that are not UTF-8 shown as such: JSON has no place for them."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _short(fields: dict[str, str], ticket_field: str) -> str:
    text = " ".join(f"{name}={value}" for name, value in fields.items() if name not in (ticket_field, "due_ms"))
    return text if len(text) <= _FIELDS_SHOWN else text[: _FIELDS_SHOWN - 1] + "…"


def _time(due_ms: int) -> str:
    try:
        return datetime.datetime.fromtimestamp(due_ms / 1000).astimezone().isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return "?"


def _left(milliseconds: int) -> str:
    return span(milliseconds) if milliseconds > 0 else "now"
