"""The consumer's HTTP interface: its health and its metrics, nothing else. Work comes through Redis, never over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flask import Flask

from common import web
from common.health import Health
from common.web_auth import Doorman


def create_app(
    doorman: Doorman, health: Callable[[], Health], facts: Callable[[], dict[str, Any]], metrics: Callable[[], bytes] | None = None
) -> Flask:
    """The application. ``facts`` (name, incarnation and the like) are part of every health answer; nothing secret, they need no token."""
    app = web.create_app(__name__, doorman, max_body=0)
    web.add_health(app, health, facts)
    if metrics is not None:
        web.add_metrics(app, metrics)
    return app
