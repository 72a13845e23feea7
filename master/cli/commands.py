"""Define the commands of operators. They look: ``usher status``; ``usher log`` and ``usher find``, which read a stream
page by page; ``usher stuck``, tickets that stand still, are retried or halted; ``usher actions``, which tells who did
what. And they act: ``usher trim``; ``usher tickets``; ``usher rules``, ``pause``, ``slow``, ``limit`` and ``resume``,
how tickets are treated from now on, without a deploy; ``usher consumers``; ``usher dead`` and ``usher delayed``, the
shelves of messages that were given up, and of those that wait for their time."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, Self
from urllib.parse import quote

import click
import orjson
from rich.console import Group, RenderableType
from rich.live import Live

from usher.common.base.clock import wall_ms
from usher.common.base.durations import Duration, Moment, Number, duration_s, moment_ms, moment_text
from usher.common.base.errors import RedisTrouble, UsherError
from usher.common.base.text import escape_control, json_line, json_safe, label, pluralize, span
from usher.common.cli.progress import progress
from usher.common.cli.send import fields_of
from usher.common.outbox.rows import TicketRows
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.message import (
    LONGEST_TICKET,
    UID_FIELD,
    as_mapping,
    check_field_name,
    first_value,
    ticket_value,
)
from usher.common.protocol.stream_id import is_id, milliseconds
from usher.common.protocol.ticket_states import TicketState
from usher.common.redis.client import Link
from usher.common.redis.locate import find_local_instance
from usher.common.redis.replies import Entry
from usher.common.runtime.settings import CommonSettings, load, options, takes_json
from usher.common.sending.producer import SECONDS
from usher.master.cli import shared as ui
from usher.master.insight.formatting import moment, visible
from usher.master.insight.live import LiveOverview, TicketFeed, parse_position
from usher.master.insight.stats import rates, sample_of
from usher.master.insight.status import ORDERS, StatusReader, retained
from usher.master.operations.shelves import check_due
from usher.master.operations.trimming import COUNTED, StillNeeded, Trimming
from usher.master.policy.explain import Reason
from usher.master.policy.letters import DeadLetter
from usher.master.policy.rules import Target
from usher.master.policy.states import BY_NAME
from usher.master.policy.ticket_orders import TicketOrder
from usher.master.policy.trim import Cut, Refused, decide, young
from usher.master.settings import OutboxUrl
from usher.master.verbs.verbs import DELAYED, LETTERS, TICKETS, VERBS, MovedDelayed, NewOrder, TicketAsk, Verb
from usher.master.verbs.view import View

_TICKETS_SHOWN = 12
_TROUBLES_SHOWN = 5


@click.command()
@takes_json
@click.option(
    "--once", is_flag=True, help="Print the table once and end (the default when the output is not a terminal)."
)
@click.option(
    "--every", type=Number(min=0.1), default=1.0, show_default=True, metavar="SECONDS", help="Time between two looks."
)
@options(CommonSettings)
def status(flags: dict[str, Any], as_json: bool, once: bool, every: float) -> None:
    """Show consumers, tickets in processing, lag, pending and rates. On a terminal the table refreshes; Ctrl-C ends it.

    Exit code 1 when a consumer of the `usher up` of this machine is not alive (and that is not just starting); with
    --json it is 0, and `missing_consumers` names them."""
    with ui.configured(flags, "status") as found:
        reader = found.status
        seen = look(reader, None, found.settings)
        screen = ui.console()
        if as_json:
            ui.print_json(seen)
            return
        if once or not screen.is_terminal:
            screen.print(drawn(seen))
        else:
            with (
                contextlib.suppress(KeyboardInterrupt),
                Live(drawn(seen), console=screen, auto_refresh=False, screen=False) as live,
            ):
                while True:
                    time.sleep(every)
                    seen = look(reader, seen, found.settings)
                    live.update(drawn(seen), refresh=True)
            return
        sys.exit(1 if seen["missing_consumers"] and not seen["starting_since_ms"] else 0)


def _logs_of_up(settings: CommonSettings) -> tuple[dict[str, str], int]:
    """Return the log of each consumer, by name, that the `usher up` of this machine runs, if that works on the same
    Redis; and since when it is starting its programs, 0 if it has."""
    up = find_local_instance(settings.state_folder)
    if up is None or settings.redis_url not in ("", up.redis_url):
        return {}, 0
    logs = {name: str(settings.state_folder / "logs" / f"{name}.log") for name in up.consumers.split(",") if name}
    return logs, up.starting_since_ms


def look(reader: StatusReader, before: dict[str, Any] | None, settings: CommonSettings) -> dict[str, Any]:
    """Return one look. Rates are per second since ``before``, None at the first look.

    ``done`` counts the entries that the group was given and has not pending; before Redis 7.0, of those in the stream.
    ``missing_consumers``: those of the `usher up` here that are not alive, each with its log; while that is starting,
    since ``starting_since_ms``, they may still come. A consumer that ends again and again before it registers is in no
    registry: only its supervisor and its log know it.
    """
    logs, starting_since_ms = _logs_of_up(settings)
    overview = reader.overview()
    overview["done"] = max(0, sample_of(overview).done or overview["entries"] - overview["lag"] - overview["pending"])
    page = reader.tickets("0", _TICKETS_SHOWN)
    sent, done = rates([sample_of(one) for one in (before, overview) if one is not None])
    per_second = {"sent_per_second": sent, "done_per_second": done}
    overview["sources"] = reader.sources()
    consumers = reader.consumers()
    alive = {row["name"] for row in consumers if row["state"] != "lost"}
    overview["missing_consumers"] = {name: log for name, log in logs.items() if name not in alive}
    overview["starting_since_ms"] = starting_since_ms
    tickets = page["tickets"][:_TICKETS_SHOWN]
    parked = reader.parked(_TICKETS_SHOWN)[0] if overview["parked"] else []
    return overview | per_second | {"consumers": consumers, "tickets_in_processing": tickets, "tickets_parked": parked}


def drawn(seen: dict[str, Any]) -> RenderableType:
    lag = f"{seen['lag']:,}" if seen["lag_is_exact"] else f"more than {seen['lag']:,}"
    there = "" if seen["has_group"] else ": not there; the master that leads makes it"
    halted = f"  halted {seen['halted']:,}" if seen["halted"] else ""
    delayed, lost, loss = seen["delayed"], seen["mishaps"]["unread_cut"], seen["last_loss"]
    sent, done = seen["sent_per_second"], seen["done_per_second"]
    first = "" if delayed["first_ms"] is None else f"  the first in {span(delayed['first_ms'] - seen['time_ms'])}"
    most = ", ".join(f"{name} {number:,}" for name, number in list(seen["behind"].items())[:5])
    facts = [
        ("trouble", seen["write_trouble"] and f"{seen['write_trouble']}  (usher doctor)"),
        ("stream", f"{seen['stream']}  (group {seen['group']}{there})"),
        ("leader", seen["leader_url"] or "none: no master leads"),
        ("entries", f"{seen['entries']:,}  done {seen['done']:,}  unread (lag) {lag}"),
        ("pending", f"{seen['pending']:,}  of these waiting under the master {seen['parked']:,}"),
        ("tickets in processing", f"{seen['tickets']:,}{halted}"),
        ("dead letters", f"{seen['dead_letters']:,}  (usher dead list)" if seen["dead_letters"] else "0"),
        ("delayed", delayed["messages"] and f"{delayed['messages']:,}{first}  (usher delayed list)"),
        ("cut unread, lost", lost and f"{lost:,}  (usher doctor)"),
        ("behind", most and f"backlog limit reached: {most}"),
        ("last loss", loss and f"{moment_text(loss['ms'], 'seconds')}  {loss['text']}  (usher doctor)"),
        *(_of_sources(seen["sources"]) if seen["sources"] is not None else ()),
        ("rules", seen["rules"] and f"{seen['rules']:,} hold tickets or consumers back  (usher rules)"),
        ("per second", "" if None in (sent, done) else f"sent {sent:,.0f}  done {done:,.0f}"),
    ]
    lines = [(name, told) for name, told in facts if told]
    parts: list[RenderableType] = [ui.table("Usher", ("", ""), lines), "", ui.consumers_table(seen["consumers"])]
    if not seen["consumers"]:
        parts.append("  none is registered: start one with `usher consumer --handler module:function`")
    is_what = "is not alive"
    if seen["starting_since_ms"]:
        is_what = f"is starting, since {moment_text(seen['starting_since_ms'], 'seconds')}"
    parts += [
        f"  {name} of `usher up` {is_what}; its log may say why: {log}"
        for name, log in seen["missing_consumers"].items()
    ]
    if seen["tickets_in_processing"]:
        shown = len(seen["tickets_in_processing"])
        total = max(shown, seen["tickets"])  # counted a moment before the rows
        parts += [
            "",
            ui.tickets_table(seen["tickets_in_processing"], f"Tickets in processing ({shown:,} of {total:,})"),
        ]
    if seen["tickets_parked"]:
        parts += ["", ui.tickets_table(seen["tickets_parked"], "Waiting: no consumer has a message of these tickets")]
    return Group(*parts)


def _of_sources(seen: dict[str, Any]) -> list[tuple[str, object]]:
    def count(row: dict[str, Any]) -> str:
        return f"{row['lag']:,}" if row["lag_is_exact"] else f"more than {row['lag']:,}"

    shares = ", ".join(f"{master['url']} {master['shards']}" for master in seen["masters"]) or "nobody: no master runs"
    lines: list[tuple[str, object]] = [
        ("sources", f"{seen['sources']:,}  not gathered yet {count(seen)}"),
        ("gathered by", f"{shares} (shards)"),
    ]
    lines += [("  behind", f"{row['source']}  {count(row)}  ({row['master'] or 'nobody'})") for row in seen["worst"]]
    lines += [("  trouble", f"{source}: {why}") for source, why in list(seen["troubles"].items())[:_TROUBLES_SHOWN]]
    return lines


#: Entries of the first page, and of any page at most. The number follows from the weight of the entries read: about
#: _PAGE_BYTES each.
_FIRST_PAGE, _LONGEST_PAGE = 4, 100
_PAGE_BYTES = 4 * 1024 * 1024
_GROWTH = 4
_BLOCK_S = 1.0
_ID = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")
_SHOWN = 160


@click.command()
@click.argument("stream", required=False)
@click.option("--since", metavar="TIME", help="From here on. [default: the first entry]")
@click.option("--until", metavar="TIME", help="Up to here. [default: the last entry]")
@click.option("--ticket", metavar="ID", help="Only messages of this ticket.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="End after so many messages.")
@click.option("--follow", is_flag=True, help="Then wait for new ones; Ctrl-C ends it.")
@takes_json
@options(CommonSettings)
def log(
    flags: dict[str, Any], stream: str | None, limit: int | None, as_json: bool, follow: bool, **given: str | None
) -> None:
    """Browse the ticket stream. STREAM defaults to USHER_TICKET_STREAM. TIME is a stream id (1700000000000-0), a time
    (2026-11-21T10:00, local unless it says otherwise), or an age (90s, 15m, 24h, 7d)."""
    if stream is not None:
        flags = flags | {"ticket_stream": stream}
    if follow and given["until"]:
        raise click.UsageError("--follow has no end, --until sets one: give only one of them")
    now_ms = wall_ms()
    start = "-" if given["since"] is None else place(given["since"], now_ms)
    end = "+" if given["until"] is None else place(given["until"], now_ms)
    wanted = None if given["ticket"] is None else given["ticket"].encode("utf-8", "surrogateescape")
    shown = 0
    with ui.configured(flags, "log", timeout_s=30.0) as at, contextlib.suppress(KeyboardInterrupt):
        for entry in _entries(at.link, at.keys.stream, start, end, follow):
            if (
                wanted is not None
                and ticket_value(entry.fields or [], at.settings.work_ticket_field.encode()) != wanted
            ):
                continue
            click.echo(_line(entry, at.settings.work_ticket_field, as_json))
            shown += 1
            if limit is not None and shown >= limit:
                return
        if not (shown or as_json):
            click.echo(escape_control(f"none in stream {at.keys.stream}"), err=True)


def place(text: str, now_ms: int) -> str:
    """Return a stream id or its time part for XRANGE. Raises click.BadParameter.

    >>> place("15m", 1_000_000_000_000)
    '999999100000'
    """
    text = text.strip()
    if text.isdigit() and int(text) in SECONDS:
        raise click.BadParameter(f"{text} is a time in seconds: an id begins with milliseconds")
    if text in ("-", "+") or (_ID.fullmatch(text) and (len(text) > 8 or "-" in text or text == "0")):
        return text
    if re.fullmatch(r"\d+(\.\d+)?[smhd]", text):
        return str(max(0, now_ms - int(duration_s(text) * 1000)))
    try:
        return str(max(0, moment_ms(text)))  # no id is older than 1970
    except ValueError as wrong:
        raise click.BadParameter(f"no stream id, no age like 15m, and {wrong}") from None


def _entries(link: Link, stream: str, start: str, end: str, follow: bool) -> Iterator[Entry]:
    last, count = b"", _FIRST_PAGE
    while True:
        since: str | bytes = b"(" + last if last else start
        page = [Entry(*entry) for entry in link.call("XRANGE", stream, since, end, "COUNT", count)]
        yield from page
        if page:
            last, weight = page[-1].id, sum(len(part) for entry in page for part in entry.fields or ())
            count = max(1, min(_LONGEST_PAGE, _GROWTH * count, _PAGE_BYTES * len(page) // (weight + 1)))
            continue
        if not follow:
            return
        behind = last or (b"0-0" if start == "-" else b"$")
        link.call("XREAD", "COUNT", 1, "BLOCK", int(_BLOCK_S * 1000), "STREAMS", stream, behind, block_s=_BLOCK_S)


def _line(entry: Entry, ticket_field: str, as_json: bool) -> str:
    fields = as_mapping(entry.fields or [])
    named = ticket_value(entry.fields or [], ticket_field.encode())
    ticket = None if named is None else named.decode("utf-8", "surrogateescape")
    at_ms = milliseconds(entry.id)
    if as_json:
        uid = first_value(entry.fields or [], UID_FIELD) or entry.id
        safe = {json_safe(name): json_safe(value) for name, value in fields.items()}
        document: dict[str, Any] = {"id": entry.id.decode(), "time": moment_text(at_ms, "milliseconds")}
        document |= {"uid": uid.decode("utf-8", "backslashreplace")}
        return json_line(document | {"ticket_id": None if ticket is None else json_safe(ticket), "fields": safe})
    rest = " ".join(f"{name}={value}" for name, value in fields.items() if name != ticket_field)
    shown = "-" if ticket is None else ticket
    text = f"{moment_text(at_ms, 'milliseconds')}  {entry.id.decode():<22}  {shown:<16}  {rest}"
    # A message may hold anything: control characters must not reach the terminal.
    safe_text = escape_control(text)
    return safe_text if len(safe_text) <= _SHOWN else safe_text[: _SHOWN - 1] + "…"


@click.command("find")
@click.argument("what", metavar="FIELD=VALUE")
@ui.limited(100, "About the most listed.")
@ui.looks
def find(flags: dict[str, Any], what: str, limit: int, as_json: bool) -> None:
    """Find messages with exactly this VALUE in a FIELD (or a path: payload.order.id), among the unfinished ones and the
    dead letters. Reads them a piece at a time, and says how many it looked at. Exit code 0, also when there are none.
    """
    field, equals, value = what.partition("=")
    try:
        check_field_name(field)
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from None
    if not equals:
        raise click.UsageError(f"{what!r} has no value: give FIELD=VALUE, such as kind=paid")
    with ui.configured(flags, "fields") as at:
        reader = at.fields
        found = reader.find(field, os.fsencode(value), None, limit, sys.maxsize)
    cells = [
        (
            row["message_id"] or "",
            row["ticket_id"] or "(none)",
            *ui.shown_texts(row, reader.names),
            f"{label(row['state'])} {row['letter_id'] or ''}".strip(),
            row["consumer_name"],
        )
        for row in found["messages"]
    ]
    columns = ("message", "ticket", *ui.shown_heads(reader.names), "state", "consumer")
    rows = [row | {"ticket_id": row["ticket_id"] and json_safe(row["ticket_id"])} for row in found["messages"]]
    further = "" if found.pop("cursor") is None else "  there may be more: --limit shows more"
    document = found | {"messages": rows, "more": bool(further)}
    of = f"{'' if found['of_is_exact'] else 'at least '}{found['of']:,}"
    looked = f"  {len(rows):,} found; looked at {found['looked_at']:,} of {of} that are unfinished or dead"
    ui.show(as_json, document, ui.table("Messages", columns, cells, ids=("message", "state")), looked, further)


@click.command()
@click.option("--apply", is_flag=True, help="Cut. Without this option nothing is changed.")
@click.option(
    "--archived-only",
    is_flag=True,
    help="Cut only archived entries, so nothing where no archive is kept.",
)
@click.option(
    "--keep", "keep_s", type=Duration(), metavar="DURATION", help="Keep entries younger than this, e.g. 90m, 24h, 7d."
)
@click.option(
    "--forget", metavar="NAME", help="Remove the checkpoint of a log consumer that no longer exists, and end."
)
@click.option(
    "--forget-group", metavar="NAME", help="Remove the saved position of a group that no longer exists, and end."
)
@click.option(
    "--forget-archive",
    is_flag=True,
    help="Remove the mark of `usher audit archive`, when no archive is kept any more, and end.",
)
@ui.looks
def trim(
    flags: dict[str, Any], apply: bool, archived_only: bool, keep_s: float | None, as_json: bool, **forget: Any
) -> None:
    """Show the readers of the ticket stream, how far each one is, and which entries could go; --apply cuts them. Never
    cut: entries that a group has unread or pending, entries behind a log consumer's checkpoint, and with
    --archived-only entries that are not archived. Exit code 1: a reader is lost, and nothing is cut before an operator
    has looked."""
    with ui.configured(flags, "trim", timeout_s=30.0) as at:
        settings = at.settings
        keys = Keys(settings.one_stream, settings.group)
        if any(forget.values()):
            sys.exit(_forget(at.link, keys, **forget))
        trimming = Trimming(at.link, keys)
        facts = trimming.facts()
        wished = [] if keep_s is None else [young(wall_ms(), keep_s)]
        decision = decide(facts, archived_only=archived_only, wished=wished)
        would = trimming.count_below(decision.floor) if isinstance(decision, Cut) else 0
        cut, trouble = 0, ""
        if apply and isinstance(decision, Cut) and would:
            cut, trouble = _cut(trimming, decision, archived_only, would)
    document = retained(settings.one_stream, facts, decision, archived_only)
    document |= {"would_cut": would, "would_cut_is_exact": would < COUNTED}
    document |= {"cut": cut if apply else None, "stopped_by": trouble or None}
    if as_json:
        ui.print_json(document)
    else:
        _print_trim_table(document)
    sys.exit(1 if isinstance(decision, Refused) or trouble else 0)


def _forget(link: Link, keys: Keys, forget: str | None, forget_group: str | None, forget_archive: bool) -> int:
    """Forget readers that no longer exist. One that does notes its place again."""
    log_keys = LogKeys(keys.stream)
    ways: dict[str, tuple[Any, ...]] = {
        f"checkpoint {forget}": (forget, "HDEL", log_keys.checkpoints, forget),
        f"saved position of group {forget_group}": (forget_group, "HDEL", log_keys.groups, forget_group),
        "archive": (forget_archive, "DEL", log_keys.archived, keys.archived),
    }
    code = 0
    for what, (is_asked, *command) in ways.items():
        if is_asked and link.call(*command):
            click.echo(f"{what} is forgotten: entries are no longer kept for it")
        elif is_asked:
            code = 1
            click.echo(f"usher: there is no {what}; `usher trim` lists them", err=True)
    return code


def _cut(trimming: Trimming, decision: Cut, archived_only: bool, would: int) -> tuple[int, str]:
    cut = 0
    with progress() as tell:
        try:
            for gone in trimming.cut(decision.floor, archived_only=archived_only):
                cut += gone
                tell("cutting", cut, would)
        except StillNeeded as needed:
            return cut, str(needed)
    return cut, ""


def _print_trim_table(told: dict[str, Any]) -> None:
    screen = ui.console()
    ages = ("" if (age_s := row["noted_s_ago"]) is None else f"{age_s:,.0f} s ago" for row in told["readers"])
    cells = [(*list(row.values())[:4], age) for row, age in zip(told["readers"], ages, strict=True)]
    title = f"{told['stream']}: entries from {told['first_id'] or 'none'}, last id {told['last_id'] or 'none'}"
    screen.print(ui.table(title, ("reader", "name", "keeps from", "why", "noted"), cells, ids=("keeps from",)))
    for text in (*_sentences(told), f"Stopped: {told['stopped_by']}" if told["stopped_by"] else ""):
        if text:
            screen.print(escape_control(text), markup=False, soft_wrap=True)


def _sentences(told: dict[str, Any]) -> list[str]:
    if told["decision"] == "refused":
        return ["Nothing is cut: a reader is lost.", *(f"  {problem}" for problem in told["problems"])]
    if told["decision"] == "nothing":
        return [f"Nothing may go: {told['why']}."]
    if told["cut"] is None:
        number = "" if told["would_cut_is_exact"] else "more than "
        what = f"{number}{pluralize(told['would_cut'], 'entry', 'entries')} below {told['floor']} may go"
        return [f"{what}; the rest is kept for {told['kept_for']}. --apply cuts them."]
    left = max(0, told["would_cut"] - told["cut"]) if told["would_cut_is_exact"] else 0
    rest = f"; some {left:,} below it stay until their node of the stream is over" if left else ""
    were = "was" if told["cut"] == 1 else "were"
    return [f"{pluralize(told['cut'], 'entry', 'entries')} below {told['floor']} {were} cut{rest}."]


@click.group()
def tickets() -> None:
    """Look at tickets in processing, and order what becomes of their first messages."""


@tickets.command("list")
@ui.asks(TicketAsk)
@click.option("--sort", type=click.Choice(list(ORDERS)), default="age", show_default=True, help="The order.")
@ui.limited(100, "Most tickets listed.")
@ui.looks
def list_tickets(flags: dict[str, Any], sort: str, limit: int, as_json: bool, **given: Any) -> None:
    """List tickets in processing, and those that wait."""
    asked = ui.asked_of(TICKETS, given)
    with ui.configured(flags, "status") as at:
        found = at.status.find(asked.meant(), sort, limit)
        rows, more = found["rows"], found["number"] > len(found["rows"]) or not found["is_all"]
        rows, shown = at.fields.add_to_tickets(rows), at.settings.shown_names
    none = "" if rows else f"  none: {asked.told('everything that was read is done')}"
    further = f"  the first {len(rows):,}; --limit shows more" if len(rows) >= limit and more else none
    listed = ui.tickets_table(rows, shown=shown)
    ui.show(as_json, {"tickets": rows, "more": more}, listed, *map(ui.unblock_hint, rows), further)


@tickets.command("finished")
@click.option("--ticket", default="", metavar="ID", help="Only those of this ticket.")
@click.option("--handler", default="", metavar="MODULE:FUNCTION", help="Only those that it handled.")
@ui.limited(100, "Most listed.")
@ui.looks
def list_finished(flags: dict[str, Any], ticket: str, handler: str, limit: int, as_json: bool) -> None:
    """List the latest messages that were done or given up, as the run log has them."""
    with ui.configured(flags, "status") as at:
        rows, older = at.history.finished(ticket, handler, "", limit, math.inf)
    is_cut, rows = older is not None or len(rows) > limit, rows[:limit]
    names = ("ticket_id", "message_id", "outcome", "handler")
    told = [row | {"outcome": row["outcome"] + ", interrupted" * ("interrupted" in row)} for row in rows]
    shown = [(_when(row["ms"]), span(row["took_ms"]), *(row[name] for name in names)) for row in told]
    listed = ui.table("Finished", ("ended", "ran for", "ticket", "message", "outcome", "handler"), shown)
    further = "  the first of more; --limit shows more" if is_cut else "  all of the run log" if rows else "  none"
    ui.show(as_json, {"finished": rows, "more": is_cut}, listed, further)


_MOST_SHOWN = 20
_ERROR_LINES = 10


class ExplainTicketSettings(CommonSettings):
    outbox_url: OutboxUrl = ""


@click.command("explain")
@click.argument("ticket_id")
@takes_json
@options(ExplainTicketSettings)
def explain_ticket(flags: dict[str, Any], ticket_id: str, as_json: bool) -> None:
    """Explain what a ticket waits for, and until when. Asks the leader, which asks the consumer that has the ticket;
    without a leader the explanation comes from Redis alone. With USHER_OUTBOX_URL it also tells which rows of the
    ticket wait in the outbox, or were refused."""
    outbox_url = load(ExplainTicketSettings, os.environ, flags).outbox_url
    with ui.configured(flags, "operator") as at:
        document = at.explained(ticket_id)
    if outbox_url:
        document = with_outbox(document, *_rows_of(outbox_url, ticket_id))
    if as_json:
        ui.print_json(document)
        return
    entries = document["entries"][:_MOST_SHOWN]
    shown = [
        (entry["id"], label(entry["state"]), str(entry["attempt"] or ""), entry["behind"] or "") for entry in entries
    ]
    click.echo(escape_control(f"{ticket_id}: {label(document['state'])}"))
    for sentence in document["sentences"]:
        click.echo(escape_control(f"  {sentence}"))
    _print_error(document)
    if shown:
        ui.console().print(
            ui.table("Entries", ("entry", "state", "attempt", "waits behind"), shown, ids=("entry", "waits behind"))
        )
    if len(document["entries"]) > len(shown):
        click.echo(f"  and {len(document['entries']) - len(shown)} more")
    for way in document["commands"]:
        click.echo(escape_control(f"  {way['command']}   # {way['does']}"))


def _rows_of(outbox_url: str, ticket_id: str) -> tuple[TicketRows, str]:
    nothing = TicketRows(0, None, "", ())
    try:
        from usher.common.outbox.store import OutboxStore
    except ModuleNotFoundError as missing:  # SQLAlchemy, or the database's driver, is an extra
        return nothing, str(missing)
    store = OutboxStore(outbox_url, "USHER_OUTBOX_URL")
    try:
        store.check()
        return store.of_ticket(ticket_id), ""
    except UsherError as trouble:
        return nothing, str(trouble)
    finally:
        store.close()


def _print_error(document: dict[str, Any]) -> None:
    error = (document.get("last_error") or document.get("dead_letter") or {}).get("error", "")
    trace = document.get("traceback", "")
    for line in (*error.splitlines()[:_ERROR_LINES], *trace.splitlines()):
        click.echo(escape_control(f"    {line}"))


def _order(order: TicketOrder) -> Callable[[View, str, dict[str, Any]], int]:
    """Return the command's way with one ticket: what it would do is said first."""

    def give(view: View, ticket_id: str, given: dict[str, Any]) -> int:
        more: dict[str, Any] = {
            "grace_s": given.get("grace_s") or 0.0,
            "fields": fields_of(given.get("fields", ())) or None,
        }
        args, as_json = NewOrder.model_construct(ticket_id=ticket_id, order=order.value, **more), given["as_json"]
        planned = VERBS["tickets order"].perform(view, args.model_copy(update={"preview": True}))
        if planned.problem or given["preview"]:
            args = args.model_copy(update={"preview": True})
        elif order not in (TicketOrder.RETRY, TicketOrder.INTERRUPT):  # which harm nothing
            ui.confirm(f"{planned.document['note']}: go on?", given["yes"], as_json)
        return ui.perform(view, "tickets order", args, as_json)

    return give


