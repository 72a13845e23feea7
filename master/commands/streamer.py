"""``usher streamer``: run the streamer of an outbox, or make its tables.

What needs SQLAlchemy, an extra, is imported where it is used: --help and --schema do without.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from common.commands.signals import StopRequest
from common.credentials import check_reach
from common.errors import SqlTrouble, StartRefused, UsherError
from common.log import configure
from common.outbox.sql_files import DIALECTS, schema
from common.redis_at_start import check_at_start
from common.running_up import resolve_redis_url
from common.set_back import look_for_steps
from common.settings import load, options
from master.settings import StreamerSettings

if TYPE_CHECKING:
    from master.streamer_wiring import StreamerProgram

_LOOK_S = 0.5
_BIND = "USHER_OUTBOX_BIND"
#: As long as its parts may take to end.
_STOP_S = 16.0


@click.command(
    help="Run the streamer: rows that an application has committed to its outbox become messages of the ticket stream. Start two: one streams, "
    "one stands by. First make the tables with --migrate, or put what --schema prints into your own migrations."
)
@click.option("--migrate", is_flag=True, help="Make or update the outbox' tables, and end.")
@click.option("--schema", "dialect", type=click.Choice(DIALECTS), help="Print the tables' SQL, and end. Nothing is connected.")
@click.option("--waiting", is_flag=True, help="Print how many rows are staged and how many were refused, and end (exit code 1 when some were).")
@options(StreamerSettings)
def streamer(flags: dict[str, Any], migrate: bool, dialect: str | None, waiting: bool) -> None:
    if dialect:
        click.echo(schema(dialect), nl=False)
        return
    try:
        settings = load(StreamerSettings, os.environ, flags)
        configure("streamer", settings.log_level, settings.log_format, settings.secrets)
        if migrate or waiting:
            sys.exit(_looked(settings, migrate))
        if settings.outbox_bind:
            _serve(settings)
            return
        from master.streamer_wiring import StreamerProgram

        redis_url = resolve_redis_url(settings)
        check_at_start(redis_url)
        program = StreamerProgram(settings, redis_url)
    except UsherError as refused:
        click.echo(f"usher streamer: {refused}", err=True)
        sys.exit(2)
    sys.exit(run(program))


def _serve(settings: StreamerSettings) -> None:
    """Until a signal comes, with health and metrics over HTTP."""
    from common.serving import Certificate, check_address, leave, serve
    from master.streamer_web import ServedStreamer

    check_reach(settings.outbox_bind, bool(settings.api_token or settings.viewer_token), settings.insecure)
    check_address(settings.outbox_bind, _BIND)
    redis_url = resolve_redis_url(settings)
    check_at_start(redis_url)
    program = partial(ServedStreamer, settings, redis_url, lambda why: leave(why=why))
    serve(program, settings.outbox_bind, "streamer", _STOP_S, _BIND, certificate=Certificate(settings.tls_cert, settings.tls_key))


def run(program: StreamerProgram) -> int:
    """Until a signal comes; the exit code."""
    with StopRequest() as stop:
        look_for_steps()
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
        raise StartRefused("USHER_OUTBOX_URL is not set: which database? (or give --outbox-url)")
    from common.outbox.database import plain, sa
    from common.outbox.store import OutboxStore

    store = OutboxStore(settings.outbox_url)
    try:
        if migrate:
            done = store.migrate()
            click.echo(f"outbox: version {', '.join(map(str, done))} applied" if done else "outbox: nothing to do")
            return 0
        store.check()
        staged, refused = store.waiting()
        click.echo(f"{staged:,} staged, {refused:,} refused")
        return 1 if refused else 0
    except (SqlTrouble, sa.exc.SQLAlchemyError) as trouble:  # the latter: it is not allowed, for one
        raise StartRefused(f"USHER_OUTBOX_URL: {plain(trouble)}") from trouble
    finally:
        store.close()
