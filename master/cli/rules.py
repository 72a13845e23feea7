"""Define the commands that change things: ``usher rules``, ``pause``, ``slow``, ``limit`` and ``resume``, how tickets
are treated from now on, without a deploy; ``usher consumers``; ``usher dead`` and ``usher delayed``, the shelves of
messages that were given up, and of those that wait for their time; and ``usher actions``, which tells who did what."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

import click

from usher.common.base.clock import wall_ms
from usher.common.base.durations import Duration, Moment, Number, moment_text
from usher.common.base.text import json_safe, label, pluralize, span
from usher.common.cli.send import fields_of
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.protocol.stream_id import is_id
from usher.master.cli import shared as ui
from usher.master.insight.formatting import moment, visible
from usher.master.operations.shelves import check_due
from usher.master.policy.letters import DeadLetter
from usher.master.policy.rules import Target
from usher.master.verbs.verbs import DELAYED, LETTERS, VERBS, Args, MovedDelayed, Verb
from usher.master.verbs.view import View

_targets = ui.stacked(
    click.argument("ticket", required=False),
    click.option(
        "--pattern",
        metavar="GLOB",
        help="All tickets whose ids fit: * is any text, ? one character, [a-z] one of these.",
    ),
    click.option("--tenant", metavar="NAME", help="All tickets of a tenant (USHER_TENANT_FIELD)."),
    click.option("--all", "everything", is_flag=True, help="All tickets."),
)


def _of_target(verb: Verb, why: str, given: dict[str, Any], **more: Any) -> Any:
    """Return arguments about a target. Its name may be no UTF-8, which no model takes."""
    everything, named = given.pop("everything"), [given.pop(name) for name in ("ticket", "pattern", "tenant")]
    told = zip((Target.TICKET, Target.PATTERN, Target.TENANT), named, strict=True)
    chosen = [(target.value, value) for target, value in told if value is not None]
    chosen += [(Target.EVERYTHING.value, "")] * everything
    if len(chosen) != 1:
        raise click.UsageError("give one of these: a ticket id, --pattern GLOB, --tenant NAME, --all")
    target, value = chosen[0]
    if not (everything or 0 < len(value.encode("utf-8", "surrogateescape")) <= LONGEST_TICKET):
        raise click.UsageError(f"a ticket id has 1 to {LONGEST_TICKET} bytes")
    facts: dict[str, Any] = {"target": target, "value": value, "reason": why}
    return verb.args.model_construct(**facts, **given, **more)


@click.group(help="Show live rules, and lift them. Without a command: list the rules.", invoke_without_command=True)
@click.pass_context
def rules(context: click.Context) -> None:
    if context.invoked_subcommand is None:
        context.invoke(list_rules)


@rules.command("list", help="List the live rules.")
@ui.looks
def list_rules(flags: dict[str, Any], as_json: bool) -> None:
    with ui.configured(flags, "operator") as at:
        book = at.rules.read()
    rows = []
    for rule in book.rules:
        since = span(wall_ms() - rule.set_ms) if rule.set_ms else ""
        does = (rule.target.value, rule.value, rule.action.value, rule.bounds)
        rows.append((rule.id, *does, rule.who, since, rule.reason))
    listed = ui.table("Rules", ("id", "target", "value", "action", "rate", "who", "since", "reason"), rows, ids=("id",))
    holds = "  the strongest one holds: pause, then the slowest; `usher rules lift ID` ends one"
    document = {"rules": [rule.shown() for rule in book.rules], "version": int(book.version or 0)}
    ui.show(as_json, document, listed, holds if rows else "  none")


@rules.command("lift", help="Lift rules. Exit code 1 when one of them does not exist.")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@ui.why_option()
@ui.looks
def lift(flags: dict[str, Any], ids: tuple[str, ...], why: str, as_json: bool) -> None:
    with ui.configured(flags, "operator") as at:
        view = at.acting(ui.caller(why))
        changes = {one: VERBS["rules lift"].perform(view, Args(), rule_id=one) for one in dict.fromkeys(ids)}
    if as_json:
        ui.print_json({"lifted": {one: changed.document or None for one, changed in changes.items()}})
    else:
        for one, changed in changes.items():
            click.echo(f"{one}: {changed.text}")
    sys.exit(1 if any(changed.problem for changed in changes.values()) else 0)


def _rule_command(action: str, told: str, *limits: Callable[[Any], Any]) -> click.Command:
    """Return the command that sets a rule with this action."""

    def args_of(verb: Verb, why: str, given: dict[str, Any]) -> Any:
        args = _of_target(verb, why, given, action=action)
        try:
            args.check()
        except ValueError as wrong:
            raise click.UsageError(str(wrong)) from None
        return args

    return ui.place_command(VERBS["rules set"], ui.stacked(_targets, *limits), args_of, action, told)


def _number(flag: str, name: str, kind: click.ParamType, told: str, **more: Any) -> Callable[[Any], Any]:
    return click.option(flag, name, type=kind, metavar="N", help=told, **more)


pause = _rule_command(
    "pause",
    "Pause tickets: consumers get no more of them; nothing is lost, their order stays, and other tickets go on."
    " Messages that a consumer already has run to their end. The pause holds until `usher resume`, whatever is"
    " restarted meanwhile.",
)
slow = _rule_command(
    "slow",
    "Slow tickets down: hand over at most so many messages of each ticket per second. A tenant has one limit for all of"
    " its tickets together, over all consumers. This holds until `usher resume`.",
    _number("--rate", "rate_per_second", Number(0.001, 1_000_000), "Messages per second, of each ticket or a tenant."),
    _number("--concurrency", "concurrency", click.IntRange(1, 1_000_000), "Tickets of a tenant at a time."),
    _number("--weight", "weight", click.IntRange(1, 1000), "A tenant's share (USHER_TENANT_WEIGHTS)."),
)
limit = _rule_command(
    "limit",
    "Limit how many messages of each ticket may be unfinished. What comes beyond, the newest, becomes a dead letter"
    " (over_limit). This holds until `usher rules lift`; pausing and slowing leave it alone.",
    _number("--messages", "ticket_limit", click.IntRange(1, 1_000_000), "Of each ticket.", required=True),
)
resume = ui.place_command(
    VERBS["resume"],
    _targets,
    _of_target,
    told="Lift the rule for a ticket, a pattern or everything: its tickets go on, in the order of the stream. Exit"
    " code 1 when there was no rule.",
)


@click.command(help="Show the actions of operators, the newest first: when, who, what, on what, why, and the outcome.")
@click.option(
    "--limit", type=click.IntRange(min=1, max=10_000), default=50, show_default=True, help="Most lines shown."
)
@ui.looks
def actions(flags: dict[str, Any], limit: int, as_json: bool) -> None:
    with ui.configured(flags, "operator") as at:
        lines, cursor = at.action_log.page(None, limit)
    now_ms, names = wall_ms(), ("who", "via", "what", "on", "why", "outcome")
    rows = [(f"{span(now_ms - line['time_ms'])} ago", *(line[name] for name in names)) for line in lines]
    document = {"actions": lines, "more": cursor is not None}
    ui.show(as_json, document, ui.table("Actions", ("when", *names), rows), "" if rows else "  none")


@click.group(help="Look at the registered consumers and their work; drain and resume them.")
def consumers() -> None:
    pass


@consumers.command("list", help="List the consumers, their states and the messages they hold.")
@ui.looks
def list_consumers(flags: dict[str, Any], as_json: bool) -> None:
    with ui.configured(flags, "status") as at:
        rows = at.status.consumers()
    none = "  none is registered: start one with `usher consumer --handler module:function`"
    ui.show(as_json, {"consumers": rows}, ui.consumers_table(rows), "" if rows else none)


@consumers.command(
    "show",
    help=(
        "Show one consumer: where it runs, and what it runs at this moment, as it tells the leader. Exit code 1 when no"
        " consumer of that name is registered."
    ),
)
@click.argument("name")
@ui.looks
def show_consumer(flags: dict[str, Any], name: str, as_json: bool) -> None:
    with ui.configured(flags, "operator") as at:
        told = at.ask_leader(f"/api/consumers/{quote(name, safe='')}/process")
        rows = told["consumers"] if told is not None else [one for one in at.status.consumers() if one["name"] == name]
    if as_json:
        ui.print_json({"consumers": rows})
    else:
        for row in rows:
            _print_consumer(row)
        if not rows:
            click.echo(f"no consumer {name!r} is registered")
    sys.exit(0 if rows else 1)


def _print_consumer(row: dict[str, Any]) -> None:
    process = row.get("process") or {}
    memory = process.get("memory_bytes")
    facts = [
        ("consumer", f"{row['incarnation']}  {row['state']}"),
        ("host", f"{process['host']}  process {process['pid']}" if process else "it did not say"),
        ("started", moment(row.get("started_ms"))),
        ("version", process.get("version", "")),
        ("handler", f"{process['handler']}  code {process['code']}" if process else ""),
        ("memory", f"{memory / 2**20:,.0f} MiB" if memory else ""),
        ("messages", f"{row['pending']:,} of {row.get('capacity', 0):,}  handlers at a time {row.get('slots', 0):,}"),
        ("lease left", f"{row['lease_ms'] / 1000:.1f} s"),
    ]
    ui.console().print(ui.table("Consumer", ("", ""), [fact for fact in facts if fact[1]]))
    if not process:
        return
    running = [
        (one["ticket_id"], one["id"], one["attempt"], span(wall_ms() - one["started_ms"]), " > ".join(one["stack"]))
        for one in process["running"]
    ]
    columns = ("ticket", "message", "attempt", "runs for", "stands at")
    title = f"Runs now: {process['runs']:,}"
    ui.console().print(ui.table(title, columns, running, numbers=("attempt", "runs for"), ids=("message",)))


for _name in ("consumers drain", "consumers resume"):
    consumers.add_command(ui.place_command(VERBS[_name]))


@click.group(
    help="Look at dead letters, redrive them, or drop them. A dead letter is a message that was given up, with the"
    " reason."
)
def dead() -> None:
    pass


@dead.command("list", help="List dead letters, the oldest first.")
@ui.asks(LETTERS.ask)
@click.option(
    "--limit", type=click.IntRange(min=1, max=100_000), default=50, show_default=True, help="Most letters listed."
)
@ui.looks
def list_letters(flags: dict[str, Any], limit: int, as_json: bool, **given: Any) -> None:
    found: list[DeadLetter] = []
    with ui.configured(flags, "dead") as at:
        letters, more = at.letters, False
        for page in letters.all(ui.asked_of(LETTERS, given).meant(), letters.last_id()):
            found += page
            more = len(found) > limit
            if more:
                break
        found = found[:limit]
        rows = at.fields.add_to_letters([letter.row() for letter in found])
    names = at.settings.shown_names
    further = f"  more than {limit:,}: give --limit, or a filter" if more else "" if found else "  none"
    listed = _table(found, [ui.shown_texts(row, names) for row in rows], names)
    ui.show(as_json, {"dead_letters": rows, "more": more}, listed, further)


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
    columns = ("letter", "ticket", *ui.shown_heads(names), "message", "reason", *extras[1:])
    return ui.table("Dead letters", columns, rows, ("attempts", "age"), ("letter", *extras), extras=extras)


@dead.command("kinds", help="Count dead letters by kind: reason, error, place and policy.")
@ui.looks
def list_kinds(flags: dict[str, Any], as_json: bool) -> None:
    with ui.configured(flags, "dead") as at:
        counts = at.letters.counts()
    names = ("id", "count", "reason", "error_type", "at", "handler", "policy")
    rows = [[getattr(one, name) for name in names] for one in counts.groups]
    document = {"kinds": [dict(zip(names, row, strict=True)) for row in rows], "are_all": counts.are_all}
    listed = ui.table("Kinds of dead letters", ("kind", *names[1:]), rows, numbers=("count",), ids=("kind",))
    ui.show(
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
@ui.looks
def show_letter(flags: dict[str, Any], letter_id: str, as_json: bool) -> None:
    if not is_id(letter_id):
        raise click.UsageError(f"{letter_id!r} is not the id of a letter: see `usher dead list`")
    with ui.configured(flags, "dead") as at:
        found = at.letters.get(letter_id.encode())
    if found is None:
        click.echo("null" if as_json else f"there is no dead letter {letter_id}", err=not as_json)
        sys.exit(1)
    document = found[0].whole(found[1])
    if as_json:
        ui.print_json(document)
        return
    fields, trace = document.pop("message_fields"), document.pop("traceback")
    screen = ui.console()
    screen.print(ui.table("Dead letter", ("", ""), _for_people(found[0])))
    screen.print(
        ui.table("Fields of the message", ("name", "value"), [(name, visible(value)) for name, value in fields])
    )
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
    dead.add_command(ui.shelf_command(_verb))
_fields = click.argument(
    "fields", nargs=-1, required=True, metavar="NAME=VALUE...", callback=lambda *given: fields_of(given[2])
)
dead.add_command(ui.place_command(VERBS["dead edit"], _fields))


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
@ui.looks
def list_delayed(flags: dict[str, Any], ticket: str | None, limit: int, as_json: bool) -> None:
    with ui.configured(flags, "delayed") as at:
        rows = at.delayed.page(None, limit, ticket or "", math.inf).rows
        counts = at.delayed.counts()
    now_ms = wall_ms()
    unsorted = counts.pop("unsorted")
    told = counts | {
        "time_ms": now_ms,
        "messages": [vars(one) | {"ticket_id": json_safe(one.ticket_id)} for one in rows],
    }
    lines = [
        (one.id, moment_text(one.due_ms, "seconds"), span(left) if left > 0 else "now", one.ticket_id, text)
        for one, left, text in ((one, one.due_ms - now_ms, " ".join(map("=".join, one.fields or ()))) for one in rows)
    ]
    listed = ui.table("Delayed messages", ("message", "due", "in", "ticket", "fields"), lines, ids=("message", "due"))
    left = f"  {pluralize(unsorted, 'message')} more, which no leader has looked at yet" if unsorted else ""
    ui.show(as_json, told, listed, f"  {len(rows):,} of {counts['waiting']:,}" if rows else "  none", left)


_when = ui.stacked(
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


delayed.add_command(ui.shelf_command(DELAYED.verbs["send"]))
delayed.add_command(ui.shelf_command(DELAYED.verbs["move"], _when, _moved))
delayed.add_command(ui.shelf_command(DELAYED.verbs["drop"]))
