"""Define ``usher delayed``: show the messages that wait for their time, send some now, move some, and drop some."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import click

from usher.common.base.clock import wall_ms
from usher.common.base.durations import Duration, Moment, moment_text
from usher.common.base.text import json_safe, pluralize
from usher.common.protocol.stream_id import is_id
from usher.master.cli.shared import (
    YES,
    caller,
    configured,
    confirm,
    console,
    looks,
    print_json,
    stacked,
    table,
    why_option,
)
from usher.master.insight.formatting import moment
from usher.master.operations.action_log import ActionLog, OperatorAction
from usher.master.operations.delayed_messages import DONE, DROP, MEANS, MOVE, SEND_NOW, Delayed, DelayedView, check_due
from usher.master.policy.explain.explain import span

_FIELDS_SHOWN = 60
#: Words of outcomes that a document has also when there was none.
_ALWAYS_TOLD = {SEND_NOW: ("moved",), MOVE: ("moved",), DROP: ("dropped", "gone")}
_ASKS = {SEND_NOW: "send {} now", MOVE: "move {} to {}", DROP: "drop {}, for every group of the stream"}


@click.group(
    help=(
        "Show, send now, move or drop delayed messages. Sent for later (`usher send --after 10m`, or an XADD to"
        " {STREAM}:delayed with the field due_ms), they enter the stream when they are due, and get their place in the"
        " order of their ticket then."
    )
)
def delayed() -> None:
    pass


@delayed.command("list", help="Show the messages that wait, the earliest first.")
@click.option("--ticket", metavar="ID", help="Only those of this ticket.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Most lines shown.")
@looks
def list_delayed(flags: dict[str, Any], ticket: str | None, limit: int, as_json: bool) -> None:
    with configured(flags, "delayed") as (settings, link, keys):
        view = DelayedView(link, keys, settings.ticket_field)
        rows = [one for one, _ in zip(view.all(ticket), range(limit), strict=False)]
        waiting, unsorted = view.waiting(), view.unsorted()
    now_ms = wall_ms()
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


_chosen = stacked(
    click.argument("ids", nargs=-1, metavar="[MESSAGE]..."),
    click.option(
        "--all", "everything", is_flag=True, help="All delayed messages, or with --ticket all of that ticket."
    ),
    click.option("--ticket", metavar="ID", help="With --all: only those of this ticket."),
    YES,
    why_option(),
    looks,
)


_EXIT = " Exit code 1 when some were left alone, as those that were gone already."


@delayed.command(
    "send",
    help="Send delayed messages now: the leading master adds them to their stream at once, in the order of their times."
    + _EXIT,
)
@_chosen
def send(**given: Any) -> None:
    _act(SEND_NOW, None, **given)


@delayed.command(
    "move", help="Move delayed messages to another time: they come into their stream then, and not before." + _EXIT
)
@click.option("--after", type=Duration(), metavar="AGE", help="So long from now: 90s, 10m, 2h, 3d.")
@click.option(
    "--at", type=Moment(), metavar="TIME", help="At 2026-11-21T10:00 (local time) or 2026-11-21T10:00+00:00 (UTC)."
)
@_chosen
def move(after: float | None, at: int | None, **given: Any) -> None:
    if (after is None) == (at is None):
        raise click.UsageError("say when they are due: give one of --after and --at")
    _act(MOVE, lambda now_ms: at if at is not None else now_ms + int((after or 0) * 1000), **given)


@delayed.command(
    "drop", help="Throw delayed messages away before they are sent, for every group of the stream." + _EXIT
)
@_chosen
def drop(**given: Any) -> None:
    _act(DROP, None, **given)


def _act(
    what: str,
    due: Callable[[int], int] | None,
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
        due_ms = None if due is None else _checked(due(view.now_ms()), view)
        when = "" if due_ms is None else moment_text(due_ms, "seconds")
        chosen = list(dict.fromkeys(ids)) or list(view.ids(ticket))
        if chosen and not yes:
            question = _ASKS[what].format(pluralize(len(chosen), "delayed message"), when)
            confirm(f"{question}?", yes, as_json)
            if due_ms is not None:
                _checked(due_ms, view)  # the answer may have taken long
        on = "delayed messages" + (f" of {ticket}" if ticket is not None else f" {', '.join(ids[:5])}" if ids else "")
        on += f" to {moment(due_ms)} UTC" if due_ms is not None else ""
        action, log = OperatorAction(by, what, on), ActionLog(link, keys)
        results = log.carry_out(action, view.change(what, chosen, due_ms)) if chosen else []
        outcomes = Counter(one.word for one in results)
    done = sum(outcomes[word] for word in DONE)
    if as_json:
        print_json({word: outcomes[word] for word in MEANS if outcomes[word] or word in _ALWAYS_TOLD[what]})
    else:
        told = {SEND_NOW: "to be sent now", MOVE: f"moved to {when}", DROP: "dropped"}[what]
        click.echo(f"{pluralize(done, 'delayed message')} {told}")
        for word in [word for word in MEANS if outcomes[word] and word not in DONE]:
            click.echo(f"  {outcomes[word]:,} {MEANS[word]}")
    sys.exit(1 if done < len(chosen) else 0)


def _checked(due_ms: int, view: DelayedView) -> int:
    try:
        check_due(due_ms, view.now_ms())
    except ValueError as refused:
        raise click.UsageError(str(refused)) from None
    return due_ms


def _document(one: Delayed) -> dict[str, Any]:
    safe = {json_safe(name): json_safe(value) for name, value in one.fields.items()}
    return {"id": one.id, "due_ms": one.due_ms, "ticket_id": json_safe(one.ticket), "fields": safe}


def _short(fields: dict[str, str], ticket_field: str) -> str:
    text = " ".join(f"{name}={value}" for name, value in fields.items() if name not in (ticket_field, "due_ms"))
    return text if len(text) <= _FIELDS_SHOWN else text[: _FIELDS_SHOWN - 1] + "…"


def _left(milliseconds: int) -> str:
    return span(milliseconds) if milliseconds > 0 else "now"
