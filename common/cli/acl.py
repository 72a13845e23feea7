"""``usher acl``: the users of Redis that Usher's programs need, and the scripts that masters load for them."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import click

from usher.common.base.errors import StartRefused
from usher.common.redis.acl import acl_file, scripts_for_others
from usher.common.redis.client import Link
from usher.common.redis.locate import resolve_redis_url
from usher.common.redis.scripts import ScriptRunner
from usher.common.runtime.settings import CommonSettings, load, options


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
