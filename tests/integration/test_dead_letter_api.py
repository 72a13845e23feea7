"""The routes of the dead letters on a real Redis: pages, filters, what is done, and how wrong questions are
answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from werkzeug.test import Client, TestResponse

from tests.doors import api_of
from tests.integration.factories import World
from usher.common.http.credentials import Identity, Role
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.consumer.lifecycle.owner_scripts import Buried

_PATH = "/api/dead-letters"
T = b"T"


@pytest.fixture
def client(world: World) -> Iterator[Client]:
    yield api_of(world.link, world.keys).test_client()


@pytest.fixture
def letters(world: World) -> list[str]:
    """Five of U that were skipped, and one for which T waits."""
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"U", *[b"%d-1" % n for n in range(1, 6)])
    for number in range(5):
        assert world.give_up(a, b"U", "skip", error=f"E{number % 2}: \x1b[31m<img>") is Buried.OK
    world.owned(leader, a, T, b"7-1", b"8-1")
    assert world.give_up(a, T, "halt") is Buried.HALTED
    return [letter_id.decode() for letter_id in world.letter_ids()]


def _asked(answered: TestResponse, status: int = 200) -> Any:
    assert answered.status_code == status, answered.text
    assert answered.headers["Cache-Control"] == "no-store"
    assert answered.mimetype == ("application/json" if status == 200 else "application/problem+json")
    return answered.json


def test_letters_come_in_pages_without_the_fields_of_their_messages(client: Client, letters: list[str]) -> None:
    first = _asked(client.get(f"{_PATH}?limit=4"))
    rest = _asked(client.get(f"{_PATH}?limit=4&cursor={first['cursor']}"))
    assert [row["id"] for row in first["dead_letters"] + rest["dead_letters"]] == letters
    assert rest["cursor"] is None
    assert rest["dead_letters"][-1] | {"id": "", "owner": "", "written_ms": 0, "fence": 0} == {
        "id": "", "message_id": "7-1", "ticket_id": "T", "reason": "gave_up", "error": "ValueError: x", "error_type": "ValueError", "at": "", "handler": "", "attempts": 3,
        "owner": "", "first_ms": 1, "last_ms": 2, "written_ms": 0, "policy": "halt", "fence": 0, "fields": 2, "cut": False, "shown_fields": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("ticket=U", 5),
        ("ticket=none", 0),
        ("error=e1", 2),
        ("reason=gave", 6),
        ("id=7-1", 1),
        ("older_than_s=3600", 0),
        ("younger_than_s=3600", 6),
    ],
)
def test_filters(client: Client, letters: list[str], query: str, count: int) -> None:
    assert len(_asked(client.get(f"{_PATH}?{query}"))["dead_letters"]) == count


def test_one_letter_has_everything(client: Client, letters: list[str]) -> None:
    whole = _asked(client.get(f"{_PATH}/{letters[-1]}"))
    assert (whole["traceback"], whole["message_fields"]) == ("at x", [["ticket_id", "T"], ["body", "body of 7-1"]])
    assert _asked(client.get(f"{_PATH}/1-1"), 404)["title"] == "unknown_dead_letter"
    for no_id in (f"{2**64}-1", f"1-{2**64}", "x", "1-1-1", "%00", "-1", "1-1%0A"):
        assert _asked(client.get(f"{_PATH}/{no_id}"), 404)["title"] == "not_found"


def test_what_its_message_says_is_for_operators_and_not_for_viewers(world: World, letters: list[str]) -> None:
    who = {"look": Identity(Role.VIEWER, "vera"), "act": Identity(Role.OPERATOR, "otto")}
    app = api_of(world.link, world.keys, **who)
    seen = {}
    for token in ("look", "act"):
        heads = {"Authorization": f"Bearer {token}"}
        whole = _asked(app.test_client().get(f"{_PATH}/{letters[-1]}", headers=heads))
        found = _asked(app.test_client().get(f"{_PATH}?error=%20x&ticket=T", headers=heads))["dead_letters"]
        seen[token] = (whole["message_fields"], whole["error"], whole["traceback"], len(found))
    fields = [["ticket_id", "T"], ["body", "body of 7-1"]]
    assert seen == {"look": (None, "ValueError", "", 0), "act": (fields, "ValueError: x", "at x", 1)}


def test_letters_are_redriven_and_dropped_by_id(client: Client, letters: list[str], world: World) -> None:
    skipped, parked = letters[0], letters[-1]
    results = _asked(client.post(f"{_PATH}/redrive", json={"ids": [skipped, parked, parked, "1-1"]}))["results"]
    assert [(result["id"], result["outcome"]) for result in results] == [
        (skipped, "added"),
        (parked, "resumed"),
        ("1-1", "gone"),
    ]
    assert world.link.call("XRANGE", world.keys.stream, results[0]["message_id"], "+")
    dropped = _asked(client.post(f"{_PATH}/drop", json={"ids": letters[:2]}))["results"]
    assert [result["outcome"] for result in dropped] == ["gone", "dropped"]
    assert len(world.dead()) == 3


def test_letters_are_chosen_by_a_filter_with_a_limit(client: Client, letters: list[str], world: World) -> None:
    first = _asked(client.post(f"{_PATH}/drop", json={"filter": {"ticket": "U"}, "limit": 3}))
    assert (len(first["results"]), first["cursor"]) == (3, letters[2])
    rest = _asked(client.post(f"{_PATH}/drop", json={"filter": {"ticket": "U"}, "limit": 3, "cursor": first["cursor"]}))
    assert ([result["id"] for result in rest["results"]], rest["cursor"]) == (letters[3:5], None)
    assert _asked(client.post(f"{_PATH}/redrive", json={"filter": {}}))["results"][0]["outcome"] == "resumed"
    assert world.dead() == []


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=x",
        "cursor=x",
        "cursor=1-1x",
        "ticket=",
        "id=7",
        "older_than_s=-1",
        "older_than_s=nan",
        "younger_than_s=1e999",
        "nope=1",
    ],
)
def test_a_query_that_cannot_be_used_is_422_and_not_repeated(client: Client, query: str) -> None:
    assert query.partition("=")[2] not in _asked(client.get(f"{_PATH}?{query}"), 422)["errors"][0]["problem"].split()


@pytest.mark.parametrize(
    "body",
    [
        {}, [], {"ids": []}, {"ids": ["1-1"], "filter": {}}, {"ids": "1-1"}, {"ids": [1]}, {"ids": ["1-1\n"]}, {"ids": ["1-1"] * 501},
        {"filter": None}, {"filter": {"nope": 1}}, {"filter": {"ticket": "x" * 257}},
        {"filter": {}, "limit": 0}, {"filter": {}, "limit": True}, {"filter": {}, "limit": 501},
        {"ids": ["1-18446744073709551616"]}, {"filter": {}, "cursor": "18446744073709551615-18446744073709551615"},
        {"filter": {"older_than_s": "1"}}, {"filter": {}, "cursor": "+"}, {"ids": ["1-1"], "more": 1},
    ],
)  # fmt: skip
@pytest.mark.parametrize("what", ["redrive", "drop"])
def test_a_body_that_cannot_be_used_changes_nothing(
    client: Client, letters: list[str], world: World, what: str, body: object
) -> None:
    with world.unchanged():
        assert _asked(client.post(f"{_PATH}/{what}", json=body), 422)["title"] == "invalid_fields"


def test_a_redis_that_is_away_is_503() -> None:
    client = api_of(Link("redis://127.0.0.1:1/0", "nobody"), Keys("s", "g")).test_client()
    for answered in (
        client.get(_PATH),
        client.get(f"{_PATH}/1-1"),
        client.post(f"{_PATH}/redrive", json={"ids": ["1-1"]}),
    ):
        assert _asked(answered, 503)["title"] == "redis_unavailable"
        assert answered.headers["Retry-After"] == "1"


def test_a_redis_that_refuses_writes_says_why(client: Client, world: World, letters: list[str]) -> None:
    """It was said to be away, which is looked for elsewhere: consumers that found no master had nothing else in their
    logs."""
    world.link.call("CONFIG", "SET", "min-replicas-to-write", "1")
    refused = _asked(client.post(f"{_PATH}/redrive", json={"ids": letters[:1]}), 503)
    world.link.call("CONFIG", "SET", "min-replicas-to-write", "0")
    assert refused["title"] == "redis_unavailable"
    assert refused["detail"] == "Redis refuses writes: too few replicas are connected (NOREPLICAS)"
    assert _asked(client.post(f"{_PATH}/redrive", json={"ids": letters[:1]}))
