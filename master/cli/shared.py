"""Parts that commands share: find Redis, open a view, options, print a document or a table; and the commands of verbs
(``usher.master.verbs``): that of a shelf's verb chooses by ids or filters, shows what would be touched, asks, does it,
and counts what came of it."""

from __future__ import annotations

import contextlib
import getpass
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, get_args, get_origin

import click
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from usher.common.base.durations import Duration
from usher.common.base.errors import GroupMissing, RedisTrouble, StartRefused
from usher.common.base.text import escape_control, json_line, label, pluralize
from usher.common.cli.masters import ask
from usher.common.cli.progress import progress
from usher.common.protocol.keys import Keys
from usher.common.protocol.stream_id import is_id
from usher.common.redis.client import CommandRefused, Link, check_reachable
from usher.common.redis.locate import resolve_redis_url
from usher.common.runtime.settings import CommonSettings, load, options, takes_json
from usher.common.runtime.signals import UntilSignal
from usher.master.insight.formatting import TICKET_COLUMNS, visible
from usher.master.operations.action_log import By
from usher.master.operations.live_rules import TooManyRules
from usher.master.policy.letters import Preview
from usher.master.policy.rules import LONGEST_REASON
from usher.master.policy.states import BAD, STATES, WARN
from usher.master.verbs.verbs import STOPPED, TICKETS, VERBS, Args, Ask, BulkJob, Item, Shelf, Unfit, Verb
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


def limited(most: int, told: str) -> Callable[[Any], Any]:
    """Return the option that says how many are listed, ``most`` if it is not given."""
    return click.option("--limit", type=click.IntRange(1, 100_000), default=most, show_default=True, help=told)


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
    """Return a master's answer to a GET; None when it does not answer with a document. Raises StartRefused when the
    file of certificates that are trusted is not there."""
    ca = settings.tls_ca and settings.tls_ca.expanduser()
    if ca and not ca.exists():
        raise StartRefused(f"USHER_TLS_CA: there is no {settings.tls_ca}")
    answer = ask(url + path, settings.api_token, str(ca) if ca else True, _READ_S)
    return answer.document if answer.status == 200 and isinstance(answer.document, dict) else None


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
    extras: Sequence[str] = (),
) -> Table:
    """Return a table for people; ``numbers`` are the columns that are aligned to the right, ``ids`` those that stay on
    one line, to be copied. As many of its ``extras`` are left out, in this order, as it takes for the others to be read
    on this terminal; none where there is no terminal: output that is kept or searched needs them all."""
    cells, screen = [[*map(_cell, row)] for row in rows], console()
    width = screen.width if screen.is_terminal or "COLUMNS" in os.environ else sys.maxsize
    needs = {}
    for number, column in enumerate(columns):
        longest = max((cell_len(row[number].plain) for row in cells), default=0)
        needs[column] = 2 + max(len(column), longest if column in (*ids, *numbers) else min(longest, _READABLE))
    for extra in extras:
        if sum(needs.values()) > width:
            del needs[extra]
    # A title may be wider than its table.
    named = Text(escape_control(title), "table.title", no_wrap=True, overflow="ignore")
    made = Table(
        title=named, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold", show_header=any(columns)
    )
    kept = [number for number, column in enumerate(columns) if column in needs]
    for number in kept:
        column = columns[number]
        side = "right" if column in numbers else "left"
        made.add_column(column, justify=side, overflow="fold", no_wrap=column in ids)  # type: ignore[arg-type]
    for row in cells:
        made.add_row(*(row[number] for number in kept))
    return made


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
    return table(title, columns, cells, ("messages", "age"), ids, names[:2:-1])


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
_READ_S = 5.0


def why_option(more: str = "", has_filter: bool = False) -> Callable[[Any], Any]:
    """Return the option for an operator's reason. ``--reason`` means the same, except where it filters dead letters."""
    flags = ("--why", "why") if has_filter else ("--why", "--reason", "why")
    return click.option(*flags, default="", metavar="TEXT", help=f"Why, for the action log{more}.")


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


#: Rows of a preview, and sentences about what was refused; and what programs get of a group.
_SHOWN, _GROUP = 20, ("reason", "error_type", "policy", "at", "count")


def perform(view: View, name: str, args: Args, as_json: bool, /, **places: str) -> int:
    """Do a verb about one thing, and print its outcome; return the exit code."""
    try:
        outcome = VERBS[name].perform(view, args, **places)
    except (TooManyRules, Unfit) as refused:
        raise click.ClickException(str(refused)) from refused
    if as_json:
        print_json(outcome.document or None)
    else:
        click.echo(escape_control(outcome.text))
    return 1 if outcome.problem else 0