#: States of a ticket that has nothing anywhere else: the outbox has the word.
_NOTHING = (TicketState.IDLE, TicketState.NOT_FOUND)


def with_outbox(document: dict[str, Any], rows: TicketRows, trouble: str = "") -> dict[str, Any]:
    """Return an explanation with what the outbox has of the ticket. ``trouble``: why that is not known."""
    unknown = [Reason("outbox_not_asked", f"its outbox is not known: {trouble}")]
    reasons = unknown if trouble else _outbox_reasons(rows)
    if not reasons:
        return document
    shown = [{"code": reason.code, "text": reason.text} for reason in reasons]
    here = [*shown, *document["reasons"]] if document["state"] in _NOTHING else [*document["reasons"], *shown]
    told = {"reasons": here, "sentences": [reason["text"] for reason in here], "summary": here[0]["text"]}
    if document["state"] in _NOTHING and rows.staged:
        halts = any(row.halts for row in rows.refused)
        told |= {"state": TicketState.HALTED_IN_OUTBOX if halts else TicketState.IN_OUTBOX}
        told |= {"waits_for": "its refused row" if halts else "the streamer"}
    return document | told


def _outbox_reasons(rows: TicketRows) -> list[Reason]:
    holding = [row for row in rows.refused if row.halts]
    found = []
    if rows.staged and not holding:
        text = f"committed and not sent yet: {pluralize(rows.staged, 'row')} of it in the outbox"
        found.append(Reason("in_outbox", f"{text}, the first ({rows.first_id}) since {rows.since}"))
    if holding:
        first = holding[0]
        text = f"row {first.id} of the outbox was refused at {first.at} ({first.reason}) and halts the ticket"
        behind = f", with {pluralize(rows.staged, 'later row')} behind it" if rows.staged else ""
        end = "until it is put back or deleted in refused_log_records"
        found.append(Reason("halted_in_outbox", f"{text}{behind}, {end}"))
    for row in rows.refused:
        if not row.halts:
            text = f"row {row.id} of the outbox was refused at {row.at} ({row.reason}): no message came of it"
            found.append(Reason("refused_in_outbox", f"{text}, and the ticket went on; refused_log_records has it"))
    return found


