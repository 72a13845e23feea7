"""What the operating commands share: who acts, what they act with, and what they say of it."""

from __future__ import annotations

import contextlib
import getpass
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import requests

from common.errors import StartRefused
from common.keys import Keys
from common.redis_client import Link
from common.settings import CommonSettings
from common.source_status import SourcesReader
from master.actions import ActionLog, By
from master.commands.looking import configured, print_json
from master.explainer import Explainer
from master.live_rules import Changed, LiveRules
from master.policy.rules import LONGEST_REASON


class _Why(click.Option):
    """Shown as ``--why`` alone: its other name is for scripts that were written before all commands had one word for it."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return record and (record[0].replace(", --reason", ""), record[1])


def why_option(more: str = "") -> Callable[[Any], Any]:
    """Why an operator acts. ``--reason`` says the same, except where that is what dead letters are filtered by."""
    return click.option("--why", "--reason", "why", cls=_Why, default="", metavar="TEXT", help=f"Why, for the action log{more}.")


class Desk(NamedTuple):
    """The configured stream, as an operator's command works on it. ``link`` is shared by all: one thread uses them."""

    settings: CommonSettings
    rules: LiveRules
    actions: ActionLog
    explainer: Explainer
    link: Link
    keys: Keys


@contextlib.contextmanager
def desk(flags: dict[str, Any]) -> Iterator[Desk]:
    """Raises as ``configured``."""
    with configured(flags, "operator") as (settings, link, keys):
        reader = None if settings.sources is None else SourcesReader(link, keys, settings.sources)
        gathering = (lambda: None) if reader is None else reader.overview
        lease_ms = int(settings.lease_seconds * 1000)
        explainer = Explainer(link, keys, settings.work_ticket_field, lease_ms, sources=gathering, by_stream=settings.by_stream)
        yield Desk(settings, LiveRules(link, keys), ActionLog(link, keys), explainer, link, keys)


def session(ca: Path | None) -> requests.Session:
    """For asking masters. ``ca``: whose certificates are trusted instead of the system's. Raises StartRefused when there is no such file."""
    made = requests.Session()
    made.trust_env = False  # these are addresses of ours: no proxy
    if ca is not None:
        if not ca.expanduser().exists():
            raise StartRefused(f"USHER_TLS_CA: there is no {ca}")
        made.verify = str(ca.expanduser())
    return made


def caller(why: str = "") -> By:
    """The user of the operating system who runs this command. Raises click.UsageError for a ``why`` that the action log does not take."""
    if not why.isprintable() or len(why) > LONGEST_REASON:
        raise click.UsageError(f"the reason must be one line of text, without control characters, of at most {LONGEST_REASON} characters")
    try:
        who = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        who = f"uid {os.getuid()}"
    return By(who, "cli", why)


def tell(changed: Changed, as_json: bool) -> None:
    """What a change of the rules did."""
    if as_json:
        print_json(changed.shown())
    else:
        click.echo(changed.told)
