"""Whoever tells how the system is - commands, page, metrics, explain - tells the same of it."""

from __future__ import annotations

from tests.integration.factories import FIELD, LEASE_MS, World
from tests.integration.gathered import Gathered
from tests.integration.memory import full_memory
from usher.common.base.clock import wall_ms
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.common.runtime.settings import CommonSettings
from usher.master.insight.live import LiveOverview
from usher.master.insight.stats import StreamStatsReader, lag_document
from usher.master.insight.status import StatusReader
from usher.master.operations.action_log import By
from usher.master.operations.live_rules import LiveRules
from usher.master.policy.board.plans import BoardFacts
from usher.master.policy.rules import Rule, RuleAction, Target
from usher.master.settings import MasterSettings
from usher.master.verbs.view import View


def _pulse(link: Link, keys: Keys) -> LiveOverview:
    made = LiveOverview(link, keys, FIELD, LEASE_MS, lambda ticket: None)
    made.snapshot(0)
    made.run_once()
    return made


def test_a_consumer_that_an_operator_drained_is_paused_for_everybody(world: World) -> None:
    leader, a, gone = world.elect(), world.join("a"), world.join("gone")
    world.owned(leader, a, b"T")
    world.end_lease(gone)
    for name in ("a", "gone"):
        LiveRules(world.link, world.keys).set(
            Rule(Target.CONSUMER, name, RuleAction.PAUSE, None, "why", "ann"), By("ann", "cli")
        )
    told = {"a": "paused", "gone": "lost"}
    assert {row["name"]: row["state"] for row in StatusReader(world.link, world.keys).consumers()} == told
    pulse = _pulse(world.link, world.keys)
    assert {row["name"]: row["state"] for row in pulse.consumers()} == told
    assert (pulse.last["living"], pulse.last["consumers"]["live"], pulse.last["consumers"]["paused"]) == (1, 0, 1)
    assert "those that drain or are paused take nothing more" in "".join(
        alarm["text"] for alarm in pulse.last["alarms"]
    )
    vitals = StreamStatsReader(world.link, world.keys).read()
    assert {name: load["state"] for name, load in vitals["consumers"].items()} == told
    assert lag_document(vitals)["consumers"] == 0, "what is to be scaled are those that take work"
    explained = View(CommonSettings(), world.link, world.keys).explain("T")
    assert "ann" in "".join(explained["sentences"])


def test_what_waits_behind_a_halted_message_is_told_alike(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    sent = world.owned(leader, a, b"T", *[b"%d-1" % number for number in (1000, 1001, 1002)])
    world.give_up(a, b"T", "halt")
    for later in (0, 1, 2):
        if later:
            sent += world.parked(leader, b"T", b"%d-1" % (2000 + later))
        [[row]] = [group["rows"] for group in _pulse(world.link, world.keys).last["groups"]]
        assert (row["state"], row["behind"], row["behind_is_exact"]) == ("halted", 2 + later, True)
        told = View(CommonSettings(), world.link, world.keys).explain("T")
        assert f"{2 + later} wait behind {sent[0].decode()}, the next is {sent[1].decode()}" in told["sentences"]
        assert (told["in_processing"], told["parked"], told["parked_is_exact"]) == (0, 2 + later, True)
        assert [entry["state"] for entry in told["entries"]] == ["halted", *["waiting"] * (2 + later)]


def test_the_leader_says_exactly_how_many_of_a_ticket_wait_which_and_since_when(world: World) -> None:
    world.elect()
    ids = tuple(b"%d-%d" % (wall_ms() - 31_000, number) for number in range(200))
    board = BoardFacts("open", 4_000, True, first=ids)
    told = View(CommonSettings(), world.link, world.keys, board=lambda ticket: board).explain("T")
    assert (told["parked"], told["parked_is_exact"], told["entries"][0]["id"]) == (4_000, True, ids[0].decode())
    following = f"3,999 wait behind {ids[0].decode()}, the next is {ids[1].decode()} (sent 31 s ago)"
    assert following in told["sentences"]


def test_what_was_not_looked_through_is_not_said_to_be_finished(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    for ticket in (b"T", b"U"):
        world.owned(leader, a, ticket)
        world.give_up(a, ticket, "skip")
    others = world.link.all_of([("XADD", world.keys.dead, "*", "a", "b")] * 200)  # by hand: the index lacks them
    few = {"lag": 0, "lag_is_exact": False}
    view = View(CommonSettings(), world.link, world.keys)
    told = [view.explain("T")]
    view.status.sources = lambda: few  # type: ignore[method-assign]
    told.append(view.explain("T"))
    assert [(one["state"], one["reasons"][0]["code"]) for one in told] == [
        ("idle", "nothing_to_do"),
        ("not_found", "not_looked_through"),
    ]
    assert "not all were searched" in told[0]["reasons"][0]["text"]
    world.link.call("XDEL", world.keys.dead, *others)
    found = View(CommonSettings(), world.link, world.keys).explain("T")
    assert [reason["code"] for reason in found["reasons"]] == ["nothing_to_do", "has_dead_letter"]
    none = View(CommonSettings(), world.link, world.keys).explain("none")
    assert none["reasons"][0]["text"].endswith("in processing: everything is finished, or nothing was ever sent")


def test_a_redis_that_takes_no_writes_is_what_a_ticket_waits_for(world: World) -> None:
    """It was said to wait for the leader, which reads the stream in order."""
    world.elect()
    world.join("a")
    world.send(b"T")
    explainer = View(CommonSettings(), world.link, world.keys)
    with full_memory(world.link):
        first, *_ = explainer.explain("T")["reasons"]
        assert first["code"] == "redis_refuses_writes"
        assert StatusReader(world.link, world.keys).overview()["write_trouble"] in first["text"]
    assert explainer.explain("T")["reasons"][0]["code"] == "lag"


def test_the_lag_is_the_same_wherever_it_is_told(world: World) -> None:
    world.elect()
    for _ in range(3):
        world.send(b"T")
    status = StatusReader(world.link, world.keys).overview()
    pulse = _pulse(world.link, world.keys).last
    vitals = StreamStatsReader(world.link, world.keys).read()
    assert (status["lag"], pulse["lag"], vitals["lag"]) == (3, 3, 3)
    assert (status["epoch"], status["leader_url"]) == (pulse["epoch"], pulse["leader_url"])


def test_what_waits_in_the_sources_is_part_of_the_lag_and_is_looked_at_for_all_who_ask(link: Link) -> None:
    world = Gathered(link)
    world.send("a", "1-1", "2-1")
    world.gather("a", quantum=1)
    world.send("b", "1-1", "2-1")
    link.call("DEL", world.keys.shares)  # nobody gathers any more
    of = link, world.keys, MasterSettings(ticket_stream="a,b", group="g").sources
    status = StatusReader(*of)
    document = lag_document(StreamStatsReader(link, world.keys, status.sources).read())
    assert (document["lag"], document["unfinished"]) == (4, 4), "one is in the work stream, one in a, two in b"
    world.send("b", "3-1")
    assert (status.sources() or {})["lag"] == 3, "what was seen a moment ago"
    assert (StatusReader(*of).sources() or {})["lag"] == 4
