"""Define ``usher consumers``: look at the registered consumers, drain and resume them."""

from __future__ import annotations

import sys
from typing import Any
from urllib.parse import quote

import click

from usher.common.base.clock import wall_ms
from usher.master.cli.shared import (
    ask_leader,
    caller,
    console,
    consumers_table,
    looks,
    operator_context,
    print_json,
    print_rule_set_change,
    status_reader,
    table,
    why_option,
)
from usher.master.insight.status import StatusReader
from usher.master.operations.live_rules import TooManyRules
from usher.master.policy.explain.explain import span


@click.group(help="Look at the registered consumers and at what they run; drain and resume them.")
def consumers() -> None:
    pass


@consumers.command("list", help="List the consumers, their states and the messages they hold.")
@looks
def list_consumers(flags: dict[str, Any], as_json: bool) -> None:
    with status_reader(flags) as reader:
        rows = reader.consumers()
    if as_json:
        print_json({"consumers": rows})
        return
    console().print(consumers_table(rows))
    if not rows:
        click.echo("  none is registered: start one with `usher consumer --handler module:function`")


@consumers.command(
    "show",
    help=(
        "Show one consumer: where it runs, and what it runs at this moment, as it tells the leader. Exit code 1 when no"
        " consumer of that name is registered."
    ),
)
@click.argument("name")
@looks
def show(flags: dict[str, Any], name: str, as_json: bool) -> None:
    with operator_context(flags) as at:
        told = ask_leader(at, f"/api/consumers/{quote(name, safe='')}/process")
        reader = StatusReader(at.link, at.keys)
        rows = told["consumers"] if told is not None else [one for one in reader.consumers() if one["name"] == name]
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
        ("version", process.get("version", "")),
        ("handler", process.get("handler", "")),
        ("memory", f"{memory / 2**20:,.0f} MiB" if memory else ""),
        ("messages", f"{row['pending']:,} of {row.get('capacity', 0):,}  handlers at a time {row.get('slots', 0):,}"),
        ("lease left", f"{row['lease_ms'] / 1000:.1f} s"),
    ]
    console().print(table("Consumer", ("", ""), [fact for fact in facts if fact[1]]))
    if not process:
        return
    now_ms = wall_ms()
    running = [
        (one["ticket_id"], one["id"], one["attempt"], span(now_ms - one["started_ms"])) for one in process["running"]
    ]
    columns = ("ticket", "message", "attempt", "runs for")
    title = f"Runs now: {process['runs']:,}"
    console().print(table(title, columns, running, numbers=("attempt", "runs for"), ids=("message",)))


@consumers.command(
    "drain",
    help=(
        "Hand nothing more to a consumer: it finishes its messages, and new ones go to others. This holds for the"
        " name, also after a restart, until `usher consumers resume`. Exit code 1 when no consumer of that name is"
        " registered."
    ),
)
@click.argument("name")
@why_option()
@looks
def drain(flags: dict[str, Any], name: str, why: str, as_json: bool) -> None:
    _change(flags, name, why, as_json, "drain")


@consumers.command(
    "resume",
    help=(
        "Hand work again to a consumer that an operator has drained. A consumer that shuts down goes on with that."
        " Exit code 1 when it was not drained."
    ),
)
@click.argument("name")
@why_option()
@looks
def resume(flags: dict[str, Any], name: str, why: str, as_json: bool) -> None:
    _change(flags, name, why, as_json, "resume")


def _change(flags: dict[str, Any], name: str, why: str, as_json: bool, what: str) -> None:
    with operator_context(flags) as at:
        step, nobody = (
            (at.rules.drain, f"no consumer {name!r} is registered")
            if what == "drain"
            else (at.rules.resume, f"consumer {name!r} was not drained by an operator")
        )
        try:
            changed = step(name, caller(why))
        except TooManyRules as full:
            raise click.ClickException(str(full)) from full
    if changed is not None:
        print_rule_set_change(changed, as_json)
        return
    click.echo("null" if as_json else nobody)
    sys.exit(1)
