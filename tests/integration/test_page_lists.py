"""Lists of the page: what they say when they find nothing, and where their rows lead."""

from __future__ import annotations

import re

import pytest
from werkzeug.test import TestResponse

from tests.doors import Site, busy
from tests.integration.factories import World
from tests.integration.test_commands_shown import shown
from usher.master.insight.formatting import TICKET_COLUMNS
from usher.master.policy.rules import Rule, RuleAction, Target, dump, rule_id


@pytest.mark.parametrize(
    ("path", "told", "all_of_them"),
    [
        (
            "/tickets?state=halted&error=Key%3CError",
            "ticket in processing fits: state halted, error Key&lt;Error",
            "/tickets",
        ),
        ("/tickets?consumer=nobody", "ticket in processing fits: consumer nobody", "/tickets"),
        ("/tickets?q=kind%3Dnone%3C", "that is unfinished or dead has kind = none&lt;: looked at 7 of 7", "/tickets"),
        ("/tickets?q=nowhere", "ticket in processing has this in its id: nowhere", "/tickets"),
        ("/dead-letters?reason=x&error=y", "dead letter fits: reason x, error y", "/dead-letters"),
        ("/consumers?name=nobody", "consumer has this in its name: nobody", "/consumers"),
        ("/delayed?ticket=none", "delayed message is of ticket none", "/delayed"),
    ],
)
def test_what_finds_nothing_says_what_was_looked_for_and_where_all_is(
    site: Site, world: World, path: str, told: str, all_of_them: str
) -> None:
    busy(world)
    page = site.get(path).text
    assert f'{told} <a href="{all_of_them}">' in page.partition('<p class="empty">No ')[2]
    assert "None" not in re.sub("<[^>]*>", "", page.partition("<main")[2])


def confirmed(site: Site, path: str, preview: str, **more: str) -> TestResponse:
    """Send the form of a preview."""
    [form] = re.findall(rf'<form method="post" action="{path}".*?</form>', preview, re.DOTALL)
    return site.post(path, **(dict(re.findall(r'type="hidden" name="([^"]+)" value="([^"]*)"', form)) | more))


def test_a_filter_that_did_not_come_through_all_tickets_says_so(
    site: Site, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy(world)
    monkeypatch.setattr("usher.master.web.pages.site._FIND_S", -1.0)
    assert "No ticket in processing, among those that could be looked at" in site.get("/tickets?consumer=nobody").text


def test_tickets_of_a_filter_are_paused_after_a_preview_and_all_resumed_at_once(
    site: Site, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, a = world.elect(), world.join("a")
    for number in range(3):
        world.owned(leader, a, b"P%d" % number, b"%d-1" % (number + 1))
    listed = site.get("/tickets?state=handed_over").text
    assert 'value="pause">Pause all...' in listed
    assert 'value="retry"' not in listed, "nothing of these can be retried"
    monkeypatch.setattr("usher.master.web.pages.site.MOST_RULES", 2)
    preview = site.post("/tickets/bulk", dry="1", what="pause", state="handed_over").text
    assert all(text in preview for text in ("Pause all 3", "until it is lifted", "room for 2 more rules"))
    assert "None:" in site.get("/rules").text
    assert confirmed(site, "/tickets/bulk", preview, why="the shop is closed").status_code == 303
    while site.bulk.jobs[0].state == "running":
        site.bulk.run_once()
    rules = site.get("/rules").text
    assert all(text in rules for text in ("3 tickets", "the shop is closed", "Resume all 3", '/tickets/P2"'))
    assert rules.count('action="/rules/lift"') == 1
    asked = dict(re.findall(r'name="(rule_id|until)" value="([0-9a-f]+)"', rules))
    site.post("/rules/set", target="ticket", value="P1", action="pause", why="the shop is closed")  # once more
    answered = site.post("/rules/lift", **asked)
    assert "lifted 2" in site.get(answered.headers["Location"]).text
    assert "ticket <bdi" in site.get("/rules").text, "what was set since is no part of it"
    assert "changed since the page was made" in site.get(site.post("/rules/lift", **asked).headers["Location"]).text
    assert site.post("/rules/lift").status_code == 422
    assert site.post("/rules/lift", rule_id=asked["rule_id"], until="x").status_code == 422


def test_a_thousand_rules_are_lifted_at_once_and_those_of_another_day_are_no_part_of_them(
    site: Site, world: World
) -> None:
    for number in range(1000):
        rule = Rule(Target.TICKET, f"T{number}", RuleAction.PAUSE, who="ann")
        set_ms = 1_000 * number + (0 if number < 990 else 120_000)
        world.link.call(
            "HSET",
            world.keys.rules,
            rule_id(Target.TICKET, f"T{number}"),
            b"%d %d " % (number + 1, set_ms) + dump(rule),
        )
    rules = site.get("/rules").text
    assert "Resume all 990" in rules
    asked = dict(
        re.findall(
            r'name="(rule_id|until)" value="([0-9a-f]+)"',
            rules.partition("Resume all 990...")[2].partition("</form>")[0],
        )
    )
    assert "lifted 990" in site.get(site.post("/rules/lift", **asked).headers["Location"]).text
    assert world.link.call("HLEN", world.keys.rules) == 10


def test_a_column_of_tickets_is_one_line_for_the_page_and_the_commands(
    site: Site, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fact is one line more in the row, and one in the document (``TicketRow``)."""
    monkeypatch.setitem(TICKET_COLUMNS, "colour", lambda row: f"blue {row['ticket_id']}")
    world.owned(world.elect(), world.join("a"), b"P1")
    assert all(text in site.get("/tickets").text for text in (">Colour</th>", ">blue P1</td>"))
    assert "blue P1" in shown(world, "tickets", "list", columns=None).output