#: Seconds between two looks: a ticket whose first message is another one by then is not stuck.
_BETWEEN_S = 1.0
_EXAMPLES = 3


@click.command("stuck")
@ui.looks
def stuck(flags: dict[str, Any], as_json: bool) -> None:
    """Show tickets that are stuck for more than 5 s, retried or halted; those in the same trouble in one line. Looks
    twice, a second apart. Exit code 0, also when there are some."""
    with ui.configured(flags, "stuck") as at:
        lease_ms = int(at.settings.lease_seconds * 1000)
        overview = LiveOverview(at.link, at.keys, at.settings.work_ticket_field, lease_ms)
        overview.at_once = math.inf
        for wait_s in (_BETWEEN_S, 0.0):
            overview.snapshot(0.0)
            overview.run_once()
            time.sleep(wait_s)
        groups, letters = at.fields.add_to_groups(overview.last["groups"]), overview.last["dead_letters"]
    names, is_cut = at.settings.shown_names, not all(one["tickets_are_all"] for one in groups)
    if as_json:
        ui.print_json({"groups": groups, "more": is_cut})
        return
    for one in groups:
        click.echo(escape_control(one["told"]))
        few = one["rows"][:_EXAMPLES]
        shown = [
            (row["ticket_id"], *ui.shown_texts(row, names), row["tried"], row["behind"], row["consumer"], row["why"])
            for row in few
        ]
        columns = ("ticket", *ui.shown_heads(names), "attempts", "behind", "consumer", "why")
        ui.console().print(ui.table("", columns, shown, numbers=("behind",), ids=("ticket",)))
        for way in _ways(one):
            click.echo(escape_control(f"  {way}"))
    if not groups:
        given_up = f"; given up: {pluralize(letters, 'dead letter')} (`usher dead list`)" if letters else ""
        calm = "no consumer is live: nothing more is handled (`usher consumers list`)"
        calm = "nothing is stuck" if overview.last["consumers"]["live"] else calm
        click.echo(f"{calm}{given_up}")
    elif is_cut:
        click.echo("of tickets that wait for a consumer only the oldest were counted")


