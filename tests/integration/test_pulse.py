"""The pulse on a real Redis: what it sees, and what those who look are told."""

from __future__ import annotations

from typing import Any

import pytest

from tests.abuse import check_contract
from tests.integration.factories import LEASE_MS, World, spent
from usher.common.base.clock import wall_ms
from usher.common.redis.client import Link
from usher.master.insight.live import LiveOverview, StuckTickets
from usher.master.insight.status import ORDERS, StatusReader
from usher.master.operations.action_log import By
from usher.master.operations.live_rules import LiveRules
from usher.master.policy.board.plans import Parked
from usher.master.policy.rules import Rule, RuleAction, Rulebook, Target
from usher.master.policy.states import Queue, TicketFilter


@pytest.fixture
def pulse(world: World) -> LiveOverview:
    """One that nobody has started: its turns are the test's."""
    return LiveOverview(world.link, world.keys, "ticket_id", LEASE_MS, lambda ticket: None)


def look(pulse: LiveOverview) -> dict[str, Any]:
    pulse.snapshot(0)
    pulse.run_once()
    return pulse.last


def stuck(pulse: LiveOverview) -> list[dict[str, Any]]:
    return [row for group in pulse.last["groups"] for row in group["rows"]]


def test_it_can_be_started_and_stopped_as_any_service(world: World) -> None:
    check_contract(
        lambda: LiveOverview(Link(world.link.url, "pulse"), world.keys, "ticket_id", LEASE_MS, lambda ticket: None)
    )


def test_an_empty_redis_is_shown_as_such(pulse: LiveOverview, world: World) -> None:
    seen = look(pulse)
    assert (seen["entries"], seen["lag"], seen["pending"], seen["groups"], seen["oldest_ms"]) == (0, 0, 0, [], None)
    assert [alarm["level"] for alarm in seen["alarms"]] == ["bad", "bad"]
    world.link.call("FLUSHALL")
    assert (look(pulse)["has_group"], pulse.last["lag"]) == (False, 0)
    world.make_group()


def test_while_nobody_looks_it_looks_every_four_minutes_and_a_page_finds_rates(pulse: LiveOverview, world: World) -> None:
    world.parked(world.elect(), b"P", b"1000-1", b"1001-1")
    pulse.queue = Queue(1, 1.0)  # of an hour ago
    for _ in range(2):
        assert 239.0 < pulse.run_once() <= 240.0
        assert (pulse.queue, pulse.last["sent_per_second"]) == (None, None)
    world.send(b"new", b"3000-1")
    assert look(pulse)["sent_per_second"] > 0
    assert (pulse.last["lag"], pulse.run_once() < 3.0) == (1, True)


def test_what_is_stuck_is_found_with_its_consumer_and_what_waits_behind(pulse: LiveOverview, world: World) -> None:
    leader, a = world.elect(), world.join("a")
    sent = world.owned(leader, a, b"T", *[b"%d-1" % n for n in (1000, 1001, 1002)])
    world.link.call(
        "HSET", world.keys.tickets, "T", b" ".join([a.name, b"5", *sent])
    )  # as if it had been handed over long ago
    world.parked(leader, b"P", b"2000-1", b"2001-1")
    world.send(b"unread", b"3000-1")
    seen = look(pulse)
    told = [
        (row["ticket_id"], row["state"], row["behind"], row["behind_is_exact"], row["consumer"]) for row in stuck(pulse)
    ]
    assert told == [("P", "waiting", 1, True, ""), ("T", "handed_over", 2, True, "a")]
    assert (seen["pending"], seen["parked"], seen["lag"], seen["oldest_ms"], seen["tickets"]) == (5, 2, 1, 1000, 1)
    [row] = pulse.consumers()
    assert (row["name"], row["state"], row["pending"], row["tickets"], row["capacity"]) == ("a", "live", 3, 1, 10_000)
    assert 0 <= row["beat_ms"] <= LEASE_MS
    world.end_lease(a)
    look(pulse)
    assert (pulse.consumers()[0]["state"], stuck(pulse)[0]["why"]) == (
        "lost",
        "its consumer is lost; it is being taken back",
    )


