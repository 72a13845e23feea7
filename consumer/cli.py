"""``usher asyncapi``: what a typed handler takes, for those who send to it."""

from __future__ import annotations

import os
from typing import Any

import click
import orjson

from usher.common.runtime.settings import CommonSettings, load, options
from usher.consumer.handlers.contract import contract_of
from usher.consumer.handlers.loader import load_target


@click.command(
    help=(
        "Print an AsyncAPI document of the messages that HANDLER (module:function) takes, made of its types. The module"
        " is imported; nothing is connected to."
    )
)
@click.argument("handler")
@options(CommonSettings)
def asyncapi(handler: str, flags: dict[str, Any]) -> None:
    settings = load(CommonSettings, os.environ, flags)
    name = handler.rpartition(":")[2]
    made = contract_of(load_target(handler), name, settings.ticket_stream, settings.ticket_field)
    click.echo(orjson.dumps(made, option=orjson.OPT_INDENT_2))
