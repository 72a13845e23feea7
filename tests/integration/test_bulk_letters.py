"""Redriving and dropping all letters that a filter means, orders and rules for all tickets: a dry run, then the action."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.abuse import check_contract
from tests.doors import acting
from tests.integration.factories import World
from usher.common.base.errors import ReplyUnknown
from usher.common.redis.client import CommandRefused
from usher.master.operations.action_log import ActionLog, By, StepResult
from usher.master.operations.live_rules import LiveRules, RuleSetChange
from usher.master.operations.shelves import DeadLetters
from usher.master.policy.letters import LetterFilter
from usher.master.policy.rules import Rule, alike
from usher.master.policy.states import TicketFilter
from usher.master.policy.ticket_orders import TicketOrder
from usher.master.verbs.verbs import (
    DELAYED,
    DONE,
    LETTERS,
    STOPPED,
    TICKETS,
    VERBS,
    Args,
    BulkJob,
    BulkJobs,
    DryRun,
    Shelf,
)
from usher.master.verbs.view import OrderResult

REDRIVE, DROP = "redrive", "drop"


@pytest.fixture
def letters(world: World) -> int:
    """250 letters of E0 and E1 by turns."""
    leader, a = world.elect(), world.join("a")
    for number in range(250):
        world.owned(leader, a, b"T%d" % number)
        world.give_up(a, b"T%d" % number, "skip", error=f"E{number % 2}: x")
    return 250


_ME, _RETRYING = By("me", "http", "why"), TicketFilter(frozenset({"retrying"}))


class Bulk(BulkJobs):
    """Jobs, and what their verbs act with."""

    def __init__(self, world: World, shelf: Shelf = LETTERS, **instead: Any) -> None:
        super().__init__()
        self.shelf, self.tools = shelf, acting(world.link, world.keys, _ME, **instead)

    def dry_run(self, wanted: Any, within_s: float = 10.0) -> DryRun:
        return self.shelf.dry_run(self.tools, wanted, within_s)

    def start(self, what: str, wanted: Any, found: DryRun) -> BulkJob:
        return self.begin(self.shelf.verbs[what], self.tools, Args(), wanted, "told", found.until, found.preview.count)


@pytest.fixture
def bulk(world: World) -> Iterator[Bulk]:
    yield Bulk(world)


def begun(bulk: Bulk, what: str, wanted: Any) -> BulkJob:
    """A job as it begins after its dry run."""
    return bulk.start(what, wanted, bulk.dry_run(wanted))


def turn_until(bulk: Bulk, job: BulkJob, state: str) -> None:
    for _ in range(100):
        if job.state == state:
            return
        bulk.run_once()
    raise AssertionError(job.state)


def test_it_can_be_started_and_stopped_as_any_service(world: World) -> None:
    check_contract(BulkJobs)


def test_a_dry_run_counts_and_what_comes_after_it_is_left_alone(bulk: Bulk, world: World, letters: int) -> None:
    wanted = LetterFilter(error="E0")
    with world.unchanged():
        found = bulk.dry_run(wanted)
    assert (found.preview.count, found.preview.groups[0].count, found.is_all) == (125, 125, True)
    late = ("usher-id", "9-9", "usher-ticket", "new", "usher-error", "E0: x", "usher-fields", "0")
    world.link.call("XADD", world.keys.dead, "*", *late)
    job = bulk.start(REDRIVE, wanted, found)
    turn_until(bulk, job, DONE)
    assert (job.done, dict(job.outcomes), job.failures) == (125, {"added": 125}, [])
    assert len(world.letter_ids()) == letters - 125 + 1
    assert not bulk.dry_run(LetterFilter(), -1.0).is_all


def test_it_stops_between_two_pages_and_says_what_was_done(bulk: Bulk, world: World, letters: int) -> None:
    job = begun(bulk, DROP, LetterFilter())
    bulk.run_once()
    bulk.stop_job(job)
    for _ in range(5):
        bulk.run_once()
    assert (job.state, job.done) == (STOPPED, 100)
    assert len(world.letter_ids()) == letters - 100


def test_letters_that_somebody_else_took_are_named(bulk: Bulk, world: World, letters: int) -> None:
    job = begun(bulk, DROP, LetterFilter())
    gone, letters_of = world.letter_ids()[0], DeadLetters(world.link, world.keys)
    real = bulk.tools.letters.drop

    def late(ids: list[bytes]) -> object:
        if gone in ids:
            letters_of.drop([gone])
        return real(ids)

    bulk.tools.letters.drop = late  # type: ignore[method-assign,assignment]
    turn_until(bulk, job, DONE)
    assert job.failures == [(gone.decode(), "gone")]
    assert job.done == letters


@pytest.mark.parametrize("is_done", [True, False])
def test_letters_whose_reply_was_lost_are_not_left_behind(
    bulk: Bulk, world: World, letters: int, is_done: bool
) -> None:
    job = begun(bulk, DROP, LetterFilter())
    real, lost = bulk.tools.letters.drop, list[int]()

    def lossy(ids: list[bytes]) -> object:
        if lost:
            return real(ids)
        lost.append(len(real(ids)) if is_done else len(ids))
        raise ReplyUnknown("the connection broke")

    bulk.tools.letters.drop = lossy  # type: ignore[method-assign,assignment]
    with pytest.raises(ReplyUnknown):
        bulk.run_once()
    turn_until(bulk, job, DONE)
    assert world.letter_ids() == []
    assert job.done == (letters - lost[0] if is_done else letters)


def test_a_job_that_runs_is_not_forgotten_for_new_ones(bulk: Bulk, world: World, letters: int) -> None:
    job = begun(bulk, DROP, LetterFilter())
    others = [begun(bulk, DROP, LetterFilter(error="none")) for _ in range(30)]
    assert bulk.job(job.id) is job
    assert (bulk.jobs[0], bulk.job(others[-1].id), bulk.job("unknown")) == (others[-1], others[-1], None)


def test_a_job_that_fails_again_and_again_holds_up_no_other(bulk: Bulk, world: World, letters: int) -> None:
    failing = begun(bulk, REDRIVE, LetterFilter(error="E0"))
    real = bulk.tools.letters.redrive

    def refused(ids: list[bytes]) -> object:
        raise CommandRefused("Redis: WRONGTYPE")

    bulk.tools.letters.redrive = refused  # type: ignore[method-assign,assignment]
    job = begun(bulk, DROP, LetterFilter(error="E1"))
    for _ in range(3):
        with contextlib.suppress(CommandRefused):
            bulk.run_once()
    turn_until(bulk, job, DONE)
    assert job.done == 125
    bulk.tools.letters.redrive = real  # type: ignore[method-assign]
    turn_until(bulk, failing, DONE)
    assert failing.done == 125


def test_an_order_is_about_messages_from_before_the_dry_run_each_ticket_once(world: World) -> None:
    def row(ticket: str, head: str) -> dict[str, Any]:
        return {"ticket_id": ticket, "state": "retrying", "message_ids": [head]}

    pages = [[row("T1", "1-0"), row("T2", "2-0")], [row("T2", "2-0")]]
    given: list[tuple[str, str]] = []

    def give(order: TicketOrder, ticket_id: str, head: str) -> OrderResult:
        given.append((ticket_id, head))
        if len(given) == 1:
            raise ReplyUnknown("lost")
        return OrderResult(ticket_id, order.value, "asked", "")

    bulk = Bulk(world, TICKETS, status=SimpleNamespace(each=lambda _: iter(pages)), give=give)
    found = bulk.dry_run(_RETRYING)
    assert found.preview.count == 2
    later = str(10**15)
    pages[:] = [[row("T1", f"{later}-0"), row("T2", "2-0")], [row("T2", "2-0"), row("T2", "3-0")]]
    job = bulk.start("give-up", _RETRYING, found)
    with pytest.raises(ReplyUnknown):
        bulk.run_once()
    turn_until(bulk, job, DONE)
    assert given == [("T2", "2-0"), ("T2", "2-0")]


def pausing(world: World, tickets: list[str], **instead: Any) -> Bulk:
    """Jobs that find these tickets."""

    def found(wanted: TicketFilter) -> Iterator[list[dict[str, Any]]]:
        yield [{"ticket_id": one, "state": "retrying", "message_ids": ["1-0"]} for one in tickets]

    return Bulk(world, TICKETS, status=SimpleNamespace(each=found), **instead)


def test_a_rule_is_set_for_each_ticket(world: World) -> None:
    tickets = ["T1", "T\udcff", "T3"]
    bulk = pausing(world, tickets)
    rules = bulk.tools.rules
    job = begun(bulk, "pause", _RETRYING)
    assert not rules.read().rules
    turn_until(bulk, job, DONE)
    book = rules.read()
    assert {(one.value, one.action.value, one.reason, one.who) for one in book.rules} == {
        (ticket, "pause", "why", "me") for ticket in tickets[:3]
    }
    assert [len(some) for some in alike(book.rules)] == [3]
    assert (dict(job.outcomes), job.failures) == ({"set": 3}, [])


def test_where_there_is_no_room_for_more_rules_it_stops_and_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("usher.master.operations.live_rules.MOST_RULES", 2)
    tickets = ["T1", "T2", "T3", "T4", "T5"]
    bulk = pausing(world, tickets)
    rules = bulk.tools.rules
    job = begun(bulk, "pause", _RETRYING)
    tickets.remove("T1")
    turn_until(bulk, job, STOPPED)
    assert (dict(job.outcomes), job.done, len(rules.read().rules)) == ({"set": 2, "no_room": 1}, 3, 2)
    [(ticket, why)] = job.failures
    assert (ticket, "lift some" in why) == ("T4", True)
    newest = ActionLog(world.link, world.keys).page(None, 1)[0][0]
    assert (newest["what"], newest["on"], newest["outcome"]) == ("pause", "tickets: told", "set 2, no_room 1")


def test_a_rule_whose_reply_was_lost_is_there_once_and_the_others_are_set_too(world: World) -> None:
    rules = LiveRules(world.link, world.keys)
    tried: list[str] = []

    def set_rule(rule: Rule, by: By) -> RuleSetChange:
        changed = rules.set(rule, by)
        tried.append(rule.value)
        if len(tried) == 2:
            raise ReplyUnknown("lost")
        return changed

    bulk = pausing(world, ["T1", "T2", "T3"], rules=SimpleNamespace(set=set_rule))
    job = begun(bulk, "pause", _RETRYING)
    with pytest.raises(ReplyUnknown):
        bulk.run_once()
    turn_until(bulk, job, DONE)
    assert tried == ["T1", "T2", "T2", "T3"]
    assert sorted(one.value for one in rules.read().rules) == ["T1", "T2", "T3"]
    assert (dict(job.outcomes), job.done) == ({"set": 2, "replaced": 1}, 3)


def test_what_was_done_before_redis_failed_is_counted_and_a_stop_is_heeded_behind_a_step() -> None:
    there, fails = [f"{number}-0" for number in range(1, 1001)], [True]

    def drop(ids: list[str]) -> Iterator[StepResult]:
        for one in ids:
            if one == "651-0" and fails.pop():
                raise CommandRefused("NOPERM")
            there.remove(one)
            yield StepResult(one.encode(), "dropped")

    view: Any = SimpleNamespace(delayed=SimpleNamespace(drop=drop))
    job = BulkJob(VERBS["delayed drop"], DELAYED, view, Args(), None, "", b"", 1000)
    page = [SimpleNamespace(id=one.encode()) for one in there]
    with pytest.raises(CommandRefused):
        list(job.take(page))
    assert job.outcomes == {"dropped": 650}
    fails.append(False)
    for _ in job.take(page):
        job.state = STOPPED
    assert (job.outcomes, len(there)) == ({"dropped": 850}, 150)
