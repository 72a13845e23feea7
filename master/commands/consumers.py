"""``usher consumers``: look at the registered consumers."""

from __future__ import annotations

from typing import Any

import click

from common.settings import CommonSettings, options
from master.commands.looking import console, consumers_table, print_json, status_reader


@click.group(help="Look at the registered consumers.")
def consumers() -> None:
    pass


@consumers.command("list", help="List the consumers: whether they live, what they hold.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@options(CommonSettings)
def list_consumers(flags: dict[str, Any], as_json: bool) -> None:
    with status_reader(flags) as reader:
        rows = reader.consumers()
    if as_json:
        print_json({"consumers": rows})
        return
    console().print(consumers_table(rows))
    if not rows:
        click.echo("  none is registered: start one with `usher consumer --consumer-name NAME --handler module:function`")
