"""Health is asked in rounds: so many at a time, everybody once, and judged when everybody was asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.factories import LEASE_MS, World
from tests.integration.memory import full_memory
from usher.common.protocol.registration import Registration
from usher.master.dispatch.dispatcher import Dispatcher
from usher.master.insight.status import consumer_rows
from usher.master.leader.elector import Lead
from usher.master.leader.limits import limits_of
from usher.master.membership import health_checker
from usher.master.membership.health_checker import HealthChecker
from usher.master.membership.registry import SILENT, RegisteredConsumer
from usher.master.operations.live_rules import read_rules
from usher.master.settings import MasterSettings


class _Asker:
    def close(self) -> None: ...


class _Checker(HealthChecker):
    asked: list[list[str]]
    told: list[frozenset[str]]
    silent_ones: frozenset[str] = frozenset()
    why = "ReadTimeoutError"

    def _ask_all(self, members: Mapping[str, RegisteredConsumer]) -> dict[str, str]:
        self.asked.append(list(members))
        return {name: self.why if name in self.silent_ones else "" for name in members}


def _checker(world: World, members: Mapping[str, RegisteredConsumer]) -> _Checker:
    steps = world.elect()
    lead = Lead()
    lead._set(steps.epoch, None)
    asker: Any = _Asker()
    closed: list[frozenset[str]] = []
    checker = _Checker(world.link, world.keys, lead, 2.0, 1, asker, lambda: members, LEASE_MS, closed.append)
    checker.asked, checker.told = [], closed
    return checker


def _members(count: int) -> dict[str, RegisteredConsumer]:
    made = [Registration(f"c{number}", "u", "http://127.0.0.1:1/", 1, 1, generation=1) for number in range(count)]
    return {one.incarnation: RegisteredConsumer(one, "live") for one in made}


def test_many_are_asked_one_slice_after_the_other_and_nobody_twice_in_a_round(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_checker, "_SLICE", 4)
    members = _members(10)
    checker = _checker(world, members)
    pauses_s = [checker.run_once() for _ in range(3)]
    assert [len(asked) for asked in checker.asked] == [4, 4, 2]
    assert sorted(name for asked in checker.asked for name in asked) == sorted(members)
    assert pauses_s[:2] == [4 / health_checker._PER_SECOND] * 2 and 1.0 < pauses_s[2] <= 2.0, "as the setting says"


def test_full_memory_keeps_nobodys_lease(world: World) -> None:
    joined = world.join("a").registration
    checker = _checker(world, {joined.incarnation: RegisteredConsumer(joined, "live")})
    checker.silent_ones, checker.why = frozenset([joined.incarnation]), "it says so itself: 503"
    with full_memory(world.link):
        checker.run_once()
    assert checker.revoked == 1
    assert world.link.call("HGET", world.keys.counters, SILENT) is None
    checker.run_once()
    assert world.link.call("HGET", world.keys.counters, SILENT) == joined.incarnation.encode()


def test_silence_alone_is_told_and_brings_no_new_tickets_and_is_revoked_without_renewals_only(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health_checker, "_SLICE", 1)
    one, two, three = world.join("a"), world.join("b"), world.join("c")
    members = {owner.incarnation: RegisteredConsumer(owner.registration, "live") for owner in (one, two, three)}
    checker = _checker(world, members)
    checker.silent_ones = frozenset({one.incarnation})

    def run_round() -> bytes | None:
        caplog.clear()
        rows = consumer_rows(world.link, world.keys, read_rules(world.link, world.keys), {})
        assert [row["incarnation"] for row in rows if row.get("silent")] == [name for told in before for name in told]
        for _ in members:
            assert checker.told[-1:] == before
            checker.run_once()
        return world.lease(one)

    before: list[frozenset[str]] = []
    assert run_round() == b"live"
    assert checker.told == [{one.incarnation}] and checker.silent == 1
    [told] = [record.facts for record in caplog.records if record.getMessage() == "consumer_silent"]  # type: ignore[attr-defined]
    assert told == {"consumer": one.incarnation, "url": one.registration.health_url, "why": checker.why}
    before = checker.told[-1:]
    assert run_round() == b"live" and not caplog.records, "it is told once"
    world.link.call("PEXPIRE", world.keys.lease(one.incarnation), LEASE_MS // 4)
    assert run_round() == b"revoked"
    assert (world.lease(two), world.lease(three)) == (b"live", b"live")
    assert checker.told[-1] == frozenset()


def test_who_says_that_it_is_not_well_is_revoked_though_it_renews(world: World) -> None:
    owners = [world.join(name) for name in "abc"]
    checker = _checker(world, {one.incarnation: RegisteredConsumer(one.registration, "live") for one in owners})
    checker.why = "it says so itself: acker is not running"
    checker.silent_ones = frozenset({owners[1].incarnation})
    checker.run_once()
    assert [world.lease(one) for one in owners] == [b"live", b"revoked", b"live"]


def test_who_is_silent_gets_tickets_while_nobody_else_takes_any(world: World) -> None:
    one, two = (RegisteredConsumer(world.join(name).registration, "live") for name in "ab")
    dispatcher = Dispatcher(world.link, world.keys, Lead(), limits_of(MasterSettings()))
    dispatcher.closed = frozenset({one.registration.incarnation})
    for state, takes in (("live", [False, True]), ("draining", [True, False]), ("live", [False, True])):
        roster = [one, replace(two, state=state)]
        dispatcher._follow_roster({member.registration.incarnation: member for member in roster})
        assert [known.accepts for known in dispatcher.board.consumers.values()] == takes


def test_that_most_are_silent_is_counted_for_as_long_as_it_is(world: World) -> None:
    checker = _checker(world, _members(3))
    checker.silent_ones = frozenset({"c0:1", "c1:1"})
    checker.run_once()
    assert checker.silent == 2
    checker.silent_ones = frozenset()
    checker.run_once()
    assert checker.silent == 0
    checker.silent_ones = frozenset({"c0:1", "c1:1"})
    checker.run_once()
    checker._lead._set(None, None)
    checker.run_once()
    assert checker.silent == 0, "who leads now counts"


def test_that_most_are_silent_is_logged_at_its_beginning_rarely_while_it_lasts_and_at_its_end(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(health_checker, "now_s", lambda: now_s)
    checker = _checker(world, _members(3))
    caplog.set_level("INFO", "usher.master.membership.health_checker")

    def logged() -> list[tuple[str, dict[str, object]]]:
        records = [
            (record.getMessage(), record.facts)
            for record in caplog.records
            if record.name == "usher.master.membership.health_checker"
        ]  # type: ignore[attr-defined]
        caplog.clear()
        return records

    for _ in range(140):
        checker.silent_ones = frozenset({"c0:1", "c1:1"})
        checker.run_once()
        now_s += 5
    told = logged()
    assert told == [("health_checks_failing", {"silent": 2, "of": 3, "for_s": lasts_s}) for lasts_s in (0, 300, 600)]
    checker.silent_ones = frozenset()
    checker.run_once()
    checker.run_once()
    assert logged() == [("health_checks_recovered", {"of": 3, "after_s": 700})]
    checker.silent_ones = frozenset({"c0:1", "c1:1"})
    checker.run_once()
    assert [action for action, _ in logged()] == ["health_checks_failing"], "a new one is told at once"


def test_silences_are_forgotten_with_the_lead_and_with_the_consumer(world: World) -> None:
    members = _members(3)
    checker = _checker(world, members)
    checker.silent_ones, checker._limit = frozenset({"c0:1"}), 5
    checker.run_once()
    assert checker._silences["c0:1"] == 1
    del members["c0:1"]
    checker.run_once()
    assert checker._silences == {"c1:1": 0, "c2:1": 0}
    checker._lead._set(None, None)
    checker.run_once()
    assert checker._silences == {}
