"""Faults one by one, each in a stream of its own that is well otherwise: each is found, and nothing else is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.audit.seeding import Seeder
from tests.audit.test_job import audit, plan
from usher.common.redis.client import Link
from usher.common.redis.embedded import EmbeddedRedis
from usher.master.audit.checks.findings import CHECKS, FENCES_PER_MS

if TYPE_CHECKING:
    from usher.master.audit.output.report import AuditReport

_S = 1_000_000
#: Ticket a has 1-1, 3-1, 5-1, ticket b the others; 6-1 is in processing, what becomes of 5-1 is said by each fault.
_DONE = ("5-1", "a", 5, 500, 550)


def _well(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE)


def _under_another_ticket(s: Seeder, link: Link) -> None:
    s.ran("c1:1", ("5-1", "z", 5, 500, 550))


def _twice_under_another_ticket(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE, ("5-1", "z", 5, 600, 650))


def _of_an_id_that_never_was(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE, ("99-1", "z", 5, 600, 650))


def _before_it_was_read(s: Seeder, link: Link) -> None:
    s.add(("7-1", "z"))
    s.ran("c1:1", _DONE, ("7-1", "z", 5, 600, 650))


def _group_set_back(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE)
    link.call("XGROUP", "SETID", s.keys.stream, s.keys.group, "3-1")


def _given_up_without_a_letter(s: Seeder, link: Link) -> None:
    s.ran("c1:1", (*_DONE, "gave_up"))


def _dead_and_pending(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE)
    s.letter("6-1", "b")


def _two_letters(s: Seeder, link: Link) -> None:
    s.ran("c1:1", (*_DONE, "gave_up"))
    for _ in range(2):
        s.letter("5-1", "a")


def _a_fence_of_tomorrow(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE)
    s.index("b", f"c1:1 {int(time.time() * 1000 + 86_400_000) * FENCES_PER_MS} 6-1")


def _claimed_by_two_tickets(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE)
    s.index("z", "c1:1 5 6-1")


def _a_damaged_record(s: Seeder, link: Link) -> None:
    """Entries that a damaged record may name are not told as lost."""
    link.call("DEL", s.keys.runs)
    s.ran("c1:1", ("1-1", "a", 5, 100, 150), record="50-1")
    link.call("XADD", s.keys.runs, "200-1", "batch", "{")


def _a_clock_ahead(s: Seeder, link: Link) -> None:
    """c1, which had the ticket a second later, did not begin before it."""
    s.add(("7-1", "a"))
    s.read()
    s.over("7-1")
    s.ran("c3:3", ("5-1", "a", 10_000 * FENCES_PER_MS, 15_001_000, 15_002_000), record="10010-1")
    s.ran("c1:1", ("7-1", "a", 11_000 * FENCES_PER_MS, 11_001_000, 11_002_000), record="11010-1")


def _an_overlap_hidden_by_a_clock(s: Seeder, link: Link) -> None:
    """By its own clock, 5 s back, c4 was over 2 s before c1 began; it ran for 3 s beside it."""
    s.ran("c1:1", ("5-1", "a", 21_000 * FENCES_PER_MS, 21_001_000, 21_100_000), record="21200-1")
    s.ran("c4:4", ("5-1", "a", 20_000 * FENCES_PER_MS, 15_001_000, 19_000_000, "stale"), record="24010-1")


def _half_a_second(s: Seeder, link: Link) -> None:
    s.ran("c1:1", ("5-1", "a", 21_000 * FENCES_PER_MS, 21_001_000, 21_100_000), record="21101-1")
    s.ran("c4:4", ("5-1", "a", 20_000 * FENCES_PER_MS, 20_001_000, 21_500_000, "stale"), record="21502-1")


#: What is wrong -> check -> what its examples are about.
FAULTS: list[tuple[Callable[[Seeder, Link], None], dict[str, set[str]]]] = [
    (_well, {}),
    (_under_another_ticket, {"ticket_differs": {"5-1"}}),
    (_twice_under_another_ticket, {"ticket_differs": {"5-1"}}),
    (_of_an_id_that_never_was, {"unread_and_run": {"99-1"}}),
    (_before_it_was_read, {"unread_and_run": {"7-1"}}),
    (_group_set_back, {"unread_and_run": {"4-1", "5-1"}}),
    (_given_up_without_a_letter, {"letter_missing": {"5-1"}}),
    (_dead_and_pending, {"dead_and_pending": {"6-1"}}),
    (_two_letters, {"letters_twice": {"5-1"}}),
    (_a_fence_of_tomorrow, {"fence_future": {"6-1"}}),
    (_claimed_by_two_tickets, {"indexed_twice": {"6-1"}}),
    (_a_damaged_record, {"run_unreadable": {"200-1"}}),
    (_a_clock_ahead, {"clock_wrong": {"c3:3"}}),
    (_an_overlap_hidden_by_a_clock, {"owners_overlap": {"5-1"}, "clock_wrong": {"c4:4"}}),
    (_half_a_second, {"owners_overlap": {"5-1"}}),
]


@pytest.fixture(scope="module")
def report(session: Any, redis_server: EmbeddedRedis) -> AuditReport:
    """The findings of one audit over all streams."""
    link = Link(redis_server.url, "test")
    try:
        link.call("FLUSHALL")
        for fault, _ in FAULTS:
            seeder = Seeder(link, fault.__name__)
            seeder.add(*((f"{n}-1", "ab"[n % 2 == 0]) for n in range(1, 7)))
            seeder.read()
            seeder.live("c1:1")
            seeder.own("c1:1", "6-1")
            seeder.index("b", "c1:1 5 6-1")
            seeder.over(*(f"{n}-1" for n in range(1, 6)))
            runs = ((f"{n}-1", "ab"[n % 2 == 0], 5, 100 * n, 100 * n + 50) for n in range(1, 5))
            seeder.ran("c1:1", *runs, record="100-1")
            fault(seeder, link)
        return audit(session, plan(redis_server.url, *(fault.__name__ for fault, _ in FAULTS)))
    finally:
        link.close()


@pytest.mark.parametrize(("fault", "expected"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_is_found_and_nothing_else(
    report: AuditReport, fault: Callable[[Seeder, Link], None], expected: dict[str, set[str]]
) -> None:
    found = [one for one in report.found if one.stream == fault.__name__]
    assert {one.check.name: {each.id or each.owner for each in one.examples} for one in found} == expected
    assert {*expected} <= {*CHECKS}
