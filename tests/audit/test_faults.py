"""Faults one by one, each in a stream of its own that is well otherwise: each is found, and nothing else is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.audit.seeding import LIMITS, Seeder
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


def _of_an_id_between_others(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE, ("3-7", "z", 5, 600, 650))


def _a_start_that_is_left_out(s: Seeder, link: Link) -> None:
    s.ran("c1:1", ("5-1", "a", 5, 500, 510, "failed", 1), ("5-1", "a", 5, 520, 530, "failed", 3))
    s.ran("c1:1", ("5-1", "a", 5, 540, 550, "done", 4))


def _a_start_that_is_counted_twice(s: Seeder, link: Link) -> None:
    s.ran("c1:1", ("5-1", "a", 5, 500, 510, "failed", 1), ("5-1", "a", 5, 520, 550, "done", 1))


def _more_failures_than_are_allowed(s: Seeder, link: Link) -> None:
    s.ran("c1:1", *(("5-1", "a", 5, 500 + 5 * n, 504 + 5 * n, "failed") for n in range(LIMITS.attempts + 1)))
    s.ran("c1:1", ("5-1", "a", 5, 540, 550))


def _called_later_again_and_again(s: Seeder, link: Link) -> None:
    """It is allowed, and so is a start of which nobody could tell: its owner's machine was lost."""
    s.ran("c1:1", *(("5-1", "a", 5, 500 + 2 * n, 501 + 2 * n, "retry_later") for n in range(20)))
    s.ran("c1:1", ("5-1", "a", 5, 540, 550))


def _a_fence_below_one_that_has_run(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE)
    s.index("b", "c1:1 4 6-1")


def _a_record_out_of_order(s: Seeder, link: Link) -> None:
    _one_more_is_owned(s)
    s.index("b", "c1:1 5 8-1 6-1")


def _a_record_with_an_id_twice(s: Seeder, link: Link) -> None:
    _one_more_is_owned(s)
    s.index("b", "c1:1 5 6-1 8-1 8-1")


def _one_more_is_owned(s: Seeder) -> None:
    s.ran("c1:1", _DONE)
    s.add(("8-1", "b"))
    s.read()
    s.own("c1:1", "8-1")


def _owned_and_never_told(s: Seeder, link: Link) -> None:
    _one_more_is_owned(s)
    link.call("HSET", s.keys.tickets, "b", "c1:1 5 6-1 8-1")


def _told_what_another_one_has(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE)
    s.live("c2:2")
    link.call("XGROUP", "CREATECONSUMER", s.keys.stream, s.keys.group, "c2:2")
    s.tell("c2:2", "b", "9 6-1")


def _told_what_was_not_read(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE)
    s.add(("9-1", "z"))
    s.tell("c1:1", "z", "5 9-1")


def _told_what_it_had(s: Seeder, link: Link) -> None:
    """An inbox is trimmed later: what it names may be over, and be somebody else's by now."""
    s.live("c2:2")
    link.call("XGROUP", "CREATECONSUMER", s.keys.stream, s.keys.group, "c2:2")
    s.tell("c2:2", "b", "3 6-1")
    s.ran("c1:1", _DONE)


def _a_lease_of_nobody(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE)
    link.call("SET", s.keys.lease("c7:7"), "live", "PX", 3_600_000)


def _a_consumer_that_never_registered(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE)
    link.call("SET", s.keys.lease("c7:7"), "live", "PX", 3_600_000)
    link.call("XGROUP", "CREATECONSUMER", s.keys.stream, s.keys.group, "c7:7")


def _a_stranger_with_a_colon(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE)
    s.add(("7-1", "z"))
    s.read()
    s.own("celery@host:worker", "7-1")


def _deleted_inside(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE)
    link.call("XDEL", s.keys.stream, "3-1")


def _lost_beside_streams_with_damage(s: Seeder, link: Link) -> None:
    """5-1 is in no record, and records of other streams cannot be read."""


def _a_key_of_another_type(s: Seeder, link: Link) -> None:
    link.call("SET", s.keys.attempts, "what")


def _counters_of_another_program(s: Seeder, link: Link) -> None:
    link.call("HSET", s.keys.counters, "unread_cut", "what")


