"""When a report goes: at once after a pause, and within it only when enough waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from tests.clock import Clock, clock_of
from usher.consumer.execution import reporter as reporter_module
from usher.consumer.execution.reporter import Reporter
from usher.consumer.lifecycle.master_client import MasterAnswer, MasterClient


class Leader:
    """Notes the ids of every report, in place of HTTP."""

    def __init__(self) -> None:
        self.reports: list[list[str]] = []
        self.status = 200
        self.longest_s = 1.0
        self.window: int | None = None
        self.retrying: list[int] = []

    def post(self, _path: str, body: bytes, headers: dict[str, str]) -> MasterAnswer:
        headers = dict(headers)
        self.retrying.append(int(headers.pop("Usher-Retrying", "0")))
        assert headers == {"Prefer": "return=minimal"}
        self.reports.append(
            [entry_id for ticket in orjson.loads(body)["tickets"] for entry_id in ticket["message_ids"]]
        )
        return MasterAnswer("", self.status, {}, 0.0, window=self.window)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return clock_of(monkeypatch, reporter_module)


def items(first: int, count: int, of_one: bool = False) -> list[Any]:
    ids = [b"%d-0" % number for number in range(first, first + count)]
    return [(b"T", 7, ids)] if of_one else [(b"T" + entry_id, 7, [entry_id]) for entry_id in ids]


def begun(spare: int, window: int = 128, keeps_up: Callable[[], bool] = lambda: False) -> tuple[Reporter, Leader]:
    """A reporter that has just reported one id."""
    leader = Leader()
    reporter = Reporter(leader, "c:1", 0, spare, window, keeps_up)  # type: ignore[arg-type]
    reporter.add(items(1, 1))
    assert reporter.run_once() == 0.0
    assert leader.reports == [["1-0"]], "the first one goes at once"
    return reporter, leader


def test_masters_that_never_answer_do_not_make_the_consumer_unwell() -> None:
    """Masters revoke the lease of one that says so for ten seconds, as it did with three of them."""
    masters = MasterClient([f"http://m{number}:8700" for number in range(5)], "")
    assert masters.longest_s == 6 * (1 + 5)
    assert Reporter(masters, "c:1", 8, 108, 128).stalls_after_s > masters.longest_s + 5


def test_what_follows_waits_for_the_end_of_the_pause(clock: Clock) -> None:
    reporter, leader = begun(spare=2000)
    reporter.add(items(2, 100))
    assert 0 < reporter.run_once() <= 0.1
    reporter.add(items(102, 1))
    clock.s += 0.05
    assert 0 < reporter.run_once() <= 0.06
    assert len(leader.reports) == 1
    clock.s += 0.06
    reporter.run_once()
    assert [len(report) for report in leader.reports] == [1, 101]


def test_while_the_consumer_keeps_up_the_pause_is_longer_and_ends_when_it_does_not(clock: Clock) -> None:
    keeps_up = True
    reporter, leader = begun(2000, keeps_up=lambda: keeps_up)
    reporter.add(items(2, 1))
    clock.s += 0.3
    assert 0.15 < reporter.run_once() <= 0.21
    assert len(leader.reports) == 1
    reporter._wake.clear()
    reporter.add(items(3, 1))
    assert not reporter._wake.wait(0), "it can wait"
    keeps_up = False
    reporter.add(items(4, 1))
    assert reporter._wake.wait(0)
    reporter._wake.clear()
    assert reporter.run_once() == 0.0
    assert leader.reports[1:] == [["2-0", "3-0", "4-0"]]
    reporter.add(items(6, 1))
    reporter.run_once()
    reporter._wake.clear()
    reporter.add(items(7, 1))
    assert not reporter._wake.wait(0), "the thread knows, and sleeps no longer than the short pause"
    clock.s += 0.11
    assert reporter.run_once() == 0.0
    assert leader.reports[2:] == [["6-0", "7-0"]]
    keeps_up = True
    reporter.add(items(5, 1))
    clock.s += 0.51
    assert reporter.run_once() == 0.0
    assert leader.reports[3:] == [["5-0"]]


def test_who_keeps_up_again_and_again_is_woken_once_for_each_report(clock: Clock) -> None:
    """As with one message at a time, whose lane is ready for a moment after each."""
    keeps_up = True
    reporter, _ = begun(2000, keeps_up=lambda: keeps_up)
    wakes = 0
    for number in range(2, 52):
        reporter._wake.clear()
        keeps_up = False
        reporter.add(items(number, 1))
        wakes += reporter._wake.is_set()
        keeps_up = True
        assert reporter.run_once() > 0
    assert wakes <= 2


def test_of_very_many_the_first_thousand_go_in_order_and_the_rest_at_once(clock: Clock) -> None:
    reporter, leader = begun(spare=20)
    clock.s += 1
    reporter.add([(b"T%d" % ticket, 7, [b"%d-%d" % (ticket, number) for number in range(700)]) for ticket in range(4)])
    for _ in range(3):
        assert reporter.run_once() == 0.0
    told = [f"{ticket}-{number}" for ticket in range(4) for number in range(700)]
    assert leader.reports[1:] == [told[:1000], told[1000:2000], told[2000:]]
    assert reporter._size == 0


def test_a_window_that_the_leader_tells_takes_the_place_of_the_capacity(clock: Clock) -> None:
    """The leader begins with twice the slots, and lets a fast consumer have more as soon as it hears of it."""
    leader = Leader()
    reporter = Reporter(leader, "c:1", 8, 2000, 512)  # type: ignore[arg-type]
    reporter.add(items(1, 1))
    reporter._last_s = clock.s  # it has just reported
    assert reporter.run_once() > 0 and not leader.reports
    leader.window = 80
    reporter.add(items(2, 3))
    assert reporter.run_once() == 0.0, "four are half of what it has beyond those that run"
    reporter.add(items(10, 35))
    assert reporter.run_once() > 0 and len(leader.reports) == 1
    reporter.add(items(100, 1))
    assert reporter.run_once() == 0.0 and len(leader.reports) == 2


def test_while_nobody_leads_it_is_said_now_and_then_how_many_were_dropped(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[int, str]] = []
    monkeypatch.setattr(reporter_module, "event", lambda action, **facts: said.append((facts["ids"], facts["why"])))
    reporter, leader = begun(spare=2000)
    leader.status = 503
    for number in range(2, 42):
        reporter.add(items(number, 1))
        clock.s += 0.5
        reporter.run_once()
    assert [ids for ids, _ in said] == [1, 20]
    assert "answered 503" in said[0][1]
    assert reporter.dropped == 40


def test_the_leader_hears_how_many_tickets_wait_for_a_retry_although_nothing_ends(clock: Clock) -> None:
    reporter, leader = begun(spare=1000)
    waiting, woken = [0], []
    reporter.retrying = lambda: waiting[0]
    reporter.wake = lambda: woken.append(waiting[0])  # type: ignore[method-assign]
    reporter.hear_of_retry()
    assert not woken
    clock.s += 1.0
    waiting[0] = 3
    reporter.hear_of_retry()
    assert woken == [3]
    assert reporter.run_once() == 0.0
    assert (leader.retrying, leader.reports[1:]) == ([0, 3], [[]])
    wait_s = reporter.run_once()
    assert 0 < wait_s <= 5 and len(leader.reports) == 2, "it has been told"
    waiting[0] = 2
    reporter.run_once()
    assert len(leader.reports) == 2, "fewer are told with what ends"
    clock.s += 5.0
    reporter.run_once()
    assert leader.retrying == [0, 3, 2], "another master may lead"
    waiting[0] = 0
    clock.s += 60.0
    reporter.run_once()
    assert len(leader.reports) == 3
    reporter.add(items(2, 1))
    reporter.run_once()
    assert leader.retrying == [0, 3, 2, 0] and leader.reports[-1] == ["2-0"]
