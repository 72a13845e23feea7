"""The page on a real Redis, asked over WSGI: who may see and do what, and that every page is there for an empty and for
a busy system."""

from __future__ import annotations

import html
import re

import click
import orjson
import pytest
from werkzeug.test import Client

from tests.doors import Site, busy, sign_in
from tests.integration.factories import World
from usher.cli import usher
from usher.common.http.credentials import Identity, Role

_PAGES = (
    *("/", "/charts", "/tickets", "/consumers", "/dead-letters", "/delayed", "/streams", "/audit", "/doctor", "/rules"),
    *("/actions", "/finished"),
)
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'self'; "
)


def test_what_has_no_letter_is_told_for_sure_and_a_search_that_was_cut_short_says_so(
    site: Site, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy(world)
    monkeypatch.setattr("usher.master.web.pages.site._LOOK_S", -1.0)
    monkeypatch.setattr("usher.master.operations.shelves.PAGE", 1)
    assert "no dead letter has this id<" in site.get("/tickets?q=9-9").text
    assert "No dead letter fits: ticket none <a" in site.get("/dead-letters?ticket=none").text
    assert "No dead letter among those searched fits: error none <a" in site.get("/dead-letters?error=none").text


@pytest.mark.parametrize("path", _PAGES)
def test_every_page_is_there_for_an_empty_system(site: Site, path: str) -> None:
    answered = site.get(path)
    assert (answered.status_code, answered.mimetype) == (200, "text/html")
    assert answered.headers["Content-Security-Policy"] == _POLICY + "frame-ancestors 'none'"
    assert answered.headers["X-Content-Type-Options"] == "nosniff"
    assert answered.headers["Cache-Control"] == "no-store"
    assert answered.headers["Referrer-Policy"] == "same-origin"
    assert not re.search(r"<script(?! src)|<style| style=| on[a-z]+=|https?://(?!one)", answered.text)
    assert len(re.findall("<h1", answered.text)) == 1


@pytest.mark.parametrize("path", _PAGES)
def test_the_command_that_a_page_names_is_one_that_does_something(site: Site, path: str) -> None:
    """And not the name of several, which prints a help text and ends with 2."""
    for line in re.findall(r"<code>usher ([^<]*)</code>", site.get(path).text):
        command: click.Command | None = usher
        for word in html.unescape(line).split():
            if (
                not isinstance(command, click.Group)
                or (found := command.get_command(click.Context(command), word)) is None
            ):
                break
            command = found
        assert not isinstance(command, click.Group) or command.invoke_without_command, line


def test_every_page_is_there_for_a_busy_system(site: Site, world: World) -> None:
    letters = busy(world)
    site.pulse.run_once()
    pages = [
        *_PAGES,
        "/tickets?q=T",
        "/tickets?q=1-1",
        f"/tickets?q={letters[0]}",
        "/tickets/T",
        "/tickets/H",
        "/tickets/P",
        "/tickets/none",
    ]
    pages += [
        "/tickets?id=..",
        "/dead-letters?error=value&ticket=H",
        f"/dead-letters/{letters[1]}",
        "/messages/1-1",
        "/consumers?name=a",
        "/consumers/a",
    ]
    for path in pages:
        assert site.get(path).status_code == 200, path
    assert "1 of this ticket" in site.get("/tickets?q=H").text
    assert "halted" in site.get("/").text
    assert "body of 1-1" in site.get("/messages/1-1").text
    assert "stray" in site.get("/audit").text
    example = b'{"check":"stray","severity":"bad","count":3,"means":"m","examples":[{"id":"1-1","ticket":"T","owner":"a","detail":"<b>"}]}'
    world.link.call("SET", world.keys.audit, b'{"verdict":"bad","findings":[%s]}' % example)
    assert "&lt;b&gt;" in site.get("/audit").text
    of_a_consumer = example.replace(b'"id":"1-1","ticket":"T"', b'"id":"","ticket":""')
    world.link.call("SET", world.keys.audit, b'{"verdict":"warn","findings":[%s]}' % of_a_consumer)
    assert "<b>a</b> &lt;b&gt;" in site.get("/audit").text, "whose clock it is, say"
    assert 'href="/messages/"' not in site.get("/audit").text
    assert "Nothing is proven beyond what the run log still holds" in site.get("/audit").text
    history = b'{"since_ms":1700000000000,"executions":1234,"before":"a <i> gap","unproven":["s: not sure"]}'
    world.link.call("HSET", world.keys.archived, "history", history, "proven_until_ms", 1700000100000)
    shown = site.get("/audit").text
    assert "2023-11-14 22:15:00" in shown
    assert "a &lt;i&gt; gap" in shown
    assert "s: not sure" in shown
    head = dict.fromkeys((f"{what}_p{n}_ms" for what in ("wait", "run") for n in (50, 95, 99)), 2000) | {"letters": 0}
    head |= {"days": 30, "at_ms": 1_700_000_000_000, "executions": 5, "retries": 1, "worker_s": 7200}
    world.link.call("HSET", world.keys.archived, "report", orjson.dumps(head))
    assert re.search("Worker hours</dt><dd[^>]*>2.0<", site.get("/audit").text)
    for odd in (b'{"findings":[3]}', b'{"findings":7}', b'{"findings":[{"examples":null}],"started_ms":"soon"}'):
        world.link.call("SET", world.keys.audit, odd)
        shown = site.get("/audit").text
        assert "of another version of Usher; the next audit" in shown and "a &lt;i&gt; gap" in shown
    world.link.call("HSET", world.keys.archived, "history", b'{"other":[1]}', "report", b'{"executions":"x"}')
    assert "Nothing is proven beyond" in site.get("/audit").text
    assert "has this entry pending" in site.get("/streams").text


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/nowhere",
            "/tickets?cursor=x",
            "/tickets/x?back=1",
            f"/tickets/{'x' * 257}",
            "/tickets?id=",
            "/messages/1-1",
            "/live/none",
        ),
        *(
            "/dead-letters?before=x",
            "/dead-letters?younger_than_s=x",
            "/dead-letters/1-1",
            "/dead-letters/jobs/x",
            "/actions?before=x",
        ),
    ],
)
def test_what_is_not_there_or_wrong_is_a_page_too(site: Site, path: str) -> None:
    answered = site.get(path)
    assert answered.status_code in (404, 422)
    assert answered.mimetype == "text/html"
    assert "Content-Security-Policy" in answered.headers
    told = site.client.get(path, headers={"Accept": "*/*"})
    assert told.mimetype == "application/problem+json"


