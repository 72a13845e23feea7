"""The page, mounted in a web application of your own, which says who comes in: ``page`` (docs/operate.md)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from flask import Flask, Request, g

from usher.common.http import app as web
from usher.common.http.answers import Problem
from usher.common.http.auth import Doorman
from usher.common.http.credentials import STRANGER, Credentials, Identity, Role
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link, SharedLink
from usher.common.redis.locate import resolve_redis_url
from usher.common.runtime.settings import CommonSettings, load
from usher.master.insight.live import LiveOverview
from usher.master.insight.status import FIELDS_S
from usher.master.web.api import REGISTER_BODY, Parts, operator_routes
from usher.master.web.pages.site import add_pages

__all__ = ["page"]

#: Names who asks, by the WSGI environment of the request, and says whether they may act; None: nobody whom you admit.
People = Callable[[Mapping[str, Any]], tuple[str, bool] | None]


class _Guests(Doorman):
    """A doorman who knows whom the application around admits."""

    def __init__(self, people: People) -> None:
        super().__init__(Credentials("", None))
        self._people = people

    def recognise(self, asked: Request) -> tuple[Identity, bool]:
        found, refused = self._people(asked.environ), "the application around this page does not admit you"
        g.refusal = None if found else Problem(403, "not_admitted", refused)
        return (Identity(Role.OPERATOR if found[1] else Role.VIEWER, found[0]) if found else STRANGER), False


def page(people: People, others: Mapping[str, str] = MappingProxyType({}), **settings: str) -> Flask:
    """Return the page as a WSGI application. It reads the settings that all commands share (``redis_url``,
    ``ticket_stream``, ...) from here or the environment, and Redis alone, as a standby does. ``others``: the addresses
    of pages of several streams, this one too, by name: its menu leads to them. Raises SettingsError."""
    given = load(CommonSettings, os.environ, settings)
    url, keys = resolve_redis_url(given), Keys(given.work_stream, given.group)
    lease_ms, field = int(given.lease_seconds * 1000), given.work_ticket_field
    reads = SharedLink(url, "page:reads")
    overview = LiveOverview(Link(url, "page:pulse"), keys, field, lease_ms)
    parts = Parts(given, reads, keys, FIELDS_S, overview=overview)
    app, starting = web.create_app(__name__, _Guests(people), REGISTER_BODY), threading.Lock()
    app.register_blueprint(operator_routes(parts))
    add_pages(app, parts)
    app.jinja_env.globals["others"] = dict(others)
    services = [overview, parts.bulk]

    @app.before_request
    def begin() -> None:  # in the process that answers, which may be a fork of the one that made this
        with starting:
            while services:
                services.pop().start()

    return app
