"""The OpenAPI document: a valid one, of every route, and kept to (a short fuzzing; ``python -m tests.fuzz`` is the long
one)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import orjson
import pytest
from flask import Flask
from openapi_spec_validator import validate
from pydantic import ValidationError

from tests.doors import doorman
from tests.fuzz import TOKEN, fuzz, fuzzed_master, told
from tests.integration.test_master_api import Desk
from usher.common.http.app import Problem
from usher.common.http.app import create_app as plain_app
from usher.common.http.openapi import add_document, document
from usher.common.http.problem import answer
from usher.common.observability.metrics import Metrics
from usher.common.runtime.health import Health
from usher.consumer.web import create_app as consumer_app
from usher.master.assembly.web_app import create_app
from usher.master.membership.health_url import parse_hosts
from usher.master.web.api import ReportBody, read_report


def _master_app() -> Flask:
    parts: dict[str, Any] = {"letters": object()}
    return create_app(
        Desk({}), doorman=doorman(TOKEN), health_hosts=parse_hosts("127.0.0.1"), metrics=Metrics(), **parts
    )  # type: ignore[arg-type]


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


def test_a_route_that_tells_nothing_is_found() -> None:
    app = plain_app(__name__, doorman(), 10)
    app.add_url_rule("/api/silent", "silent", lambda: answer({}))
    with pytest.raises(TypeError, match="GET /api/silent does not say"):
        document(app, "x")


def test_a_consumer_has_one_too() -> None:
    app = consumer_app(doorman(), lambda: Health(()), dict, Metrics())
    add_document(app, "a consumer")
    validate(app.test_client().get("/api/openapi.json").get_json())


def test_what_is_told_of_reports_is_what_is_read() -> None:
    """Reports are read by hand; the model that the document has must take and refuse the same."""
    rng = random.Random(1)
    odd: list[Any] = [
        None,
        True,
        1,
        -1,
        2**63,
        2**63 - 1,
        "",
        "x",
        "1-0",
        "1-0\n",
        "c1:7",
        "c1",
        [],
        ["1-0"],
        ["1-0", "2-0"],
        {},
        1.0,
        "a" * 256,
        "a" * 257,
    ]

    def item() -> Any:
        good: dict[str, Any] = {
            "ticket_id": rng.choice(["T", "ä", "a" * 256]),
            "fence": rng.choice([0, 2**63 - 1]),
            "message_ids": ["1-0", "2-0"],
        }
        return good if rng.random() < 0.5 else _broken(good, rng, odd)

    seen = {True: 0, False: 0}
    for _ in range(3000):
        report: Any = {"incarnation": "c1:7", "tickets": [item() for _ in range(rng.randint(1, 3))]}
        if rng.random() < 0.3:
            report = _broken(report, rng, odd)
        try:
            ReportBody.model_validate(report)
            fits = not any(not item["ticket_id"] and len(item["message_ids"]) > 1 for item in report["tickets"])
        except ValidationError:
            fits = False
        try:
            read_report(orjson.dumps(report))
            taken = True
        except Problem:
            taken = False
        assert taken == fits, report
        seen[taken] += 1
    assert min(seen.values()) > 300


def _broken(good: dict[str, Any], rng: random.Random, odd: list[Any]) -> Any:
    name = rng.choice([*good, "more"])
    if rng.random() < 0.1:
        return rng.choice(odd)
    return (
        {key: value for key, value in good.items() if key != name}
        if rng.random() < 0.3
        else {**good, name: rng.choice(odd)}
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("phases", ["fuzzing", pytest.param("coverage", marks=pytest.mark.slow)])
def test_no_case_of_a_short_fuzzing_is_answered_otherwise_than_told(
    redis_url: str, tmp_path: Path, phases: str
) -> None:
    with fuzzed_master(tmp_path, redis_url) as url:
        for with_token in (True, False):
            done = fuzz(url, tmp_path, 4 if with_token else 1, with_token, phases=phases)
            assert done.returncode == 0, told(done)
