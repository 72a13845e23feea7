"""Define ``usher tickets``: look at tickets in processing, explain what one waits for, and order what becomes of it."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote

import click

from usher.common.base.errors import UsherError
from usher.common.base.text import escape_control, label, pluralize
from usher.common.outbox.rows import TicketRows
from usher.common.runtime.settings import CommonSettings, load, options
from usher.master.cli.follow import follow_ticket
from usher.master.cli.options import OperatorContext, ask_leader, caller, operator_context, why_option
from usher.master.cli.shared import (
    configured,
    console,
    fields_of,
    print_json,
    status_reader,
    table,
    tickets_table,
    unblock_hint,
)
from usher.master.insight.status import LOOKED_AT, StatusReader
from usher.master.operations.action_log import By, counted
from usher.master.operations.ticket_orders import TicketOrders
from usher.master.policy.explain.outbox_rows import with_outbox
from usher.master.policy.ticket_filter import LISTED, ORDERS, TicketFilter, parse_states
from usher.master.policy.ticket_orders import TicketOrder
from usher.master.settings import OutboxUrl


@click.group(help="Look at tickets in processing, and order what becomes of their first messages.")
def tickets() -> None:
    pass


class StatesType(click.ParamType):
    name = "states"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> frozenset[str]:
        try:
            return value if isinstance(value, frozenset) else parse_states(value)
        except ValueError as wrong:
            self.fail(str(wrong), param, ctx)


def ticket_filters(command: Callable[..., Any]) -> Callable[..., Any]:
    of_states = f"Only these: {', '.join(LISTED)}."
    for decorate in (
        click.option("--error", default="", metavar="TEXT", help="Only those whose last error has this."),
        click.option("--consumer", default="", metavar="NAME", help="Only those that this consumer has."),
        click.option("--state", "states", type=StatesType(), default="", metavar="STATES", help=of_states),
    ):
        command = decorate(command)
    return command


@tickets.command("list", help="List tickets in processing, and those that wait.")
@ticket_filters
@click.option("--sort", type=click.Choice(list(ORDERS)), help="Look at all, and list the first in this order.")
@click.option(
    "--limit", type=click.IntRange(min=1, max=100_000), default=100, show_default=True, help="Most tickets listed."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@options(CommonSettings)
def list_tickets(
    flags: dict[str, Any],
    states: frozenset[str],
    consumer: str,
    error: str,
    sort: str | None,
    limit: int,
    as_json: bool,
) -> None:
    wanted = TicketFilter(states, consumer, error)
    with configured(flags, "status") as at:
        reader = StatusReader(at.link, at.keys, at.settings.sources, at.settings.work_ticket_field)
        if sort is None and wanted == TicketFilter():
            rows, more = _first(reader, limit)
        else:
            found = reader.find(wanted, sort or "age", limit)
            rows, more = reader.explained(found.rows), found.number > len(found.rows) or not found.is_all
        rows, shown = fields_of(at).add_to_tickets(rows), at.settings.shown_names
    if as_json:
        print_json({"tickets": rows, "more": more})
        return
    console().print(tickets_table(rows, shown=shown))
    for line in filter(None, map(unblock_hint, rows)):
        click.echo(line)
    if not rows:
        click.echo(
            "  none: everything that was read is done" if wanted == TicketFilter() else f"  none: {wanted.told()}"
        )
    elif len(rows) >= limit and more:
        click.echo(f"  the first {len(rows):,}; --limit shows more")
    elif more:
        click.echo(
            f"  more is waiting: only tickets of the oldest {LOOKED_AT} messages are listed; `usher tickets explain`"
            " knows every ticket"
        )


def _first(reader: StatusReader, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Return the tickets that come first, in no order, and whether there are more."""
    rows: list[dict[str, Any]] = []
    cursor: str | None = "0"
    while cursor is not None and len(rows) < limit:
        page = reader.tickets(cursor, min(1000, limit))
        rows += page["tickets"]
        cursor = page["cursor"]
    is_cut, rows = cursor is not None or len(rows) > limit, reader.explained(rows[:limit])
    parked = reader.parked(limit - len(rows))
    return [*rows, *parked.rows], is_cut or not parked.is_all


@tickets.command("show", help="Show one ticket. Exit code 1 when nothing of it is in processing.")
@click.argument("ticket_id")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@options(CommonSettings)
def show_ticket(flags: dict[str, Any], ticket_id: str, as_json: bool) -> None:
    with status_reader(flags) as reader:
        found = reader.ticket(ticket_id)
    if as_json:
        print_json(found)
    elif found is None:
        click.echo(
            f"nothing of ticket {ticket_id!r} is in processing; `usher tickets explain` tells whether something of it"
            " waits"
        )
    else:
        console().print(tickets_table([found], "Ticket"))
        for message_id in found.get("message_ids", ()):
            click.echo(f"  {message_id}")
        if (told := unblock_hint(found)) is not None:
            click.echo(told)
    if found is None:
        sys.exit(1)


_MOST_SHOWN = 20
_ERROR_LINES, _MOST_HINTS = 10, 5
#: Most tickets that one order is given about.
_MOST_AT_ONCE = 10_000


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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@options(ExplainTicketSettings)
def explain_ticket(flags: dict[str, Any], ticket_id: str, as_json: bool) -> None:
    outbox_url = load(ExplainTicketSettings, os.environ, flags).outbox_url
    with operator_context(flags) as at:
        document = _explained(at, ticket_id)
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
    """Return the ticket's rows in the outbox, or why they are not known."""
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
    """Print the text of the last error, and the end of its traceback. A leader of a former version tells neither."""
    error = (document.get("last_error") or document.get("dead_letter") or {}).get("error", "")
    trace = document.get("traceback", "")
    for line in (*error.splitlines()[:_ERROR_LINES], *trace.splitlines()):
        click.echo(escape_control(f"    {line}"))


