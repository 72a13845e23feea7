"""Names that come over HTTP have no markup and no control characters, texts for people are one line, tickets may have
any id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from werkzeug.test import Client

from tests.browser.test_hostile_texts import CORPUS
from tests.doors import api_of, environ_of
from tests.integration.factories import World
from usher.cli import usher
from usher.master.membership.consumer_http import parse_hosts
from usher.master.operations.action_log import ActionLog
from usher.master.web.api import routes

_CONTROL = (
    "a\r\nSet-Cookie: x=1",
    "a\nb",
    "a\x1b[31mred",
    "a\x07",
    "a\x00",
    "a\x7f",
    "a\x9b31m",
    "a\u202eb",
    "a\u2028b",
    "a\tb",
)
_MARKUP = tuple(text for text in CORPUS if text.isprintable())
_HOSTILE = (*CORPUS, *_CONTROL)


class _Unused:
    """The master behind the routes: none of these requests may come so far."""


@pytest.fixture
def client(world: World) -> Client:
    app = api_of(world.link, world.keys)
    app.register_blueprint(routes(_Unused(), parse_hosts("127.0.0.1")))  # type: ignore[arg-type]
    return app.test_client()


def _registration(**changes: str) -> dict[str, Any]:
    return {"name": "c1", "health_url": "http://127.0.0.1:1/api/health", **changes}


def _report(**changes: Any) -> dict[str, Any]:
    return {"incarnation": "c1:7", "tickets": [{"ticket_id": "T", "fence": 1, "message_ids": ["1-0"]} | changes]}


_REGISTER, _RULES, _LETTERS = "/api/consumers/register", "/api/rules", "/api/dead-letters"
#: Where a name may stand: path, and the body with it.
_NAMES: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "name": lambda text: (_REGISTER, _registration(name=text)),
    "uuid": lambda text: (_REGISTER, _registration(uuid=text)),
    "lock": lambda text: (_REGISTER, _registration(lock=text)),
    "health_url": lambda text: (_REGISTER, _registration(health_url=text)),
    "incarnation that leaves": lambda text: ("/api/consumers/deregister", {"incarnation": f"{text}:1"}),
    "incarnation that reports": lambda text: ("/api/messages/acknowledge", _report() | {"incarnation": f"{text}:1"}),
    "message id": lambda text: ("/api/messages/acknowledge", _report(message_ids=[text])),
    "name of a field": lambda text: (_REGISTER, _registration(**{text: "x"})),
    "consumer of a rule": lambda text: (_RULES, {"target": "consumer", "value": text, "action": "pause"}),
    "stream of a rule": lambda text: (_RULES, {"target": "stream", "value": text, "action": "pause"}),
    "target of a rule": lambda text: (_RULES, {"target": text, "value": "x", "action": "pause"}),
    "action of a rule": lambda text: (_RULES, {"target": "everything", "action": text}),
    "letter": lambda text: (f"{_LETTERS}/redrive", {"ids": [text]}),
    "letter of a filter": lambda text: (f"{_LETTERS}/drop", {"filter": {"id": text}}),
    "cursor": lambda text: (f"{_LETTERS}/drop", {"filter": {}, "cursor": text}),
}
_TEXTS: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "why of a rule": lambda text: (_RULES, {"target": "everything", "action": "pause", "reason": text}),
    "why of a drain": lambda text: ("/api/consumers/c1/drain", {"reason": text}),
    "why of a resume": lambda text: ("/api/consumers/c1/resume", {"reason": text}),
    "why of a redrive": lambda text: (f"{_LETTERS}/redrive", {"ids": ["1-0"], "reason": text}),
    "why of a drop": lambda text: (f"{_LETTERS}/drop", {"ids": ["1-0"], "reason": text}),
}


@pytest.mark.parametrize("where", _NAMES)
def test_a_hostile_name_is_refused_and_not_repeated(client: Client, where: str) -> None:
    for text in _HOSTILE:
        if (where, text) == ("lock", ".."):
            continue  # nothing but compared, and fits what locks may look like
        path, body = _NAMES[where](text)
        answered = client.post(path, json=body)
        assert answered.status_code == 422, text
        assert text not in answered.text
        assert answered.mimetype == "application/problem+json"


@pytest.mark.parametrize("where", _TEXTS)
def test_a_text_for_people_is_one_line_without_control_characters(client: Client, where: str) -> None:
    for text in _CONTROL:
        path, body = _TEXTS[where](text)
        assert client.post(path, json=body).status_code == 422, repr(text)
    for text in _MARKUP:  # it is shown literally
        path, body = _TEXTS[where](text)
        assert client.post(path, json=body).status_code in (200, 201, 404), text


def test_a_hostile_name_in_a_path_or_query_is_nobody(client: Client) -> None:
    for text in _HOSTILE:
        name = quote(text, safe="")
        for path in (f"/api/consumers/{name}/drain", f"/api/consumers/{name}/resume"):
            answered = client.post(path, json={})
            assert (answered.status_code, answered.mimetype) == (404, "application/problem+json"), text
            assert text not in answered.text or text == ".."
        assert client.delete(f"/api/rules/{name}").status_code in (404, 405)
        assert client.get(f"/api/actions?cursor={name}").status_code == 422
        assert client.get(f"/api/actions?{name}=1").status_code == 422
        assert client.get(f"{_LETTERS}?id={name}").status_code == 422


def test_a_ticket_may_be_called_anything_and_comes_back_as_it_is(client: Client, world: World) -> None:
    for text in _HOSTILE:
        told = client.post(_RULES, json={"target": "ticket", "value": text, "action": "pause"})
        assert told.json is not None
        assert (told.status_code, told.json["rule"]["value"]) == (201, text)
        assert client.get(f"{_LETTERS}?ticket={quote(text, safe='')}").status_code == 200
        assert client.get(f"{_LETTERS}?error={quote(text, safe='')}").status_code == 200


@pytest.mark.parametrize(
    "words",
    [
        ("dead", "drop", "1-0", "--yes", "--why"),
        ("dead", "redrive", "1-0", "--yes", "--why"),
        ("pause", "T", "--reason"),
        ("resume", "T", "--reason"),
        ("consumers", "drain", "c1", "--reason"),
        ("rules", "lift", "x", "--reason"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_commands_refuse_such_texts_too(world: World, words: tuple[str, ...]) -> None:
    environ = environ_of(world)
    for text in _CONTROL:
        if "\0" not in text:  # no command line can have it
            done = CliRunner().invoke(usher, [*words, text], env=environ)
            assert done.exit_code == 2, repr(text)
            assert "one line" in done.output
    assert not ActionLog(world.link, world.keys).page(None, 1)[0]
