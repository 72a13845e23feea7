"""Redriving and dropping all letters that a filter means: counted first, done when somebody says so."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.abuse import check_contract
from tests.integration.factories import World
from usher.common.base.errors import ReplyUnknown
from usher.common.redis.client import CommandRefused
from usher.master.operations.action_log import ActionLog, By
from usher.master.operations.bulk_letters import (
    COUNTING,
    DONE,
    DROP,
    READY,
    REDRIVE,
    STOPPED,
    BulkJob,
    BulkLetters,
)
from usher.master.operations.dead_letters import DeadLetters
from usher.master.operations.live_rules import LiveRules, RuleSetChange
from usher.master.operations.ticket_orders import OrderResult
from usher.master.policy.letters import LetterFilter
from usher.master.policy.rules import Rule, alike
from usher.master.policy.ticket_filter import TicketFilter
from usher.master.policy.ticket_orders import TicketOrder

#: No orders about tickets: how they are found, orders given, and rules set.
_NO_TICKETS: Any = (lambda wanted: iter(()), None, None)


@pytest.fixture
def letters(world: World) -> int:
    """250 letters of E0 and E1 by turns."""
    leader, a = world.elect(), world.join("a")
    for number in range(250):
        world.owned(leader, a, b"T%d" % number)
        world.give_up(a, b"T%d" % number, "skip", error=f"E{number % 2}: x")
    return 250


@pytest.fixture
def bulk(world: World) -> Iterator[BulkLetters]:
    yield BulkLetters(DeadLetters(world.link, world.keys), *_NO_TICKETS)


def turn_until(bulk: BulkLetters, job: BulkJob, state: str) -> None:
    for _ in range(100):
        if job.state == state:
            return
        bulk.run_once()
    raise AssertionError(job.state)


def test_it_can_be_started_and_stopped_as_any_service(world: World) -> None:
    check_contract(lambda: BulkLetters(DeadLetters(world.link, world.keys), *_NO_TICKETS))


def test_nothing_is_done_before_somebody_says_so(bulk: BulkLetters, world: World, letters: int) -> None:
    job = bulk.prepare(REDRIVE, LetterFilter(error="E0"), "with the error E0", "me")
    assert not bulk.run(job, "me", "why"), "it is not counted yet"
    turn_until(bulk, job, READY)
    assert (job.preview.count, job.preview.groups[0].count) == (125, 125)
    bulk.run_once()
    assert len(world.letter_ids()) == letters
    assert bulk.run(job, "you", "it is mended")
    assert not bulk.run(job, "you", "twice")
    turn_until(bulk, job, DONE)
    assert (job.done, dict(job.outcomes), job.failures, job.who, job.why) == (
        125,
        {"added": 125},
        [],
        "you",
        "it is mended",
    )
    assert len(world.letter_ids()) == letters - 125


def test_what_is_written_after_the_count_is_left_alone(bulk: BulkLetters, world: World, letters: int) -> None:
    job = bulk.prepare(DROP, LetterFilter(), "all", "me")
    turn_until(bulk, job, READY)
    world.link.call(
        "XADD",
        world.keys.dead,
        "*",
        "usher-id",
        "9-9",
        "usher-ticket",
        "new",
        "usher-reason",
        "late",
        "usher-fields",
        "0",
    )
    bulk.run(job, "me", "")
    turn_until(bulk, job, DONE)
    assert len(world.letter_ids()) == 1


def test_it_stops_between_two_pages_and_says_what_was_done(bulk: BulkLetters, world: World, letters: int) -> None:
    job = bulk.prepare(DROP, LetterFilter(), "all", "me")
    turn_until(bulk, job, READY)
    bulk.run(job, "me", "")
    bulk.run_once()
    bulk.stop_job(job)
    for _ in range(5):
        bulk.run_once()
    assert (job.state, job.done) == (STOPPED, 100)
    assert len(world.letter_ids()) == letters - 100


@pytest.mark.parametrize("what", [DROP, REDRIVE])
def test_stopped_while_a_page_is_counted_it_changes_nothing(
    bulk: BulkLetters, world: World, letters: int, what: str
) -> None:
    job = bulk.prepare(what, LetterFilter(), "all", "me")
    real = bulk._letters.page

    def stopped_meanwhile(*args: object) -> object:
        found = real(*args)  # type: ignore[arg-type]
        if job.preview.count:
            bulk.stop_job(job)
        return found

    bulk._letters.page = stopped_meanwhile  # type: ignore[method-assign,assignment]
    turn_until(bulk, job, STOPPED)
    for _ in range(5):
        bulk.run_once()
    assert (job.state, job.done, dict(job.outcomes)) == (STOPPED, 0, {})
    assert len(world.letter_ids()) == letters


def test_letters_that_somebody_else_took_are_named(bulk: BulkLetters, world: World, letters: int) -> None:
    job = bulk.prepare(DROP, LetterFilter(), "all", "me")
    turn_until(bulk, job, READY)
    bulk.run(job, "me", "")
    gone, letters_of = world.letter_ids()[0], DeadLetters(world.link, world.keys)
    real = bulk._letters.drop

    def late(ids: list[bytes]) -> object:
        if gone in ids:
            letters_of.drop([gone])
        return real(ids)

    bulk._letters.drop = late  # type: ignore[method-assign,assignment]
    turn_until(bulk, job, DONE)
    assert job.failures == [(gone.decode(), "gone")]
    assert job.done == letters


def test_jobs_come_one_after_the_other_and_the_newest_is_shown_first(
    bulk: BulkLetters, world: World, letters: int
) -> None:
    first, second = (bulk.prepare(DROP, LetterFilter(error=error), error, "me") for error in ("E0", "E1"))
    assert bulk.jobs == [second, first]
    bulk.run_once()
    assert (first.preview.count > 0, second.state, second.preview.count) == (True, COUNTING, 0)
    turn_until(bulk, second, READY)
    assert (bulk.job(first.id), bulk.job("unknown")) == (first, None)


@pytest.mark.parametrize("is_done", [True, False])
def test_letters_whose_reply_was_lost_are_not_left_behind(
    bulk: BulkLetters, world: World, letters: int, is_done: bool
) -> None:
    job = bulk.prepare(DROP, LetterFilter(), "all", "me")
    turn_until(bulk, job, READY)
    bulk.run(job, "me", "")
    real, lost = bulk._letters.drop, list[int]()

    def lossy(ids: list[bytes]) -> object:
        if lost:
            return real(ids)
        lost.append(len(real(ids)) if is_done else len(ids))
        raise ReplyUnknown("the connection broke")

    bulk._letters.drop = lossy  # type: ignore[method-assign,assignment]
    with pytest.raises(ReplyUnknown):
        bulk.run_once()
    turn_until(bulk, job, DONE)
    assert world.letter_ids() == []
    assert job.done == (letters - lost[0] if is_done else letters)


def test_a_job_that_runs_is_not_forgotten_for_new_ones(bulk: BulkLetters, world: World, letters: int) -> None:
    job = bulk.prepare(DROP, LetterFilter(), "all", "me")
    turn_until(bulk, job, READY)
    bulk.run(job, "me", "")
    others = [bulk.prepare(DROP, LetterFilter(error="none"), "none", "me") for _ in range(30)]
    assert bulk.job(job.id) is job
    assert len(bulk.jobs) < len(others)
    assert bulk.job(others[-1].id) is others[-1]


def test_a_job_that_fails_again_and_again_holds_up_no_other(bulk: BulkLetters, world: World, letters: int) -> None:
    failing = bulk.prepare(REDRIVE, LetterFilter(error="E0"), "E0", "me")
    turn_until(bulk, failing, READY)
    bulk.run(failing, "me", "")
    real = bulk._letters.redrive

    def refused(ids: list[bytes]) -> object:
        raise CommandRefused("Redis: WRONGTYPE")

    bulk._letters.redrive = refused  # type: ignore[method-assign,assignment]
    job = bulk.prepare(DROP, LetterFilter(error="E1"), "E1", "me")
    for _ in range(3):
        with contextlib.suppress(CommandRefused):
            bulk.run_once()
    turn_until(bulk, job, READY)
    bulk.run(job, "me", "")
    turn_until(bulk, job, DONE)
    assert job.done == 125
    bulk._letters.redrive = real  # type: ignore[method-assign]
    turn_until(bulk, failing, DONE)
    assert failing.done == 125


def test_an_order_is_about_the_tickets_and_the_messages_that_were_counted(world: World) -> None:
    """What fits by the time it is run, and what its first message has left behind, nobody has looked at."""

    def row(ticket: str, head: str) -> dict[str, Any]:
        return {"ticket_id": ticket, "state": "retrying", "message_ids": [head]}

    pages = [[row("T1", "1-0"), row("T2", "2-0")], [row("T2", "2-0")]]
    given: list[tuple[str, str]] = []

    def give(order: TicketOrder, ticket_id: str, by: By, head: str) -> OrderResult:
        given.append((ticket_id, head))
        if len(given) == 1:
            raise ReplyUnknown("lost")
        return OrderResult(ticket_id, order.value, "asked", "")

    bulk = BulkLetters(DeadLetters(world.link, world.keys), lambda wanted: iter(pages), give, None)  # type: ignore[arg-type]
    job = bulk.prepare("give_up", TicketFilter(frozenset({"retrying"})), "retrying", "me")
    turn_until(bulk, job, READY)
    assert job.preview.count == 2
    pages[:] = [[row("T1", "5-0"), row("T2", "2-0"), row("T3", "3-0")], [row("T2", "2-0"), row("T2", "9-0")]]
    assert bulk.run(job, "me", "why")
    with pytest.raises(ReplyUnknown):
        bulk.run_once()
    turn_until(bulk, job, DONE)
    assert given == [("T2", "2-0"), ("T2", "2-0")]


def rule_setter(world: World, tickets: list[str]) -> tuple[LiveRules, BulkLetters]:
    """Bulk actions that find these tickets; a moment later each has another first message."""
    rules, heads = LiveRules(world.link, world.keys), itertools.count(1)

    def found(wanted: TicketFilter) -> Iterator[list[dict[str, Any]]]:
        head = f"{next(heads)}-0"
        yield [{"ticket_id": one, "state": "retrying", "message_ids": [head]} for one in tickets]

    return rules, BulkLetters(DeadLetters(world.link, world.keys), found, None, rules.set)  # type: ignore[arg-type]


def test_a_rule_is_set_for_each_ticket_that_was_counted_whatever_its_first_message_is_by_then(world: World) -> None:
    tickets = ["T1", "T\udcff", "T3"]
    rules, bulk = rule_setter(world, tickets)
    job = bulk.prepare("pause", TicketFilter(frozenset({"retrying"})), "retrying", "ann")
    turn_until(bulk, job, READY)
    assert not rules.read().rules
    tickets.append("newcomer")
    assert bulk.run(job, "ann", "mended soon")
    turn_until(bulk, job, DONE)
    book = rules.read()
    assert {(one.value, one.action.value, one.reason, one.who) for one in book.rules} == {
        (ticket, "pause", "mended soon", "ann") for ticket in tickets[:3]
    }
    assert [len(some) for some in alike(book.rules)] == [3]
    assert (dict(job.outcomes), job.failures) == ({"set": 3}, [])


def test_where_there_is_no_room_for_more_rules_it_stops_and_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("usher.master.operations.live_rules.MOST_RULES", 2)
    tickets = ["T1", "T2", "T3", "T4", "T5"]
    rules, bulk = rule_setter(world, tickets)
    job = bulk.prepare("pause", TicketFilter(frozenset({"retrying"})), "retrying", "ann")
    turn_until(bulk, job, READY)
    tickets.remove("T1")
    bulk.run(job, "ann", "why")
    turn_until(bulk, job, STOPPED)
    assert (job.outcomes["set"], job.done, len(rules.read().rules)) == (2, 3, 2)
    [(ticket, why)] = job.failures
    assert (ticket, "lift some" in why) == ("T4", True)
    newest = ActionLog(world.link, world.keys).page(None, 1)[0][0]
    assert (newest["what"], newest["on"], newest["outcome"]) == ("pause", "5 tickets: retrying", "set 2")


def test_a_rule_whose_reply_was_lost_is_there_once_and_the_others_are_set_too(world: World) -> None:
    rules, _ = rule_setter(world, [])
    tried: list[str] = []

    def set_rule(rule: Rule, by: By) -> RuleSetChange:
        changed = rules.set(rule, by)
        tried.append(rule.value)
        if len(tried) == 2:
            raise ReplyUnknown("lost")
        return changed

    rows = [{"ticket_id": one, "state": "retrying", "message_ids": ["1-0"]} for one in ("T1", "T2", "T3")]
    bulk = BulkLetters(DeadLetters(world.link, world.keys), lambda wanted: iter([rows]), None, set_rule)  # type: ignore[arg-type]
    job = bulk.prepare("pause", TicketFilter(frozenset({"retrying"})), "retrying", "ann")
    turn_until(bulk, job, READY)
    bulk.run(job, "ann", "why")
    with pytest.raises(ReplyUnknown):
        bulk.run_once()
    turn_until(bulk, job, DONE)
    assert tried == ["T1", "T2", "T2", "T3"]
    assert [one.value for one in rules.read().rules] == ["T1", "T2", "T3"]
    assert (dict(job.outcomes), job.done) == ({"set": 2, "replaced": 1}, 3)