def _explained(at: OperatorContext, ticket_id: str) -> dict[str, Any]:
    return _ask_leader(at, ticket_id) or at.explainer.explain(ticket_id).document()


def _ask_leader(at: OperatorContext, ticket_id: str) -> dict[str, Any] | None:
    """Return the leader's explanation; None when there is no leader, or it does not answer."""
    asked = quote(ticket_id.encode("utf-8", "surrogateescape"), safe="")
    document = ask_leader(at, f"/api/explain?id={asked}")
    return document if {"state", "sentences", "entries", "commands"} <= (document or {}).keys() else None


_ORDERS = {
    TicketOrder.RETRY: (
        "retry",
        "Start a ticket's first message now, instead of waiting for its next attempt.",
    ),
    TicketOrder.GIVE_UP: (
        "give-up",
        "Make a dead letter of a ticket's first unfinished message, in its turn; the ticket goes on with the next one,"
        " under any dead letter policy. A message that runs is given up when its run has failed.",
    ),
    TicketOrder.CANCEL: (
        "cancel",
        "End the run of a ticket's message, as that of one past its deadline is ended: with its process, unless it has"
        " one of its own. It counts as a crash, and what else runs there is cut off and runs again.",
    ),
}


def _add_order(order: TicketOrder) -> None:
    name, text = _ORDERS[order]

    @tickets.command(name, help=f"{text} Exit code 1 when this makes no sense now. Without TICKET_ID: of all that fit.")
    @click.argument("ticket_id", required=False)
    @ticket_filters
    @click.option("--preview", is_flag=True, help="Only say what it would do.")
    @click.option("--yes", is_flag=True, help="Do not ask.")
    @why_option()
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
    @options(CommonSettings)
    def give(
        flags: dict[str, Any],
        ticket_id: str | None,
        states: frozenset[str],
        consumer: str,
        error: str,
        preview: bool,
        yes: bool,
        why: str,
        as_json: bool,
    ) -> None:
        by, wanted = caller(why), TicketFilter(states, consumer, error)
        if (ticket_id is None) == (wanted == TicketFilter()):
            raise click.UsageError("give a ticket, or filters: --state, --consumer, --error")
        given = _OrderAsked(order, by, preview, yes, as_json)
        with operator_context(flags) as at:
            code = _give_one(at, ticket_id, given) if ticket_id is not None else _give_all(at, wanted, given)
        sys.exit(code)


class _OrderAsked(NamedTuple):
    order: TicketOrder
    by: By
    is_preview: bool
    yes: bool
    as_json: bool


def _give_one(at: OperatorContext, ticket_id: str, given: _OrderAsked) -> int:
    orders = TicketOrders(at.link, at.keys, lambda asked: _explained(at, asked))
    result = orders.preview(given.order, ticket_id)
    if result.outcome == "planned" and not given.is_preview:
        if given.order is not TicketOrder.RETRY:  # which harms nothing
            _ask(f"{result.note}: go on?", given)
        result = orders.give(given.order, ticket_id, given.by)
    if given.as_json:
        print_json(result.shown())
    else:
        click.echo(escape_control(f"{result.outcome}: {result.note}"))
    return 1 if result.outcome == "refused" else 0


def _give_all(at: OperatorContext, wanted: TicketFilter, given: _OrderAsked) -> int:
    """Give an order about every ticket that fits; one that cannot be given for a ticket is told, and stops no other."""
    reader = StatusReader(at.link, at.keys, at.settings.sources, at.settings.work_ticket_field)
    found = reader.find(wanted, "age", _MOST_AT_ONCE)
    rows = list({row["ticket_id"]: row for row in found.rows}.values())  # one whose record changes may come twice
    if not given.as_json:
        console().print(tickets_table(rows[:_MOST_SHOWN], f"{pluralize(found.number, 'ticket')}: {wanted.told()}"))
    outcomes: Counter[str] = Counter()
    if rows and not given.is_preview:
        name = given.order.value.replace("_", " ")
        _ask(f"{name} the first message of {pluralize(len(rows), 'ticket')}: go on?", given)
        orders = TicketOrders(at.link, at.keys, lambda asked: _explained(at, asked))
        for row in rows:
            head = row["message_ids"][0] if row.get("message_ids") else ""
            result = orders.give(given.order, row["ticket_id"], given.by, head)
            outcomes[result.outcome] += 1
            if result.outcome == "refused" and not given.as_json:
                click.echo(escape_control(f"  {row['ticket_id']}: {result.note}"))
    if given.as_json:
        print_json({"matched": found.number, "outcomes": dict(outcomes)})
    else:
        click.echo(f"  {counted(outcomes.elements()) or 'nothing was done'}")
    return 0 if rows and not outcomes["refused"] else 1


def _ask(question: str, given: _OrderAsked) -> None:
    if given.yes:
        return
    if given.as_json:
        raise click.UsageError("--json does not ask: pass --yes too")
    if not sys.stdin.isatty():
        raise click.UsageError("stdin is not a terminal: pass --yes")
    if not click.confirm(escape_control(question)):
        sys.exit(1)


for _order in TicketOrder:
    _add_order(_order)
tickets.add_command(follow_ticket)
tickets.add_command(explain_ticket)
