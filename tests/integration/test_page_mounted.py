"""The page inside a Django project and a FastAPI application, which say who comes in (``usher.page``)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from asgiref.wsgi import WsgiToAsgi
from fastapi import FastAPI
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client

from tests.doors import HTML, busy, environ_of
from tests.integration.factories import World
from usher.page import page

_PEOPLE = {"ann": ("ann", True), "vera": ("vera", False)}


def _who(environ: Mapping[str, Any]) -> tuple[str, bool] | None:
    return _PEOPLE.get(environ.get("HTTP_X_USER", ""))


async def _asked(app: FastAPI, path: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
        return await client.get(path, headers=HTML | {"X-User": "vera"})


@pytest.fixture
def mounted(world: World, monkeypatch: pytest.MonkeyPatch) -> Client:
    for name, value in environ_of(world).items():
        monkeypatch.setenv(name, value)
    busy(world)
    app = page(_who, {"ticket_stream": "/usher/", "billing <b>": "/billing/"})
    (fast := FastAPI()).mount("/usher", WsgiToAsgi(app))
    answered = asyncio.run(_asked(fast, "/usher/tickets"))
    wanted = ('href="/usher/consumers"', '<a href="/usher/" aria-current="true">', "billing &lt;b&gt;")
    assert answered.status_code == 200 and all(told in answered.text for told in wanted)
    return Client(DispatcherMiddleware(lambda environ, start: [], {"/usher": app}))


def test_the_application_around_says_who_comes_in_and_who_may_act(mounted: Client) -> None:
    seen = mounted.get("/usher/tickets/T", headers=HTML | {"X-User": "ann"})
    assert seen.status_code == 200 and 'action="/usher/rules/set"' in seen.text
    assert 'action="/usher/rules/set"' not in mounted.get("/usher/tickets/T", headers=HTML | {"X-User": "vera"}).text
    assert mounted.get("/usher/", headers=HTML).status_code == 403
    rule, own = {"target": "ticket", "value": "T", "action": "pause"}, {"Origin": "http://localhost"}
    codes = [
        mounted.post("/usher/rules/set", data=rule, headers=HTML | {"X-User": who} | origin).status_code
        for who, origin in (("vera", own), ("ann", {"Origin": "http://evil"}), ("ann", own))
    ]
    assert codes == [403, 403, 303]
    assert "ann" in mounted.get("/usher/actions", headers=HTML | {"X-User": "ann"}).text