def _letters_of_another_program(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE)
    for name in ("what", "what", "99999999999999999999-1", b"\xff", ""):
        link.call("XADD", s.keys.dead, "*", "usher-id", name, "usher-reason", "what")


def _attempts_of_another_program(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE)
    link.call("HSET", s.keys.attempts, "what", "what")


def _an_inbox_of_another_program(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE)
    s.tell("c1:1", "z", "what what")
    link.call("XADD", s.keys.inbox("c1:1"), "*", "fence", "what", "x", "")


def _numbers_beyond_all_bounds(s: Seeder, link: Link) -> None:
    s.ran("c1:1", _DONE)
    odd = (("end_us", -(2**70)), ("start_us", 2**63 - 1), ("fences", 2**63), ("attempts", 2**70))
    for n, (name, value) in enumerate(odd):
        columns = {"ids": ["5-1"], "tickets": ["a"], "fences": [5], "attempts": [1], "start_us": [500], "end_us": [550]}
        record = json.dumps({"consumer": "c1:1", **columns, name: [value]})
        link.call("XADD", s.keys.runs, f"18446744073709551614-{n}", "batch", record)


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
    (_of_an_id_between_others, {"unread_and_run": {"3-7"}}),
    (_a_start_that_is_left_out, {"attempts_wrong": {"5-1"}}),
    (_a_start_that_is_counted_twice, {"attempts_wrong": {"5-1"}}),
    (_more_failures_than_are_allowed, {"failed_often": {"5-1"}}),
    (_called_later_again_and_again, {}),
    (_a_fence_below_one_that_has_run, {"fence_low": {"6-1"}}),
    (_a_record_out_of_order, {"index_unordered": {"6-1"}}),
    (_a_record_with_an_id_twice, {"index_unordered": {"6-1"}}),
    (_owned_and_never_told, {"never_told": {"8-1"}}),
    (_told_what_another_one_has, {"inbox_differs": {"6-1"}}),
    (_told_what_was_not_read, {"inbox_differs": {"9-1"}}),
    (_told_what_it_had, {}),
    (_a_lease_of_nobody, {"lease_orphan": {"c7:7"}}),
    (_a_consumer_that_never_registered, {"unregistered": {"c7:7"}}),
    (_a_stranger_with_a_colon, {"stranger_owns": {"celery@host:worker"}}),
    (_deleted_inside, {}),
    (_lost_beside_streams_with_damage, {"lost": {"5-1"}}),
    (_a_key_of_another_type, {"key_foreign": {""}}),
    (_counters_of_another_program, {"key_foreign": {""}}),
    (_letters_of_another_program, {"letters_twice": {"what"}}),
    (_attempts_of_another_program, {"attempts_leaked": {"what"}}),
    (_an_inbox_of_another_program, {}),
    (_numbers_beyond_all_bounds, {"run_unreadable": {f"18446744073709551614-{n}" for n in range(4)}}),
]


@pytest.fixture(scope="module")
def server(short_tmp: Path) -> Iterator[EmbeddedRedis]:
    """A server that knows what was deleted from a stream."""
    with EmbeddedRedis(short_tmp / "faults", port=None, durable=False) as server:
        yield server


@pytest.fixture(scope="module", params=["local", pytest.param("spark", marks=pytest.mark.slow)])
def report(request: pytest.FixtureRequest, server: EmbeddedRedis) -> AuditReport:
    """The findings of one audit over all streams."""
    session = request.getfixturevalue(request.param)
    link = Link(server.url, "test")
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
        return audit(session, plan(server.url, *(fault.__name__ for fault, _ in FAULTS)))
    finally:
        link.close()


@pytest.mark.parametrize(("fault", "expected"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_is_found_and_nothing_else(
    report: AuditReport, fault: Callable[[Seeder, Link], None], expected: dict[str, set[str]]
) -> None:
    found = [one for one in report.found if one.stream == fault.__name__]
    assert {one.check.name: {each.id or each.owner for each in one.examples} for one in found} == expected
    assert {*expected} <= {*CHECKS}


def test_what_was_deleted_inside_is_said(report: AuditReport) -> None:
    assert [one for one in report.unproven if one.startswith("_deleted_inside: ")] == [
        "_deleted_inside: entries were deleted inside it, the last one 3-1 (XDEL); whether they were handled was not"
        " looked at"
    ]
