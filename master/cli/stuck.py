"""Define ``usher stuck``: tickets that stand still, are retried or halted, those in the same trouble in one line."""

from __future__ import annotations

import math
import shlex
import time
from typing import Any

import click

from usher.common.base.clock import wall_ms
from usher.common.base.text import escape_control, pluralize
from usher.common.protocol.keys import MASTER
from usher.common.redis.replies import TicketStream
from usher.common.runtime.settings import CommonSettings, options
from usher.master.cli.shared import configured, console, fields_of, print_json, shown_heads, shown_texts, table
from usher.master.insight.stuck_tickets import MOST, StuckTickets
from usher.master.membership.registry import read_registry, state_of
from usher.master.operations.live_rules import read_rules

#: Seconds between two looks: a ticket whose first message is another one by then is not stuck.
_BETWEEN_S = 1.0
_EXAMPLES = 3


@click.command(
    "stuck",
    help=(
        "Show tickets that stand still for more than 5 s, are being retried, or are halted; those in the same trouble"
        " in one line. Looks twice, a second apart. Exit code 0, also when there are some."
    ),
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@options(CommonSettings)
def stuck(flags: dict[str, Any], as_json: bool) -> None:
    with configured(flags, "stuck") as at:
        found = StuckTickets(at.link, at.keys, at.settings.work_ticket_field)
        rules = read_rules(at.link, at.keys)
        members = read_registry(at.link, at.keys)
        states = {incarnation: state_of(member, rules) for incarnation, member in members.items()}
        group = {consumer.name: consumer.pending for consumer in TicketStream(at.link, at.keys).group_consumers()}
        found.advance(math.inf, True, states, rules, wall_ms())
        found.rows(group.get(MASTER, 0), states, rules, wall_ms())
        time.sleep(_BETWEEN_S)
        rows = found.rows(group.get(MASTER, 0), states, rules, wall_ms())
        groups = fields_of(at).add_to_groups(found.groups(rows))
        letters = at.link.call("XLEN", at.keys.dead)
    names = at.settings.shown_names
    if as_json:
        print_json({"groups": groups, "more": len(rows) >= MOST})
        return
    for one in groups:
        click.echo(escape_control(one["told"]))
        few = one["rows"][:_EXAMPLES]
        shown = [
            (row["ticket_id"], *shown_texts(row, names), row["tried"], row["behind"], row["consumer"], row["why"])
            for row in few
        ]
        columns = ("ticket", *shown_heads(names), "attempts", "behind", "consumer", "why")
        console().print(table("", columns, shown, numbers=("behind",), ids=("ticket",)))
        for way in _ways(one):
            click.echo(escape_control(f"  {way}"))
    if not groups:
        given_up = f"; given up: {pluralize(letters, 'dead letter')} (`usher dead list`)" if letters else ""
        click.echo(f"nothing is stuck{given_up}")
    elif len(rows) >= MOST:
        click.echo(f"what has not failed is counted among the {MOST} oldest tickets")


def _ways(group: dict[str, Any]) -> list[str]:
    if not (group["error"] or not group["text"]):
        return []
    error = f" --error {shlex.quote(group['error'])}" if group["error"] else ""
    ways = [f"usher tickets list --state {group['state']}{error}"]
    if group["state"] == "halted" and error:
        ways.append(f"usher dead redrive --all{error} --policy halt   # runs them again, after the fix")
    elif group["state"] == "retrying":
        ways.append(f"usher tickets retry --state retrying{error}   # now, after the fix")
    return ways