def test_files_are_kept_by_browsers_that_ask_whether_they_are_still_the_same(site: Site) -> None:
    for address in re.findall(r'(?:href|src)="(/static/[^"]+)"', site.get("/").text):
        with site.get(address) as answered:
            assert answered.status_code == 200
            assert answered.headers["Cache-Control"] == "no-cache"
            assert answered.headers["X-Content-Type-Options"] == "nosniff"
        with site.client.get(address, headers={"If-None-Match": answered.headers["ETag"]}) as again:
            assert (again.status_code, again.data) == (304, b"")


def test_letters_are_redriven_and_the_log_says_who_and_why(site: Site, world: World) -> None:
    letters = busy(world)
    answered = site.post("/dead-letters/redrive", id=letters[0], why="mended", back="/dead-letters?ticket=D")
    assert answered.status_code == 303
    assert answered.headers["Location"].startswith("/dead-letters?ticket=D&said=")
    assert "redrive: added 1" in site.get(answered.headers["Location"]).text.lower()
    assert len(world.letter_ids()) == 1
    log = site.get("/actions").text
    assert all(text in log for text in ("anybody", "redrive", "mended", "added 1"))
    gone = site.post("/dead-letters/drop", id=letters[1], back="//evil.example")
    assert gone.headers["Location"].startswith("/?said=")
    assert world.letter_ids() == []
    assert "Nothing was chosen" in site.get(site.post("/dead-letters/drop", id="<b>").headers["Location"]).text


def test_a_redrive_says_which_other_groups_get_the_message(site: Site, world: World) -> None:
    letters = busy(world)
    world.link.call("XGROUP", "CREATE", world.keys.stream, "shipping", "$")
    said = "a new message is one for every group of the stream: shipping handles it too"
    assert said in site.post("/dead-letters/bulk", dry="1", what="redrive").text
    for path in ("/dead-letters", f"/dead-letters/{letters[0]}"):
        assert said in site.get(path).text, path
    assert said in site.get(site.post("/dead-letters/redrive", id=letters[0]).headers["Location"]).text


