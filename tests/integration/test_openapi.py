"""The OpenAPI document: a valid one, of every route, and kept to (a short fuzzing; ``python -m tests.fuzz`` is the long
one)."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from flask import Flask
from openapi_spec_validator import validate

from tests.doors import doorman
from tests.fuzz import TOKEN, fuzz, fuzzed_master, told
from tests.integration.test_master_api import Desk
from usher.common.http.answers import answer
from usher.common.http.app import create_app as plain_app
from usher.common.http.openapi import document
from usher.common.observability.metrics import Metrics
from usher.master.assembly.facing import create_app
from usher.master.membership.consumer_http import parse_hosts


def _master_app() -> Flask:
    hosts, nothing = parse_hosts("127.0.0.1"), Mock()
    return create_app(Desk({}), doorman=doorman(TOKEN), health_hosts=hosts, metrics=Metrics(), parts=nothing)  # type: ignore[arg-type]


def test_the_document_is_valid_and_has_every_route_with_its_role() -> None:
    app = _master_app()
    assert app.test_client().get("/api/openapi.json").status_code == 401
    served = app.test_client().get("/api/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"}).get_json()
    validate(served)
    roles = {
        f"{method} {path}": told["x-role"]
        for path, methods in served["paths"].items()
        for method, told in methods.items()
    }
    assert roles["post /api/messages/acknowledge"] == "consumer"
    assert roles["post /api/dead-letters/redrive"] == "operator"
    assert roles["get /api/tickets/{ticket_id}"] == roles["get /metrics"] == "viewer"
    assert roles["get /api/health/live"] == "anybody"
    ours = [rule for rule in app.url_map.iter_rules() if rule.rule.startswith("/api/")]
    assert len(ours) + 1 == len(roles)
    [limit] = [one for one in served["paths"]["/api/actions"]["get"]["parameters"] if one["name"] == "limit"]
    assert limit["schema"] == {"type": "integer", "minimum": 1, "maximum": 10**9 - 1}


def test_a_route_that_tells_nothing_is_found() -> None:
    app = plain_app(__name__, doorman(), 10)
    app.add_url_rule("/api/silent", "silent", lambda: answer({}))
    with pytest.raises(TypeError, match="GET /api/silent does not say"):
        document(app, "x")


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("phases", ["fuzzing", "coverage"])
def test_no_case_of_a_short_fuzzing_is_answered_otherwise_than_told(
    redis_url: str, tmp_path: Path, phases: str
) -> None:
    with fuzzed_master(tmp_path, redis_url) as url:
        for with_token in (True, False):
            done = fuzz(url, tmp_path, 4 if with_token else 1, with_token, phases=phases)
            assert done.returncode == 0, told(done)