def _ways(group: dict[str, Any]) -> list[str]:
    known = BY_NAME[group["state"]].ways if group["state"] in BY_NAME else ()
    if "slow" in known:
        return ["usher slow --tenant NAME --rate N   # a tenant that floods; or start more consumers"]
    if not (group["error"] or not group["text"]):
        return []
    error = f" --error {shlex.quote(group['error'])}" if group["error"] else ""
    ways = [f"usher tickets list --state {group['state']}{error}"]
    if "redrive" in known and error:
        ways.append(f"usher dead redrive --all{error} --policy halt   # runs them again, after the fix")
    elif "retry" in known:
        ways.append(f"usher tickets retry --state {group['state']}{error}   # now, after the fix")
    return ways


#: Seconds until Redis, which is away, is asked again.
_PAUSE_S = 1.0


class _Here:
    """A reader of live events that takes them at once, in place of one who is connected to a master."""

    closed, unwritten = False, 0

    def __init__(self) -> None:
        self.frames: list[str] = []

    def open(self, *_who: Any) -> Self:
        return self

    def send(self, data: bytes) -> None:
        self.frames += data.decode().split("\n\n")


@click.command("follow")
@click.argument("ticket_id")
@click.option(
    "--from",
    "position",
    default="",
    help="Id of an event: begin with the events after it. 0: begin with everything that is still there.",
)
@ui.looks
def follow_ticket(flags: dict[str, Any], ticket_id: str, position: str, as_json: bool) -> None:
    """Follow a ticket as it happens: entries, hand-overs, attempts, completions. Ends with Ctrl-C."""
    with ui.configured(flags, "follow") as at:
        for name, place_of, facts in follow(at, ticket_id, position):
            document = {"event": name, "id": place_of, **facts}
            click.echo(json_line(document) if as_json else _event_line(name, facts))


