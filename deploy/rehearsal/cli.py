"""``usher rehearse``: a dry run that calls a handler with existing messages, before they are redriven or the handler is
deployed; it changes nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import click
from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from usher.common.base.errors import RedisTrouble, StartRefused
from usher.common.base.log import redacted
from usher.common.base.text import escape_control, pluralize
from usher.common.protocol.stream_id import is_id
from usher.common.redis.client import CommandRefused
from usher.common.runtime.settings import CommonSettings, load, options
from usher.common.runtime.stop_request import StopAsked, StopRequest
from usher.consumer.isolation.process import HandlerProcess
from usher.consumer.isolation.values import NOT_RUN, CallResult, ProcessSpec
from usher.deploy.rehearsal.candidates import Candidates, Named
from usher.deploy.rehearsal.selection import Candidate, Rehearsed, exit_code, in_order, redrive_command
from usher.master.cli.options import OF_LETTERS, wanted_of
from usher.master.cli.shared import CommandContext, configured, console, print_json, table
from usher.master.policy.letters import LetterFilter

_LAST = 100
_NOTHING_SAID = 2
_FILTERS = ("reason", "error", "older_than", "younger_than")
#: Flags with which a following command finds the same letters.
_WHERE = ("redis_url", "state_dir", "ticket_stream", "ticket_scope", "group")
_HELP = """Call HANDLER (module:function) with existing messages, and say how each call ends: a dry run. Redis is only
read: nothing is acknowledged, counted or redriven, no master is needed, and whatever runs goes on.

\b
  usher rehearse shop:handle --letter 1700000000000-0    does the mended handler take this dead letter?
  usher rehearse shop:handle --error KeyError            ... and all that were given up with a KeyError?
  usher rehearse shop:handle --ticket 42                 all messages of a ticket: letters, and entries of the stream
  usher rehearse shop:handle --message 1700000000000-0   one entry of the stream, whatever became of it

SQL statements that the handler runs through SqlSink and AsyncSqlSink are rolled back, whatever tokens and uids are
stored; until then they hold their locks. RedisGuard does nothing, and the headers of the HTTP sink tell the service.
EVERYTHING ELSE THAT THE HANDLER DOES IS REAL, unless it asks `message.is_rehearsal`; so the command asks first.
Messages come one by one, a batch handler gets lists of one, and each message meets the data as stored now, without the
effects of the messages before it.

The handler runs in a process of its own, in this folder and environment. What it prints goes to stderr. A call that
runs past its deadline (@handler(deadline_s=...), else USHER_HANDLER_SECONDS, else 60 s) is ended and reported as hung;
one that ends its process is reported too.

