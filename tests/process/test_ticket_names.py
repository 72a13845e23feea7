"""A ticket is found whatever its id is: by the API, by `usher tickets explain` and `follow`, and by the links of the
page."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import closing
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
import requests
from click.testing import CliRunner

from tests.process.crew import KEYS, Crew
from usher.cli import usher
from usher.common.redis.client import Link
from usher.common.redis.embedded import EmbeddedRedis
from usher.master.cli.commands import follow
from usher.master.cli.shared import configured
from usher.master.membership.consumer_http import OwnerQuestion, parse_hosts

pytestmark = pytest.mark.process

_HANDLER = """
import time

def wait(message):
    time.sleep(600)
"""
#: Ids that a path, a query, a proxy or a client may take for something else.
_IDS = (
    *(
        "x/explain", "explain", "/explain", "x/explain/explain", "x/events", "events", "x", "a/b", "a//b", "/a", "a/",
        "a?b", "?id=x", "a#b", "#",
    ),
    *(
        "%2F", "a%2Fb", "%", "%252F", ".", "..", "...", "a/..", "../x", "a/./b", "a.b", "a b", " ", "a+b", "a&id=x",
        "a;b", "a\\b", "ä😀", "[a-z]*",
    ),
)  # fmt: skip  # fmt: skip


class Held(NamedTuple):
    """A system in which every ticket of ``_IDS`` waits, each with one entry: ``entries`` has the ids of these."""

    crew: Crew
    entries: dict[str, str]

    def get(self, path: str) -> requests.Response:
        return requests.get(self.crew.masters[0] + path, timeout=20)


@pytest.fixture(scope="module")
def held() -> Iterator[Held]:
    with (
        tempfile.TemporaryDirectory(prefix="usher-t-", dir="/tmp") as name,
        EmbeddedRedis(Path(name) / "redis", port=None, durable=False) as redis,
    ):
        (Path(name) / "shop.py").write_text(_HANDLER)
        link = Link(redis.url, "test")
        with Crew(Path(name), redis.url, USHER_LEASE_SECONDS="20", USHER_CONCURRENCY="100") as crew:
            crew.start(1, ["c1"], "shop:wait")
            entries = {ticket: link.call("XADD", KEYS.stream, "*", "ticket_id", ticket).decode() for ticket in _IDS}
            crew.until(lambda: link.call("HLEN", KEYS.tickets) == len(_IDS), 30, "all are handed over")
            yield Held(crew, entries)
        link.close()


def command(held: Held, *words: str) -> Any:
    environ = {**dict.fromkeys((name for name in os.environ if name.startswith("USHER_")), None), **held.crew._environ}
    done = CliRunner().invoke(usher, [*words], env=environ)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def found(document: Any) -> tuple[str, list[str]]:
    """The ticket that an explanation is about, and its entries."""
    return document["ticket_id"], [entry["id"] for entry in document["entries"]]


def test_the_api_finds_it_by_query(held: Held) -> None:
    for ticket, entry in held.entries.items():
        asked = quote(ticket, safe="")
        assert found(held.get(f"/api/explain?id={asked}").json()) == (ticket, [entry])
        listed = held.get(f"/api/tickets?id={asked}").json()
        assert [(row["ticket_id"], row["message_ids"]) for row in listed["tickets"]] == [(ticket, [entry])]
        assert listed["cursor"] is None


def test_the_api_explains_it_by_path_but_for_dots_which_clients_take_out(held: Held) -> None:
    for ticket, entry in held.entries.items():
        if ticket not in (".", ".."):
            assert found(held.get(f"/api/tickets/{quote(ticket, safe='')}/explain").json()) == (ticket, [entry])


def test_its_owner_says_what_it_does_with_it(held: Held) -> None:
    [registered] = held.get("/api/consumers").json()["consumers"]
    with closing(OwnerQuestion(parse_hosts("127.0.0.1"))) as ask_owner:
        for ticket, entry in held.entries.items():
            told = ask_owner(registered["health_url"], ticket)
            assert told is not None, ticket
            assert [own.id for own in told.entries] == [entry.encode()], ticket


def test_who_is_not_there_is_not_found_and_what_cannot_be_is_refused(held: Held) -> None:
    assert held.get("/api/tickets?id=nobody").json() == {"tickets": [], "cursor": None}
    assert held.get("/api/explain?id=nobody").json()["state"] == "idle"
    for path in (
        "/api/explain",
        "/api/explain?id=",
        f"/api/explain?id={'t' * 257}",
        "/api/tickets?id=",
        "/api/events?id=",
        "/api/events",
    ):
        assert held.get(path).status_code == 422, path


def test_the_command_finds_it(held: Held) -> None:
    for ticket, entry in held.entries.items():
        told = command(held, "tickets", "explain", "--json", "--", ticket)
        assert found(told) == (ticket, [entry])


def test_following_it_tells_its_own_past(held: Held) -> None:
    flags = {"redis_url": held.crew._environ["USHER_REDIS_URL"], "ticket_stream": KEYS.stream, "group": KEYS.group}
    for ticket, entry in held.entries.items():
        with configured(flags, "test") as at, closing(follow(at, ticket, "0")) as events:  # type: ignore[type-var]
            assert next(facts for name, _, facts in events if name == "entry")["message_id"] == entry, ticket


def test_the_links_of_the_page_lead_to_it(held: Held) -> None:
    page = held.get("/tickets").text
    links = {unescape(link) for link in re.findall(r'href="(/tickets[/?][^"]+)"', page)}
    seen = {}
    for link in links:
        heading = re.search(r"<h1[^>]*>.*?<bdi[^>]*>(.*?)</bdi>", held.get(link).text, re.DOTALL)
        if heading is not None:
            seen[unescape(heading[1])] = link
    assert set(seen) >= set(_IDS)
    for ticket in _IDS:
        assert held.entries[ticket] in held.get(seen[ticket]).text