def follow(view: View, ticket_id: str, position: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield events for ever, as masters send them: name, position, facts. Raises click.UsageError."""
    here: Any = _Here()
    feed = TicketFeed(view.link, view.keys, view.settings.work_ticket_field, here)
    try:
        begin = parse_position(position) if position else None
    except ValueError as wrong:
        raise click.UsageError(f"--from: {wrong}") from None
    feed.follow("", ticket_id.encode("utf-8", "surrogateescape"), begin, True)
    while True:
        try:
            wait_s = feed.run_once()
        except RedisTrouble as trouble:  # it goes on from where it is
            click.echo(escape_control(f"usher: {trouble}; asked again in {_PAUSE_S:g} s"), err=True)
            wait_s = _PAUSE_S
        frames, here.frames = here.frames, []
        for told in (dict(line.split(": ", 1) for line in frame.splitlines()) for frame in frames):
            if "event" in told:  # others say where it is
                yield told["event"], told.get("id", ""), orjson.loads(told["data"])
        time.sleep(wait_s)


def _event_line(event: str, told: dict[str, Any]) -> str:
    facts = "  ".join(
        f"{name}={escape_control(value if isinstance(value, str) else orjson.dumps(value).decode())}"
        for name, value in told.items()
        if name not in ("ticket_id", "time_ms")
    )
    return f"{_when(told.get('time_ms', time.time() * 1000))}  {event:<11}  {facts}"


def _when(ms: float) -> str:
    try:
        at = datetime.fromtimestamp(ms / 1000)
    except (OverflowError, ValueError, OSError):
        return "?"  # the time of an id that a producer chose
    return at.strftime("%H:%M:%S" if at.date() == datetime.now().date() else "%Y-%m-%d %H:%M:%S")


def _with_message(command: Any) -> Any:
    grace = click.option("--grace", "grace_s", type=Duration(), help="Cancel a run that has not ended after so long.")
    told = "Send a message to the ticket first; again for more fields."
    return grace(click.option("--with", "fields", multiple=True, metavar="FIELD=VALUE", help=told)(command))


for _one in TicketOrder:
    _extra = _with_message if _one is TicketOrder.INTERRUPT else lambda command: command
    tickets.add_command(ui.shelf_command(TICKETS.verbs[_one.value.replace("_", "-")], _extra, one=_order(_one)))
for _command in (ui.shelf_command(TICKETS.verbs["pause"]), follow_ticket, explain_ticket):
    tickets.add_command(_command)


_targets = ui.stacked(
    click.argument("ticket", required=False),
    click.option(
        "--pattern",
        metavar="GLOB",
        help="All tickets whose ids fit: * is any text, ? one character, [a-z] one of these.",
    ),
    click.option("--tenant", metavar="NAME", help="All tickets of a tenant (USHER_TENANT_FIELD)."),
    click.option("--all", "everything", is_flag=True, help="All tickets."),
)


def _of_target(verb: Verb, why: str, given: dict[str, Any], **more: Any) -> Any:
    """Return arguments about a target. Its name may be no UTF-8, which no model takes."""
    everything, named = given.pop("everything"), [given.pop(name) for name in ("ticket", "pattern", "tenant")]
    told = zip((Target.TICKET, Target.PATTERN, Target.TENANT), named, strict=True)
    chosen = [(target.value, value) for target, value in told if value is not None]
    chosen += [(Target.EVERYTHING.value, "")] * everything
    if len(chosen) != 1:
        raise click.UsageError("give one of these: a ticket id, --pattern GLOB, --tenant NAME, --all")
    target, value = chosen[0]
    if not (everything or 0 < len(value.encode("utf-8", "surrogateescape")) <= LONGEST_TICKET):
        raise click.UsageError(f"a ticket id has 1 to {LONGEST_TICKET} bytes")
    facts: dict[str, Any] = {"target": target, "value": value, "reason": why}
    return verb.args.model_construct(**facts, **given, **more)


@click.group(invoke_without_command=True)
@click.pass_context
def rules(context: click.Context) -> None:
    """Show live rules, and lift them. Without a command: list the rules."""
    if context.invoked_subcommand is None:
        context.invoke(list_rules)


@rules.command("list")
@ui.looks
def list_rules(flags: dict[str, Any], as_json: bool) -> None:
    """List the live rules."""
    with ui.configured(flags, "operator") as at:
        book = at.rules.read()
    rows = []
    for rule in book.rules:
        since = span(wall_ms() - rule.set_ms) if rule.set_ms else ""
        does = (rule.target.value, rule.value, rule.action.value, rule.bounds)
        rows.append((rule.id, *does, rule.who, since, rule.reason))
    listed = ui.table("Rules", ("id", "target", "value", "action", "rate", "who", "since", "reason"), rows, ids=("id",))
    holds = "  the strongest one holds: pause, then the slowest; `usher rules lift ID` ends one"
    document = {"rules": [rule.shown() for rule in book.rules], "version": int(book.version or 0)}
    ui.show(as_json, document, listed, holds if rows else "  none")


@rules.command("lift")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@ui.why_option()
@ui.looks
def lift(flags: dict[str, Any], ids: tuple[str, ...], why: str, as_json: bool) -> None:
    """Lift rules. Exit code 1 when one of them does not exist."""
    with ui.configured(flags, "operator") as at:
        view = at.acting(ui.caller(why))
        verb = VERBS["rules lift"]
        changes = {one: verb.perform(view, verb.args(), rule_id=one) for one in dict.fromkeys(ids)}
    if as_json:
        ui.print_json({"lifted": {one: changed.document or None for one, changed in changes.items()}})
    else:
        for one, changed in changes.items():
            click.echo(f"{one}: {changed.text}")
    sys.exit(1 if any(changed.problem for changed in changes.values()) else 0)


def _rule_command(action: str, told: str, *limits: Callable[[Any], Any]) -> click.Command:
    """Return the command that sets a rule with this action."""

    def args_of(verb: Verb, why: str, given: dict[str, Any]) -> Any:
        args = _of_target(verb, why, given, action=action)
        try:
            args.check()
        except ValueError as wrong:
            raise click.UsageError(str(wrong)) from None
        return args

    return ui.place_command(VERBS["rules set"], ui.stacked(_targets, *limits), args_of, action, told)


def _number(flag: str, name: str, kind: click.ParamType, told: str, **more: Any) -> Callable[[Any], Any]:
    return click.option(flag, name, type=kind, metavar="N", help=told, **more)


pause = _rule_command(
    "pause",
    "Pause tickets: consumers get no more of them; nothing is lost, their order stays, and other tickets go on."
    " Messages that a consumer already has run to their end. The pause holds until `usher resume`, whatever is"
    " restarted meanwhile.",
)
slow = _rule_command(
    "slow",
    "Slow tickets down: hand over at most so many messages of each ticket per second. A tenant has one limit for all of"
    " its tickets together, over all consumers. This holds until `usher resume`.",
    _number("--rate", "rate_per_second", Number(0.001, 1_000_000), "Messages per second, of each ticket or a tenant."),
    _number("--concurrency", "concurrency", click.IntRange(1, 1_000_000), "Tickets of a tenant at a time."),
    _number("--weight", "weight", click.IntRange(1, 1000), "A tenant's share (USHER_TENANT_WEIGHTS)."),
)
limit = _rule_command(
    "limit",
    "Limit how many messages of each ticket may be unfinished. What comes beyond, the newest, becomes a dead letter"
    " (over_limit). This holds until `usher rules lift`; pausing and slowing leave it alone.",
    _number("--messages", "ticket_limit", click.IntRange(1, 1_000_000), "Of each ticket.", required=True),
)
resume = ui.place_command(
    VERBS["resume"],
    _targets,
    _of_target,
    told="Lift the rule for a ticket, a pattern or everything: its tickets go on, in the order of the stream. Exit"
    " code 1 when there was no rule.",
)


@click.command()
@ui.limited(50, "Most lines shown.")
@ui.looks
def actions(flags: dict[str, Any], limit: int, as_json: bool) -> None:
    """Show the actions of operators, the newest first: when, who, what, on what, why, and the outcome."""
    with ui.configured(flags, "operator") as at:
        lines, cursor = at.action_log.page(None, limit)
    now_ms, names = wall_ms(), ("who", "via", "what", "on", "why", "outcome")
    rows = [(f"{span(now_ms - line['time_ms'])} ago", *(line[name] for name in names)) for line in lines]
    document = {"actions": lines, "more": cursor is not None}
    ui.show(as_json, document, ui.table("Actions", ("when", *names), rows), "" if rows else "  none")


@click.group()
def consumers() -> None:
    """Look at the registered consumers and their work; drain and resume them."""


@consumers.command("list")
@ui.looks
def list_consumers(flags: dict[str, Any], as_json: bool) -> None:
    """List the consumers, their states and the messages they hold."""
    with ui.configured(flags, "status") as at:
        rows = at.status.consumers()
    none = "  none is registered: start one with `usher consumer --handler module:function`"
    ui.show(as_json, {"consumers": rows}, ui.consumers_table(rows), "" if rows else none)


@consumers.command("show")
@click.argument("name")
@ui.looks
def show_consumer(flags: dict[str, Any], name: str, as_json: bool) -> None:
    """Show one consumer: where it runs, and what it runs at this moment, as it tells the leader. Exit code 1 when no
    consumer of that name is registered."""
    with ui.configured(flags, "operator") as at:
        told = at.ask_leader(f"/api/consumers/{quote(name, safe='')}/process")
        rows = told["consumers"] if told is not None else [one for one in at.status.consumers() if one["name"] == name]
    if as_json:
        ui.print_json({"consumers": rows})
    else:
        for row in rows:
            _print_consumer(row)
        if not rows:
            click.echo(f"no consumer {name!r} is registered")
    sys.exit(0 if rows else 1)


def _print_consumer(row: dict[str, Any]) -> None:
    process = row.get("process") or {}
    memory = process.get("memory_bytes")
    facts = [
        ("consumer", f"{row['incarnation']}  {row['state']}"),
        ("host", f"{process['host']}  process {process['pid']}" if process else "it did not say"),
        ("started", moment(row.get("started_ms"))),
        ("version", process.get("version", "")),
        ("handler", f"{process['handler']}  code {process['code']}" if process else ""),
        ("memory", f"{memory / 2**20:,.0f} MiB" if memory else ""),
        ("messages", f"{row['pending']:,} of {row.get('capacity', 0):,}  handlers at a time {row.get('slots', 0):,}"),
        ("lease left", f"{row['lease_ms'] / 1000:.1f} s"),
    ]
    ui.console().print(ui.table("Consumer", ("", ""), [fact for fact in facts if fact[1]]))
    if not process:
        return
    running = [
        (one["ticket_id"], one["id"], one["attempt"], span(wall_ms() - one["started_ms"]), " > ".join(one["stack"]))
        for one in process["running"]
    ]
    columns = ("ticket", "message", "attempt", "runs for", "stands at")
    title = f"Runs now: {process['runs']:,}"
    ui.console().print(ui.table(title, columns, running, numbers=("attempt", "runs for"), ids=("message",)))


for _name in ("consumers drain", "consumers resume"):
    consumers.add_command(ui.place_command(VERBS[_name]))


@click.group()
def dead() -> None:
    """Look at dead letters, redrive them, or drop them. A dead letter is a message that was given up, with the
    reason."""


@dead.command("list")
@ui.asks(LETTERS.ask)
@ui.limited(50, "Most letters listed.")
@ui.looks
def list_letters(flags: dict[str, Any], limit: int, as_json: bool, **given: Any) -> None:
    """List dead letters, the oldest first."""
    found: list[DeadLetter] = []
    with ui.configured(flags, "dead") as at:
        letters, more = at.letters, False
        for page in letters.all(ui.asked_of(LETTERS, given).meant(), letters.last_id()):
            found += page
            more = len(found) > limit
            if more:
                break
        found = found[:limit]
        rows = at.fields.add_to_letters([letter.row() for letter in found])
    names = at.settings.shown_names
    further = f"  more than {limit:,}: give --limit, or a filter" if more else "" if found else "  none"
    listed = _table(found, [ui.shown_texts(row, names) for row in rows], names)
    ui.show(as_json, {"dead_letters": rows, "more": more}, listed, further)


def _table(letters: Sequence[DeadLetter], shown: Sequence[list[str]], names: Sequence[str]) -> Any:
    now_ms = wall_ms()
    rows = [
        (
            letter.id.decode(errors="replace"),
            letter.ticket.decode(errors="replace"),
            *chosen,
            letter.message_id.decode(errors="replace"),
            (f"{letter.reason}: {visible(letter.error, 80)}" if letter.error else letter.reason)
            + (f" in {letter.at}" if letter.at else ""),
            letter.attempts,
            label(letter.policy),
            span(now_ms - letter.written_ms),
        )
        for letter, chosen in zip(letters, shown, strict=True)
    ]
    extras = ("message", "attempts", "policy", "age")
    columns = ("letter", "ticket", *ui.shown_heads(names), "message", "reason", *extras[1:])
    return ui.table("Dead letters", columns, rows, ("attempts", "age"), ("letter", *extras), extras=extras)


@dead.command("kinds")
@ui.looks
def list_kinds(flags: dict[str, Any], as_json: bool) -> None:
    """Count dead letters by kind: reason, error, place and policy."""
    with ui.configured(flags, "dead") as at:
        counts = at.letters.counts()
    names = ("id", "count", "reason", "error_type", "at", "handler", "policy")
    rows = [[getattr(one, name) for name in names] for one in counts.groups]
    document = {"kinds": [dict(zip(names, row, strict=True)) for row in rows], "are_all": counts.are_all}
    listed = ui.table("Kinds of dead letters", ("kind", *names[1:]), rows, numbers=("count",), ids=("kind",))
    ui.show(
        as_json,
        document,
        listed,
        "  none" if not rows else counts.wrong or "  `usher dead list --kind KIND` lists them",
    )


@dead.command("show")
@click.argument("letter_id", metavar="LETTER")
@ui.looks
def show_letter(flags: dict[str, Any], letter_id: str, as_json: bool) -> None:
    """Show one dead letter with its traceback and its message's fields. Exit code 1 when there is no such letter."""
    if not is_id(letter_id):
        raise click.UsageError(f"{letter_id!r} is not the id of a letter: see `usher dead list`")
    with ui.configured(flags, "dead") as at:
        found = at.letters.get(letter_id.encode())
    if found is None:
        click.echo("null" if as_json else f"there is no dead letter {letter_id}", err=not as_json)
        sys.exit(1)
    document = found[0].whole(found[1])
    if as_json:
        ui.print_json(document)
        return
    fields, trace = document.pop("message_fields"), document.pop("traceback")
    screen = ui.console()
    screen.print(ui.table("Dead letter", ("", ""), _for_people(found[0])))
    screen.print(
        ui.table("Fields of the message", ("name", "value"), [(name, visible(value)) for name, value in fields])
    )
    if trace:
        click.echo("".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in trace))


