"""Who redrives or drops dead letters leaves a line in the action log, whichever way it is done: who, when, why, and
what came of it."""

from __future__ import annotations

import getpass
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from tests.doors import Site, api_of, environ_of
from tests.integration.factories import World
from usher.common.base.errors import NotNow
from usher.common.http.credentials import Identity, Role
from usher.master.cli.commands import dead
from usher.master.operations.action_log import ActionLog
from usher.master.operations.shelves import AT_ONCE, DeadLetters
from usher.master.verbs.verbs import DONE

_WAYS = pytest.mark.parametrize(("what", "word"), [("redrive", "added"), ("drop", "dropped")])


@pytest.fixture
def letters(world: World) -> Callable[[int], list[str]]:
    """Makes so many dead letters, and tells their ids."""

    leader, a = world.elect(), world.join("a")
    numbers = itertools.count()

    def made(count: int) -> list[str]:
        for _ in range(count):
            ticket = b"T%d" % next(numbers)
            world.owned(leader, a, ticket)
            world.give_up(a, ticket, "skip")
        return [letter_id.decode() for letter_id in world.letter_ids()[-count:]]

    return made


@pytest.fixture
def api(world: World) -> Iterator[Any]:
    client = api_of(world.link, world.keys, otto=Identity(Role.OPERATOR, "otto")).test_client()
    yield lambda what, **body: client.post(
        f"/api/dead-letters/{what}", json=body, headers={"Authorization": "Bearer otto"}
    )


def lines(world: World) -> list[tuple[str, ...]]:
    """Who, how, what, to what, why and with what outcome; the newest first. All were written just now."""
    found, _ = ActionLog(world.link, world.keys).page(None, 100)
    assert all(abs(time.time() * 1000 - line["time_ms"]) < 600_000 for line in found)
    return [tuple(line[name] for name in ("who", "via", "what", "on", "why", "outcome")) for line in found]


def usher_dead(world: World, *words: str) -> Any:
    environ = environ_of(world)
    return CliRunner().invoke(dead, [*words], env=environ)


@_WAYS
def test_by_http(api: Any, world: World, letters: Callable[[int], list[str]], what: str, word: str) -> None:
    ids = letters(3)
    assert api(what, ids=ids[:1], reason="it is mended").status_code == 200
    assert api(what, filter={"error": "ValueError"}, reason="all of them").status_code == 200
    assert api(what, ids=ids[:1]).status_code == 200
    assert lines(world) == [
        ("otto", "http", what, f"1 dead letter, from {ids[0]}", "", "gone 1"),
        ("otto", "http", what, f"2 dead letters, from {ids[1]}", "all of them", f"{word} 2"),
        ("otto", "http", what, f"1 dead letter, from {ids[0]}", "it is mended", f"{word} 1"),
    ]


@_WAYS
def test_by_command(world: World, letters: Callable[[int], list[str]], what: str, word: str) -> None:
    ids, me = letters(3), getpass.getuser()
    assert usher_dead(world, what, ids[0], "--yes", "--why", "it is mended").exit_code == 0
    assert usher_dead(world, what, "--all", "--error", "ValueError", "--yes", "--why", "all of them").exit_code == 0
    assert lines(world) == [
        (me, "cli", what, f"2 dead letters, from {ids[1]}: error ValueError", "all of them", f"{word} 2"),
        (me, "cli", what, f"1 dead letter, from {ids[0]}", "it is mended", f"{word} 1"),
    ]


@_WAYS
def test_by_the_page(site: Site, world: World, letters: Callable[[int], list[str]], what: str, word: str) -> None:
    ids = letters(3)
    assert site.post(f"/dead-letters/{what}", id=ids[0], why="it is mended").status_code == 303
    asked = {"what": what, "error": "ValueError", "until": "9999999999999-0", "count": "2", "why": "all of them"}
    assert site.post("/dead-letters/bulk", **asked).status_code == 303
    [job] = site.bulk.jobs
    while job.state != DONE:
        site.bulk.run_once()
    assert lines(world) == [
        ("anybody", "http", what, "dead letters: error ValueError", "all of them", f"{word} 2"),
        ("anybody", "http", what, "dead letters: error ValueError", "all of them", "begun"),
        ("anybody", "http", what, f"1 dead letter, from {ids[0]}", "it is mended", f"{word} 1"),
    ]


@_WAYS
def test_what_was_done_before_redis_went_away_is_in_the_log(
    api: Any, world: World, letters: Callable[[int], list[str]], monkeypatch: pytest.MonkeyPatch, what: str, word: str
) -> None:
    ids = letters(2 * (AT_ONCE + 2))
    run, calls = DeadLetters._act, []

    def once(self: DeadLetters, step: str, some: Any) -> Any:
        calls.append(step)
        if len(calls) % 2 == 0:
            raise NotNow("LOADING", "LOADING")
        return run(self, step, some)

    monkeypatch.setattr(DeadLetters, "_act", once)
    assert api(what, ids=ids[::2], reason="by HTTP").status_code == 503
    assert usher_dead(world, what, *ids[1::2], "--yes", "--why", "by command").exit_code != 0
    told = {why: outcome for *_, why, outcome in lines(world)}
    assert told["by HTTP"] == f"{word} {AT_ONCE}, then Redis failed"
    assert told["by command"].endswith("then Redis failed")
