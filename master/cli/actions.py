"""Define ``usher actions``: the actions of operators, the newest first."""

from __future__ import annotations

import time
from typing import Any

import click

from usher.common.runtime.settings import CommonSettings, options
from usher.master.cli.options import operator_context
from usher.master.cli.shared import console, print_json, table
from usher.master.policy.explain.explain import span


@click.command(help="Show the actions of operators, the newest first: when, who, what, on what, why, and the outcome.")
@click.option(
    "--limit", type=click.IntRange(min=1, max=10_000), default=50, show_default=True, help="Most lines shown."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@options(CommonSettings)
def actions(flags: dict[str, Any], limit: int, as_json: bool) -> None:
    with operator_context(flags) as at:
        lines, cursor = at.actions.page(None, limit)
    if as_json:
        print_json({"actions": lines, "more": cursor is not None})
        return
    now_ms = time.time_ns() // 1_000_000
    rows = [
        (
            f"{span(now_ms - line['time_ms'])} ago",
            line["who"],
            line["via"],
            line["what"],
            line["on"],
            line["why"],
            line["outcome"],
        )
        for line in lines
    ]
    console().print(table("Actions", ("when", "who", "via", "what", "on", "why", "outcome"), rows))
    if not rows:
        click.echo("  none")
