"""``usher send``: add messages to the ticket stream, one from the command line, the rows of a CSV file, or made up: the
same seed gives the same messages on every machine, so that two runs can be compared."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import os
import random
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import click
from click.core import ParameterSource

from usher.common.base.clock import now_s
from usher.common.base.durations import Duration, Moment, Number, moment_text, option
from usher.common.base.errors import (
    Behind,
    CallTimeout,
    MessageUndecodable,
    NotNow,
    ReplyUnknown,
    StartRefused,
    UsherError,
)
from usher.common.base.text import escape_control, json_line, pluralize
from usher.common.cli.progress import progress
from usher.common.protocol.message import DUE_FIELD, FOR_FIELD, LONGEST_TICKET, check_ticket
from usher.common.redis.client import CommandRefused, Link, check_reachable
from usher.common.redis.locate import resolve_redis_url
from usher.common.redis.replies import redis_ms
from usher.common.runtime.settings import CommonSettings, load, options, takes_json
from usher.common.sending.producer import BATCH, LATEST_MS, LimitSign, Outgoing, Producer, Sent

#: Longest value that Redis takes (proto-max-bulk-len). Python's own limit is 128 KiB.
_LONGEST_CELL = 512 * 1024 * 1024
#: What databases and pandas write for a value that is not there: no ticket of all rows without one.
_NULLS = frozenset(("\\N", "NULL", "null", "None", "nan", "NaN", "NaT", "<NA>"))
_GZIP_MAGIC = b"\x1f\x8b"
_STATES = ("Active", "Awaiting User Info", "Resolved", "Closed")
_PRIORITIES = ("1 - Critical", "2 - High", "3 - Moderate", "4 - Low")
_GROUPS = 40


class WorkloadUnusable(UsherError):
    """The input cannot be sent."""


def incidents(count: int, tickets: int, seed: int) -> Iterator[Outgoing]:
    """Yield ``count`` updates of ``tickets`` made-up incidents; the frequency of tickets is Zipf distributed with
    exponent 1.

    The n-th most frequent ticket comes with probability 1 / (n * H), H = 1 + 1/2 + ... + 1/tickets: few tickets are
    hot, most are rare. ``number`` counts the updates of a ticket from 1, so that a reader sees the order.
    """
    rng = random.Random(seed)
    weights = list(itertools.accumulate(1.0 / rank for rank in range(1, tickets + 1)))
    ranks, updates = range(1, tickets + 1), Counter[int]()
    for _ in range(count):
        rank = rng.choices(ranks, cum_weights=weights)[0]
        updates[rank] += 1
        fields = {
            "number": str(updates[rank]),
            "state": "New" if updates[rank] == 1 else rng.choice(_STATES),
            "priority": _PRIORITIES[rank % len(_PRIORITIES)],
            "group": f"Group {rank % _GROUPS + 1}",
        }
        yield Outgoing(f"INC{rank:07d}", fields)


class CsvSource(contextlib.AbstractContextManager["CsvSource"]):
    """A CSV file whose rows are messages: column ``key`` names the ticket, every column becomes a field.

    ``path`` may be ``-`` for standard input; gzip is recognised by its first bytes. Text is UTF-8; other bytes travel
    through unchanged except in the key column, where they are an error. ``with CsvSource(...) as rows: for message in
    rows``. Raises StartRefused when the file or its header cannot be used, WorkloadUnusable (file, line, column) at a
    bad row.
    """

    def __init__(self, path: str, key: str, ticket_field: str = "ticket_id") -> None:
        self._shown = "standard input" if path == "-" else path
        self._key = key
        self._raw = self._opened(path)
        self._lines = self._rows()
        try:
            self.columns = self._read_header(ticket_field)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self._raw is not getattr(sys.stdin, "buffer", None):
            self._raw.close()

    def __iter__(self) -> Iterator[Outgoing]:
        header, place = self.columns, self.columns.index(self._key)
        others = [(index, _raw(name)) for index, name in enumerate(header) if name != self._ticket_field]
        for row in self._guarded():
            if not row:
                continue  # an empty line
            if len(row) != len(header):
                raise self._wrong(f"has {len(row)} columns, the header has {len(header)}")
            ticket = row[place]
            self._check_ticket(ticket)
            yield Outgoing(ticket, {name: _raw(row[index]) for index, name in others})

    def _check_ticket(self, ticket: str) -> None:
        if ticket in _NULLS:
            raise self._wrong(f"column {self._key!r} is {ticket}, which is no key: leave the row out, or give it one")
        raw = ticket.encode("utf-8", "surrogateescape")
        try:
            check_ticket(raw)
        except MessageUndecodable as wrong:
            told = {
                "empty_ticket_id": "is empty; it names the ticket",
                "ticket_id_too_long": f"has {len(raw)} bytes; a ticket id has at most {LONGEST_TICKET}",
                "ticket_id_not_utf8": "is not UTF-8; it names the ticket",
            }
            raise self._wrong(f"column {self._key!r} {told.get(wrong.reason, wrong.reason)}") from None

    def _opened(self, path: str) -> io.BufferedReader:
        try:
            return cast(io.BufferedReader, sys.stdin.buffer) if path == "-" else Path(path).open("rb")
        except AttributeError:
            raise StartRefused("--csv: standard input is closed") from None
        except OSError as problem:
            raise StartRefused(f"--csv: {path} cannot be read: {problem.strerror}") from problem

    def _rows(self) -> Any:
        packed = self._raw.peek(2)[:2] == _GZIP_MAGIC
        plain: Any = gzip.GzipFile(fileobj=self._raw) if packed else self._raw
        csv.field_size_limit(_LONGEST_CELL)  # of the whole process: this one has no other reader
        return csv.reader(io.TextIOWrapper(plain, "utf-8-sig", errors="surrogateescape", newline=""), strict=True)

    def _read_header(self, ticket_field: str) -> list[str]:
        try:
            header = next(self._guarded(), [])
        except WorkloadUnusable as problem:
            raise StartRefused(f"--csv: {problem}") from problem
        if not header:
            raise StartRefused(f"--csv: {self._shown} is empty; its first line must name the columns")
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise StartRefused(f"--csv: {self._shown}:1: column {twice[0]!r} appears twice")
        if self._key not in header:
            raise StartRefused(f"--key: {self._shown} has no column {self._key!r}; it has: {', '.join(header)}")
        if ticket_field in header and ticket_field != self._key:
            raise StartRefused(
                f"--key: {self._shown} has a column {ticket_field!r}, the ticket field; use --key {ticket_field} or"
                " another USHER_TICKET_FIELD"
            )
        self._ticket_field = ticket_field
        return header

    def _guarded(self) -> Iterator[list[str]]:
        try:
            yield from self._lines
        except csv.Error as problem:
            raise self._wrong(f"is not CSV: {problem}") from problem
        except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
            raise self._wrong(f"cannot be unpacked: {problem}") from problem
        except OSError as problem:
            raise self._wrong(f"cannot be read: {problem.strerror or problem}") from problem

    def _wrong(self, what: str) -> WorkloadUnusable:
        return WorkloadUnusable(f"{self._shown}:{self._lines.line_num}: {what}")


def _raw(text: str) -> Any:
    """Return a text; the bytes that it was where they are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")
    return text


