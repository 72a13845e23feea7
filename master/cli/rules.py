"""Define ``usher rules``, ``usher pause``, ``usher slow`` and ``usher resume``: change how tickets are treated from now
on, without a deploy; ``usher consumers``: look at consumers, drain and resume them; and ``usher actions``, which tells
who did what."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import quote

import click

from usher.common.base.clock import wall_ms
from usher.common.base.durations import Number
from usher.common.base.text import escape_control, span
from usher.common.protocol.message import LONGEST_TICKET
from usher.master.cli.shared import (
    caller,
    configured,
    console,
    consumers_table,
    looks,
    print_json,
    show,
    stacked,
    table,
    why_option,
)
from usher.master.cli.verbs import perform, place_command
from usher.master.insight.formatting import moment
from usher.master.policy.rules import Target, rule_id
from usher.master.verbs.verbs import VERBS, Args, NewRule, OfTarget

_WHY = why_option(" and for explanations of what the tickets wait for")


_targets = stacked(
    click.argument("ticket", required=False),
    click.option(
        "--pattern",
        metavar="GLOB",
        help="All tickets whose ids fit: * is any text, ? one character, [a-z] one of these.",
    ),
    click.option("--tenant", metavar="NAME", help="All tickets of a tenant (USHER_TENANT_FIELD)."),
    click.option("--all", "everything", is_flag=True, help="All tickets."),
)


def _target(ticket: str | None, pattern: str | None, tenant: str | None, everything: bool) -> tuple[Target, str]:
    named = ((Target.TICKET, ticket), (Target.PATTERN, pattern), (Target.TENANT, tenant))
    given = [(target, value) for target, value in named if value is not None]
    given += [(Target.EVERYTHING, "")] * everything
    if len(given) != 1:
        raise click.UsageError("give one of these: a ticket id, --pattern GLOB, --tenant NAME, --all")
    target, value = given[0]
    if (
        target is not Target.EVERYTHING
        and not 0 < len((value or "").encode("utf-8", "surrogateescape")) <= LONGEST_TICKET
    ):
        raise click.UsageError(f"a ticket id has 1 to {LONGEST_TICKET} bytes")
    return target, value or ""


@click.group(help="Show live rules, and lift them. Without a command: list the rules.", invoke_without_command=True)
@click.pass_context
def rules(context: click.Context) -> None:
    if context.invoked_subcommand is None:
        context.invoke(list_rules)


@rules.command("list", help="List the live rules.")
@looks
def list_rules(flags: dict[str, Any], as_json: bool) -> None:
    with configured(flags, "operator") as at:
        book = at.rules.read()
    rows = []
    for rule in book.rules:
        since = span(wall_ms() - rule.set_ms) if rule.set_ms else ""
        does = (rule.target.value, rule.value, rule.action.value, rule.bounds)
        rows.append((rule.id, *does, rule.who, since, rule.reason))
    listed = table("Rules", ("id", "target", "value", "action", "rate", "who", "since", "reason"), rows, ids=("id",))
    holds = "  the strongest one holds: pause, then the slowest; `usher rules lift ID` ends one"
    document = {"rules": [rule.shown() for rule in book.rules], "version": int(book.version or 0)}
    show(as_json, document, listed, holds if rows else "  none")


@rules.command("lift", help="Lift rules. Exit code 1 when one of them does not exist.")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@why_option()
@looks
def lift(flags: dict[str, Any], ids: tuple[str, ...], why: str, as_json: bool) -> None:
    with configured(flags, "operator") as at:
        view = at.acting(caller(why))
        changes = {one: VERBS["rules lift"].perform(view, Args(), rule_id=one) for one in dict.fromkeys(ids)}
    if as_json:
        print_json({"lifted": {one: changed.document or None for one, changed in changes.items()}})
    else:
        for one, changed in changes.items():
            click.echo(f"{one}: {changed.text}")
    sys.exit(1 if any(changed.problem for changed in changes.values()) else 0)


def _rule_command(action: Literal["pause", "slow", "limit"], told: str, *limits: Callable[[Any], Any]) -> click.Command:
    """Return the command that sets a rule with this action."""

    @stacked(_targets, *limits, _WHY, looks)
    def act(flags: dict[str, Any], why: str, as_json: bool, **given: Any) -> None:
        chosen = [given.pop(name) for name in ("ticket", "pattern", "tenant", "everything")]
        target, value = _target(*chosen)  # may be no UTF-8, which no model takes
        args = NewRule.model_construct(target=target.value, value=value, action=action, reason=why, **given)
        try:
            args.check()
        except ValueError as wrong:
            raise click.UsageError(str(wrong)) from None
        sys.exit(_performed(flags, "rules set", args, as_json))

    return click.command(action, help=told)(act)


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


def _performed(flags: dict[str, Any], name: str, args: Any, as_json: bool) -> int:
    with configured(flags, "operator") as at:
        view = at.acting(caller(args.reason))
        code = perform(view, name, args, as_json)
        fitting = view.rules.read().all_of(args.value.encode("utf-8", "surrogateescape"))
        for rule in fitting if args.target == Target.TICKET.value and not as_json else ():
            if rule.id != rule_id(Target.TICKET, args.value):
                told = f"another rule fits it too: it is {rule.told()}; `usher rules lift {rule.id}`"
                click.echo(escape_control(told))
        if args.target == Target.TENANT.value and not at.settings.tenant_field:
            click.echo("USHER_TENANT_FIELD is empty here: where masters have none, no message is of a tenant", err=True)
    return code


@click.command(
    help=(
        "Lift the rule for a ticket, a pattern or everything: its tickets go on, in the order of the stream. Exit"
        " code 1 when there was no rule."
    )
)
@_targets
@why_option()
@looks
def resume(flags: dict[str, Any], why: str, as_json: bool, **chosen: Any) -> None:
    target, value = _target(**chosen)
    args = OfTarget.model_construct(target=target.value, value=value, reason=why)
    sys.exit(_performed(flags, "resume", args, as_json))


@click.command(help="Show the actions of operators, the newest first: when, who, what, on what, why, and the outcome.")
@click.option(
    "--limit", type=click.IntRange(min=1, max=10_000), default=50, show_default=True, help="Most lines shown."
)
@looks
def actions(flags: dict[str, Any], limit: int, as_json: bool) -> None:
    with configured(flags, "operator") as at:
        lines, cursor = at.action_log.page(None, limit)
    now_ms, names = wall_ms(), ("who", "via", "what", "on", "why", "outcome")
    rows = [(f"{span(now_ms - line['time_ms'])} ago", *(line[name] for name in names)) for line in lines]
    document = {"actions": lines, "more": cursor is not None}
    show(as_json, document, table("Actions", ("when", *names), rows), "" if rows else "  none")


@click.group(help="Look at the registered consumers and their work; drain and resume them.")
def consumers() -> None:
    pass


@consumers.command("list", help="List the consumers, their states and the messages they hold.")
@looks
def list_consumers(flags: dict[str, Any], as_json: bool) -> None:
    with configured(flags, "status") as at:
        rows = at.status.consumers()
    none = "  none is registered: start one with `usher consumer --handler module:function`"
    show(as_json, {"consumers": rows}, consumers_table(rows), "" if rows else none)


@consumers.command(
    "show",
    help=(
        "Show one consumer: where it runs, and what it runs at this moment, as it tells the leader. Exit code 1 when no"
        " consumer of that name is registered."
    ),
)
@click.argument("name")
@looks
def show_consumer(flags: dict[str, Any], name: str, as_json: bool) -> None:
    with configured(flags, "operator") as at:
        told = at.ask_leader(f"/api/consumers/{quote(name, safe='')}/process")
        rows = told["consumers"] if told is not None else [one for one in at.status.consumers() if one["name"] == name]
    if as_json:
        print_json({"consumers": rows})
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
    console().print(table("Consumer", ("", ""), [fact for fact in facts if fact[1]]))
    if not process:
        return
    running = [
        (one["ticket_id"], one["id"], one["attempt"], span(wall_ms() - one["started_ms"]), " > ".join(one["stack"]))
        for one in process["running"]
    ]
    columns = ("ticket", "message", "attempt", "runs for", "stands at")
    title = f"Runs now: {process['runs']:,}"
    console().print(table(title, columns, running, numbers=("attempt", "runs for"), ids=("message",)))


for _name in ("consumers drain", "consumers resume"):
    consumers.add_command(place_command(VERBS[_name]))
