"""Define ``usher tickets follow``: the events of one ticket, as they happen, from a master's server-sent events."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import click
import orjson
import requests
from pydantic import Field

from usher.common.base.errors import StartRefused
from usher.common.base.text import escape_control, json_line
from usher.common.redis.locate import find_local_instance
from usher.common.runtime.settings import CommonSettings, load, options
from usher.master.cli.shared import session

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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document per event and line.")
@options(FollowSettings)
def follow_ticket(flags: dict[str, Any], ticket_id: str, position: str, as_json: bool) -> None:
    settings = load(FollowSettings, os.environ, flags)
    up = find_local_instance(settings.state_folder)
    urls = (settings.master_urls or (up.master_urls if up is not None else _USUAL)).split(",")
    for told in follow(
        [url.strip().rstrip("/") for url in urls], ticket_id, position, settings.api_token, settings.tls_ca
    ):
        click.echo(json_line({"event": told.name, "id": told.position, **told.data}) if as_json else _line(told))


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


def _line(told: ServerSentEvent) -> str:
    facts = "  ".join(
        f"{name}={_format_event_value(value)}"
        for name, value in told.data.items()
        if name not in ("ticket_id", "time_ms")
    )
    return f"{_when(told.data.get('time_ms', time.time() * 1000))}  {told.name:<11}  {facts}"


def _when(ms: float) -> str:
    """Return a local time; with the day when it is not today."""
    try:
        at = datetime.fromtimestamp(ms / 1000)
    except (OverflowError, ValueError, OSError):
        return "?"  # the time of an id that a producer chose
    return at.strftime("%H:%M:%S" if at.date() == datetime.now().date() else "%Y-%m-%d %H:%M:%S")


def _format_event_value(value: object) -> str:
    return escape_control(value if isinstance(value, str) else orjson.dumps(value).decode())
