"""Define ``usher status``: the state of the system, as a table that is refreshed, or one JSON document; ``usher log``:
browse a stream by id or time; ``usher find``: look for messages by a field; both read page by page, and the stream is
never held as a whole; and ``usher trim``: show what no reader of the stream needs any more, and cut it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live

from usher.common.base.clock import wall_ms
from usher.common.base.durations import Duration, Number, duration_s, moment_ms, moment_text
from usher.common.base.text import escape_control, json_line, json_safe, label, pluralize, span
from usher.common.cli.progress import progress
from usher.common.protocol.keys import Keys
from usher.common.protocol.message import UID_FIELD, as_mapping, check_field_name, first_value, ticket_value
from usher.common.protocol.stream_id import milliseconds
from usher.common.redis.client import Link
from usher.common.redis.locate import find_local_instance
from usher.common.redis.replies import Entry
from usher.common.runtime.settings import CommonSettings, options, takes_json
from usher.common.sending.producer import SECONDS
from usher.master.cli.shared import (
    configured,
    console,
    consumers_table,
    looks,
    print_json,
    show,
    shown_heads,
    shown_texts,
    table,
    tickets_table,
)
from usher.master.insight.diagnostics import retained
from usher.master.insight.status import StatusReader
from usher.master.messages.fields import FoundMessages, MessageFields
from usher.master.operations.trimming import COUNTED, StillNeeded, Trimming
from usher.master.policy.rates import rates, sample_of
from usher.master.policy.trim import Cut, Refused, decide, young

_TICKETS_SHOWN = 12
_TROUBLES_SHOWN = 5


_HELP = """Show consumers, tickets in processing, lag, pending and rates. On a terminal the table refreshes; Ctrl-C ends
it.

