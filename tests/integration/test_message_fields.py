"""The fields of messages, in lists and in a search by FIELD=VALUE: who sees them, how much is read, and that nothing is
cut in silence."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

import pytest
from werkzeug.test import TestResponse

from tests.doors import Site, api_of, doorman
from tests.integration.factories import World, fetch, hand_over, plan
from tests.integration.test_commands_shown import shown
from usher.common.base.errors import ReplyUnknown
from usher.common.http import app as web
from usher.common.http.auth import needs
from usher.common.http.credentials import Identity, Role
from usher.common.protocol.attempts import Attempts
from usher.common.protocol.message import SHOWN_BYTES
from usher.master.insight import status as message_fields
from usher.master.insight.live import LiveOverview
from usher.master.insight.status import LONGEST_VALUE, MessageFields, StatusReader

_NAMES = ("order", "payload.customer.id")
_PAYLOAD = b'{"customer": {"id": 42}}'


@pytest.fixture
def filled(world: World) -> World:
    """Messages of the kind paid: one that a consumer has, one that waits, one of a halted ticket, one unread, one done,
    and one that is a dead letter; and some of another kind."""
    leader, a = world.elect(), world.join("a")
    said: list[tuple[bytes, bytes, tuple[bytes | str, ...]]] = [
        (b"1-1", b"O", ("kind", "paid", "order", "<b>17</b>", "payload", _PAYLOAD)),
        (b"2-1", b"H", ("kind", "paid")),
        (b"3-1", b"L", ("kind", "paid", "order", "of a letter")),
        (b"4-1", b"W", ("kind", "sent")),
        (b"5-1", b"W", ("kind", "paid", "order", "x" * 1000)),
        (b"6-1", b"DONE", ("kind", "paid")),
    ]
    for entry_id, ticket, fields in said:
        world.add(entry_id, "ticket_id", ticket, *fields)
    assert len(fetch(leader, 100)) == len(said)
    for entry_id, ticket, _ in said:
        if ticket != b"W":
            hand_over(leader, plan(a, {ticket: [entry_id]}, {ticket: world.head(ticket)}))
    world.give_up(a, b"H", "halt")
    world.give_up(a, b"L", "skip")
    a.steps.ack([b"6-1"])
    world.add(b"7-1", "ticket_id", "U", "kind", "paid")
    return world


def reader(world: World, *names: str, within_s: float = 10.0) -> MessageFields:
    return MessageFields(world.link, world.keys, "ticket_id", names, within_s)


def told(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(row["message_id"], row["ticket_id"], row["state"], row["consumer_name"]) for row in found["messages"]]


_FOUND = [
    ("1-1", "O", "handed_over", "a"),
    ("2-1", "H", "halted", ""),
    ("5-1", "W", "waiting", ""),
    ("7-1", "U", "unread", ""),
    ("3-1", "L", "dead_letter", ""),
]
#: What is dead, of which the ticket of the first one waits for it.
_DEAD = [_FOUND[1], _FOUND[4]]


def test_chosen_fields_are_read_and_what_is_cut_is_said(filled: World) -> None:
    ids: list[dict[str, Any]] = [{"id": one} for one in ("1-1", "2-1", "5-1", "9-9", None)]
    rows = reader(filled, *_NAMES).add(ids, lambda row: row["id"])
    assert [row["shown_fields"] for row in rows] == [
        {"order": "<b>17</b>", "payload.customer.id": "42"},
        dict.fromkeys(_NAMES),
        {"order": "x" * SHOWN_BYTES + "... (1,000 bytes)", "payload.customer.id": None},
        dict.fromkeys(_NAMES),
        dict.fromkeys(_NAMES),
    ]
    letters = reader(filled, "order").add_to_letters([{"id": one.decode()} for one in filled.letter_ids()])
    assert [row["shown_fields"] for row in letters] == [{"order": None}, {"order": "of a letter"}]


def test_what_there_is_no_time_to_read_is_not_taken_for_missing(filled: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_fields, "_READ_AT_ONCE", 1)
    rows = reader(filled, "order", within_s=-1.0).add([{"id": "1-1"}, {"id": "5-1"}], lambda row: row["id"])
    assert [row["shown_fields"] for row in rows] == [{"order": "<b>17</b>"}, None]


def test_a_list_is_read_in_one_call_and_without_chosen_fields_in_none(
    filled: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    rows: list[dict[str, Any]] = [{"id": "1-1"}, {"id": "2-1"}, {"id": "5-1"}]
    for names, expected in ((("order",), ["read_fields"]), ((), [])):
        made = reader(filled, *names)
        run = made._link.run
        monkeypatch.setattr(made._link, "run", lambda name, *more, run=run: (calls.append(name), run(name, *more))[1])
        made.add(rows, lambda row: row["id"])
        assert calls == expected
        calls.clear()


# ---- the search


def test_a_search_finds_what_is_unfinished_and_dead_and_says_how_far_it_came(filled: World) -> None:
    found = reader(filled).find("kind", b"paid")
    assert told(found) == _FOUND
    assert [row["letter_id"] for row in (found["messages"][1], found["messages"][4])] == [
        one.decode() for one in filled.letter_ids()
    ]
    assert (found["looked_at"], found["cursor"]) == (7, None), "4 are pending, 1 is unread, 2 are dead"
    assert told(reader(filled).find("payload.customer.id", b"42")) == _FOUND[:1]


def test_a_search_goes_on_where_it_ended_until_it_has_looked_at_all(
    filled: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_fields, "_FIND_AT_ONCE", 1)
    rows, cursor, looked = list[tuple[Any, ...]](), None, list[int]()
    while not looked or cursor is not None:
        found = reader(filled).find("kind", b"paid", cursor, most_looked_at=1)
        rows, cursor = [*rows, *told(found)], found["cursor"]
        looked.append(found["looked_at"])
    assert rows == [*_FOUND[:4], *_DEAD]
    assert looked == sorted(looked)
    assert (looked[0], looked[-1]) == (1, 7)
    assert len(reader(filled).find("kind", b"paid", most=2)["messages"]) == 2


def test_what_is_handed_over_while_the_search_goes_on_is_found(filled: World) -> None:
    started = reader(filled).find("kind", b"paid", most_looked_at=1)
    assert told(started) == _FOUND[:3]
    filled.add(b"8-1", "ticket_id", "D", "kind", "paid")
    filled.link.call("DEL", filled.keys.leader)
    leader, b = filled.elect(), filled.join("b")
    assert [entry.id for entry in fetch(leader, 10)] == [b"7-1", b"8-1"]
    hand_over(leader, plan(b, {b"D": [b"8-1"]}))
    rest = [("7-1", "U", "waiting", ""), ("8-1", "D", "handed_over", "b"), *_DEAD]
    assert told(reader(filled).find("kind", b"paid", started["cursor"])) == rest
    b.steps.ack([b"8-1"])
    assert told(reader(filled).find("kind", b"paid", started["cursor"])) == [rest[0], *_DEAD], "one is done"
    highest = "18446744073709551615-18446744073709551615"
    assert told(reader(filled).find("kind", b"paid", f"pending_{highest}_6-1_4")) == [rest[0], *_DEAD]


@pytest.mark.parametrize("value", [b"\xff\x00\n", b".*", b"a=b & c+%", b"", b"y" * LONGEST_VALUE])
def test_a_value_is_compared_as_it_is(filled: World, value: bytes) -> None:
    filled.add(b"8-1", "ticket_id", "V", "is", value)
    filled.add(b"9-1", "ticket_id", "V", "is", value + b"!")
    assert [row["message_id"] for row in reader(filled).find("is", value)["messages"]] == ["8-1"]
    site = Site(filled)
    answered = site.get(f"/tickets?q=is%3D{quote(value, safe='')}")
    assert re.findall(r"/messages/([0-9-]+)", answered.text) == ["8-1"]


def test_a_stream_without_its_group_is_all_unread(world: World) -> None:
    world.link.call("XGROUP", "DESTROY", world.keys.stream, world.keys.group)
    world.add(b"1-1", "ticket_id", "T", "kind", "paid")
    world.add(b"18446744073709551615-18446744073709551615", "kind", "paid")
    try:
        found = reader(world).find("kind", b"paid")
        assert [(row["ticket_id"], row["state"]) for row in found["messages"]] == [("T", "unread"), (None, "unread")]
        assert (found["looked_at"], found["of"], found["cursor"]) == (2, 2, None)
    finally:
        world.link.call("FLUSHALL")
        world.make_group()


# ---- who may see it


def as_(site: Site, who: str, path: str) -> TestResponse:
    return site.client.get(path, headers={"Accept": "text/html", "Authorization": f"Bearer {who}"})


def test_lists_show_the_chosen_fields_to_operators_alone(filled: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveOverview, "snapshot", lambda pulse, patience_s=0: pulse.last)
    look, act = Identity(Role.VIEWER, "vera"), Identity(Role.OPERATOR, "otto")
    site = Site(filled, shown=_NAMES, look=look, act=act)
    record = filled.record(b"O")
    assert record is not None
    filled.spoil(b"O", record.owner + b" 5 1-1")  # as if it had been handed over long ago
    site.pulse._looked_s = 1e18  # somebody looks all the time
    site.look()
    for path in ("/", "/tickets", "/tickets/O", "/tickets?q=O", "/tickets?q=kind%3Dpaid", "/tickets?state=handed_over"):
        page = as_(site, "act", path).text
        assert (
            '<td data-label="order" class="shown"><bdi title="&lt;b&gt;17&lt;/b&gt;">&lt;b&gt;17&lt;/b&gt;</bdi></td>'
            in page
        ), path
        assert '<td data-label="payload.customer.id" class="shown"><bdi title="42">42</bdi></td>' in page, path
        hidden = as_(site, "look", path)
        assert hidden.status_code == 200
        assert "17&lt;" not in hidden.text, path
        assert 'class="shown"' not in hidden.text, path
    assert ">of a letter</bdi>" in as_(site, "act", "/dead-letters").text
    assert (
        '<td data-label="order" class="shown"><span class="soft">-</span></td>'
        in as_(site, "act", "/dead-letters").text
    )
    assert "of a letter" not in as_(site, "look", "/dead-letters").text
    assert "Only operators can see and search message content" in as_(site, "look", "/tickets?q=kind%3Dpaid").text


def test_the_page_says_how_far_a_search_came_and_goes_on(filled: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_fields, "_FIND_AT_ONCE", 4)
    monkeypatch.setattr(MessageFields.find, "__defaults__", (None, 100, 1))
    site = Site(filled)
    first = site.get("/tickets?q=kind%3Dpaid").text
    assert re.search(r"3 found; looked at 4 of (at least )?7 messages", first)
    [further] = re.findall(r'href="([^"]*&amp;at=[^"]*)"', first)
    second = site.get(further.replace("&amp;", "&")).text
    assert "Further 1 found; looked at 5 of" in second
    assert "Exactly this id" not in second
    for bad in ("/tickets?q=a%3Db&at=x", "/tickets?q=usher-id%3D1", f"/tickets?q=a%3D{'b' * (LONGEST_VALUE + 1)}"):
        assert site.get(bad).status_code == 422, bad


def test_programs_search_too_if_they_may(filled: World) -> None:
    look, act = Identity(Role.VIEWER, "vera"), Identity(Role.OPERATOR, "otto")
    app = api_of(filled.link, filled.keys, ("order",), look=look, act=act)

    def get(who: str, path: str) -> TestResponse:
        return app.test_client().get(path, headers={"Authorization": f"Bearer {who}"})

    assert get("look", "/api/find?field=kind&value=paid").status_code == 403
    found = get("act", "/api/find?field=kind&value=paid&limit=2").get_json()
    assert [row["message_id"] for row in found["messages"]][:2] == ["1-1", "2-1"]
    assert (found["looked_at"], found["of"]) >= (4, 7)
    filled.add(b"8-1", "ticket_id", "V", "kind", b"\xff")
    for value, number in ((b"\xff", 1), ("\ufffd".encode(), 0)):
        answered = get("act", f"/api/find?field=kind&value={quote(value)}").get_json()
        assert len(answered["messages"]) == number
    for bad in ("field=kind", "field=usher-id&value=1", "field=kind&value=1&cursor=x"):
        assert get("act", f"/api/find?{bad}").status_code == 422, bad
    assert get("act", f"/api/find?field=kind&value={'ä' * 4_000}").status_code == 414
    assert [row["shown_fields"] for row in get("act", "/api/dead-letters").get_json()["dead_letters"]] == [
        {"order": None},
        {"order": "of a letter"},
    ]
    assert "shown_fields" not in get("look", "/api/dead-letters").get_json()["dead_letters"][0]


# ---- commands


def test_commands_list_chosen_fields_and_search(filled: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USHER_SHOWN_FIELDS", "order, attempts")
    tickets = shown(filled, "tickets", "list", columns=None).output
    assert re.search(r"ticket +order= +attempts= +state", tickets)
    assert re.search(r"O +<b>17</b> +- +handed over", tickets)
    assert re.search(r"L +of a letter +- ", shown(filled, "dead", "list", columns=None).output)
    assert re.search(r"H +- +- ", shown(filled, "stuck", columns=None).output)
    found = shown(filled, "find", "kind=paid", columns=None).output
    assert re.search(r"7-1 +U +- +- +unread", found)
    assert re.search(r"  5 found; looked at 7 of (at least )?7 that", found)
    as_json = json.loads(shown(filled, "find", "kind=paid", "--limit", "1", "--json").output)
    assert as_json["messages"][0]["shown_fields"] == {"order": "<b>17</b>", "attempts": None}
    for wrong in ("kind", "=paid", "usher-id=1"):
        assert shown(filled, "find", wrong).exit_code == 2
    monkeypatch.setenv("USHER_SHOWN_FIELDS", "a,b,c,d,e,f,g,h,i")
    assert "at most 8 fields can be shown" in str(shown(filled, "tickets", "list").exception)


def test_a_message_has_the_same_state_in_a_search_as_in_the_list_of_its_ticket_and_on_its_page(world: World) -> None:
    """It was "retrying" in the list, "put off" on its own page, and "waiting" where it was searched for."""
    leader, a, site = world.elect(), world.join("a"), Site(world)
    world.owned(leader, a, b"T", b"1-1", b"2-1")
    a.steps.charge({b"1-1": Attempts(2, 2)})
    assert world.give_back(a, {b"T": [b"1-1", b"2-1"]}, 60_000) == []
    found = reader(world).find("ticket_id", b"T")
    assert [row["state"] for row in found["messages"]] == ["retrying", "waiting"]
    assert [site.get(f"/api/messages/{one}").json["state"] for one in ("1-1", "2-1")] == ["retrying", "waiting"]
    [halted] = world.owned(leader, a, b"H", b"3-1")
    world.give_up(a, b"H", "halt")
    told = [StatusReader(world.link, world.keys).ticket(ticket) for ticket in ("T", "H")]
    assert [row and row["state"] for row in told] == ["retrying", "halted"]
    assert site.get(f"/api/messages/{halted.decode()}").json["state"] == "halted"  # type: ignore[index]
    [row] = reader(world).find("ticket_id", b"H")["messages"]
    assert (row["state"], bool(row["letter_id"])) == ("halted", True), "one message, one row"


@pytest.mark.parametrize(("took_s", "asked"), [(0.0, 2), (5.0, 1)])
def test_a_read_that_redis_does_not_answer_is_tried_again_only_where_that_took_no_time(
    monkeypatch: pytest.MonkeyPatch, took_s: float, asked: int
) -> None:
    """While Redis hung, an answer took 10 s: two times as long as the one question."""
    app, times, clock = web.create_app(__name__, doorman(), 0), list[float](), [1000.0]
    monkeypatch.setattr(web, "now_s", lambda: clock[0])

    @app.get("/api/thing")
    @needs(Role.ANYBODY)
    def thing() -> str:
        times.append(clock[0])
        clock[0] += took_s
        raise ReplyUnknown("timeout")

    assert app.test_client().get("/api/thing").status_code == 503
    assert len(times) == asked
