"""The options that select dead letters, for every command that works on some of them."""

from __future__ import annotations

import contextlib
import getpass
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import requests

from usher.common.base.durations import Duration
from usher.common.base.errors import StartRefused
from usher.common.doctor.source_status import SourcesReader
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.common.runtime.settings import CommonSettings
from usher.master.cli.shared import configured, print_json
from usher.master.insight.explainer import Explainer
from usher.master.operations.action_log import ActionLog, By
from usher.master.operations.live_rules import LiveRules, RuleSetChange
from usher.master.policy.letters import LetterFilter
from usher.master.policy.rules import LONGEST_REASON

#: Seconds that the leader may take: it asks a consumer in turn.
_CONNECT_S, _READ_S = 1.0, 5.0


class Age(Duration):
    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return int(super().convert(value, param, ctx) * 1000)


#: The filters by text and by time of a letter.
OF_LETTERS = (
    click.option(
        "--reason",
        default="",
        metavar="TEXT",
        help="Only those given up for a reason that contains this; not your own reason.",
    ),
    click.option("--error", default="", metavar="TEXT", help="Only those whose error, or its type, contains this."),
    click.option(
        "--older-than", type=Age(), metavar="AGE", help="Only those written longer ago than this: 90s, 10m, 2h, 3d."
    ),
    click.option("--younger-than", type=Age(), metavar="AGE", help="Only those written less long ago than this."),
)
_REASON, _ERROR, _OLDER, _YOUNGER = OF_LETTERS
_POLICY = click.option(
    "--policy",
    default="",
    type=click.Choice(["", "halt", "skip"]),
    help="Only those written under this policy.",
)
_TICKET = click.option("--ticket", metavar="ID", help="Only those of this ticket.")
_ID = click.option(
    "--id", "message_id", metavar="ID", help="Only the one with this id, or of the message with this id."
)


def filters(command: Callable[..., Any]) -> Callable[..., Any]:
    for decorate in reversed((_TICKET, _REASON, _ERROR, _POLICY, _ID, _OLDER, _YOUNGER)):
        command = decorate(command)
    return command


def wanted_of(given: dict[str, Any]) -> LetterFilter:
    now_ms = time.time_ns() // 1_000_000
    ticket, letter_id, older, younger = (
        given["ticket"],
        given.get("message_id"),
        given["older_than"],
        given["younger_than"],
    )
    return LetterFilter(
        None if ticket is None else ticket.encode("utf-8", "surrogateescape"),
        given["reason"],
        given["error"],
        None if letter_id is None else letter_id.encode("utf-8", "surrogateescape"),
        None if younger is None else now_ms - younger,
        None if older is None else now_ms - older,
        given.get("policy", ""),
    )


class _WhyOption(click.Option):
    """An option shown as ``--why`` alone: its other name is for scripts that were written before all commands used one
    word."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return record and (record[0].replace(", --reason", ""), record[1])


def why_option(more: str = "") -> Callable[[Any], Any]:
    """Return the option for an operator's reason. ``--reason`` means the same, except where it filters dead letters."""
    return click.option(
        "--why", "--reason", "why", cls=_WhyOption, default="", metavar="TEXT", help=f"Why, for the action log{more}."
    )


class OperatorContext(NamedTuple):
    """The configured stream, as an operator's command works on it. ``link`` is shared by all: one thread uses them."""

    settings: CommonSettings
    rules: LiveRules
    actions: ActionLog
    explainer: Explainer
    link: Link
    keys: Keys


@contextlib.contextmanager
def operator_context(flags: dict[str, Any]) -> Iterator[OperatorContext]:
    with configured(flags, "operator") as (settings, link, keys):
        reader = None if settings.sources is None else SourcesReader(link, keys, settings.sources)
        gathering = (lambda: None) if reader is None else reader.overview
        lease_ms = int(settings.lease_seconds * 1000)
        explainer = Explainer(
            link, keys, settings.work_ticket_field, lease_ms, sources=gathering, by_stream=settings.by_stream
        )
        yield OperatorContext(settings, LiveRules(link, keys), ActionLog(link, keys), explainer, link, keys)


def session(ca: Path | None) -> requests.Session:
    """Return an HTTP session for masters. ``ca``: a file of certificates that are trusted instead of the system's.
    Raises StartRefused when there is no such file."""
    made = requests.Session()
    made.trust_env = False  # our own addresses: no proxy
    if ca is not None:
        if not ca.expanduser().exists():
            raise StartRefused(f"USHER_TLS_CA: there is no {ca}")
        made.verify = str(ca.expanduser())
    return made


def ask_leader(at: OperatorContext, path: str) -> dict[str, Any] | None:
    """Return the leader's answer to a GET; None when there is no leader, or it does not answer with a document."""
    url = at.explainer.leader_url()
    if not url:
        return None
    headers = {"Authorization": f"Bearer {at.settings.api_token}"} if at.settings.api_token else {}
    try:
        with session(at.settings.tls_ca) as asking:
            answered = asking.get(url + path, headers=headers, timeout=(_CONNECT_S, _READ_S), allow_redirects=False)
            document = answered.json() if answered.status_code == 200 else None
    except (requests.RequestException, ValueError):
        return None
    return document if isinstance(document, dict) else None


def caller(why: str = "") -> By:
    """Return the user of the operating system who runs this command. Raises click.UsageError for a ``why`` that the
    action log does not take."""
    if not why.isprintable() or len(why) > LONGEST_REASON:
        raise click.UsageError(
            f"the reason must be one line of text, without control characters, of at most {LONGEST_REASON} characters"
        )
    try:
        who = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        who = f"uid {os.getuid()}"
    return By(who, "cli", why)


def print_rule_set_change(changed: RuleSetChange, as_json: bool) -> None:
    if as_json:
        print_json(changed.shown())
    else:
        click.echo(changed.told)
