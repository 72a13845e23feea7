"""Define ``usher tickets``: look at tickets in processing, explain what one waits for, and order what becomes of it."""

from __future__ import annotations

import os
import sys
from typing import Any, ClassVar
from urllib.parse import quote

import click
import requests

from usher.common.base.errors import UsherError
from usher.common.base.labels import label
from usher.common.base.text import escape_control
from usher.common.outbox.rows import TicketRows
from usher.common.runtime.settings import CommonSettings, load, options
from usher.master.cli.follow import follow_ticket
from usher.master.cli.options import OperatorContext, caller, operator_context, session, why_option
from usher.master.cli.shared import console, print_json, status_reader, table, tickets_table, unblock_hint
from usher.master.insight.ticket_states import LOOKED_AT
from usher.master.operations.ticket_orders import OrderResult, TicketOrders
from usher.master.policy.explain.outbox_rows import with_outbox
from usher.master.policy.ticket_orders import TicketOrder
from usher.master.settings import OutboxUrl


@click.group(help="Look at tickets in processing, and order what becomes of their first messages.")
def tickets() -> None:
    pass


@tickets.command("list", help="List tickets in processing, and those that wait.")
@click.option(
    "--limit", type=click.IntRange(min=1, max=100_000), default=100, show_default=True, help="Most tickets listed."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@options(CommonSettings)
def list_tickets(flags: dict[str, Any], limit: int, as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    cursor: str | None = "0"
    with status_reader(flags) as reader:
        while cursor is not None and len(rows) < limit:
            page = reader.tickets(cursor, min(1000, limit))
            rows += page["tickets"]
            cursor = page["cursor"]
        is_cut, rows = cursor is not None or len(rows) > limit, reader.explained(rows[:limit])
        parked = reader.parked(limit - len(rows))
    more, rows = is_cut or not parked.is_all, [*rows, *parked.rows]
    if as_json:
        print_json({"tickets": rows, "more": more})
        return
    console().print(tickets_table(rows))
    for line in filter(None, map(unblock_hint, rows)):
        click.echo(line)
    if not rows:
        click.echo("  none: everything that was read is done")
    elif len(rows) >= limit and more:
        click.echo(f"  the first {len(rows):,}; --limit shows more")
    elif more:
        click.echo(
            f"  more is waiting: only tickets of the oldest {LOOKED_AT} messages are listed; `usher tickets explain`"
            " knows every ticket"
        )


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


#: Seconds that the leader may take: it asks the owner in turn.
_CONNECT_S, _READ_S = 1.0, 5.0
_MOST_SHOWN = 20


class ExplainSettings(CommonSettings):
    """The settings needed to ask the leader, and Redis."""

    UNREAD: ClassVar[frozenset[str]] = CommonSettings.UNREAD - {"tls_ca"}


class ExplainTicketSettings(ExplainSettings):
    """The settings needed to ask the outbox, too."""

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
    with operator_context({field: flags[field] for field in CommonSettings.model_fields}) as at:
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
    from usher.common.outbox.store import OutboxStore  # SQLAlchemy is an extra

    store = OutboxStore(outbox_url, "USHER_OUTBOX_URL")
    try:
        store.check()
        return store.of_ticket(ticket_id), ""
    except UsherError as trouble:
        return TicketRows(0, None, "", ()), str(trouble)
    finally:
        store.close()


def _explained(at: OperatorContext, ticket_id: str) -> dict[str, Any]:
    return _ask_leader(at, ticket_id) or at.explainer.explain(ticket_id).document()


def _ask_leader(at: OperatorContext, ticket_id: str) -> dict[str, Any] | None:
    """Return the leader's explanation; None when there is no leader, or it does not answer."""
    url = at.explainer.leader_url()
    if not url:
        return None
    asked = f"{url}/api/explain?id={quote(ticket_id.encode('utf-8', 'surrogateescape'), safe='')}"
    headers = {"Authorization": f"Bearer {at.settings.api_token}"} if at.settings.api_token else {}
    try:
        with session(at.settings.tls_ca) as asking:
            answered = asking.get(asked, headers=headers, timeout=(_CONNECT_S, _READ_S), allow_redirects=False)
            document = answered.json() if answered.status_code == 200 else None
    except (requests.RequestException, ValueError):
        return None
    return (
        document
        if isinstance(document, dict) and {"state", "sentences", "entries", "commands"} <= document.keys()
        else None
    )


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

    @tickets.command(name, help=f"{text} Exit code 1 when this makes no sense now.")
    @click.argument("ticket_id")
    @click.option("--preview", is_flag=True, help="Only say what it would do.")
    @click.option("--yes", is_flag=True, help="Do not ask.")
    @why_option()
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
    @options(ExplainSettings)
    def give(flags: dict[str, Any], ticket_id: str, preview: bool, yes: bool, why: str, as_json: bool) -> None:
        by = caller(why)
        with operator_context(flags) as at:
            orders = TicketOrders(at.link, at.keys)
            result = orders.preview(order, ticket_id, lambda asked: _explained(at, asked))
            if result.outcome == "planned" and not preview:
                _ask(result, yes, as_json)
                result = orders.give(order, ticket_id, by, lambda asked: _explained(at, asked))
        if as_json:
            print_json(result.shown())
        else:
            click.echo(escape_control(f"{result.outcome}: {result.note}"))
        if result.outcome == "refused":
            sys.exit(1)


def _ask(planned: OrderResult, yes: bool, as_json: bool) -> None:
    """Ask whether to go on, except for a retry, which harms nothing."""
    if yes or planned.order == TicketOrder.RETRY.value:
        return
    if as_json:
        raise click.UsageError("--json does not ask: pass --yes too")
    if not sys.stdin.isatty():
        raise click.UsageError("stdin is not a terminal: pass --yes")
    if not click.confirm(escape_control(f"{planned.note}: go on?")):
        sys.exit(1)


for _order in TicketOrder:
    _add_order(_order)
tickets.add_command(follow_ticket)
tickets.add_command(explain_ticket)
