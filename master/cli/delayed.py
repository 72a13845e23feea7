"""Define ``usher delayed``: show the messages that wait for their time, and drop some."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from usher.common.base.durations import moment_text
from usher.common.base.text import json_safe, pluralize
from usher.common.protocol.stream_id import is_id
from usher.common.runtime.settings import CommonSettings, options
from usher.master.cli.options import caller, why_option
from usher.master.cli.shared import configured, console, print_json, table
from usher.master.operations.action_log import FAILED, ActionLog, OperatorAction
from usher.master.operations.delayed_messages import Delayed, DelayedView
from usher.master.policy.explain.explain import span

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_FIELDS_SHOWN = 60
#: The most messages dropped by one call.
_AT_ONCE = 1000
#: The word in the action log. It differs from the one for dead letters, by which the audit knows what it cannot prove
#: (master/audit/checks/letters.py).
DROP_DELAYED = "drop_delayed"


@click.group(
    help=(
        "Show and drop delayed messages. Sent for later (`usher send --after 10m`, or an XADD to {STREAM}:delayed"
        " with the field due_ms), they enter the stream when they are due, and get their place in the order of their"
        " ticket then."
    )
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
        print_json(
            {
                "waiting": waiting.messages,
                "first_ms": waiting.first_ms,
                "time_ms": now_ms,
                "messages": [_document(one) for one in rows],
            }
        )
        return
    field = settings.ticket_field
    lines = [
        (one.id, moment_text(one.due_ms, "seconds"), _left(one.due_ms - now_ms), one.ticket, _short(one.fields, field))
        for one in rows
    ]
    console().print(
        table("Delayed messages", ("message", "due", "in", "ticket", "fields"), lines, ids=("message", "due"))
    )
    click.echo("  none" if not rows else f"  {len(rows):,} of {waiting.messages:,}")
    if unsorted:
        click.echo(f"  {pluralize(unsorted, 'message')} more, which no leader has looked at yet")


@delayed.command(
    "drop",
    help=(
        "Throw delayed messages away before they are sent, for every group of the stream. Exit code 1 when some were"
        " already gone."
    ),
)
@click.argument("ids", nargs=-1, metavar="[MESSAGE]...")
@click.option("--all", "everything", is_flag=True, help="All delayed messages, or with --ticket all of that ticket.")
@click.option("--ticket", metavar="ID", help="With --all: only those of this ticket.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@why_option()
@_JSON
@options(CommonSettings)
def drop(
    flags: dict[str, Any],
    ids: tuple[str, ...],
    everything: bool,
    ticket: str | None,
    yes: bool,
    why: str,
    as_json: bool,
) -> None:
    if bool(ids) == everything or (ticket is not None and not everything):
        raise click.UsageError("give ids of messages, or --all, with --ticket or without; see `usher delayed list`")
    if wrong := next((text for text in ids if not is_id(text)), None):
        raise click.UsageError(
            f"{wrong!r} is not the id of a message: it looks like 1526919030474-55, see `usher delayed list`"
        )
    by = caller(why)
    with configured(flags, "delayed") as (settings, link, keys):
        view = DelayedView(link, keys, settings.ticket_field)
        chosen = list(dict.fromkeys(ids)) or list(view.ids(ticket))
        if chosen and not yes:
            if as_json:
                raise click.UsageError("--json does not ask: pass --yes too")
            if not sys.stdin.isatty():
                raise click.UsageError("stdin is not a terminal: pass --yes")
            if not click.confirm(f"drop {pluralize(len(chosen), 'delayed message')}, for every group of the stream?"):
                sys.exit(1)
        on = "delayed messages" + (f" of {ticket}" if ticket is not None else f" {', '.join(ids[:5])}" if ids else "")
        dropped = _dropped(view, ActionLog(link, keys), OperatorAction(by, DROP_DELAYED, on), chosen)
    if as_json:
        print_json({"dropped": dropped, "gone": len(chosen) - dropped})
    else:
        click.echo(
            f"{pluralize(dropped, 'delayed message')} dropped"
            + (f", {len(chosen) - dropped:,} were not there" if dropped < len(chosen) else "")
        )
    sys.exit(1 if dropped < len(chosen) else 0)


def _dropped(view: DelayedView, actions: ActionLog, action: OperatorAction, chosen: Sequence[str]) -> int:
    """Drop messages; return how many were there. The action log records it even when Redis fails in the middle."""
    dropped, ended = 0, FAILED
    try:
        for at in range(0, len(chosen), _AT_ONCE):
            dropped += view.drop(chosen[at : at + _AT_ONCE])
        ended = ""
    finally:
        if chosen:
            actions.note(
                action, f"dropped {dropped}, gone {len(chosen) - dropped}" if not ended else f"dropped {dropped}{ended}"
            )
    return dropped


def _document(one: Delayed) -> dict[str, Any]:
    safe = {json_safe(name): json_safe(value) for name, value in one.fields.items()}
    return {"id": one.id, "due_ms": one.due_ms, "ticket_id": json_safe(one.ticket), "fields": safe}


def _short(fields: dict[str, str], ticket_field: str) -> str:
    text = " ".join(f"{name}={value}" for name, value in fields.items() if name not in (ticket_field, "due_ms"))
    return text if len(text) <= _FIELDS_SHOWN else text[: _FIELDS_SHOWN - 1] + "…"


def _left(milliseconds: int) -> str:
    return span(milliseconds) if milliseconds > 0 else "now"
