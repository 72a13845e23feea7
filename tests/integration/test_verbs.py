"""One function is a verb: from it come its route, its place in the OpenAPI document, its command, its form, its preview,
its bulk job and its line in the action log."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from click.testing import CliRunner

from tests.doors import Site, api_of, busy, environ_of
from tests.integration.factories import World
from tests.integration.test_page_lists import confirmed
from usher.common.http.openapi import document
from usher.master.cli.shared import shelf_command
from usher.master.operations.action_log import ActionLog, StepResult
from usher.master.verbs.verbs import LETTERS, VERBS, Args
from usher.master.verbs.view import View


def add() -> None:
    @LETTERS.verb("touch", "Touch")
    def touch(view: View, items: Sequence[Any], args: Args) -> Iterator[Any]:
        """Touch dead letters, and leave them."""
        return (StepResult(item.id, "done") for item in items)


@pytest.fixture
def touch() -> Iterator[None]:
    add()
    yield
    del VERBS["dead touch"], LETTERS.verbs["touch"]


def test_a_verb_costs_a_few_lines(world: World, touch: None, request: pytest.FixtureRequest) -> None:
    assert len(inspect.getsource(add).splitlines()) <= 10
    page: Site = request.getfixturevalue("site")  # made now: forms are those of the verbs that are there
    letters = busy(world)
    app = api_of(world.link, world.keys)
    told = document(app, "x")["paths"]["/api/dead-letters/touch"]["post"]
    assert (told["summary"], told["x-role"]) == ("Touch dead letters, and leave them.", "operator")
    client = app.test_client()
    answered = client.post("/api/dead-letters/touch", json={"ids": letters[:1], "reason": "by HTTP"})
    assert answered.get_json()["results"] == [{"id": letters[0], "outcome": "done"}]
    assert client.post("/api/dead-letters/touch", json={"ids": ["x"]}).status_code == 422
    said = page.post("/dead-letters/touch", id=letters[0], why="by form").headers["Location"]
    assert "Touch: done 1" in page.get(said).text
    preview = page.post("/dead-letters/bulk", dry="1", what="touch", error="ValueError").text
    assert "Touch all 2" in preview and "Touch dead letters, and leave them." in preview
    assert confirmed(page, "/dead-letters/bulk", preview, why="by job").status_code == 303
    page.bulk.run_once()
    page.bulk.run_once()
    environ = environ_of(world)
    for words in (["--all", "--preview"], [letters[0], "--yes", "--why", "by command"]):
        done = CliRunner().invoke(shelf_command(VERBS["dead touch"]), words, env=environ, obj={"json": True})
        assert json.loads(done.output)["outcomes"] == ({} if "--all" in words else {"done": 1})
    lines = ActionLog(world.link, world.keys).page(None, 10)[0]
    assert [(line["why"], line["what"], line["outcome"]) for line in reversed(lines)] == [
        ("by HTTP", "touch", "done 1"),
        ("by form", "touch", "done 1"),
        ("by job", "touch", "begun"),
        ("by job", "touch", "done 2"),
        ("by command", "touch", "done 1"),
    ]