Exit code 1 when a consumer of the `usher up` of this machine is not alive (and that is not just starting); with --json
it is 0, and `missing_consumers` names them."""


@click.command(help=_HELP)
@takes_json
@click.option(
    "--once", is_flag=True, help="Print the table once and end (the default when the output is not a terminal)."
)
@click.option(
    "--every", type=Number(min=0.1), default=1.0, show_default=True, metavar="SECONDS", help="Time between two looks."
)
@options(CommonSettings)
def status(flags: dict[str, Any], as_json: bool, once: bool, every: float) -> None:
    with configured(flags, "status") as found:
        reader = found.status
        seen = look(reader, None, found.settings)
        screen = console()
        if as_json:
            print_json(seen)
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
    facts = [
        ("stream", f"{seen['stream']}  (group {seen['group']}{there})"),
        ("leader", seen["leader_url"] or "none: no master leads"),
        ("entries", f"{seen['entries']:,}  done {seen['done']:,}  unread (lag) {lag}"),
        ("pending", f"{seen['pending']:,}  of these waiting under the master {seen['parked']:,}"),
        (
            "tickets in processing",
            f"{seen['tickets']:,}  halted {seen['halted']:,}" if seen["halted"] else seen["tickets"],
        ),
        ("dead letters", f"{seen['dead_letters']:,}  (usher dead list)" if seen["dead_letters"] else 0),
    ]
    if seen["delayed"]["messages"]:
        first_ms = seen["delayed"]["first_ms"]
        when = "" if first_ms is None else f"  the first in {span(first_ms - seen['time_ms'])}"
        facts.append(("delayed", f"{seen['delayed']['messages']:,}{when}  (usher delayed list)"))
    told = seen["mishaps"]
    if told["unread_cut"]:
        facts.append(("cut unread, lost", f"{told['unread_cut']:,}  (usher doctor)"))
    if seen["behind"]:
        most = ", ".join(f"{name} {number:,}" for name, number in list(seen["behind"].items())[:5])
        facts.append(("behind", f"backlog limit reached: {most}"))
    if (loss := seen["last_loss"]) is not None:
        facts.append(("last loss", f"{moment_text(loss['ms'], 'seconds')}  {loss['text']}  (usher doctor)"))
    if seen["write_trouble"]:
        facts.insert(0, ("trouble", f"{seen['write_trouble']}  (usher doctor)"))
    if seen["sources"] is not None:
        facts += _of_sources(seen["sources"])
    if seen["rules"]:
        facts.append(("rules", f"{seen['rules']:,} hold tickets or consumers back  (usher rules)"))
    if seen["done_per_second"] is not None and seen["sent_per_second"] is not None:
        facts.append(("per second", f"sent {seen['sent_per_second']:,.0f}  done {seen['done_per_second']:,.0f}"))
    parts: list[RenderableType] = [table("Usher", ("", ""), facts), "", consumers_table(seen["consumers"])]
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
        parts += ["", tickets_table(seen["tickets_in_processing"], f"Tickets in processing ({shown:,} of {total:,})")]
    if seen["tickets_parked"]:
        parts += ["", tickets_table(seen["tickets_parked"], "Waiting: no consumer has a message of these tickets")]
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


@click.command(
    help=(
        "Browse the ticket stream. STREAM defaults to USHER_TICKET_STREAM. TIME is a stream id (1700000000000-0), a"
        " time (2026-11-21T10:00, local unless it says otherwise), or an age (90s, 15m, 24h, 7d)."
    )
)
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
    if stream is not None:
        flags = flags | {"ticket_stream": stream}
    if follow and given["until"]:
        raise click.UsageError("--follow has no end, --until sets one: give only one of them")
    now_ms = wall_ms()
    start = "-" if given["since"] is None else place(given["since"], now_ms)
    end = "+" if given["until"] is None else place(given["until"], now_ms)
    wanted = None if given["ticket"] is None else given["ticket"].encode("utf-8", "surrogateescape")
    shown = 0
    with configured(flags, "log", timeout_s=30.0) as at, contextlib.suppress(KeyboardInterrupt):
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
        last = page[-1].id if page else last
        if page:
            weight = sum(len(part) for entry in page for part in entry.fields or ())
            count = max(1, min(_LONGEST_PAGE, _GROWTH * count, _PAGE_BYTES * len(page) // (weight + 1)))
            continue
        if not follow:
            return
        if not last:
            last = _start_of_following(link, stream, start)
        link.call("XREAD", "COUNT", 1, "BLOCK", int(_BLOCK_S * 1000), "STREAMS", stream, last, block_s=_BLOCK_S)


def _start_of_following(link: Link, stream: str, start: str) -> bytes:
    if start == "-":
        return b"0-0"
    found = link.call("XREVRANGE", stream, start, "-", "COUNT", 1)
    return bytes(found[0][0]) if found else b"0-0"


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


@click.command(
    "find",
    help=(
        "Find messages with exactly this VALUE in a FIELD (or a path: payload.order.id), among the unfinished ones and"
        " the dead letters. Reads them a piece at a time, and says how many it looked at. Exit code 0, also when there"
        " are none."
    ),
)
@click.argument("what", metavar="FIELD=VALUE")
@click.option(
    "--limit", type=click.IntRange(min=1, max=100_000), default=100, show_default=True, help="About the most listed."
)
@looks
def find(flags: dict[str, Any], what: str, limit: int, as_json: bool) -> None:
    field, equals, value = what.partition("=")
    try:
        check_field_name(field)
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from None
    if not equals:
        raise click.UsageError(f"{what!r} has no value: give FIELD=VALUE, such as kind=paid")
    with configured(flags, "fields") as at:
        reader = at.fields
        found = _found(reader, field, os.fsencode(value), limit)
    cells = [
        (
            row["message_id"] or "",
            row["ticket_id"] or "(none)",
            *shown_texts(row, reader.names),
            f"{label(row['state'])} {row['letter_id'] or ''}".strip(),
            row["consumer_name"],
        )
        for row in found.rows
    ]
    columns = ("message", "ticket", *shown_heads(reader.names), "state", "consumer")
    rows = [row | {"ticket_id": row["ticket_id"] and json_safe(row["ticket_id"])} for row in found.rows]
    counts = {"looked_at": found.looked_at, "of": found.number, "of_is_exact": found.is_exact}
    document = {"messages": rows, **counts, "more": found.cursor is not None}
    of = f"{'' if found.is_exact else 'at least '}{found.number:,}"
    looked = f"  {len(rows):,} found; looked at {found.looked_at:,} of {of} that are unfinished or dead"
    further = "" if found.cursor is None else "  there may be more: --limit shows more"
    show(as_json, document, table("Messages", columns, cells, ids=("message", "state")), looked, further)


def _found(reader: MessageFields, field: str, value: bytes, limit: int) -> FoundMessages:
    found = reader.find(field, value, None, limit)
    rows = found.rows
    while found.cursor is not None and len(rows) < limit:
        found = reader.find(field, value, found.cursor, limit - len(rows))
        rows += found.rows
    return found._replace(rows=rows)


@click.command(
    help=(
        "Show the readers of the ticket stream, how far each one is, and which entries could go; --apply cuts them."
        " Never cut: entries that a group has unread or pending, entries behind a log consumer's checkpoint, and with"
        " --archived-only entries that are not archived. Exit code 1: a reader is lost, and nothing is cut before an"
        " operator has looked."
    )
)
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
@looks
def trim(
    flags: dict[str, Any], apply: bool, archived_only: bool, keep_s: float | None, as_json: bool, **forget: Any
) -> None:
    with configured(flags, "trim", timeout_s=30.0) as at:
        settings = at.settings
        trimming = Trimming(at.link, Keys(settings.one_stream, settings.group))
        if any(forget.values()):
            sys.exit(_forget(trimming, **forget))
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
        print_json(document)
    else:
        _print_trim_table(document)
    sys.exit(1 if isinstance(decision, Refused) or trouble else 0)


def _forget(trimming: Trimming, forget: str | None, forget_group: str | None, forget_archive: bool) -> int:
    found = True
    if forget_archive:
        found = trimming.forget_archive()
        click.echo("the archive is forgotten" if found else "usher: no archive is noted for this stream", err=not found)
    for name, what, do in (
        (forget, "checkpoint", trimming.forget),
        (forget_group, "saved position of group", trimming.forget_group),
    ):
        if name and do(name):
            click.echo(f"{what} {name} is forgotten: entries are no longer kept for it")
        elif name:
            found = False
            click.echo(f"usher: there is no {what} {name}; `usher trim` lists them", err=True)
    return 0 if found else 1


def _cut(trimming: Trimming, decision: Cut, archived_only: bool, would: int) -> tuple[int, str]:
    cut = 0
    with progress() as show:
        try:
            for gone in trimming.cut(decision.floor, archived_only=archived_only):
                cut += gone
                show("cutting", cut, would)
        except StillNeeded as needed:
            return cut, str(needed)
    return cut, ""


def _print_trim_table(told: dict[str, Any]) -> None:
    screen = console()
    ages = ("" if (age_s := row["noted_s_ago"]) is None else f"{age_s:,.0f} s ago" for row in told["readers"])
    cells = [(*list(row.values())[:4], age) for row, age in zip(told["readers"], ages, strict=True)]
    title = f"{told['stream']}: entries from {told['first_id'] or 'none'}, last id {told['last_id'] or 'none'}"
    screen.print(table(title, ("reader", "name", "keeps from", "why", "noted"), cells, ids=("keeps from",)))
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