def test_a_letter_is_edited_and_sent_again_as_a_new_message_at_the_end_of_its_ticket(site: Site, world: World) -> None:
    [_, halting] = busy(world)
    world.link.call("XADD", world.keys.stream, "7-1", "ticket_id", "H", "body", b"later")
    form = re.search(
        r'<form method="post" action="/dead/edit".*?</form>', site.get(f"/dead-letters/{halting}").text, re.S
    )
    assert form and re.findall(r'name="field.(\w+)".*?>\n(.*?)</textarea>', form[0]) == [("body", "body of 5-1")]
    sent = {"letter_id": halting, "why": "a typo", "back": "/dead-letters"}
    assert "it stays a message of ticket H" in site.post("/dead/edit", **sent, **{"field.ticket_id": "T"}).text
    said = site.post("/dead/edit", **sent, **{"field.body": "two\r\nlines <b>"}).headers["Location"]
    assert "behind the others of ticket H; the letter is gone" in site.get(said).text
    [*_, (_, last)] = world.link.call("XRANGE", world.keys.stream, "-", "+")
    assert last == [b"ticket_id", b"H", b"body", b"two\nlines <b>", b"uid", f"edited-{halting}".encode()]
    assert halting.encode() not in world.letter_ids() and b"H" not in world.state().index, "nothing holds it up"


def test_numbers_of_letters_that_are_not_exact_are_told_as_such(site: Site, world: World) -> None:
    busy(world)
    world.link.call("SET", world.keys.letters, "x")
    site.look()
    for path in ("/", "/dead-letters", "/dead-letters?ticket=T"):
        assert "Numbers by error are not exact" in site.get(path).text, path


def test_rules_are_set_and_lifted(site: Site, world: World) -> None:
    busy(world)
    answered = site.post("/rules/set", target="ticket", value="T", action="pause", why="asked", back="/tickets/T")
    assert answered.headers["Location"].startswith("/tickets/T?said=")
    ticket = site.get("/tickets/T").text
    rule = re.search(r'action="/rules/lift".*?name="rule_id" value="([0-9a-f]+)"', ticket, re.DOTALL)
    assert rule
    assert "Resume" in ticket
    assert (
        site.post("/rules/set", target="pattern", value="T*", action="slow", rate_per_second="2.5").status_code == 303
    )
    limit = {"target": "everything", "action": "limit", "value": "", "rate_per_second": "", "ticket_limit": "20"}
    assert site.post("/rules/set", **limit).status_code == 303
    rules = site.get("/rules").text
    assert all(text in rules for text in ("asked", "T*", "2.5/s", "20 unfinished messages"))
    assert site.post("/rules/lift", rule_id=rule[1]).status_code == 303
    assert "asked" not in site.get("/rules").text
    for target, action in (("ticket", "pause"), ("x", "pause"), ("everything", "slow")):
        assert site.post("/rules/set", target=target, action=action).status_code == 422
    assert site.post("/rules/set", target="pattern", value="T", action="slow", rate_per_second="x").status_code == 422


@pytest.mark.parametrize("why", ["one\ntwo", "\x1b[31mred", "\u202eturned", "\x9b2J"])
def test_a_reason_that_would_act_on_a_terminal_is_refused_before_anything_is_done(
    site: Site, world: World, why: str
) -> None:
    letters = busy(world)
    site.post("/rules/set", target="ticket", value="T", action="pause")
    rule = re.search(r'name="rule_id" value="([0-9a-f]+)"', site.get("/rules").text)
    assert rule
    before = site.get("/actions").text.count("<tr")
    for path, form in (
        ("/consumers/drain", {"name": "a"}),
        ("/consumers/resume", {"name": "a"}),
        ("/rules/lift", {"rule_id": rule[1]}),
        ("/tickets/order", {"ticket_id": "P", "order": "give_up"}),
        ("/dead-letters/drop", {"id": letters[0]}),
        ("/dead-letters/redrive", {"id": letters[0]}),
    ):
        assert site.post(path, **form, why=why).status_code == 422, path
    assert site.get("/actions").text.count("<tr") == before
    assert world.letter_ids() == [letter_id.encode() for letter_id in letters]


def test_what_may_be_ordered_is_offered_and_done(site: Site, guarded: Site, world: World) -> None:
    busy(world)
    page = site.get("/tickets/P").text
    assert re.findall(r'<button name="order" value="(\w+)"', page) == ["give_up"]
    assert "3-1 becomes a dead letter as soon as a consumer gets it" in page
    answered = site.post("/tickets/order", ticket_id="P", order="give_up", why="refunded")
    assert "3-1 becomes a dead letter" in site.get(answered.headers["Location"]).text
    assert "refunded" in site.get("/actions").text
    refused = site.post("/tickets/order", ticket_id="P", order="cancel")
    assert "nothing of it runs" in site.get(refused.headers["Location"]).text
    assert site.post("/tickets/order", ticket_id="P", order="eat").status_code == 422
    assert guarded.client.post("/tickets/order", headers={"Authorization": "Bearer look"}).status_code == 403


