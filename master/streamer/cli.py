"""``usher streamer``: run the streamer of an outbox, or make its tables.

Modules that need SQLAlchemy, an extra, are imported where they are used: --help and --schema do without.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from usher.common.base.errors import SqlTrouble, StartRefused
from usher.common.base.log import configure
from usher.common.base.text import pluralize
from usher.common.http.credentials import check_reach
from usher.common.outbox.rows import DIALECTS, schema
from usher.common.redis.locate import check_at_start, resolve_redis_url
from usher.common.runtime.settings import load, options
from usher.common.runtime.signals import StopRequest
from usher.master.settings import StreamerSettings

if TYPE_CHECKING:
    from usher.master.streamer.program import StreamerProgram

_LOOK_S = 0.5
_BIND = "USHER_OUTBOX_BIND"
#: Seconds that its parts may take to end.
_STOP_S = 16.0


@click.command()
@click.option("--migrate", is_flag=True, help="Create the outbox' tables, and exit.")
@click.option("--schema", "dialect", type=click.Choice(DIALECTS), help="Print the tables' SQL, and exit.")
@click.option("--waiting", is_flag=True, help="Print how many rows are staged and refused; exit code 1: some refused.")
@options(StreamerSettings)
def streamer(flags: dict[str, Any], migrate: bool, dialect: str | None, waiting: bool) -> None:
    """Run the streamer: rows that an application has committed to its outbox become messages of the ticket stream.
    Start two: one streams, one stands by. First make the tables with --migrate, or put what --schema prints into your
    own migrations."""
    if dialect:
        click.echo(schema(dialect), nl=False)
        return
    settings = load(StreamerSettings, os.environ, flags)
    configure("streamer", settings.log_level, settings.log_format, settings.secrets)
    if migrate or waiting:
        sys.exit(_looked(settings, migrate))
    from usher.common.http.serve import check_address, serve
    from usher.common.http.tls import server_tls
    from usher.master.streamer.program import StreamerProgram

    if bind := settings.outbox_bind:
        check_reach(bind, settings.api_token, settings.tokens_file)
        check_address(bind, _BIND)
    redis_url = resolve_redis_url(settings)
    check_at_start(redis_url, {})
    make = partial(StreamerProgram, settings, redis_url)
    if bind:
        serve(make, bind, "streamer", _STOP_S, _BIND, server_tls(settings.tls_cert, settings.tls_key))
        return
    sys.exit(run(make()))


def run(program: StreamerProgram) -> int:
    with StopRequest() as stop:
        program.start()
        try:
            while not stop.wait(_LOOK_S):
                if not program.alive:
                    return 1
        finally:
            program.stop()
    return 0


def _looked(settings: StreamerSettings, migrate: bool) -> int:
    if not settings.outbox_url:
        raise StartRefused("USHER_OUTBOX_URL is not set: name the database there, or with --outbox-url")
    from usher.common.outbox.store import OutboxStore
    from usher.common.sql.alchemy import driver_message, sa

    store = OutboxStore(settings.outbox_url)
    try:
        if migrate:
            click.echo("outbox: the tables are made" if store.migrate() else "outbox: nothing to do")
            return 0
        store.check()
        staged, refused = store.waiting()
        halted = pluralize(store.halted(), "ticket")
        click.echo(f"{staged:,} staged, {refused:,} refused, {halted} halted by refused rows")
        return 1 if refused else 0
    except (SqlTrouble, sa.exc.SQLAlchemyError) as trouble:  # the latter: for example a missing right
        raise StartRefused(f"USHER_OUTBOX_URL: {driver_message(trouble)}") from trouble
    finally:
        store.close()
