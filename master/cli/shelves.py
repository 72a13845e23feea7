"""Define ``usher dead`` and ``usher delayed``: the shelves of messages that were given up, and of those that wait for
their time. What is done with them are verbs (``usher.master.verbs``)."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import click

from usher.common.base.clock import wall_ms
from usher.common.base.durations import Duration, Moment, moment_text
from usher.common.base.text import json_safe, label, pluralize, span
from usher.common.protocol.stream_id import is_id
from usher.master.cli.shared import (
    configured,
    console,
    fitted,
    looks,
    print_json,
    show,
    shown_heads,
    shown_texts,
    stacked,
    table,
)
from usher.master.cli.verbs import asked_of, asks, place_command, shelf_command
from usher.master.insight.formatting import moment, visible
from usher.master.operations.delayed_messages import check_due
from usher.master.policy.letters import DeadLetter
from usher.master.verbs.verbs import DELAYED, LETTERS, VERBS, MovedDelayed
from usher.master.verbs.view import View


@click.group(
    help="Look at dead letters, redrive them, or drop them. A dead letter is a message that was given up, with the"
    " reason."
)
def dead() -> None:
    pass


@dead.command("list", help="List dead letters, the oldest first.")
@asks(LETTERS.ask)
@click.option(
    "--limit", type=click.IntRange(min=1, max=100_000), default=50, show_default=True, help="Most letters listed."
)
@looks
def list_letters(flags: dict[str, Any], limit: int, as_json: bool, **given: Any) -> None:
    found: list[DeadLetter] = []
    with configured(flags, "dead") as at:
        letters, more = at.letters, False
        for page in letters.all(asked_of(LETTERS, given).meant(), letters.last_id()):
            found += page
            more = len(found) > limit
            if more:
                break
        found = found[:limit]
        rows = at.fields.add_to_letters([letter.row() for letter in found])
    names = at.settings.shown_names
    further = f"  more than {limit:,}: give --limit, or a filter" if more else "" if found else "  none"
    listed = _table(found, [shown_texts(row, names) for row in rows], names)
    show(as_json, {"dead_letters": rows, "more": more}, listed, further)


def _table(letters: Sequence[DeadLetter], shown: Sequence[list[str]], names: Sequence[str]) -> Any:
    now_ms = wall_ms()
    rows = [
        (
            letter.id.decode(errors="replace"),
            letter.ticket.decode(errors="replace"),
            *chosen,
            letter.message_id.decode(errors="replace"),
            (f"{letter.reason}: {visible(letter.error, 80)}" if letter.error else letter.reason)
            + (f" in {letter.at}" if letter.at else ""),
            letter.attempts,
            label(letter.policy),
            span(now_ms - letter.written_ms),
        )
        for letter, chosen in zip(letters, shown, strict=True)
    ]
    extras = ("message", "attempts", "policy", "age")
    columns = ("letter", "ticket", *shown_heads(names), "message", "reason", *extras[1:])
    return fitted("Dead letters", columns, rows, ("attempts", "age"), ("letter", *extras), extras=extras)


@dead.command("kinds", help="Count dead letters by kind: reason, error, place and policy.")
@looks
def list_kinds(flags: dict[str, Any], as_json: bool) -> None:
    with configured(flags, "dead") as at:
        counts = at.letters.counts()
    names = ("id", "count", "reason", "error_type", "at", "handler", "policy")
    rows = [[getattr(one, name) for name in names] for one in counts.groups]
    document = {"kinds": [dict(zip(names, row, strict=True)) for row in rows], "are_all": counts.are_all}
    listed = table("Kinds of dead letters", ("kind", *names[1:]), rows, numbers=("count",), ids=("kind",))
    show(
        as_json,
        document,
        listed,
        "  none" if not rows else counts.wrong or "  `usher dead list --kind KIND` lists them",
    )


@dead.command(
    "show",
    help="Show one dead letter with its traceback and its message's fields. Exit code 1 when there is no such letter.",
)
@click.argument("letter_id", metavar="LETTER")
@looks
def show_letter(flags: dict[str, Any], letter_id: str, as_json: bool) -> None:
    if not is_id(letter_id):
        raise click.UsageError(f"{letter_id!r} is not the id of a letter: see `usher dead list`")
    with configured(flags, "dead") as at:
        found = at.letters.get(letter_id.encode())
    if found is None:
        click.echo("null" if as_json else f"there is no dead letter {letter_id}", err=not as_json)
        sys.exit(1)
    document = found[0].whole(found[1])
    if as_json:
        print_json(document)
        return
    fields, trace = document.pop("message_fields"), document.pop("traceback")
    screen = console()
    screen.print(table("Dead letter", ("", ""), _for_people(found[0])))
    screen.print(table("Fields of the message", ("name", "value"), [(name, visible(value)) for name, value in fields]))
    if trace:
        click.echo("".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in trace))


def _for_people(letter: DeadLetter) -> list[tuple[str, str]]:
    row = letter.row()
    named = {"fields": f"{letter.fields}{', some of them cut or missing' if letter.cut else ''}"}
    told = {
        name: named.get(name, str(value or ""))
        for name, value in row.items()
        if name != "cut" and not name.endswith("_ms")
    }
    times = {"first tried": letter.first_ms, "last tried": letter.last_ms, "given up": letter.written_ms}
    told |= {name: f"{moment(ms)} UTC" for name, ms in times.items() if ms}
    return [(name.replace("_", " "), value) for name, value in told.items() if value]


for _verb in LETTERS.verbs.values():
    dead.add_command(shelf_command(_verb))
dead.add_command(place_command(VERBS["dead edit"]))


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
    with configured(flags, "delayed") as at:
        rows = at.delayed.page(None, limit, ticket or "", math.inf).rows
        waiting, unsorted = at.delayed.waiting(), at.delayed.unsorted()
    now_ms = wall_ms()
    told: dict[str, Any] = {"waiting": waiting.messages, "first_ms": waiting.first_ms, "time_ms": now_ms}
    told |= {"messages": [one._asdict() | {"ticket_id": json_safe(one.ticket_id)} for one in rows]}
    lines = [
        (one.id, moment_text(one.due_ms, "seconds"), span(left) if left > 0 else "now", one.ticket_id, text)
        for one, left, text in ((one, one.due_ms - now_ms, " ".join(map("=".join, one.fields))) for one in rows)
    ]
    listed = table("Delayed messages", ("message", "due", "in", "ticket", "fields"), lines, ids=("message", "due"))
    left = f"  {pluralize(unsorted, 'message')} more, which no leader has looked at yet" if unsorted else ""
    show(as_json, told, listed, f"  {len(rows):,} of {waiting.messages:,}" if rows else "  none", left)


_when = stacked(
    click.option("--after", type=Duration(), metavar="AGE", help="So long from now: 90s, 10m, 2h, 3d."),
    click.option(
        "--at", type=Moment(), metavar="TIME", help="At 2026-11-21T10:00 (local time) or 2026-11-21T10:00+00:00 (UTC)."
    ),
)


def _moved(view: View, given: dict[str, Any]) -> Any:
    after, at = given["after"], given["at"]
    if (after is None) == (at is None):
        raise click.UsageError("say when they are due: give one of --after and --at")
    due_ms = at if at is not None else view.delayed.now_ms() + int(after * 1000)
    try:
        check_due(due_ms, view.delayed.now_ms())
    except ValueError as refused:
        raise click.UsageError(str(refused)) from None
    return MovedDelayed.model_construct(ids=[], due_ms=due_ms)


delayed.add_command(shelf_command(DELAYED.verbs["send"]))
delayed.add_command(shelf_command(DELAYED.verbs["move"], _when, _moved))
delayed.add_command(shelf_command(DELAYED.verbs["drop"]))