def asks(ask: type[Ask], only: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Return the options of a filter, or of some of its fields."""
    told = ((name, info) for name, info in ask.model_fields.items() if info.description)
    return stacked(*(_option(name, info) for name, info in told if not only or name in only))


def _option(name: str, info: Any) -> Callable[[Any], Any]:
    kind: Any = click.STRING
    metavar = {"ticket": "ID", "id": "ID", "consumer": "NAME", "state": "STATES"}.get(name, "TEXT")
    if get_origin(info.annotation) is Literal:
        kind, metavar = click.Choice(known := get_args(info.annotation)), "|".join(filter(None, known))
    elif name.endswith("_s"):
        kind, metavar = Duration(), "AGE"
    told = {"default": info.default, "metavar": metavar or None, "help": info.description}
    return click.option(_flag(name), name, type=kind, **told)


def _flag(name: str) -> str:
    return "--kind" if name == "group" else f"--{name.removesuffix('_s').replace('_', '-')}"  # --group is a setting


def asked_of(shelf: Shelf, given: dict[str, Any]) -> Any:
    """Return the filter that options ask for. A ticket id may be any bytes, so no model reads it. Raises UsageError."""
    named = {name: given.pop(name) for name in shelf.ask.model_fields if name in given}
    if not is_id(named.get("id") or "0-0"):
        raise click.UsageError(f"--id: {named['id']!r} is no id, such as 1526919030474-55")
    try:
        shelf.meant(asked := shelf.ask.model_construct(**named), True)
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from None
    return asked


def place_command(
    verb: Verb,
    extra: Callable[[Any], Any] = lambda command: command,
    args_of: Callable[[Verb, str, dict[str, Any]], Args] = lambda verb, why, given: verb.args(reason=why, **given),
    word: str = "",
    told: str = "",
) -> click.Command:
    """Return the command of a verb about one thing. ``extra``: arguments and options of its own, and ``args_of`` what
    they say; ``word`` and ``told``: its name and help, if they are not the verb's."""

    @extra
    @why_option(" and for explanations of what the tickets wait for" if word else "")
    @looks
    def act(flags: dict[str, Any], why: str, as_json: bool, **given: Any) -> None:
        by, places = caller(why), {name: given.pop(name) for name in verb.places}
        args = args_of(verb, why, given)
        with configured(flags, "operator") as at:
            code = perform(at.acting(by), verb.name, args, as_json, **places)
        sys.exit(code)

    for name in reversed(verb.places):
        act = click.argument(name)(act)
    return click.command(word or verb.word, help=told or f"{verb.help} Exit code 1 when that changes nothing.")(act)


def shelf_command(
    verb: Verb,
    extra: Callable[[Any], Any] = lambda command: command,
    args_of: Callable[[View, dict[str, Any]], Args] = lambda view, given: Args(),
    one: Callable[[View, str, dict[str, Any]], int] | None = None,
) -> click.Command:
    """Return the command of a verb of a shelf. ``extra``: options of its own, and ``args_of`` what they say; ``one``:
    does it to a single one, if that is said otherwise."""
    shelf = verb.shelf
    assert shelf is not None
    noun = shelf.noun.rpartition(" ")[2]

    @click.argument("ids", nargs=-1, metavar=f"[{noun.upper()}]...")
    @click.option("--all", "everything", is_flag=True, help="All that match the filters; without a filter, all.")
    @asks(shelf.ask)
    @extra
    @click.option("--preview", is_flag=True, help="Only say what it would do.")
    @YES
    @why_option(has_filter="reason" in shelf.ask.model_fields)
    @looks
    def act(flags: dict[str, Any], ids: tuple[str, ...], everything: bool, why: str, **given: Any) -> None:
        asked = asked_of(shelf, given)
        _check_choice(shelf, verb, ids, everything, asked)
        if given["as_json"] and not (given["yes"] or given["preview"] or (one and ids)):
            raise click.UsageError("--json does not ask: pass --yes too")
        by = caller(why)
        with configured(flags, "operator") as at:
            view = at.acting(by)
            if one is not None and len(ids) == 1:
                code = one(view, ids[0], given)
            elif given.pop("fields", None) or given.pop("grace_s", None):
                raise click.UsageError("--with and --grace go with one ticket")
            else:
                code = _act(view, verb, shelf, list(dict.fromkeys(ids)), asked, args_of, given)
        sys.exit(code)

    code = "Exit code 1 when some were left as they are, 0 when nothing matches."
    return click.command(verb.word, help=f"{verb.help} {code}")(act)


def _check_choice(shelf: Shelf, verb: Verb, ids: Sequence[str], everything: bool, asked: Ask) -> None:
    group = verb.name.partition(" ")[0]
    if ids and (everything or asked.given):
        raise click.UsageError("filters go with --all, not with ids; give your reason as --why")
    if not (ids or everything or (asked.given and shelf is TICKETS)):
        flags = ", ".join(_flag(name) for name, one in shelf.ask.model_fields.items() if one.description)
        raise click.UsageError(f"give ids (`usher {group} list`), or --all, with filters or without: {flags}")
    if wrong_id := next((one for one in ids if shelf is not TICKETS and not is_id(one)), None):
        noun = shelf.noun.rpartition(" ")[2]
        looks_like = f"it looks like 1526919030474-55, see `usher {group} list`"
        raise click.UsageError(f"{wrong_id!r} is not the id of a {noun}: {looks_like}")


def _act(
    view: View,
    verb: Verb,
    shelf: Shelf,
    ids: list[str],
    asked: Ask,
    args_of: Callable[[View, dict[str, Any]], Args],
    given: dict[str, Any],
) -> int:
    args_of(view, given)  # wrong ones end it here
    told, as_json = asked.told(""), given["as_json"]
    pages: Iterator[Sequence[Any]]
    if ids:
        preview, pages = Preview(), iter([[Item(one.encode("utf-8", "surrogateescape")) for one in ids]])
        preview.add(shelf.named(view, ids))
    else:
        wanted = shelf.meant(asked, True)
        found = shelf.dry_run(view, wanted, math.inf)
        preview, pages = found.preview, shelf.pages(view, wanted, found.until)
    nothing = f"no {shelf.noun} matches: {told}" if told else f"there are no {shelf.noun}s"
    if not as_json:
        _show_preview(view, verb, shelf, preview, "" if ids else nothing)
    job, code = BulkJob(verb, shelf, view, Args(), None, "" if ids else told, b"", preview.count, tries=5), 0
    if not given["preview"] and (ids or preview.count):
        if preview.count:
            confirm(f"{verb.label.lower()}: {pluralize(preview.count, shelf.noun)}?", given["yes"], as_json)
        job.args = args_of(view, given)  # anew: the answer may have taken long
        code = _carry_out(job, pages)
    if as_json:
        groups = [{name: vars(one)[name] for name in _GROUP} for one in preview.groups]
        document = {"matched": preview.count, "outcomes": dict(job.outcomes), "groups": groups}
        others = shelf.others(view, verb.word) if job.outcomes["added"] else []
        print_json(document | {"leader_url": view.letters.leader_url or None, "other_groups": others})
        return code
    notes = [f"  {one}: {why}" for one, why in job.failures if why not in shelf.means][:_SHOWN]
    for line in (*notes, *shelf.sentences(job.outcomes.elements())):
        click.echo(escape_control(line))
    if job.outcomes and verb.word == "redrive" and not view.letters.leader_url:
        click.echo("no master leads at the moment: nothing moves before one does")
    return code


def _show_preview(view: View, verb: Verb, shelf: Shelf, preview: Preview, nothing: str) -> None:
    if not preview.count:
        click.echo(escape_control(nothing), nl=bool(nothing))
        return
    title, nouns = f"{pluralize(preview.count, shelf.noun)} to {verb.word.replace('-', ' ')}", f"{shelf.noun}s"
    rows = [(one.count, label(one.reason), one.told, label(one.policy)) for one in preview.groups[:_SHOWN]]
    heads = (nouns, shelf.grouped, "error", "policy")
    kept = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    cells = [[row[at] for at in kept] for row in rows]
    console().print(table(title, [heads[at] for at in kept], cells, numbers=(nouns,)))
    for line in shelf.warns(view, verb.word, preview):
        click.echo(line, err=True)


def _carry_out(job: BulkJob, pages: Iterator[Sequence[Any]]) -> int:
    """Do it to all of these, and return the exit code."""
    with progress() as show, UntilSignal() as until, contextlib.suppress(KeyboardInterrupt):  # the second one
        for _ in job.carry_out(pages):
            show(job.verb.word, job.outcomes.total(), job.count)
            if until.came:
                job.state = STOPPED
    return 130 if until.came else int(any(word not in job.shelf.good for word in job.outcomes))
