"""Parts that commands share: find Redis, open a reader, options, ask the leader, print a document or a table."""

from __future__ import annotations

import contextlib
import getpass
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import requests
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from usher.common.base.errors import GroupMissing, RedisTrouble, StartRefused
from usher.common.base.text import escape_control, json_line
from usher.common.protocol.keys import Keys
from usher.common.redis.client import CommandRefused, Link, check_reachable
from usher.common.redis.locate import resolve_redis_url
from usher.common.runtime.settings import CommonSettings, load, options, takes_json
from usher.master.insight.formatting import TICKET_COLUMNS, visible
from usher.master.operations.action_log import By
from usher.master.policy.rules import LONGEST_REASON
from usher.master.policy.states import BAD, STATES, WARN
from usher.master.verbs.view import View

#: A width, in characters, at which nothing is folded.
_UNFOLDED = 10_000
#: Characters of a folded column in which a text can still be read.
_READABLE = 28
#: Colours of the states of consumers and tickets.
_STYLES = {"live": "green", "draining": "yellow", "revoked": "red", "lost": "red"}
_STYLES |= {state.name: {BAD: "red", WARN: "yellow"}.get(state.severity, "") for state in STATES}


def stacked(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for one in reversed(decorators):
            command = one(command)
        return command

    return decorate


YES = click.option("--yes", is_flag=True, help="Do not ask.")
#: Of a command that shows something, and reads the settings of all.
looks = stacked(takes_json, options(CommonSettings))


def confirm(question: str, yes: bool, as_json: bool) -> None:
    """Ask on the terminal whether to go on, and end the command if not. Raises click.UsageError where nobody can be
    asked."""
    if yes:
        return
    if as_json:
        raise click.UsageError("--json does not ask: pass --yes too")
    if not sys.stdin.isatty():
        raise click.UsageError("stdin is not a terminal: pass --yes")
    if not click.confirm(escape_control(question)):
        sys.exit(1)


def _ask(settings: CommonSettings, url: str, path: str) -> dict[str, Any] | None:
    """Return a master's answer to a GET; None when it does not answer with a document."""
    headers = {"Authorization": f"Bearer {settings.api_token}"} if settings.api_token else {}
    try:
        with session(settings.tls_ca) as asking:
            answered = asking.get(url + path, headers=headers, timeout=(_CONNECT_S, _READ_S), allow_redirects=False)
            document = answered.json() if answered.status_code == 200 else None
    except (requests.RequestException, ValueError):
        return None
    return document if isinstance(document, dict) else None


@contextlib.contextmanager
def configured(flags: dict[str, Any], role: str, timeout_s: float = 5.0) -> Iterator[View]:
    """Yield the view of a command, of the configured stream, which is the work stream of several. ``role`` names the
    connection. Raises SettingsError and StartRefused; an error that Redis answers later (to a user without the right,
    say) becomes StartRefused too."""
    settings = load(CommonSettings, os.environ, flags)
    url = resolve_redis_url(settings)
    check_reachable(url)
    try:
        with Link(url, f"usher:{role}", timeout_s) as link:
            yield View(settings, link, Keys(settings.work_stream, settings.group), ask=partial(_ask, settings))
    except GroupMissing as missing:
        raise StartRefused(
            f"USHER_GROUP: stream {settings.work_stream} has no group {settings.group}. The master that leads makes it"
            " (again): does one run for this stream and group, and are they the ones that you mean"
            " (USHER_TICKET_STREAM, USHER_GROUP)? `usher doctor` looks"
        ) from missing
    except (RedisTrouble, CommandRefused) as trouble:
        setting = "USHER_TICKET_STREAM" if "WRONGTYPE" in str(trouble) else "USHER_REDIS_URL"
        raise StartRefused(f"{setting}: {trouble}") from trouble


def shown_heads(names: Sequence[str]) -> list[str]:
    return [f"{name}=" for name in names]


def shown_texts(row: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Return the cells of a row's chosen fields; "-" for one that its message lacks."""
    shown = row.get("shown_fields")
    return ["not read" if shown is None else "-" if shown[name] is None else shown[name] for name in names]


def print_json(document: Any) -> None:
    click.echo(json_line(document))


def show(as_json: bool, document: Any, shown: Table, *lines: str | None) -> None:
    """Print the document for programs, or the table and the lines for people."""
    if as_json:
        print_json(document)
        return
    console().print(shown)
    for line in filter(None, lines):
        click.echo(line)


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    numbers: Sequence[str] = (),
    ids: Sequence[str] = (),
) -> Table:
    """Return a table for people; ``numbers`` are the columns that are aligned to the right, ``ids`` those that stay on
    one line, to be copied."""
    # A title may be wider than its table.
    named = Text(escape_control(title), "table.title", no_wrap=True, overflow="ignore")
    made = Table(
        title=named, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold", show_header=any(columns)
    )
    for column in columns:
        made.add_column(
            column, justify="right" if column in numbers else "left", overflow="fold", no_wrap=column in ids
        )
    for row in rows:
        made.add_row(*map(_cell, row))
    return made


def fitted(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    numbers: Sequence[str],
    ids: Sequence[str],
    extras: Sequence[str],
) -> Table:
    """Return such a table fitted to the terminal: as many of its ``extras`` are left out, in this order, as it takes
    for the others to be read. None are where there is no terminal: output that is kept or searched needs them all."""
    at, cells = list(columns), [[_cell(value).plain for value in row] for row in rows]
    screen = console()
    width = screen.width if screen.is_terminal or "COLUMNS" in os.environ else sys.maxsize
    needs = {}
    for number, column in enumerate(columns):
        longest = max((cell_len(row[number]) for row in cells), default=0)
        needs[column] = 2 + max(len(column), longest if column in (*ids, *numbers) else min(longest, _READABLE))
    for extra in extras:
        if sum(needs[column] for column in at) > width:
            at.remove(extra)
    kept = [columns.index(column) for column in at]
    return table(title, at, [[row[number] for number in kept] for row in rows], numbers, ids)


def _cell(value: object) -> Text:
    if isinstance(value, Text):
        return Text(escape_control(value.plain), value.style)
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return Text(escape_control(text), _STYLES.get(text, ""))


def consumers_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = ("consumer", "state", "pending", "slots", "capacity", "lease left", "generation")
    cells = []
    for row in rows:
        state, lease = row["state"] + ", silent over HTTP" * bool(row.get("silent")), f"{row['lease_ms'] / 1000:.1f} s"
        room, generation = (row.get("slots", ""), row.get("capacity", "")), row["incarnation"].rpartition(":")[2]
        cells.append((row["name"], state, row["pending"], *room, lease, generation))
    return table("Consumers", columns, cells, numbers=columns[2:6], ids=columns[6:])


def tickets_table(
    rows: Sequence[dict[str, Any]], title: str = "Tickets in processing", shown: Sequence[str] = ()
) -> Table:
    ticket, *names = TICKET_COLUMNS
    columns = (ticket, *shown_heads(shown), *names)
    cells = [
        (TICKET_COLUMNS[ticket](row), *shown_texts(row, shown), *(TICKET_COLUMNS[name](row) for name in names))
        for row in rows
    ]
    ids = ("first message", "attempts")
    return fitted(title, columns, cells, ("messages", "age"), ids, names[:2:-1])


def unblock_hint(row: dict[str, Any]) -> str | None:
    if row["state"] == "paused":
        return escape_control(f"  {row['ticket_id']} is {row['why']}")
    if row["state"] != "halted":
        return None
    letter = row.get("dead_letter")
    ids = row.get("message_ids") or ["?"]
    why = f" ({letter['reason']}: {visible(letter['error'], 200)})" if letter else ""
    ticket = shlex.quote(row["ticket_id"])
    ways = f"`usher dead redrive --all --ticket {ticket}` runs it again, `usher dead drop --all --ticket {ticket}`"
    return escape_control(f"  {row['ticket_id']} waits for message {ids[0]}{why}: {ways} skips it")


def console() -> Console:
    """Return a console. Without a terminal it folds no word: a search in kept output finds each word in one piece."""
    shown = Console(highlight=False, emoji=False)
    if not (shown.is_terminal or "COLUMNS" in os.environ):
        shown.width = _UNFOLDED
    return shown


#: Seconds that the leader may take: it asks a consumer in turn.
_CONNECT_S, _READ_S = 1.0, 5.0


def why_option(more: str = "", has_filter: bool = False) -> Callable[[Any], Any]:
    """Return the option for an operator's reason. ``--reason`` means the same, except where it filters dead letters."""
    flags = ("--why", "why") if has_filter else ("--why", "--reason", "why")
    return click.option(*flags, default="", metavar="TEXT", help=f"Why, for the action log{more}.")


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