#: Seconds between two looks of --wait.
_LOOK_S = 0.5
#: Seconds for which a message that has a uid is sent again; and of the naps between batches.
_PATIENCE_S, _LONGEST_NAP_S, _SHORTEST_NAP_S = 10.0, 0.1, 0.001


def paced(
    messages: Iterable[Outgoing],
    rate: float | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[list[Outgoing]]:
    """Yield the messages in batches: message i is due at i / rate, however late the former ones were."""
    source = iter(messages)
    started, taken = clock(), 0
    due = 1 if rate else BATCH
    while batch := list(itertools.islice(source, min(due, BATCH))):
        taken += len(batch)
        yield batch
        while rate and (due := int((clock() - started) * rate) + 1 - taken) < 1:
            sleep(min(_LONGEST_NAP_S, max(_SHORTEST_NAP_S, started + taken / rate - clock())))


def redis_url(**settings: str) -> str:
    """Return the URL of the Redis that commands use: the one that is set, else that of `usher run` or `usher up` on
    this machine. Raises StartRefused."""
    return resolve_redis_url(load(CommonSettings, os.environ, settings))


@click.command()
@option("--csv csv_path", "CSV file with a header line; .gz too, - for standard input.", metavar="FILE")
@option("--key", "Column of the CSV that names the ticket.", metavar="COLUMN")
@option("--simulate", "Send N made-up incident updates.", click.IntRange(min=1), metavar="N")
@option("--tickets", "Different tickets of --simulate; some are hot (Zipf).", click.IntRange(min=1), 2000)
@option("--seed", "The same seed gives the same messages.", int, 1)
@option("--ticket", "Send one message of this ticket, with the fields given as FIELD=VALUE.", metavar="ID")
@option(
    "--rate", "Messages per second. Default: as fast as Redis takes them.", Number(min=0, min_open=True), metavar="N"
)
@option(
    "--wait",
    "Wait before each batch while masters say that too much waits (USHER_BACKLOG_LIMIT). With --ticket: wait until it"
    " is handled, and print its result; exit code 1: a dead letter, 124: not handled within --timeout.",
    is_flag=True,
)
@option("--timeout timeout_s", "Of --wait.", Duration(), "60s")
@option(
    "--dedup",
    "Send a message only if its field uid was not sent in the last SECONDS. Retries after lost answers.",
    Number(min=1, max=86_400),
    metavar="SECONDS",
)
@option(
    "--after after_s",
    "Delay it: the message comes into the stream after 90s, 10m, 2h, 3d.",
    Duration(),
    metavar="DURATION",
)
@option(
    "--at at_ms",
    "Delay it until a time such as 2026-11-21T10:00, local unless it says otherwise.",
    Moment(),
    metavar="TIME",
)
@takes_json
@click.argument("fields", nargs=-1, metavar="[FIELD=VALUE]...")
@options(CommonSettings)
def send(flags: dict[str, Any], **given: Any) -> None:
    """Send messages: the rows of a CSV file, a made-up incident workload, or one message (FIELD=VALUE ...)."""
    settings = load(CommonSettings, os.environ, flags)
    _check_usage(given)
    if given["after_s"] is not None or given["at_ms"] is not None:
        _check_gathered(settings, flags)
    url = resolve_redis_url(settings)
    with contextlib.ExitStack() as stack:
        source = _source(given, settings.ticket_field, stack)
        check_reachable(url)
        link = stack.enter_context(Link(url, "usher:send"))
        stream, field, dedup_s = settings.one_stream, settings.ticket_field, given["dedup"] or 0.0
        producer = Producer(link, stream, field, dedup_s, patience_s=_PATIENCE_S if dedup_s else 0.0)
        before = _waiting(link, stream) if given["wait"] else lambda: None
        if given["wait"] and given["ticket"]:
            before()
            sys.exit(_answered(Producer(url, stream, field), source[0], given["timeout_s"]))
        sys.exit(_sent(producer, stream, source, given, before, _due(given, link)))


def _check_usage(given: dict[str, Any]) -> None:
    known = {"--csv": given["csv_path"], "--simulate": given["simulate"], "--ticket": given["ticket"]}
    ways = [flag for flag, value in known.items() if value is not None]
    if len(ways) != 1:
        raise click.UsageError(
            f"give one of --csv, --simulate and --ticket ({'none' if not ways else ' and '.join(ways)} given)"
        )
    if (given["csv_path"] is None) != (given["key"] is None):
        raise click.UsageError("--csv and --key belong together: --key names the column that holds the ticket")
    if given["after_s"] is not None and given["at_ms"] is not None:
        raise click.UsageError("--after and --at both say when the messages are due: give one of them")
    if given["after_s"] is not None and Producer.ms_from_now(given["after_s"]) >= LATEST_MS:
        raise click.UsageError("--after: that is too late, the last time is in the year 33658")
    if given["ticket"] == "":
        raise click.UsageError("--ticket is empty: the message would be a dead letter at once (empty_ticket_id)")
    if given["ticket"] and given["wait"] and {given["dedup"], given["after_s"], given["at_ms"]} != {None}:
        raise click.UsageError("--wait with --ticket is for the result: it goes with no --after, --at and --dedup")
    for name, flag in {"timeout_s": "wait", "tickets": "simulate", "seed": "simulate"}.items():
        is_given = click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT
        if is_given and not given[flag]:
            raise click.UsageError(f"--{name.removesuffix('_s')} is of --{flag}, which is not given")
    if given["fields"] and given["ticket"] is None:
        raise click.UsageError(f"{given['fields'][0]!r}: fields on the command line need --ticket")


def _check_gathered(settings: CommonSettings, flags: dict[str, Any]) -> None:
    """Refuse a delayed message beside one of several streams: no master looks there, but beside the work stream."""
    everything = load(
        CommonSettings, os.environ, {field: value for field, value in flags.items() if field != "ticket_stream"}
    )
    if (
        everything.sources is not None
        and settings.sources is None
        and everything.sources.takes(settings.ticket_stream.encode())
    ):
        way_out = (
            f"give --ticket-stream '{everything.work_stream}' and the field"
            f" {FOR_FIELD.decode()}={settings.ticket_stream}"
        )
        raise click.UsageError(
            f"{settings.ticket_stream} is gathered (USHER_TICKET_STREAM is {everything.ticket_stream}); for later,"
            f" {way_out}"
        )


def _source(given: dict[str, Any], ticket_field: str, stack: contextlib.ExitStack) -> Any:
    """Return the messages. Refuse those without what --dedup knows them by, and with a field that looks as if it said
    when they are due, and would not."""
    if given["simulate"] is not None:
        made = incidents(given["simulate"], given["tickets"], given["seed"])
        if not given["dedup"]:
            return made
        name = f"simulated-{given['seed']}-{given['tickets']}"
        return (Outgoing(one.ticket_id, {**one.fields, "uid": f"{name}-{n}"}) for n, one in enumerate(made, 1))
    fields = fields_of(given["fields"], ticket_field)
    source: Any = [Outgoing(given["ticket"], fields)]
    names, uid = list(fields), "field uid=..."
    if given["csv_path"] is not None:
        source = stack.enter_context(CsvSource(given["csv_path"], given["key"], ticket_field))
        names, uid = source.columns, "column uid"
    if DUE_FIELD.decode() in names:
        raise click.UsageError(
            f"a field {DUE_FIELD.decode()} delays nothing here: say it with --after or --at, or give it another name"
        )
    if given["dedup"] and "uid" not in names:
        raise click.UsageError(f"--dedup needs a {uid}: by it a message is recognised when it is sent again")
    return source


def _due(given: dict[str, Any], link: Link) -> Callable[[], int | None]:
    """Return when messages that are sent now are due: a duration is counted by the clock that decides, which is
    Redis'."""
    after_s = given["after_s"]
    if after_s is None:
        return lambda: given["at_ms"]
    try:
        from_now_ms = redis_ms(link) + after_s * 1000 - now_s() * 1000
    except CommandRefused:  # this user has no right to TIME
        return lambda: Producer.ms_from_now(after_s)
    return lambda: int(from_now_ms + now_s() * 1000)


def fields_of(pairs: Sequence[str], ticket_field: str = "") -> dict[str, str]:
    """Parse FIELD=VALUE, each. Raises UsageError."""
    fields = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{pair!r} is not FIELD=VALUE")
        if name == ticket_field:
            raise click.UsageError(f"{pair!r}: the ticket is given with --ticket")
        if name in fields:
            raise click.UsageError(f"{pair!r}: the field {name} is given twice")
        fields[name] = value
    return fields


def _waiting(link: Link, stream: str) -> Callable[[], None]:
    sign = LimitSign(link, stream)

    def wait() -> None:
        is_told = False
        while True:
            sign.learn(link.call(*sign.command))
            try:
                return sign.check(())
            except Behind as behind:
                if not is_told:
                    told = f"usher: {behind.waiting:,} messages wait in {stream}: this send waits, too"
                    click.echo(escape_control(told), err=True)
                is_told = True
                time.sleep(_LOOK_S)

    return wait


def _answered(producer: Producer, message: Outgoing, timeout_s: float) -> int:
    try:
        answers = producer.stream(message.ticket_id, message.fields, timeout_s)
        answers.per_part = False
        try:
            deque(answers, 0)
        except KeyboardInterrupt:
            click.echo(f"usher: interrupted; message {answers.id or 'unknown'} is handled all the same", err=True)
            return 130
    except (UsherError, CommandRefused, ValueError) as problem:
        click.echo(escape_control(f"usher: {problem}"), err=True)
        return 124 if isinstance(problem, CallTimeout) else 1
    result = answers.result
    click.echo(result if isinstance(result, bytes) else json_line(result))
    return 0


def _sent(
    producer: Producer,
    stream: str,
    source: Any,
    given: dict[str, Any],
    before: Callable[[], None],
    due_ms: Callable[[], int | None],
) -> int:
    """Send everything, each batch after ``before``; return the exit code: 0 all accepted, 1 not all, 130 stopped by a
    signal, whichever it was: what was accepted is told."""
    started, code, unknown = time.monotonic(), 0, 0
    told: dict[str, Any] = {"sent": 0, "repeated": 0, "unknown": 0, "stream": stream, "due_ms": None, "last_id": ""}
    told |= {"seconds": 0.0, "messages_per_second": 0.0, "error": None}
    try:
        with progress(is_counted=False) as show:
            for batch in paced(source, given["rate"]):
                before()
                sent: list[Sent] = []
                told["due_ms"], unknown = due_ms(), len(batch)
                try:
                    producer.send_into(sent, batch, told["due_ms"])
                finally:
                    unknown -= len(sent)
                    told["repeated"] += (repeated := sum(one.repeated for one in sent))
                    told["sent"] += len(sent) - repeated
                told["last_id"] = sent[-1].id
                show(f"sending: {told['sent']:,} messages", told["sent"], 0)
    except (NotNow, WorkloadUnusable, ValueError, MessageUndecodable) as problem:  # it did not happen
        told["error"], code = str(problem), 1
    except (ReplyUnknown, CommandRefused) as problem:
        told["error"], told["unknown"], code = str(problem), unknown, 1
    except KeyboardInterrupt:
        told["error"], told["unknown"], code = "stopped by a signal", unknown, 130
    seconds = time.monotonic() - started
    told |= {"seconds": round(seconds, 3), "messages_per_second": round(told["sent"] / max(seconds, 1e-9), 1)}
    if given["as_json"]:
        click.echo(json_line(told))
    else:
        how = f"in {seconds:.1f} s ({told['messages_per_second']:,.0f}/s)"
        if told["sent"] == 1 and told["last_id"]:  # a single message has no rate
            how = f"as {told['last_id']}"
        known = told["repeated"]
        repeats = f", {known:,} were there already and were not sent again" if known else ""
        if told["due_ms"] is not None:
            stream = f"the delayed messages of {stream}, due {moment_text(told['due_ms'], 'seconds')},"
        click.echo(f"{told['sent']:,} sent to {stream} {how}{repeats}")
    if code:
        click.echo(escape_control(f"usher: {told['error']}"), err=True)
        lost = f"; the last batch of {told['unknown']:,} may or may not have arrived" if told["unknown"] else ""
        were = "was" if told["sent"] == 1 else "were"
        click.echo(f"usher: {pluralize(told['sent'], 'message')} {were} certainly accepted{lost}", err=True)
    return code
