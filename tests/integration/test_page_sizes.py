"""Pages of a large system: bounded in bytes and in round trips to Redis, and everything is found."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from tests.doors import Site
from tests.integration.factories import NO_LOCK, World
from usher.common.protocol.keys import LogKeys
from usher.common.protocol.registration import Registration
from usher.common.protocol.sources import SourceSelection
from usher.common.redis.client import Link
from usher.common.redis.replies import redis_ms
from usher.master.policy.explain import SHOWN

_MOST_BYTES = 300_000


class Trips:
    """Round trips of all links, of this thread: others may go on behind former tests."""

    def __init__(self) -> None:
        self.count, self.thread = 0, threading.get_ident()

    def of(self, site: Site, path: str) -> int:
        """Of a GET, which has to be answered and short."""
        before = self.count
        answered = site.get(path)
        assert answered.status_code == 200
        assert len(answered.data) < _MOST_BYTES, path
        return self.count - before


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> Trips:
    made, send = Trips(), Link._send

    def counted(link: Link, connection: Any, packed: Any, replies: int = 1) -> None:
        made.count += threading.get_ident() == made.thread
        send(link, connection, packed, replies)

    monkeypatch.setattr(Link, "_send", counted)
    return made


def made(world: World, monkeypatch: pytest.MonkeyPatch, sources: SourceSelection | None = None) -> Iterator[Site]:
    monkeypatch.setattr("usher.master.insight.live.LiveOverview.snapshot", lambda pulse, patience_s=0: pulse.last)
    site = Site(world, sources)
    site.pulse._looked_s = 1e18
    site.pulse.run_once()
    yield site


@pytest.fixture
def site(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    yield from made(world, monkeypatch)


@pytest.fixture
def gathering(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    yield from made(world, monkeypatch, SourceSelection.parse("shop:*,listed"))


def names_in(text: str, pattern: str) -> list[str]:
    return re.findall(f">({pattern})<", text)


def test_three_hundred_sources_are_paged_searched_and_told_with_their_troubles(
    gathering: Site, world: World, trips: Trips
) -> None:
    names = [f"shop:{number:03d}" for number in range(300)]
    link, keys = world.link, world.keys
    says = {
        "url": "http://m1",
        "setting": "shop:*,listed",
        "sources": 300,
        "mode": "x",
        "moved": 0,
        "troubles": [["shop:far", "before", "why"]],
    }
    link.call("HSET", keys.shares, "m1", b"%d %b" % (redis_ms(link) + 60_000, orjson.dumps(says)))
    link.pipeline([("XADD", name, "*", "ticket_id", "42") for name in names for _ in range(2)])
    for at in range(0, len(names), 100):
        some = [name.encode() for name in names[at : at + 100]]
        groups = [LogKeys(name.decode()).groups for name in some]
        script_keys = (keys.stream, keys.gathered, keys.dead, keys.counters, *some, *groups, keys.letters)
        link.run("gather", script_keys, (keys.group, "ticket_id", 256, 1000, 1))
    link.call("DEL", "shop:007")
    link.call("SET", "shop:007", "no stream")
    link.call("XADD", "shop:123", "*", "ticket_id", "42")

    assert trips.of(gathering, "/streams") <= 25
    first = gathering.get("/streams").text
    found = names_in(first, r"shop:\d+|listed")
    assert len(found) == 99, "and shop:far"
    of_worth = [first.index(name) for name in ("shop:007", "shop:far", "shop:123")]
    assert of_worth == sorted(of_worth), "what needs somebody, then where most waits"
    assert "not_a_stream" in first
    assert "before: why" in first
    assert "1 to 100 of 302" in first
    second = gathering.get("/streams?from=100").text
    third = gathering.get("/streams?from=200").text
    rest = names_in(gathering.get("/streams?from=300").text, r"shop:\d+|listed")
    every = [*found, *names_in(second, r"shop:\d+|listed"), *names_in(third, r"shop:\d+|listed"), *rest]
    assert sorted(every) == sorted([*names, "listed"])
    assert names_in(gathering.get("/streams?source=:29").text, r"shop:\d+|listed") == [
        f"shop:29{last}" for last in range(10)
    ]
    assert "No source has this in its name" in gathering.get("/streams?source=%3Cb%3E").text
    assert gathering.get("/streams?from=x").status_code == 422
    assert "source not_a_stream" in gathering.get("/doctor").text, "the doctor looks at the sources too"


def test_a_thousand_consumers_are_paged_and_found_by_name(site: Site, world: World, trips: Trips) -> None:
    lives = [
        world.members.register(
            Registration(f"c{number:04d}", f"{number:032d}", "http://127.0.0.1:1/api/health", 8, 100, NO_LOCK)
        ).registration
        for number in range(1000)
    ]
    world.link.call("DEL", world.keys.lease(lives[777].incarnation))
    before = trips.count
    site.pulse.run_once()
    assert trips.count - before <= 15, "a turn of the pulse asks for all of them at once"
    assert trips.of(site, "/consumers") <= 2
    first = site.get("/consumers").text
    found = names_in(first, r"c\d{4}")
    assert len(found) == 200
    assert found[0] == "c0777", "who is lost comes first"
    pages, text = [found], first
    while following := re.search(r'href="(/consumers\?[^"]+)" rel="next"', text):
        text = site.get(following[1].replace("&amp;", "&")).text
        pages.append(names_in(text, r"c\d{4}"))
    assert sorted(name for page in pages for name in page) == [one.name for one in lives]
    assert names_in(site.get("/consumers?name=c099").text, r"c\d{4}") == [f"c099{last}" for last in range(10)]
    assert trips.of(site, "/") <= 5, "points of the last hour, and letters by their time (a script, sent once)"


def test_a_hundred_thousand_tickets_are_paged_and_searched(site: Site, world: World, trips: Trips) -> None:
    world.apart_because = "the index is made up"
    for at in range(0, 100_000, 5000):
        flat = [
            part for number in range(at, at + 5000) for part in (b"INC-%d" % number, b"a:1 5 %d-1" % (1000 + number))
        ]
        world.link.call("HSET", world.keys.tickets, *flat)
    for _ in range(21):
        site.pulse.run_once()
    # a page of the index, what its tickets are doing, their errors, and who is parked (a script, sent once)
    assert trips.of(site, "/tickets") <= 5
    assert trips.of(site, "/tickets") <= 4
    assert 90 <= len(names_in(site.get("/tickets").text, r"INC-\d+")) <= 150
    assert trips.of(site, "/tickets?q=INC-7") <= 150, "it looks for a moment, not for as long as it takes"
    assert trips.of(site, "/tickets/INC-77777") <= 23, "scripts are sent once"
    assert trips.of(site, "/tickets/INC-77777") <= 13
    assert trips.of(site, "/") <= 3
    stuck = names_in(site.get("/").text, r"INC-\d+")
    assert stuck[:3] == ["INC-0", "INC-1", "INC-2"]
    assert len(stuck) == SHOWN
    assert "<b>100,000</b> tickets <b>recovering: on a</b>" in site.get("/").text, "they are one group"