def test_a_drain_that_is_one_rule_too_many_says_what_to_do(
    site: Site, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("usher.master.operations.live_rules.MOST_RULES", 1)
    busy(world)
    site.pulse.run_once()
    assert site.post("/rules/set", target="ticket", value="T", action="pause").status_code == 303
    answered = site.post("/consumers/drain", name="a")
    assert answered.status_code == 409
    assert "lift some" in answered.text


# -- who may


def test_a_session_whose_user_has_signed_out_is_none_at_any_master_although_its_cookie_was_copied(world: World) -> None:
    sites = [Site(world, token="all", look=Identity(Role.VIEWER, "vera")) for _ in range(2)]  # type: ignore[arg-type]
    others = [Client(site.app) for site in sites]
    sign_in(sites[0], "look")
    cookie = sites[0].client.get_cookie("usher")
    assert cookie is not None
    for site, other in zip(sites, others, strict=True):
        site.app.extensions["usher_doorman"].noted_in = world.link, world.keys
        other.set_cookie("usher", cookie.value)
        assert other.get("/api/messages/9-9").status_code == 404
    sites[0].post("/logout")
    assert [other.get("/api/messages/9-9").status_code for other in others] == [401, 401]


def test_strangers_are_shown_the_way_in(guarded: Site) -> None:
    answered = guarded.get("/tickets?q=x")
    assert (answered.status_code, answered.headers["Location"]) == (303, "/login?next=%2Ftickets%3Fq%3Dx")
    page = guarded.get("/login?next=//evil").text
    assert 'name="next" value="/"' in page and "/consumers" not in page, "nothing is said of what is inside"
    assert sign_in(guarded, "wrong").status_code == 403
    assert sign_in(guarded, "consume").status_code == 403, "a consumer's token is for no pages"
    assert guarded.client.post("/consumers/drain", data={"name": "a"}).status_code == 401


def test_viewers_see_everything_but_what_messages_say_and_can_do_nothing(guarded: Site, world: World) -> None:
    letters = busy(world)
    answered = sign_in(guarded, "look")
    assert answered.headers["Location"] == "/tickets"
    assert all(one in answered.headers["Set-Cookie"] for one in ("SameSite=Strict", "HttpOnly"))
    for path in (*_PAGES, "/tickets/T", "/tickets/D", "/tickets/H", f"/dead-letters/{letters[0]}"):
        page = guarded.get(path).text
        assert not set(re.findall(r'<form method="post"[^>]*action="([^"]+)"', page)) - {"/logout"}, path
        assert "formaction" not in page, path
        assert not re.search(r"body of \d", page), path
        assert "ValueError: " not in page, path
    said = guarded.get("/messages/1-1").text
    assert "T</bdi>" in said and "body of" not in said, "what a message says is for operators"
    letter_actions = ("/dead-letters/redrive", "/dead-letters/drop", "/dead-letters/bulk", "/dead/edit")
    for path in ("/consumers/drain", "/consumers/resume", *letter_actions, "/rules/set", "/rules/lift"):
        told = guarded.post(path, name="a", id=letters[0], what="drop", target="everything", action="pause")
        assert told.status_code == 403, path
    assert [letter.decode() for letter in world.letter_ids()] == letters


def test_operators_act_under_their_name_and_only_from_our_own_forms(guarded: Site, world: World) -> None:
    letters = busy(world)
    sign_in(guarded, "act")
    form = {"id": letters[0], "why": "x"}
    assert guarded.client.post("/dead-letters/drop", data=form).status_code == 403, "without the token of the form"
    foreign = guarded.client.post("/dead-letters/drop", data=form, headers={"Origin": "http://evil.example"})
    assert foreign.status_code == 403
    assert len(world.letter_ids()) == len(letters)
    assert guarded.post("/dead-letters/drop", **form).status_code == 303
    assert len(world.letter_ids()) == len(letters) - 1
    assert "otto" in guarded.get("/actions").text
    guarded.post("/logout")
    assert guarded.get("/").status_code == 303
