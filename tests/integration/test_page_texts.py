"""Hostile texts, wherever a page shows what others write: parsed as a browser does, nothing of them is markup."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from urllib.parse import quote

import pytest

from tests.browser.test_hostile_texts import CORPUS
from tests.doors import Site
from tests.hands import ticket_url, visible
from tests.integration.factories import World, fetch

_ALIEN_TAGS = {"img", "script", "iframe", "style", "object", "base", "meta", "link"}


class _Reader(HTMLParser):
    """What is markup in the page's main part."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.places: list[str] = []
        self.text = ""
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = self._inside or tag == "main"
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name in ("style", "srcdoc")]
        self.places += [value or "" for name, value in attrs if name in ("href", "src", "action", "formaction")]
        if self._inside and "class" not in dict(attrs):
            self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "main"

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    assert not reader.handlers
    assert not set(reader.tags) & _ALIEN_TAGS
    assert all(place.startswith(("/", "#")) and not place.startswith("//") for place in reader.places)
    return reader


@pytest.fixture
def hostile(world: World, site: Site) -> Iterator[Site]:
    leader, a = world.elect(), world.join("a")
    for at, text in enumerate(CORPUS):
        ticket = text.encode()
        world.add(b"%d-1" % (1000 + 10 * at), "ticket_id", ticket, ticket, ticket)
        fetch(leader, 1)
        world.owned(leader, a, b"d" + ticket, b"%d-1" % (1005 + 10 * at))
        world.give_up(a, b"d" + ticket, "skip", error=text)
    site.pulse.run_once()
    yield site


def test_texts_of_others_are_never_markup(hostile: Site, world: World) -> None:
    ids = [letter_id.decode() for letter_id in world.letter_ids()]
    paths = [
        "/",
        "/tickets",
        "/dead-letters",
        *[ticket_url(text) for text in CORPUS],
        *[ticket_url(f"d{text}") for text in CORPUS],
    ]
    paths += [f"/dead-letters/{letter_id}" for letter_id in ids] + [
        f"/messages/{1000 + 10 * at}-1" for at in range(len(CORPUS))
    ]
    for path in paths:
        answered = hostile.get(path)
        assert answered.status_code == 200, path
        read(answered.text)
    letters = read(hostile.get("/dead-letters").text).text
    assert [text for text in CORPUS if visible(text) not in letters] == []
    for at, text in enumerate(CORPUS):
        assert visible(text) in read(hostile.get(f"/messages/{1000 + 10 * at}-1").text).text


@pytest.mark.parametrize(
    "path",
    [
        "/tickets?q=",
        "/tickets?cursor=",
        "/tickets?id=",
        "/dead-letters?error=",
        "/dead-letters?before=",
        "/?said=",
        "/consumers?name=",
        "/x/",
    ],
)
def test_texts_of_queries_are_never_markup(site: Site, path: str) -> None:
    for text in (*CORPUS, "x" * 10_000):
        answered = site.get(path + quote(text, safe=""))
        assert answered.status_code < 500
        if answered.mimetype == "text/html":
            read(answered.text)
