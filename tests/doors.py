"""Doors for tests of applications: who may come in, the routes, and the page over WSGI."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flask import Flask
from werkzeug.test import Client, TestResponse

from tests.integration.factories import LEASE_MS, World
from usher.common.http import app as web
from usher.common.http.auth import Doorman
from usher.common.http.credentials import Credentials, Identity, Role, line_of
from usher.common.http.serve import Liveness
from usher.common.observability.metrics import Metrics
from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SourceSelection
from usher.common.redis.client import Link
from usher.common.runtime.service import Health
from usher.consumer.execution.lanes import Lanes
from usher.consumer.lifecycle.journal import Journal
from usher.consumer.policy.outcome import RetryPolicy
from usher.master.insight.live import LiveOverview
from usher.master.web.api import Parts, operator_routes
from usher.master.web.pages.site import add_pages

HTML = {"Accept": "text/html,*/*;q=0.8"}


def doorman(token: str = "", **others: Identity) -> Doorman:
    """One who asks for ``token`` (all rights), or for one of ``others``: token -> identity. Without any he asks
    nobody."""
    return Doorman(Credentials(token, others=others))


def tokens_file(folder: Path, *tokens: tuple[Role, str, str], signed_on: str = "") -> str:
    """Write a tokens file with (role, name, token) each, and lines of people; return its path."""
    file = folder / "tokens"
    file.touch(0o600)
    file.write_text("".join(f"{line_of(*one)}\n" for one in tokens) + signed_on)
    return str(file)


def environ_of(world: World) -> dict[str, str]:
    """The environment of a command on this world."""
    return {
        "USHER_REDIS_URL": world.link.url,
        "USHER_TICKET_STREAM": world.keys.stream,
        "USHER_GROUP": world.keys.group,
    }


def parts_of(
    link: Link, keys: Keys, shown: Sequence[str] = (), sources: SourceSelection | None = None, lease_ms: int = LEASE_MS
) -> Parts:
    """Parts that operators look at and act with, all on one link."""
    facts: Any = {"work_ticket_field": "ticket_id", "ticket_field": "ticket_id", "by_stream": False, "sources": sources}
    settings = SimpleNamespace(**facts, shown_names=shown, lease_seconds=lease_ms / 1000)
    overview = LiveOverview(link, keys, "ticket_id", lease_ms)
    return Parts(settings, link, keys, 10.0, overview=overview)


def api_of(link: Link, keys: Keys, shown: Sequence[str] = (), **tokens: Identity) -> Flask:
    """The routes for operators, and nothing else."""
    parts, app = parts_of(link, keys, shown), web.create_app("test", doorman(**tokens), 4096)
    app.register_blueprint(operator_routes(parts))
    return app


def acting(link: Link, keys: Keys, by: Any, **instead: Any) -> Any:
    """What verbs act with."""
    view = parts_of(link, keys).acting(by)
    vars(view).update(instead)
    return view


class Site:
    """The page, with a pulse whose turns are the test's."""

    def __init__(
        self, world: World, sources: SourceSelection | None = None, shown: Sequence[str] = (), **tokens: Identity
    ) -> None:
        parts = parts_of(world.link, world.keys, shown, sources, LEASE_MS)
        self.pulse, self.bulk = parts.overview, parts.bulk
        self.app: Flask = web.create_app("test", doorman(**tokens), 4096)
        add_pages(self.app, parts)
        self.app.register_blueprint(operator_routes(parts))
        self.client = Client(self.app)

    def look(self) -> None:
        self.pulse.snapshot(0)
        self.pulse.run_once()

    def get(self, path: str) -> TestResponse:
        return self.client.get(path, headers=HTML)

    def post(self, path: str, **form: str | list[str]) -> TestResponse:
        """As the form of a page does."""
        token = re.search(r'name="csrf_token" value="([^"]+)"', self.get("/").text)
        return self.client.post(
            path, data=form | ({"csrf_token": token[1]} if token else {}), headers=HTML | {"Origin": "http://localhost"}
        )


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pulse is looked at as it is."""
    monkeypatch.setattr(LiveOverview, "snapshot", lambda pulse, patience_s=0: pulse.last)


@pytest.fixture
def site(world: World, still: None) -> Site:
    made = Site(world)
    made.pulse._looked_s = 1e18  # somebody looks all the time
    made.pulse.run_once()
    return made


@pytest.fixture
def guarded(world: World, still: None) -> Site:
    named = {"look": (Role.VIEWER, "vera"), "act": (Role.OPERATOR, "otto"), "consume": (Role.CONSUMER, "c*")}
    return Site(world, **{token: Identity(*who) for token, who in named.items()})


def busy(world: World) -> list[str]:
    """Tickets in every state, letters, an audit, a rule; ids of the letters."""
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.parked(leader, b"P", b"3-1")
    world.owned(leader, a, b"D", b"4-1")
    world.give_up(a, b"D", "skip")
    world.owned(leader, a, b"H", b"5-1")
    world.give_up(a, b"H", "halt", error="ValueError: <b>")
    world.send(b"unread", b"6-1")
    summary = b'{"run":"r","started_ms":1,"seconds":2.5,"verdict":"warn","findings":[{"check":"stray","severity":"warn","count":3,"means":"m","examples":[]}],"unproven":0,"pending":1,"executions":2,"repeated":0}'
    world.link.call("SET", world.keys.audit, summary)
    return [letter_id.decode() for letter_id in world.letter_ids()]


def sign_in(site: Site, token: str) -> TestResponse:
    return site.client.post("/login", data={"token": token, "next": "/tickets"}, headers=HTML)


def consumer_program(health: Callable[[], Health], **facts: str) -> SimpleNamespace:
    """A consumer's program as far as its web application needs it."""
    settings = SimpleNamespace(api_token="", tokens_file=None, bind="0.0.0.0:8721", hosts="scraped.example")
    settings.advertise_url = "http://shop-1:8721"
    program = SimpleNamespace(settings=settings, facts=lambda: facts, stopped=False, metrics=Metrics(), health=health)
    executor = SimpleNamespace(policy=RetryPolicy(3, 0.0, 0.0))
    program.incarnation = SimpleNamespace(name="c1:1", executor=executor, lanes=Lanes())
    program.journal, program.liveness = Journal(None, "", "c1:1", 1), lambda: Liveness(1.0, "")
    return program