Exit code 0: all were taken. 1: some were not. 2: nothing can be said, and why. 130: Ctrl-C.
"""
_WARNING = (
    "Usher's SQL sinks roll back, RedisGuard does nothing. All else that the handler does is REAL (HTTP, mail, files, a"
    " database of its own), unless it asks message.is_rehearsal."
)


class RehearseSettings(CommonSettings):
    """Settings of a rehearsal."""

    UNREAD: ClassVar[frozenset[str]] = CommonSettings.UNREAD - {"log_level", "log_format"} | {"lease_seconds"}

    handler_seconds: float = Field(
        0.0, ge=0, description="Longest that one call may take; its process is ended then. 0: 60 s."
    )


class _Selection(NamedTuple):
    """Selection of messages: those with these ids, or of this ticket, or letters that match."""

    letter_ids: list[bytes]
    message_ids: list[bytes]
    ticket: bytes | None
    wanted: LetterFilter | None
    most: int


def _of_letters(command: Callable[..., Any]) -> Callable[..., Any]:
    for decorate in reversed(OF_LETTERS):
        command = decorate(command)
    return command


@click.command(help=_HELP)
@click.argument("handler", envvar="USHER_HANDLER")
@click.option(
    "--letter",
    "letter_ids",
    multiple=True,
    metavar="ID",
    help="This dead letter, or that of the message with this id; repeatable.",
)
@click.option(
    "--message", "message_ids", multiple=True, metavar="ID", help="This entry of the (work) stream; repeatable."
)
@click.option(
    "--ticket",
    metavar="ID",
    help="All that is there of this ticket; with a filter or --all its letters only. Of several streams: STREAM/ID.",
)
@click.option("--all", "everything", is_flag=True, help="All dead letters that the filters let through.")
@_of_letters
@click.option(
    "--last",
    type=click.IntRange(1, 10_000),
    metavar="N",
    help=f"Of a ticket, or of letters that fit, the newest N. [default: {_LAST}]",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; needs --yes.")
@options(RehearseSettings)
def rehearse(flags: dict[str, Any], handler: str, yes: bool, as_json: bool, **given: Any) -> None:
    module, colon, name = handler.partition(":")
    if not (module and colon and name):
        raise StartRefused(f"HANDLER must look like module:function (it is {handler!r})")
    asked = _asked(given)
    if as_json and not yes:
        raise click.UsageError("--json does not ask: pass --yes too")
    if not yes and not sys.stdin.isatty():
        raise click.UsageError(f"stdin is not a terminal: pass --yes. {_WARNING}")
    settings = load(RehearseSettings, os.environ, flags)
    with configured({field: flags[field] for field in CommonSettings.model_fields}, "rehearse") as at:
        with StopRequest() as stop, _bar() as bar:

            def on_page(what: str, count: int) -> None:
                stop.check()
                bar(f"{what}: {count:,}")

            finder = Candidates(at.link, at.keys, settings.work_ticket_field, on_page)
            try:
                candidates = _found(finder, asked, at)
            except StopAsked:
                sys.exit(stop.exit_code)
        _tell_notes(finder.notes)
        if not yes and not _agreed(handler, candidates):
            sys.exit(_NOTHING_SAID)
        log, secrets = (settings.log_level, settings.log_format), tuple(filter(None, settings.secrets))
        play = ProcessSpec(
            handler, at.keys.stream, settings.sources is not None, settings.handler_seconds, log, secrets
        )
        done: list[Rehearsed] = []
        code = _rehearse(finder, candidates, play, done)
    where = {field: flags[field] for field in _WHERE}
    _print_rehearsals(handler, done, len(candidates), redrive_command(done, where), as_json)
    sys.exit(code)


def _asked(given: dict[str, Any]) -> _Selection:
    """Parse the selection. Raises click.UsageError when it is not clear which messages are meant."""
    letter_ids, message_ids = (list(map(_id_of, dict.fromkeys(given[name]))) for name in ("letter_ids", "message_ids"))
    ticket = None if given["ticket"] is None else given["ticket"].encode("utf-8", "surrogateescape")
    is_filtered = given["everything"] or any(given[name] not in (None, "") for name in _FILTERS)
    if not (letter_ids or message_ids or ticket is not None or is_filtered):
        raise click.UsageError(
            "say which messages: --letter ID, --message ID, --ticket ID, or dead letters by --error, --reason, age, or"
            " --all"
        )
    if (letter_ids or message_ids) and (ticket is not None or is_filtered or given["last"]):
        raise click.UsageError("--letter and --message name messages; --ticket, --last and filters do not go with them")
    return _Selection(
        letter_ids, message_ids, ticket, wanted_of(given) if is_filtered else None, given["last"] or _LAST
    )


def _id_of(text: str) -> bytes:
    if not is_id(text):
        raise click.UsageError(f"{text!r} is not an id: an id looks like 1526919030474-55")
    return text.encode()


def _found(finder: Candidates, asked: _Selection, at: CommandContext) -> list[Candidate]:
    """Find the selected messages, in the order of the stream. Raises StartRefused when a named one does not exist, or
    none matches."""
    if asked.wanted is not None:
        found = finder.matching(asked.wanted, asked.most)
        nothing = "no dead letter matches (usher dead list)"
    elif asked.ticket is not None:
        found = finder.of_ticket(asked.ticket, asked.most)
        hint = "; of several streams a ticket is called STREAM/ID" if at.settings.by_stream else ""
        nothing = (
            f"of ticket {asked.ticket.decode(errors='replace')!r} nothing is in {at.keys.stream}, nor in the dead"
            f" letters{hint}"
        )
    else:
        letters, entries = finder.letters(asked.letter_ids), finder.messages(asked.message_ids)
        _check_named(letters, entries, at)
        found, nothing = in_order([*entries.found, *letters.found]), ""
    if not found:
        raise StartRefused(f"nothing to rehearse: {nothing}")
    return found


def _check_named(letters: Named, entries: Named, at: CommandContext) -> None:
    wrong = [
        f"there is no dead letter {one.decode()}, nor one of a message {one.decode()} (usher dead list)"
        for one in letters.missing
    ]
    wrong += [
        f"{at.keys.stream} has no entry {one.decode()} (any more); is there a dead letter of it? (--letter)"
        for one in entries.missing
    ]
    if wrong:
        raise StartRefused("nothing was rehearsed:\n  " + "\n  ".join(wrong))


def _tell_notes(notes: Sequence[str]) -> None:
    for note in notes:
        click.echo("usher: " + escape_control(note, kept="\n"), err=True)


def _agreed(handler: str, candidates: Sequence[Candidate]) -> bool:
    click.echo(f"{handler} is called with {pluralize(len(candidates), 'message')}, one by one. {_WARNING}", err=True)
    return click.confirm("Go on?", err=True)


def _rehearse(finder: Candidates, candidates: Sequence[Candidate], play: ProcessSpec, done: list[Rehearsed]) -> int:
    """Call the handler with one message after another, and return the exit code. ``done`` is filled as it goes, so that
    it can be shown whatever happens later."""
    with StopRequest() as stop, _bar(len(candidates)) as bar:
        process = HandlerProcess(play, os.environ, stop.check)
        try:
            with process:
                for one in candidates:
                    stop.check()
                    bar(one.id)
                    done.append(Rehearsed(one, _run(finder, one, process)))
        except StopAsked:
            return stop.exit_code
        except StartRefused as refused:  # its module could be imported before, and no longer can
            if not done:
                raise
            process.notes.append(str(refused))
            return 1
        finally:
            _tell_notes(process.notes)
    return exit_code(done)


def _run(finder: Candidates, one: Candidate, process: HandlerProcess) -> CallResult:
    if one.unfit:
        return CallResult(NOT_RUN, one.unfit)
    try:
        body = _body(finder, one)
    except (RedisTrouble, CommandRefused) as trouble:  # the results of the others are shown all the same
        return CallResult(NOT_RUN, f"Redis: {trouble}")
    if body is None:
        return CallResult(NOT_RUN, "its fields are no longer complete anywhere")
    return process.run(one.piece(body))


def _body(finder: Candidates, one: Candidate) -> list[bytes] | None:
    try:
        return finder.body(one)
    except RedisTrouble:  # Redis may have closed a connection that was idle while a handler ran
        return finder.body(one)


def _print_rehearsals(handler: str, done: Sequence[Rehearsed], asked: int, command: str | None, as_json: bool) -> None:
    taken = sum(one.now.is_taken for one in done)
    if as_json:
        counts = {"messages": asked, "taken": taken, "not_taken": len(done) - taken, "not_tried": asked - len(done)}
        print_json(
            {
                "handler": handler,
                **counts,
                "rehearsals": [one.document() for one in done],
                "redrive": command and redacted(command),
            }
        )
        return
    rows = [_styled(one) for one in done]
    columns = ("", "id", "ticket", "before", "now", "seconds")
    console().print(table(f"Rehearsal of {handler}", columns, rows, numbers=("seconds",), ids=("", "id", "seconds")))
    if asked == 1 and done and done[0].now.traceback:
        click.echo(escape_control(done[0].now.traceback.rstrip(), kept="\n"))
    left = f", {asked - len(done):,} not tried" if len(done) < asked else ""
    click.echo(f"{taken:,} of {pluralize(asked, 'message')} taken{left}; nothing was acknowledged or redriven")
    if command is not None:
        click.echo(escape_control(redacted(command)))


def _styled(one: Rehearsed) -> list[object]:
    *cells, now, seconds = one.row()
    return [*cells, Text(now, "green" if one.now.is_taken else "red"), seconds]


@contextlib.contextmanager
def _bar(total: int | None = None) -> Iterator[Callable[[str], object]]:
    """Yield a function that shows its text and the progress on a terminal (it is called before each turn), and does
    nothing elsewhere."""
    screen = Console(stderr=True)
    if not screen.is_terminal:
        yield lambda told: None
        return
    columns = (
        TextColumn("{task.description}"),
        *((BarColumn(), MofNCompleteColumn()) if total else ()),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("", total=total)
        turns = iter(range(total or 0))
        yield lambda told: bar.update(task, description=told, completed=next(turns, None))
