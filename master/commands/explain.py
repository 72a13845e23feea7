"""``usher tickets explain``: what a ticket waits for, and until when."""

from __future__ import annotations

from typing import Any, ClassVar
from urllib.parse import quote

import click
import requests

from common.printable import printable
from common.settings import CommonSettings, options
from master.commands.looking import console, print_json, table
from master.commands.operator import Desk, desk, session

#: How long the leader may take: it asks the owner in turn.
_CONNECT_S, _READ_S = 1.0, 5.0
_MOST_SHOWN = 20


class ExplainSettings(CommonSettings):
    """What asking the leader needs, and Redis."""

    UNREAD: ClassVar[frozenset[str]] = CommonSettings.UNREAD - {"tls_ca"}


@click.command(
    "explain",
    help="Say what a ticket waits for, and until when. Asks the leader, who asks the consumer that has the ticket; without a leader it says what "
    "Redis knows.",
)
@click.argument("ticket_id")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@options(ExplainSettings)
def explain_ticket(flags: dict[str, Any], ticket_id: str, as_json: bool) -> None:
    with desk(flags) as at:
        document = _ask_leader(at, ticket_id) or at.explainer.explain(ticket_id).document()
    if as_json:
        print_json(document)
        return
    entries = document["entries"][:_MOST_SHOWN]
    shown = [(entry["id"], entry["state"].replace("_", " "), str(entry["attempt"] or ""), entry["behind"] or "") for entry in entries]
    click.echo(printable(f"{ticket_id}: {document['state'].replace('_', ' ')}"))
    for sentence in document["sentences"]:
        click.echo(printable(f"  {sentence}"))
    if shown:
        console().print(table("Entries", ("entry", "state", "attempt", "waits behind"), shown, ids=("entry", "waits behind")))
    if len(document["entries"]) > len(shown):
        click.echo(f"  and {len(document['entries']) - len(shown)} more")
    for way in document["commands"]:
        click.echo(printable(f"  {way['command']}   # {way['does']}"))


def _ask_leader(at: Desk, ticket_id: str) -> dict[str, Any] | None:
    """What the leader says; None when there is none, or it does not answer."""
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
    return document if isinstance(document, dict) and {"state", "sentences", "entries", "commands"} <= document.keys() else None