def _for_people(letter: DeadLetter) -> list[tuple[str, str]]:
    row = letter.row()
    named = {"fields": f"{letter.fields}{', some of them cut or missing' if letter.cut else ''}"}
    told = {
        name: named.get(name, str(value or ""))
        for name, value in row.items()
        if name != "cut" and not name.endswith("_ms")
    }
    times = {"first tried": letter.first_ms, "last tried": letter.last_ms, "given up": letter.written_ms}
    told |= {name: f"{moment(ms)} UTC" for name, ms in times.items() if ms}
    return [(name.replace("_", " "), value) for name, value in told.items() if value]


for _verb in LETTERS.verbs.values():
    dead.add_command(ui.shelf_command(_verb))
_fields = click.argument(
    "fields", nargs=-1, required=True, metavar="NAME=VALUE...", callback=lambda *given: fields_of(given[2])
)
dead.add_command(ui.place_command(VERBS["dead edit"], _fields))


@click.group()
def delayed() -> None:
    """Show, send now, move or drop delayed messages. Sent for later (`usher send --after 10m`, or an XADD to
    {STREAM}:delayed with the field due_ms), they enter the stream when they are due, and get their place in the order
    of their ticket then."""


@delayed.command("list")
@click.option("--ticket", metavar="ID", help="Only those of this ticket.")
@ui.limited(50, "Most lines shown.")
@ui.looks
def list_delayed(flags: dict[str, Any], ticket: str | None, limit: int, as_json: bool) -> None:
    """Show the messages that wait, the earliest first."""
    with ui.configured(flags, "delayed") as at:
        rows = at.delayed.page(None, limit, ticket or "", math.inf).rows
        counts = at.delayed.counts()
    now_ms = wall_ms()
    unsorted = counts.pop("unsorted")
    told = counts | {
        "time_ms": now_ms,
        "messages": [vars(one) | {"ticket_id": json_safe(one.ticket_id)} for one in rows],
    }
    lines = [
        (one.id, moment_text(one.due_ms, "seconds"), span(left) if left > 0 else "now", one.ticket_id, text)
        for one, left, text in ((one, one.due_ms - now_ms, " ".join(map("=".join, one.fields or ()))) for one in rows)
    ]
    listed = ui.table("Delayed messages", ("message", "due", "in", "ticket", "fields"), lines, ids=("message", "due"))
    left = f"  {pluralize(unsorted, 'message')} more, which no leader has looked at yet" if unsorted else ""
    ui.show(as_json, told, listed, f"  {len(rows):,} of {counts['waiting']:,}" if rows else "  none", left)


_due = ui.stacked(
    click.option("--after", type=Duration(), metavar="AGE", help="So long from now: 90s, 10m, 2h, 3d."),
    click.option(
        "--at", type=Moment(), metavar="TIME", help="At 2026-11-21T10:00 (local time) or 2026-11-21T10:00+00:00 (UTC)."
    ),
)


def _moved(view: View, given: dict[str, Any]) -> Any:
    after, at = given["after"], given["at"]
    if (after is None) == (at is None):
        raise click.UsageError("say when they are due: give one of --after and --at")
    due_ms = at if at is not None else view.delayed.now_ms() + int(after * 1000)
    try:
        check_due(due_ms, view.delayed.now_ms())
    except ValueError as refused:
        raise click.UsageError(str(refused)) from None
    return MovedDelayed.model_construct(ids=[], due_ms=due_ms)


delayed.add_command(ui.shelf_command(DELAYED.verbs["send"]))
delayed.add_command(ui.shelf_command(DELAYED.verbs["move"], _due, _moved))
delayed.add_command(ui.shelf_command(DELAYED.verbs["drop"]))
