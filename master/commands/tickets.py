"""``usher tickets``: look at tickets in processing, and explain what one waits for."""

from __future__ import annotations

import sys
from typing import Any

import click

from common.settings import CommonSettings, options
from master.commands.explain import explain_ticket
from master.commands.follow import follow_ticket
from master.commands.looking import console, print_json, status_reader, tickets_table, way_out
from master.ticket_states import LOOKED_AT


@click.group(help="Look at tickets in processing.")
def tickets() -> None:
    pass


@tickets.command("list", help="List tickets in processing, and those that are parked.")
@click.option("--limit", type=click.IntRange(min=1, max=100_000), default=100, show_default=True, help="Most tickets listed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@options(CommonSettings)
def list_tickets(flags: dict[str, Any], limit: int, as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    cursor: str | None = "0"
    with status_reader(flags) as reader:
        while cursor is not None and len(rows) < limit:
            page = reader.tickets(cursor, min(1000, limit))
            rows += page["tickets"]
            cursor = page["cursor"]
        is_cut, rows = cursor is not None or len(rows) > limit, reader.explained(rows[:limit])
        parked = reader.parked(limit - len(rows))
    more, rows = is_cut or not parked.is_all, [*rows, *parked.rows]
    if as_json:
        print_json({"tickets": rows, "more": more})
        return
    console().print(tickets_table(rows))
    for line in filter(None, map(way_out, rows)):
        click.echo(line)
    if not rows:
        click.echo("  none: everything that was read is done")
    elif len(rows) >= limit and more:
        click.echo(f"  the first {len(rows):,}; --limit shows more")
    elif more:
        click.echo(f"  more is parked: tickets of the oldest {LOOKED_AT} messages are here; `usher tickets explain` knows every ticket")


@tickets.command("show", help="Show one ticket. Exit code 1 when nothing of it is in processing.")
@click.argument("ticket_id")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@options(CommonSettings)
def show_ticket(flags: dict[str, Any], ticket_id: str, as_json: bool) -> None:
    with status_reader(flags) as reader:
        found = reader.ticket(ticket_id)
    if as_json:
        print_json(found)
    elif found is None:
        click.echo(f"nothing of ticket {ticket_id!r} is in processing; `usher tickets explain` tells whether something of it waits")
    else:
        console().print(tickets_table([found], "Ticket"))
        for message_id in found.get("message_ids", ()):
            click.echo(f"  {message_id}")
        if (told := way_out(found)) is not None:
            click.echo(told)
    if found is None:
        sys.exit(1)


tickets.add_command(follow_ticket)
tickets.add_command(explain_ticket)
