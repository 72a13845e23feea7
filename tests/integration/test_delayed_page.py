"""The page and the routes of delayed messages, on a real Redis: lists, previews, what is done, and who may."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from werkzeug.test import Client

from tests.doors import Site, api_of, sign_in
from tests.integration.delays import FUTURE, delay, left, log_keys, now_ms, send_due, sent
from tests.integration.factories import World
from usher.common.http.credentials import Identity, Role
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.operations.action_log import ActionLog
from usher.master.operations.shelves import DelayedView, member_of

#: A time that any test is before, in a form, and in milliseconds.
_AT, _AT_MS = "2031-07-01T12:00:00", 1_940_673_600_000


@pytest.fixture
def three(world: World) -> tuple[LeaderScripts, list[str]]:
    """The leader, and the messages of A, B and A, in the order of their times."""
    leader = world.elect()
    ids = [delay(world, ticket, FUTURE + n, "text", f"<i>{n}").decode() for n, ticket in enumerate((b"A", b"B", b"A"))]
    leader.due_delayed(10)
    return leader, ids


def _form(page: str) -> dict[str, list[str]]:
    """Hidden fields of the form that a preview shows, but the token."""
    found: dict[str, list[str]] = {}
    [form] = re.findall(r'<form method="post" action="/delayed/bulk".*?</form>', page, re.DOTALL)
    for name, value in re.findall(r'type="hidden" name="([^"]+)" value="([^"]*)"', form):
        found.setdefault(name, []).append(html.unescape(value))
    return {name: values for name, values in found.items() if name != "csrf_token"}


def _run(site: Site, page: str, why: str = "") -> str:
    """Confirm a preview; what is said then."""
    answered = site.post("/delayed/bulk", **{**_form(page), "why": why})  # type: ignore[arg-type]
    assert answered.status_code == 303, answered.text
    site.bulk.run_once()
    return site.get(answered.headers["Location"]).text


def _said(page: str) -> str:
    [said] = re.findall(r'<p class="(?:said" role="status|summary)">(.*?)</p>', page)
    return html.unescape(said)


def test_the_list_tells_what_waits_and_escapes_what_messages_say(
    site: Site, world: World, three: tuple[LeaderScripts, list[str]]
) -> None:
    delay(world, b"C", FUTURE)
    page = site.get("/delayed").text
    assert re.findall(r'name="id" value="([^"]+)"', page) == three[1]
    assert "&lt;i&gt;0" in page and "<i>0" not in page
    assert 'id="delayed-count" data-swap>4<' in page
    assert "1 more, which no leader has put in order yet" in page
    assert re.findall(r'name="id" value="([^"]+)"', site.get("/delayed?ticket=B").text) == [three[1][1]]
    assert "No delayed message is of ticket none <a" in site.get("/delayed?ticket=none").text


def test_chosen_messages_are_sent_now_after_a_preview(
    site: Site, world: World, three: tuple[LeaderScripts, list[str]]
) -> None:
    leader, ids = three
    with world.unchanged():
        page = site.post("/delayed/bulk", dry="1", what="send", id=[ids[2], ids[0]]).text  # type: ignore[arg-type]
        assert "2 messages of ticket A will be sent now" in page
    assert _said(_run(site, page, "they wait")) == "2 messages to be sent now"
    send_due(world, leader)
    assert (sent(world), left(world)) == ([b"A", b"A"], 1)
    [line] = ActionLog(world.link, world.keys).page(None, 10)[0]
    assert (line["what"], line["why"], line["outcome"]) == ("send_delayed_now", "they wait", "moved 2")
    assert line["on"] == f"2 delayed messages, from {ids[2]}"
    again = site.post("/delayed/bulk", **_form(page))  # type: ignore[arg-type]
    assert "2 left alone: not waiting any more" in _said(site.get(again.headers["Location"]).text)
    assert (sent(world), left(world)) == ([b"A", b"A"], 1), "once"
    assert "None of them waits any more" in site.post("/delayed/bulk", dry="1", what="drop", id=ids[0]).text


def test_one_that_is_sent_between_preview_and_answer_is_told(
    site: Site, world: World, three: tuple[LeaderScripts, list[str]]
) -> None:
    leader, ids = three
    page = site.post("/delayed/bulk", dry="1", what="drop", id=ids).text  # type: ignore[arg-type]
    list(DelayedView(world.link, world.keys, "ticket_id").move(ids[:1], None))
    send_due(world, leader)
    assert _said(_run(site, page)).startswith("2 messages dropped; 1 left alone: not waiting any more")
    assert (sent(world), left(world)) == ([b"A"], 0)


@pytest.mark.parametrize(
    ("at", "given", "due_ms"),
    [
        (_AT, "", _AT_MS),
        (_AT, str(_AT_MS - 7_200_000), _AT_MS - 7_200_000),  # a script knows the browser's zone
        (_AT + "+01:00", "", _AT_MS - 3_600_000),
    ],
)
def test_a_time_is_in_utc_unless_a_script_has_said_otherwise(
    site: Site, world: World, three: tuple[LeaderScripts, list[str]], at: str, given: str, due_ms: int
) -> None:
    page = site.post("/delayed/bulk", dry="1", what="move", id=three[1][1], at=at, due_ms=given).text
    assert _form(page)["due_ms"] == [str(due_ms)]
    assert "1 message of ticket B will be due at" in page
    assert "1 message moved to 20" in _said(_run(site, page))
    assert world.link.call("ZSCORE", log_keys(world).due, member_of(three[1][1])) == b"%d" % due_ms


@pytest.mark.parametrize(
    ("at", "told"),
    [
        ("", "say when they are to be sent"),
        ("soon", "write the time as"),
        ("2020-01-01T00:00", "that time is over"),
        ("2999-01-01T00:00", "more than 10 years ahead"),
        ("9999-12-31T23:59:59-23:00", ""),
    ],
)
def test_a_time_that_cannot_be_is_refused_with_a_sentence(
    site: Site, world: World, three: tuple[LeaderScripts, list[str]], at: str, told: str
) -> None:
    with world.unchanged():
        answered = site.post("/delayed/bulk", dry="1", what="move", id=three[1][1], at=at)
    assert answered.status_code == 422
    assert told in answered.text


def test_a_preview_that_is_confirmed_too_late_moves_nothing(
    site: Site, world: World, three: tuple[LeaderScripts, list[str]]
) -> None:
    with world.unchanged():
        answered = site.post("/delayed/bulk", what="move", id=three[1][0], due_ms=str(now_ms(world) - 1))
    assert (answered.status_code, "that time is over" in answered.text) == (422, True)


def test_all_of_a_ticket_are_dropped_but_what_came_after_the_preview(
    site: Site, world: World, three: tuple[LeaderScripts, list[str]]
) -> None:
    leader, ids = three
    page = site.post("/delayed/bulk", dry="1", what="drop", all="1", ticket="A").text
    assert "2 messages of ticket A will be thrown away" in page
    later = delay(world, b"A", FUTURE).decode()
    leader.due_delayed(10)
    assert _said(_run(site, page)) == "2 messages dropped"
    rows = DelayedView(world.link, world.keys, "ticket_id").page(None, 10).rows
    assert [row.id for row in rows] == [later, ids[1]]


@pytest.mark.parametrize("form", [{"what": "send"}, {"what": "x", "id": "1-1"}, {"what": "drop", "id": "x"}])
def test_a_form_without_a_choice_is_refused(site: Site, form: dict[str, str]) -> None:
    for dry in ("1", ""):
        assert site.post("/delayed/bulk", dry=dry, **form).status_code == 422


def test_viewers_see_when_but_not_what_and_can_do_nothing(
    guarded: Site, world: World, three: tuple[LeaderScripts, list[str]]
) -> None:
    sign_in(guarded, "look")
    page = guarded.get("/delayed").text
    assert three[1][0] in page
    assert "&lt;i&gt;" not in page and "checkbox" not in page and "/delayed/bulk" not in page
    with world.unchanged():
        for dry in ("1", ""):
            assert guarded.post("/delayed/bulk", dry=dry, what="drop", id=three[1][0]).status_code == 403


# ---- the routes ----


@pytest.fixture
def api(world: World) -> Client:
    who = {"look": Identity(Role.VIEWER, "vera"), "act": Identity(Role.OPERATOR, "otto")}
    return api_of(world.link, world.keys, **who).test_client()


def _ask(api: Client, path: str, token: str = "act", **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {token}"}
    if not body:
        return api.get(f"/api/delayed{path}", headers=headers)
    return api.post(f"/api/delayed{path}", json=body, headers=headers)


def test_programs_list_send_move_and_drop(api: Client, world: World, three: tuple[LeaderScripts, list[str]]) -> None:
    leader, ids = three
    first = _ask(api, "?limit=2").json
    assert [row["id"] for row in first["delayed"]] == ids[:2]
    assert first["delayed"][0]["fields"] == [["text", "<i>0"]]
    rest = _ask(api, f"?limit=2&cursor={first['cursor']}").json
    assert ([row["id"] for row in rest["delayed"]], rest["cursor"], rest["waiting"]) == (ids[2:], None, 3)
    assert [row["fields"] for row in _ask(api, "?ticket=B", "look").json["delayed"]] == [None]
    moved = _ask(api, "/move", ids=[ids[0], "99999999999999-1"], due_ms=FUTURE - 9, reason="later")
    assert moved.status_code == 422, "FUTURE is too far away"
    due_ms = now_ms(world) + 60_000
    moved = _ask(api, "/move", ids=[ids[0], "99999999999999-1"], due_ms=due_ms, reason="later").json
    assert {one["id"]: one["outcome"] for one in moved["results"]} == {ids[0]: "moved", "99999999999999-1": "unknown"}
    assert _ask(api, "/send", ids=ids[1:2]).json["results"] == [{"id": ids[1], "outcome": "moved"}]
    send_due(world, leader)
    assert sent(world) == [b"B"]
    assert _ask(api, "/drop", ids=ids[1:]).json["results"] == [
        {"id": ids[1], "outcome": "gone"},
        {"id": ids[2], "outcome": "dropped"},
    ]
    lines = ActionLog(world.link, world.keys).page(None, 10)[0]
    assert [(line["who"], line["what"]) for line in lines] == [
        ("otto", "drop_delayed"),
        ("otto", "send_delayed_now"),
        ("otto", "move_delayed"),
    ]
