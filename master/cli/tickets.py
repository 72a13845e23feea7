"""Define ``usher tickets``: look at tickets in processing, explain what one waits for, and order what becomes of it;
and ``usher stuck``: those that stand still, are retried or halted, those in the same trouble in one line."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import click
import orjson
import requests
from pydantic import Field

from usher.common.base.durations import Duration
from usher.common.base.errors import StartRefused, UsherError
from usher.common.base.text import escape_control, json_line, label, pluralize, span
from usher.common.cli.send import fields_of
from usher.common.outbox.rows import TicketRows
from usher.common.protocol.ticket_states import TicketState
from usher.common.redis.locate import find_local_instance
from usher.common.runtime.settings import CommonSettings, load, options, takes_json
from usher.master.cli.shared import (
    configured,
    confirm,
    console,
    looks,
    print_json,
    session,
    show,
    shown_heads,
    shown_texts,
    table,
    tickets_table,
    unblock_hint,
)
from usher.master.cli.verbs import asked_of, asks, perform, shelf_command
from usher.master.insight.live_overview import MOST, LiveOverview
from usher.master.insight.status import ORDERS
from usher.master.policy.explain.explain import Reason
from usher.master.policy.states import BY_NAME
from usher.master.policy.ticket_orders import TicketOrder
from usher.master.settings import OutboxUrl
from usher.master.verbs.verbs import TICKETS, VERBS, NewOrder, TicketAsk
from usher.master.verbs.view import View


@click.group(help="Look at tickets in processing, and order what becomes of their first messages.")
def tickets() -> None:
    pass


@tickets.command("list", help="List tickets in processing, and those that wait.")
@asks(TicketAsk)
@click.option("--sort", type=click.Choice(list(ORDERS)), default="age", show_default=True, help="The order.")
@click.option(
    "--limit", type=click.IntRange(min=1, max=100_000), default=100, show_default=True, help="Most tickets listed."
)
@looks
def list_tickets(flags: dict[str, Any], sort: str, limit: int, as_json: bool, **given: Any) -> None:
    asked = asked_of(TICKETS, given)
    with configured(flags, "status") as at:
        found = at.status.find(asked.meant(), sort, limit)
        rows, more = found["rows"], found["number"] > len(found["rows"]) or not found["is_all"]
        rows, shown = at.fields.add_to_tickets(rows), at.settings.shown_names
    none = "" if rows else f"  none: {asked.told('everything that was read is done')}"
    further = f"  the first {len(rows):,}; --limit shows more" if len(rows) >= limit and more else none
    listed = tickets_table(rows, shown=shown)
    show(as_json, {"tickets": rows, "more": more}, listed, *map(unblock_hint, rows), further)


@tickets.command("finished", help="List the latest messages that were done or given up, as the run log has them.")
@click.option("--ticket", default="", metavar="ID", help="Only those of this ticket.")
@click.option("--handler", default="", metavar="MODULE:FUNCTION", help="Only those that it handled.")
@click.option("--limit", type=click.IntRange(min=1, max=100_000), default=100, show_default=True, help="Most listed.")
@looks
def list_finished(flags: dict[str, Any], ticket: str, handler: str, limit: int, as_json: bool) -> None:
    with configured(flags, "status") as at:
        rows, older = at.history.finished(ticket, handler, "", limit)
        while len(rows) < limit and older is not None:
            more, older = at.history.finished(ticket, handler, older, limit - len(rows))
            rows += more
    is_cut, rows = older is not None or len(rows) > limit, rows[:limit]
    names = ("ticket_id", "message_id", "outcome", "handler")
    told = [row | {"outcome": row["outcome"] + ", interrupted" * ("interrupted" in row)} for row in rows]
    shown = [(_when(row["ms"]), span(row["took_ms"]), *(row[name] for name in names)) for row in told]
    listed = table("Finished", ("ended", "ran for", "ticket", "message", "outcome", "handler"), shown)
    further = "  the first of more; --limit shows more" if is_cut else "  all of the run log" if rows else "  none"
    show(as_json, {"finished": rows, "more": is_cut}, listed, further)


_MOST_SHOWN = 20
_ERROR_LINES = 10


class ExplainTicketSettings(CommonSettings):
    outbox_url: OutboxUrl = ""


@click.command(
    "explain",
    help=(
        "Explain what a ticket waits for, and until when. Asks the leader, which asks the consumer that has the"
        " ticket; without a leader the explanation comes from Redis alone. With USHER_OUTBOX_URL it also tells which"
        " rows of the ticket wait in the outbox, or were refused."
    ),
)
@click.argument("ticket_id")
@takes_json
@options(ExplainTicketSettings)
def explain_ticket(flags: dict[str, Any], ticket_id: str, as_json: bool) -> None:
    outbox_url = load(ExplainTicketSettings, os.environ, flags).outbox_url
    with configured(flags, "operator") as at:
        document = at.explained(ticket_id)
    if outbox_url:
        document = with_outbox(document, *_rows_of(outbox_url, ticket_id))
    if as_json:
        print_json(document)
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
        console().print(
            table("Entries", ("entry", "state", "attempt", "waits behind"), shown, ids=("entry", "waits behind"))
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
            confirm(f"{planned.document['note']}: go on?", given["yes"], as_json)
        return perform(view, "tickets order", args, as_json)

    return give


#: States of a ticket that has nothing anywhere else: the outbox has the word.
_NOTHING = (TicketState.IDLE, TicketState.NOT_FOUND)


def with_outbox(document: dict[str, Any], rows: TicketRows, trouble: str = "") -> dict[str, Any]:
    """Return an explanation with what the outbox has of the ticket. ``trouble``: why that is not known."""
    unknown = [Reason("outbox_not_asked", f"its outbox is not known: {trouble}")]
    reasons = unknown if trouble else _outbox_reasons(rows)
    if not reasons:
        return document
    shown = [reason._asdict() for reason in reasons]
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


@click.command(
    "stuck",
    help=(
        "Show tickets that are stuck for more than 5 s, retried or halted; those in the same trouble"
        " in one line. Looks twice, a second apart. Exit code 0, also when there are some."
    ),
)
@looks
def stuck(flags: dict[str, Any], as_json: bool) -> None:
    with configured(flags, "stuck") as at:
        lease_ms = int(at.settings.lease_seconds * 1000)
        overview = LiveOverview(at.link, at.keys, at.settings.work_ticket_field, lease_ms)
        overview.at_once = math.inf
        for wait_s in (_BETWEEN_S, 0.0):
            overview.snapshot(0.0)
            overview.run_once()
            overview.at_once = 0  # all are counted
            time.sleep(wait_s)
        groups, letters = at.fields.add_to_groups(overview.last["groups"]), overview.last["dead_letters"]
    names, is_cut = at.settings.shown_names, not all(one["tickets_are_all"] for one in groups)
    if as_json:
        print_json({"groups": groups, "more": is_cut})
        return
    for one in groups:
        click.echo(escape_control(one["told"]))
        few = one["rows"][:_EXAMPLES]
        shown = [
            (row["ticket_id"], *shown_texts(row, names), row["tried"], row["behind"], row["consumer"], row["why"])
            for row in few
        ]
        columns = ("ticket", *shown_heads(names), "attempts", "behind", "consumer", "why")
        console().print(table("", columns, shown, numbers=("behind",), ids=("ticket",)))
        for way in _ways(one):
            click.echo(escape_control(f"  {way}"))
    if not groups:
        given_up = f"; given up: {pluralize(letters, 'dead letter')} (`usher dead list`)" if letters else ""
        calm = "no consumer is live: nothing more is handled (`usher consumers list`)"
        calm = "nothing is stuck" if overview.last["consumers"]["live"] else calm
        click.echo(f"{calm}{given_up}")
    elif is_cut:
        click.echo(f"tickets that have not failed are counted among the {MOST} oldest of each state only")


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


_CONNECT_S = 3.0
#: A master sends its position every 10 s: one that is silent for longer has gone.
_SILENCE_S = 35.0
_PAUSE_S = 1.0
_USUAL = "http://127.0.0.1:8700"


class FollowSettings(CommonSettings):
    master_urls: str = Field(
        "", description=f"Masters to ask, comma separated. Empty: those of `usher up`, else {_USUAL}."
    )


class ServerSentEvent(NamedTuple):
    """A server-sent event. One without a name only carries the position."""

    position: str
    name: str
    data: dict[str, Any]


@click.command(
    "follow", help="Follow a ticket as it happens: entries, hand-overs, attempts, completions. Ends with Ctrl-C."
)
@click.argument("ticket_id")
@click.option(
    "--from",
    "position",
    default="",
    help="Id of an event: begin with the events after it. 0: begin with everything that is still there.",
)
@takes_json
@options(FollowSettings)
def follow_ticket(flags: dict[str, Any], ticket_id: str, position: str, as_json: bool) -> None:
    settings = load(FollowSettings, os.environ, flags)
    up = find_local_instance(settings.state_folder)
    urls = (settings.master_urls or (up.master_urls if up is not None else _USUAL)).split(",")
    for told in follow(
        [url.strip().rstrip("/") for url in urls], ticket_id, position, settings.api_token, settings.tls_ca
    ):
        click.echo(json_line({"event": told.name, "id": told.position, **told.data}) if as_json else _event_line(told))


def follow(
    urls: Sequence[str], ticket_id: str, position: str, token: str, ca: Path | None = None
) -> Iterator[ServerSentEvent]:
    """Yield events for ever: when a master goes, another one continues from the same position. Raises StartRefused when
    no master answers at the beginning, and when one refuses."""
    asking = session(ca)
    begun = False
    while True:
        trouble = ""
        for url in urls:
            try:
                with _ask(asking, url, ticket_id, position, token) as reply:
                    begun = True
                    for told in parse(lines_of(reply.iter_content(chunk_size=1))):
                        position = told.position or position
                        if told.name:
                            yield told
            except requests.RequestException as failed:
                trouble = f"{url}: {failed}"
        if not begun:
            raise StartRefused(f"USHER_MASTER_URLS: no master answers; {trouble}")
        time.sleep(_PAUSE_S)


def _ask(session: requests.Session, url: str, ticket_id: str, position: str, token: str) -> requests.Response:
    headers = {"Accept": "text/event-stream"}
    if position:
        headers["Last-Event-ID"] = position
    if token:
        headers["Authorization"] = f"Bearer {token}"
    address = f"{url}/api/events?id={quote(ticket_id.encode('utf-8', 'surrogateescape'), safe='')}"
    reply = session.get(address, headers=headers, stream=True, timeout=(_CONNECT_S, _SILENCE_S), allow_redirects=False)
    if reply.status_code == 200:
        return reply
    with reply:
        if reply.status_code >= 500:
            raise requests.RequestException(f"HTTP {reply.status_code}")
        refused = _document(reply)
    hint = "; set USHER_API_TOKEN" if reply.status_code == 401 else ""
    raise StartRefused(f"{url} refuses: HTTP {reply.status_code} {refused}{hint}")


def _document(reply: requests.Response) -> str:
    try:
        document = reply.json()
    except ValueError:
        return ""
    problems = "; ".join(f"{one.get('field')} {one.get('problem')}" for one in document.get("errors", ()))
    return problems or str(document.get("detail") or document.get("title"))


def lines_of(content: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of pieces, byte by byte as a rule, each as soon as it is whole. (``iter_lines`` of requests
    copies a line anew for each of its bytes: an entry of 64 KiB takes it seconds, and a client that reads so slowly
    loses the connection.)"""
    line = bytearray()
    for piece in content:
        *whole, rest = piece.split(b"\n")
        for end in whole:
            yield bytes(line + end)
            line.clear()
        line += rest


def parse(lines: Iterable[bytes]) -> Iterator[ServerSentEvent]:
    """Yield events from the lines of an event stream (the part of the format that our masters use)."""
    position = name = data = ""
    for line in lines:
        field, _, value = line.decode(errors="replace").partition(": ")
        if field == "id":
            position = value
        elif field == "event":
            name = value
        elif field == "data":
            data = value
        elif not line:
            if position or name:
                yield ServerSentEvent(position, name, orjson.loads(data) if data else {})
            position = name = data = ""


def _event_line(told: ServerSentEvent) -> str:
    facts = "  ".join(
        f"{name}={escape_control(value if isinstance(value, str) else orjson.dumps(value).decode())}"
        for name, value in told.data.items()
        if name not in ("ticket_id", "time_ms")
    )
    return f"{_when(told.data.get('time_ms', time.time() * 1000))}  {told.name:<11}  {facts}"


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
    tickets.add_command(shelf_command(TICKETS.verbs[_one.value.replace("_", "-")], _extra, one=_order(_one)))
for _command in (shelf_command(TICKETS.verbs["pause"]), follow_ticket, explain_ticket):
    tickets.add_command(_command)
