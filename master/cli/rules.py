"""Define ``usher rules``, ``usher pause``, ``usher slow`` and ``usher resume``: change how tickets are treated from now
on, without a deploy; and ``usher actions``, which tells who did what."""

from __future__ import annotations

import sys
from typing import Any

import click

from usher.common.base.clock import wall_ms
from usher.common.base.durations import Number
from usher.common.base.text import escape_control
from usher.common.protocol.message import LONGEST_TICKET
from usher.master.cli.shared import (
    OperatorContext,
    caller,
    console,
    looks,
    operator_context,
    print_json,
    print_rule_set_change,
    stacked,
    table,
    why_option,
)
from usher.master.operations.live_rules import TooManyRules
from usher.master.policy.explain.explain import span
from usher.master.policy.rules import Rule, RuleAction, Target, rule_id

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
        raise click.UsageError("give a ticket id, or --pattern GLOB, or --tenant NAME, or --all")
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
    with operator_context(flags) as at:
        book = at.rules.read()
    if as_json:
        print_json({"rules": [rule.shown() for rule in book.rules], "version": int(book.version or 0)})
        return
    now_ms = wall_ms()
    rows = []
    for rule in book.rules:
        limits = [f"{rule.rate_per_second:g}/s"] if rule.rate_per_second else []
        limits += [f"{rule.concurrency} at a time"] if rule.concurrency else []
        limits += [f"weight {rule.weight}"] if rule.weight else []
        rate, since = ", ".join(limits), span(now_ms - rule.set_ms) if rule.set_ms else ""
        rows.append((rule.id, rule.target.value, rule.value, rule.action.value, rate, rule.who, since, rule.reason))
    console().print(
        table("Rules", ("id", "target", "value", "action", "rate", "who", "since", "reason"), rows, ids=("id",))
    )
    click.echo(
        "  none" if not rows else "  the strongest one holds: pause, then the slowest; `usher rules lift ID` ends one"
    )


@rules.command("lift", help="Lift rules. Exit code 1 when one of them does not exist.")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@why_option()
@looks
def lift(flags: dict[str, Any], ids: tuple[str, ...], why: str, as_json: bool) -> None:
    with operator_context(flags) as at:
        changes = {chosen: at.rules.lift(chosen, caller(why)) for chosen in dict.fromkeys(ids)}
    if as_json:
        print_json(
            {"lifted": {chosen: None if changed is None else changed.shown() for chosen, changed in changes.items()}}
        )
    else:
        for chosen, changed in changes.items():
            click.echo(f"{chosen}: {'there is no such rule' if changed is None else changed.told}")
    if None in changes.values():
        sys.exit(1)


@click.command(
    help=(
        "Pause tickets: nothing more of them is handed over; nothing is lost, their order stays, and other tickets go"
        " on. Messages that a consumer already has run to their end. The pause holds until `usher resume`, whatever"
        " is restarted meanwhile."
    )
)
@_targets
@_WHY
@looks
def pause(flags: dict[str, Any], why: str, as_json: bool, **chosen: Any) -> None:
    target, value = _target(**chosen)
    _set(flags, Rule(target, value, RuleAction.PAUSE, None, why, caller().who), as_json)


@click.command(
    help=(
        "Slow tickets down: hand over at most so many messages of each ticket per second. A tenant has one limit for"
        " all of its tickets together, over all consumers. This holds until `usher resume`."
    )
)
@_targets
@click.option(
    "--rate",
    type=Number(min=0.001, max=1_000_000),
    metavar="N",
    help="Messages per second, of each ticket, or of the tenant.",
)
@click.option("--concurrency", type=click.IntRange(1, 1_000_000), metavar="N", help="Tickets of a tenant at a time.")
@click.option("--weight", type=click.IntRange(1, 1000), metavar="N", help="A tenant's share (USHER_TENANT_WEIGHTS).")
@_WHY
@looks
def slow(
    flags: dict[str, Any],
    rate: float | None,
    concurrency: int | None,
    weight: int | None,
    why: str,
    as_json: bool,
    **chosen: Any,
) -> None:
    target, value = _target(**chosen)
    if target is not Target.TENANT and (rate is None or concurrency or weight):
        raise click.UsageError("give --rate; --concurrency and --weight are for a --tenant")
    if not (rate or concurrency or weight):
        raise click.UsageError("give --rate, --concurrency or --weight")
    rule = Rule(target, value, RuleAction.SLOW, rate, why, caller().who, concurrency=concurrency, weight=weight)
    _set(flags, rule, as_json)


def _set(flags: dict[str, Any], rule: Rule, as_json: bool) -> None:
    with operator_context(flags) as at:
        try:
            print_rule_set_change(at.rules.set(rule, caller(rule.reason)), as_json)
        except TooManyRules as full:
            raise click.ClickException(str(full)) from full
        if not as_json:
            _tell_others(at, rule.target, rule.value)


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
    with operator_context(flags) as at:
        changed = at.rules.lift(rule_id(target, value), caller(why), "resume")
        if changed is not None:
            print_rule_set_change(changed, as_json)
        elif as_json:
            print_json(None)
        else:
            click.echo(escape_control(f"there is no rule for {target.value} {value}".rstrip()))
        if not as_json:
            _tell_others(at, target, value)
    if changed is None:
        sys.exit(1)


def _tell_others(at: OperatorContext, target: Target, value: str) -> None:
    """Print the other rules that fit: of several rules the strongest holds."""
    if target is Target.TICKET:
        for rule in at.rules.read().all_of(value.encode("utf-8", "surrogateescape")):
            if rule.id != rule_id(target, value):
                click.echo(
                    escape_control(f"another rule fits it too: it is {rule.told()}; `usher rules lift {rule.id}`")
                )


@click.command(help="Show the actions of operators, the newest first: when, who, what, on what, why, and the outcome.")
@click.option(
    "--limit", type=click.IntRange(min=1, max=10_000), default=50, show_default=True, help="Most lines shown."
)
@looks
def actions(flags: dict[str, Any], limit: int, as_json: bool) -> None:
    with operator_context(flags) as at:
        lines, cursor = at.actions.page(None, limit)
    if as_json:
        print_json({"actions": lines, "more": cursor is not None})
        return
    now_ms, names = wall_ms(), ("who", "via", "what", "on", "why", "outcome")
    rows = [(f"{span(now_ms - line['time_ms'])} ago", *(line[name] for name in names)) for line in lines]
    console().print(table("Actions", ("when", *names), rows))
    if not rows:
        click.echo("  none")
