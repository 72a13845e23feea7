"""``usher acl``: the users of Redis that Usher's programs need."""

from __future__ import annotations

import os
from typing import Any

import click

from usher.common.redis.acl import acl_file
from usher.common.runtime.settings import CommonSettings, load, options


@click.command(
    help=(
        "Print an ACL file for Redis: a user for each kind of program, with no more rights than it needs. Nothing is"
        " changed."
    )
)
@options(CommonSettings)
def acl(flags: dict[str, Any]) -> None:
    settings = load(CommonSettings, os.environ, flags)
    sources = settings.sources
    fed = () if sources is None else (*sources.names, *sources.patterns)
    click.echo(acl_file(settings.work_stream, settings.group, fed), nl=False)