def test_what_waits_behind_is_what_the_leader_knows_where_redis_was_not_asked_for_all(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    for ticket in (b"ALL", b"PART"):
        [sent] = world.owned(leader, a, ticket)
        world.spoil(ticket, b"%s 5 %s" % (a.name, sent))
    world.parked(leader, b"P", *[b"%d-1" % number for number in range(2000, 2060)])
    memory = {b"ALL": Parked(70, True), b"PART": Parked(80, False), b"P": None}
    for board, all_, part in ((memory.get, (70, True), (80, False)), (lambda ticket: None, (0, False), (0, False))):
        look(pulse := LiveOverview(world.link, world.keys, "ticket_id", LEASE_MS, board))
        told = {row["ticket_id"]: (row["behind"], row["behind_is_exact"]) for row in stuck(pulse)}
        assert told == {"ALL": all_, "PART": part, "P": (49, False)}


def test_entries_without_a_body_are_not_forgotten(pulse: LiveOverview, world: World) -> None:
    leader = world.elect()
    *_, last = world.parked(leader, b"P", b"1000-1", b"1001-1", b"1002-1")
    look(pulse)
    assert [(row["behind"], row["behind_is_exact"]) for row in stuck(pulse)] == [(2, True)]
    world.link.call("XDEL", world.keys.stream, last)
    look(pulse)
    assert [(row["behind"], row["behind_is_exact"]) for row in stuck(pulse)] == [(1, False)]


def test_a_ticket_that_moves_on_is_not_stuck_any_more(pulse: LiveOverview, world: World) -> None:
    leader, a = world.elect(), world.join("a")
    sent = world.owned(leader, a, b"T", b"1000-1", b"1001-1")
    world.spoil(b"T", b"%s 5 %s %s" % (a.name, *sent))
    look(pulse)
    assert len(stuck(pulse)) == 1
    world.spoil(b"T", b"%s 5 %s" % (a.name, sent[1]))
    for _ in range(2):
        look(pulse)
        assert stuck(pulse) == []
    world.apart_because = "its first message is gone from the index only"


def test_what_is_parked_under_an_id_from_the_future_is_stuck_since_it_was_seen(
    pulse: LiveOverview, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.parked(world.elect(), b"T", b"%d-1" % (1000 * wall_ms()))
    look(pulse)
    assert stuck(pulse) == []
    monkeypatch.setattr("usher.master.insight.stats.wall_ms", lambda: wall_ms() + 10_000)
    look(pulse)
    [row] = stuck(pulse)
    assert (row["ticket_id"], row["state"]) == ("T", "waiting")
    assert pulse.last["alarms"][0]["level"] != "ok"


def test_many_are_looked_at_slice_by_slice_and_told_when_two_scans_have_found_the_same_first_message(
    world: World,
) -> None:
    leader, a = world.elect(), world.join("a")
    [halted], _ = world.owned(leader, a, b"HALTED", b"1-1"), world.parked(leader, b"P", b"2-1")
    world.spoil(b"HALTED", b"halted 5 " + halted)
    names = [b"t%d" % number for number in range(3000)]
    world.link.pipeline(
        [("HSET", world.keys.tickets, name, b"a:1 5 %d-1" % (5000 + at)) for at, name in enumerate(names)]
    )
    scan, told = StuckTickets(world.link, world.keys, "ticket_id"), list[Any]()

    def until_it_is_over() -> dict[str, Any]:
        while True:
            told[:] = scan.look(500, 3000, {"a:1": "live"}, Rulebook(), wall_ms())
            if scan._cursor == b"0":
                return {one["state"]: (one["tickets"], one["tickets_are_all"]) for one in told}

    first = {
        one["state"]: one["tickets_are_all"] for one in scan.look(500, 3000, {"a:1": "live"}, Rulebook(), wall_ms())
    }
    assert (first["waiting"], scan.owned_by("a:1")) == (False, None), "not all was looked at"
    assert until_it_is_over() == {"halted": (1, True), "waiting": (1, True)}, "what fails, and what nobody has, at once"
    assert (scan.owned_by("a:1"), scan.owned_by("b:1")) == (3000, 0)
    world.link.call("HSET", world.keys.tickets, names[0], b"a:1 5 9000-1")
    assert until_it_is_over() == {"halted": (1, True), "waiting": (1, True), "handed_over": (2999, True)}
    rows = next(one["rows"] for one in told if one["state"] == "handed_over")
    assert [row["ticket_id"].encode() for row in rows[:3]] == names[1:4], "the oldest ones"
    world.link.call("DEL", world.keys.tickets)
    until_it_is_over()
    assert scan.owned_by("a:1") == 0
    world.apart_because = "the index was written by hand"


def test_while_nobody_looks_it_looks_at_no_consumers(pulse: LiveOverview, world: World) -> None:
    assert pulse.run_once() > 1.5
    before = pulse.last
    world.join("a")
    pulse.run_once()
    assert (pulse.last["living"], before["living"]) == (None, None)
    assert look(pulse)["living"] == 1


def test_when_redis_is_away_a_snapshot_is_stale_and_nothing_is_ok(pulse: LiveOverview) -> None:
    look(pulse)
    assert "stale" not in pulse.snapshot(0)
    pulse._closely_s = pulse._watched_s = pulse._closely_s - 10  # it hangs, and no turn has failed yet
    seen = pulse.snapshot(0)
    assert ("Redis does not answer" in seen["stale"], "ok" in {one["level"] for one in seen["alarms"]}) == (True, False)
    look(pulse)
    pulse._trouble = "NotNow: away"
    assert "away" in pulse.snapshot(0)["stale"]


def test_ten_thousands_that_were_put_off_hide_neither_what_hangs_nor_what_is_paused(
    pulse: LiveOverview, world: World
) -> None:
    leader, a = world.elect(), world.join("a")
    for number in range(220):
        [one] = world.parked(leader, name := b"later-%d" % number, b"%d-1" % (1000 + number))
        world.spoil(name, b"waits@9000000000000 5 " + one)
    [hangs], _ = world.owned(leader, a, b"HANGS", b"5000-1"), world.parked(leader, b"HELD", b"6000-1")
    world.spoil(b"HANGS", b"%s 5 %s" % (a.name, hangs))
    LiveRules(world.link, world.keys).set(Rule(Target.TICKET, "HELD", RuleAction.PAUSE), By("test", "cli", ""))
    look(pulse)
    worst = min(pulse.last["groups"], key=lambda one: one["level"])
    [row] = worst["rows"]
    assert (worst["level"], worst["text"], row["ticket_id"]) == ("bad", "on a", "HANGS")
    for _ in range(2):  # slice by slice
        look(pulse)
    assert {one["state"]: one["tickets"] for one in pulse.last["groups"]}["paused"] == 1
    reader, found = StatusReader(world.link, world.keys), list[Any]()
    asked = spent(world.link, lambda: found.append(reader.find(TicketFilter(frozenset({"paused"})), "age", 9)))
    assert [row["ticket_id"] for row in found[0]["rows"]] == ["HELD"]
    assert asked["xrange"] == 1, "no body is read of what the index names"
    world.apart_because = "the index was written by hand"


def test_lists_of_a_moment_share_one_scan_and_show_what_holds_now(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    for name in (b"S", b"T"):
        world.owned(leader, a, name)
    reader, found = StatusReader(world.link, world.keys), list[Any]()
    first = reader.find(TicketFilter(), "ticket", 1)
    assert ([row["ticket_id"] for row in first["rows"]], first["number"], first["is_all"]) == (["S"], 2, True)
    reader.forget()
    asked = spent(world.link, lambda: found.extend(reader.find(TicketFilter(), order, 9) for order in ORDERS))
    assert (asked["hscan"], {len(one["rows"]) for one in found}) == (1, {2})
    world.link.call("HDEL", world.keys.tickets, b"T")
    world.spoil(b"S", b"halted 5 1-1")
    later = reader.find(TicketFilter(), "ticket", 9)
    assert [(row["ticket_id"], row["state"], row["message_ids"]) for row in later["rows"]] == [("S", "halted", ["1-1"])]
    assert later["age_s"] >= found[0]["age_s"]
    assert spent(world.link, lambda: (reader.forget(), reader.find(TicketFilter(), "age", 9)))["hscan"] == 1
    world.apart_because = "the index was written by hand"
