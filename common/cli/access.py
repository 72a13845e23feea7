"""``usher acl``: the users of Redis that Usher's programs need, and the scripts that masters load for them; and ``usher
token``: tokens for the HTTP API and the page."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import click

from usher.common.base.errors import StartRefused
from usher.common.base.text import json_line
from usher.common.http.credentials import FILE_ROLES, Role, line_of, new_token
from usher.common.redis.acl import acl_file, scripts_for_others
from usher.common.redis.client import Link
from usher.common.redis.locate import resolve_redis_url
from usher.common.redis.scripts import ScriptRunner
from usher.common.runtime.settings import CommonSettings, load, options, takes_json


@click.command(
    help=(
        "Print an ACL file for Redis: a user for each kind of program, with no more rights than it needs. Nothing is"
        " changed."
    )
)
@click.option(
    "--server",
    type=click.Choice(["7", "6.2"]),
    default="7",
    show_default=True,
    help="Version of Redis: 7 or later, or 6.2, which cannot keep a user from scripts of its own, nor tell keys apart.",
)
@click.option(
    "--load",
    "loads",
    is_flag=True,
    help="Print nothing; load the scripts of this version, as the user of masters, before consumers are upgraded.",
)
@options(CommonSettings)
def acl(server: str, loads: bool, flags: dict[str, Any]) -> None:
    settings = load(CommonSettings, os.environ, flags)
    if loads:
        _load_scripts(settings)
        return
    sources = settings.sources
    fed = () if sources is None else (*sources.names, *sources.patterns)
    click.echo(acl_file(settings.work_stream, settings.group, fed, selectors=server != "6.2"), nl=False)


def _load_scripts(settings: CommonSettings) -> None:
    names = scripts_for_others()
    with contextlib.closing(Link(resolve_redis_url(settings), "acl")) as link:
        refused = ScriptRunner(link).load_for_others(names)
    if refused:
        raise StartRefused(f"Redis refuses to load scripts: {refused[0]}")
    click.echo(f"{len(names)} scripts are loaded")


@click.group(help="Make tokens for the HTTP API and the page.")
def token() -> None:
    pass


@token.command(
    "new", help="Make a token for ROLE (viewer, operator or consumer) and NAME, and the line for USHER_TOKENS_FILE."
)
@click.argument("role", type=click.Choice([role.value for role in FILE_ROLES]))
@click.argument("name")
@takes_json
def new(role: str, name: str, as_json: bool) -> None:
    """Make a token. NAME: the name in the action log; of a consumer its name, or the beginning of its name and a
    `*`."""
    made = new_token()
    try:
        line = line_of(Role(role), name, made)
    except ValueError as wrong:
        raise click.UsageError(f"NAME: {wrong}") from None
    if as_json:
        click.echo(json_line({"role": role, "name": name, "token": made, "line": line}))
        return
    click.echo(f"{made}\n")
    click.echo(
        f"Give it to {name} as USHER_API_TOKEN; it is not kept anywhere. Add this line to USHER_TOKENS_FILE of every"
        " master:\n",
        err=True,
    )
    click.echo(line)
