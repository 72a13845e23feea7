"""The page of one message: what is known of it in each state, and that it says what is not known any more."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.doors import Site, busy, sign_in
from tests.integration.delays import FUTURE, delay, now_ms, send_due
from tests.integration.factories import World
from usher.common.protocol.last_error import LastError, encode
from usher.master.operations.shelves import DeadLetters
from usher.master.verbs.verbs import MessageShown

_RUN = (
    '{"consumer":"a:7","ids":["%s","9-9"],"tickets":["T","U"],"fences":[88,89],"attempts":[2,1],'
    '"start_us":[1700000000000000,1],"end_us":[1700000002500000,2],"outcomes":["failed","done"]}'
)


def _text(page: str) -> str:
    """Return what the page says, without its markup."""
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", page.partition("<main")[2].partition("<footer")[0]))


def test_a_running_message_has_its_state_owner_and_fields(site: Site, world: World) -> None:
    busy(world)
    page = site.get("/messages/1-1").text
    told = _text(page)
    assert "body of 1-1" in told
    assert '<a class="id" href="/tickets/T">' in page and '<a href="/consumers/a">a</a>' in page
    assert "The run log is empty" in told
    behind = site.get("/messages/2-1").text
    assert '<dt>Waits behind</dt><dd><a class="id" href="/messages/1-1">' in behind


def test_its_executions_are_told_from_when_it_was_sent(site: Site, world: World) -> None:
    busy(world)
    for number in range(60):  # more than one look of the script takes
        world.link.call("XADD", world.keys.runs, f"{number + 1}-1", "batch", _RUN % f"7-{number}")
    world.link.call("XADD", world.keys.runs, "*", "batch", _RUN % "1-1")
    told = _text(site.get("/messages/1-1").text)
    assert "failed 2 a 88" in told and "2.5 s" in told
    assert "The run log begins at" in told, "the first attempt is not there"
    world.link.call("DEL", world.keys.runs)
    world.link.call("XADD", world.keys.runs, "*", "batch", (_RUN % "1-1").replace("[2,1]", "[1,1]"))
    assert "The run log begins at" not in _text(site.get("/messages/1-1").text)
    world.link.call("XADD", world.keys.runs, "*", "batch", _RUN % "7-3")
    assert site.get("/messages/7-3").status_code == 200, "of what is left in the run log alone"
    assert "Its content is gone" in _text(site.get("/messages/7-3").text)


def test_a_run_log_that_was_cut_says_so(site: Site, world: World) -> None:
    busy(world)
    world.link.call("XADD", world.keys.runs, "1700000000000-0", "batch", _RUN % "other")
    told = _text(site.get("/messages/1-1").text)
    assert "None in the run log. The run log begins at 2023-11-14 22:13:20.000 : earlier runs are unknown" in told


def test_its_error_is_told_with_its_line_and_for_operators_with_text_and_traceback(guarded: Site, world: World) -> None:
    busy(world)
    noted = encode(LastError("KeyError: <bob>", "KeyError", "shop/orders.py:41", 3, 2, 5, 1_700_000_000_000), "T" * 99)
    world.link.call("HSET", world.keys.attempts, "2-1", "3 2 0 0")
    world.link.call("HSET", world.keys.errors, "2-1", noted.head, "t2-1", noted.traceback)
    sign_in(guarded, "act")
    told = guarded.get("/messages/2-1").text
    assert "KeyError: &lt;bob&gt;" in told and "shop/orders.py:41" in told and "T" * 99 in told
    assert "2 of 5 (3 starts)" in told
    guarded.post("/logout")
    sign_in(guarded, "look")
    told = guarded.get("/messages/2-1").text
    assert "KeyError" in told and "shop/orders.py:41" in told
    assert "bob" not in told and "TTTT" not in told and "body of" not in told


def test_a_dead_message_has_its_letter_and_a_redriven_one_its_origin(site: Site, world: World) -> None:
    letters = busy(world)
    page = site.get("/messages/4-1").text
    assert f'<a class="id" href="/dead-letters/{letters[0]}">' in page and "Was given up" in page
    assert '<a class="id" href="/messages/4-1">' in site.get(f"/dead-letters/{letters[0]}").text
    [added] = DeadLetters(world.link, world.keys).redrive([letters[0].encode()])
    new_id = added.message_id.decode()
    assert 'Redriven from</dt><dd><a class="id" href="/messages/4-1">' in site.get(f"/messages/{new_id}").text


def test_a_replay_names_its_original(site: Site, world: World) -> None:
    busy(world)
    again = world.link.call("XADD", world.keys.stream, "*", "ticket_id", "T", "uid", "x@fix", "usher_replay_of", "1-1")
    assert 'Replay of</dt><dd><a class="id" href="/messages/1-1">' in site.get(f"/messages/{again.decode()}").text


def test_a_delayed_message_says_when_it_is_due_and_a_sent_one_when_it_was(site: Site, world: World) -> None:
    leader = world.elect()
    entry_id = delay(world, b"D", FUTURE, "text", "<i>").decode()
    leader.due_delayed(10)
    page = site.get(f"/messages/{entry_id}").text
    assert "Waits for its time" in page and "2096-10-02" in page and "&lt;i&gt;" in page
    delay(world, b"E", now_ms(world) - 1000)
    [new_id] = send_due(world, leader)
    assert "for later: it was due at" in site.get(f"/messages/{new_id.decode()}").text  # type: ignore[union-attr]


# -- the same over HTTP


def _told(site: Site, message_id: str, token: str = "", query: str = "") -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    answered = site.client.get(f"/api/messages/{message_id}{query}", headers=headers)
    assert answered.status_code == 200, answered.text
    TypeAdapter(MessageShown).validate_python(told := answered.get_json())
    return dict(told)


def test_programs_are_told_what_the_page_shows(site: Site, world: World) -> None:
    letters = busy(world)
    world.link.call("XADD", world.keys.runs, "*", "batch", _RUN % "1-1")
    told = _told(site, "1-1")
    assert (told["message_id"], told["ticket_id"], told["sent_ms"], told["field_count"]) == ("1-1", "T", 1, 2)
    assert ["body", "body of 1-1"] in told["fields"]
    assert told["entry"]["id"] == "1-1" and told["sentences"], "it is the first of its ticket"
    assert told["dead_letter"] is None
    [run] = told["executions"]
    assert (run["owner"], run["outcome"], run["attempt"], run["took_ms"]) == ("a:7", "failed", 2, 2500.0)
    assert told["executions_are_cut"] is True
    assert _told(site, "2-1")["entry"]["behind"] == "1-1"
    assert _told(site, "2-1")["sentences"] == []
    dead = _told(site, "4-1")
    assert (dead["state"], dead["dead_letter"]["id"]) == ("dead_letter", letters[0])
    assert _told(site, "6-1")["state"] == "unread"


def test_each_state_of_a_message_has_a_word(site: Site, world: World) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T", b"1-1")
    a.steps.ack([b"1-1"], b"{}", 10)
    assert _told(site, "1-1")["state"] == "over"
    entry_id = delay(world, b"D", FUTURE, "text", "<i>").decode()
    leader.due_delayed(10)
    told = _told(site, entry_id)
    assert (told["state"], told["delayed"]["due_ms"], told["bytes"]) == ("delayed", int(FUTURE), None)
    world.link.call("XADD", world.keys.runs, "*", "batch", _RUN % "7-3")
    assert (_told(site, "7-3")["state"], _told(site, "7-3")["fields"]) == ("gone", None)
    for path in ("5-5", "x", "1-1-1", "18446744073709551616-0"):
        answered = site.client.get(f"/api/messages/{path}")
        assert (answered.status_code, answered.mimetype) == (404, "application/problem+json"), path
    assert site.client.get("/api/messages/1-1?cursor=x").status_code == 422
    assert site.client.get("/api/messages/1-1?other=x").status_code == 422


def test_what_is_pending_and_trimmed_has_the_state_of_what_is_pending(site: Site, world: World) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T", b"1-1")
    world.parked(leader, b"P", b"3-1")
    world.delete(b"1-1", b"3-1")
    assert [_told(site, one)["state"] for one in ("1-1", "3-1")] == ["handed_over", "waiting"]
    assert _told(site, "1-1")["bytes"] is None
    assert "handed over, though its content is gone." in _text(site.get("/messages/1-1").text)
    a.steps.ack([b"1-1"], b"{}", 10)
    assert site.client.get("/api/messages/1-1").status_code == 404, "nothing is left of it"


def test_a_message_without_a_ticket_id_has_a_state(site: Site, world: World) -> None:
    world.elect()
    world.add(b"1-1", "body", "no ticket")
    assert _told(site, "1-1")["state"] == "unread"
    assert "unread, without a ticket id." in _text(site.get("/messages/1-1").text)
    world.link.call("XREADGROUP", "GROUP", world.keys.group, "master", "COUNT", 9, "STREAMS", world.keys.stream, ">")
    assert _told(site, "1-1")["state"] == "waiting", "until it is set apart as a dead letter"
    world.link.call("XACK", world.keys.stream, world.keys.group, "1-1")
    assert _told(site, "1-1")["state"] == "over"


def test_a_message_far_behind_in_its_ticket_has_a_state(site: Site, world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = [b"%d-1" % (number + 1) for number in range(1200)]
    world.owned(leader, a, b"T", ids[0])
    world.parked(leader, b"T", *ids[1:])
    told = _told(site, "1200-1")
    assert told["entry"] is None, "the explanation names the first ones"
    assert told["state"] == "waiting"
    assert "waiting, not among the first of its ticket." in _text(site.get("/messages/1200-1").text)


def test_a_search_in_the_run_log_goes_on_at_its_cursor(
    site: Site, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy(world)
    monkeypatch.setattr("usher.master.insight.status._RUNS_AT_ONCE", 1)
    monkeypatch.setattr("usher.master.insight.status._PIECE_EVENTS", 1)
    for number in (1, 2):
        world.link.call("XADD", world.keys.runs, f"{number}-1", "batch", _RUN % "1-1")
    first = _told(site, "1-1")
    assert (len(first["executions"]), first["cursor"]) == (1, "1-1")
    assert len(_told(site, "1-1", query="?cursor=1-1")["executions"]) == 1


def test_viewers_are_told_neither_what_a_message_says_nor_what_its_error_says(guarded: Site, world: World) -> None:
    letters = busy(world)
    noted = encode(LastError("KeyError: <bob>", "KeyError", "shop/orders.py:41", 3, 2, 5, 1_700_000_000_000), "T" * 99)
    world.link.call("HSET", world.keys.attempts, "2-1", "3 2 0 0")
    world.link.call("HSET", world.keys.errors, "2-1", noted.head, "t2-1", noted.traceback)
    entry_id = delay(world, b"D", FUTURE, "text", "body of it").decode()
    world.link.call("DEL", world.keys.leader)
    world.elect().due_delayed(10)
    told = _told(guarded, "2-1", "act")
    assert (told["last_error"]["error"], told["traceback"], told["attempts"], told["charged"]) == (
        "KeyError: <bob>",
        "T" * 99,
        3,
        2,
    )
    assert letters
    for message_id in ("2-1", "4-1", "5-1", entry_id):
        seen, hidden = (json.dumps(_told(guarded, message_id, who)) for who in ("act", "look"))
        assert "body of" in seen or message_id == "4-1"
        assert not re.search("body of|bob|TTTT|ValueError: ", hidden), message_id
    assert _told(guarded, "2-1", "look")["last_error"]["told"] == "KeyError in shop/orders.py:41"
    for token, status in (("consume", 403), ("", 401), ("wrong", 401)):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        assert guarded.client.get("/api/messages/2-1", headers=headers).status_code == status
