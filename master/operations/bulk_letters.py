"""Bulk actions: redrive or drop all dead letters that match a filter, or give an order about all tickets that do, or
set a rule for each of them. A dry run counts them; the action goes page by page, and can be stopped at any time.

What came after the dry run is not touched: letters by their ids, tickets by those of their first messages. What was
done stays done when this master ends in between; the rest can be asked for again. When a reply is lost, or Redis
refuses, the letters are read again from the first one: those that were changed are gone, and their outcome is not
counted; a rule that was set then is replaced by itself.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from usher.common.base.clock import now_s, wall_ms
from usher.common.base.log import event
from usher.common.protocol.last_error import error_name
from usher.common.protocol.stream_id import rank
from usher.common.runtime.service import Service
from usher.master.operations.action_log import By, OperatorAction
from usher.master.operations.action_log import counted as outcome_of
from usher.master.operations.dead_letters import AT_ONCE, DeadLetters, LetterResult
from usher.master.operations.live_rules import RuleSetChange, TooManyRules
from usher.master.operations.ticket_orders import OrderResult
from usher.master.policy.letters import HALT, DeadLetter, LetterFilter, Preview
from usher.master.policy.rules import Rule, RuleAction, Target
from usher.master.policy.ticket_filter import TicketFilter
from usher.master.policy.ticket_orders import TicketOrder

log = logging.getLogger(__name__)

#: Most jobs that are remembered, and most letters that are named because nothing was done for them.
_REMEMBERED, _NAMED = 20, 200
_IDLE_S = 5.0
#: Seconds that a dry run may take.
_COUNT_S = 2.0
RUNNING, DONE, STOPPED = "running", "done", "stopped"
REDRIVE, DROP = "redrive", "drop"
#: Rule that a bulk action can set, one for each ticket.
PAUSE = RuleAction.PAUSE.value
#: Outcomes after which the letter is no longer where it was.
_GOOD = frozenset({"resumed", "added", "released", "dropped", "asked", "done", "set", "replaced"})


class TicketItem(NamedTuple):
    """A ticket that an order or a rule is about, for the preview as letters are. ``group``: what it has in common with
    others."""

    id: bytes
    group: tuple[str, str, str, str]
    head: str
    policy: str = HALT


#: Yields the rows of all tickets that fit; gives an order about one, and its first unfinished message; sets a rule.
FindTickets = Callable[[TicketFilter], Iterator[list[dict[str, Any]]]]
GiveOrder = Callable[[TicketOrder, str, By, str], OrderResult]
SetRule = Callable[[Rule, By], RuleSetChange]


class DryRun(NamedTuple):
    """What an action would touch. ``until``: an id above which nothing is meant; ``is_all``: there was time to count
    all."""

    preview: Preview
    until: bytes
    is_all: bool


@dataclass
class BulkJob:
    """A bulk action. Written by the service's thread, read by pages; ``told`` is the filter in words, ``count`` how
    many a dry run has found. ``touched``: the tickets that are done, of which each may be found again."""

    what: str
    wanted: LetterFilter | TicketFilter
    told: str
    by: By
    until: bytes
    count: int
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: str = RUNNING
    done: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)
    created_ms: int = field(default_factory=wall_ms)
    touched: set[bytes] = field(default_factory=set)
    pages: Iterator[Sequence[DeadLetter | TicketItem]] | None = None
    failed_turns: int = 0

    @property
    def is_of_tickets(self) -> bool:
        return isinstance(self.wanted, TicketFilter)

    @property
    def about(self) -> str:
        return f"{'tickets' if self.is_of_tickets else 'dead letters'}: {self.told}"

    @property
    def is_over(self) -> bool:
        return self.state in (DONE, STOPPED)


class BulkLetters(Service):
    """Service that runs the jobs of one master, one page at a time, oldest first; but a job that fails lets the others
    pass."""

    name = "bulk"

    def __init__(self, letters: DeadLetters, find: FindTickets, give: GiveOrder, set_rule: SetRule) -> None:
        super().__init__()
        self._letters = letters
        self._find = find
        self._give = give
        self._set_rule = set_rule
        self._jobs: list[BulkJob] = []
        self._lock = threading.Lock()

    # -- from other threads

    @property
    def jobs(self) -> list[BulkJob]:
        with self._lock:
            return list(reversed(self._jobs))

    def job(self, job_id: str) -> BulkJob | None:
        return next((one for one in self.jobs if one.id == job_id), None)

    def dry_run(self, wanted: LetterFilter | TicketFilter, now_ms: int) -> DryRun:
        """Count what an action would touch now, by Redis' clock. Raises what ``Link.call`` raises."""
        of_letters = isinstance(wanted, LetterFilter)
        until, ends_s = self._letters.last_id() if of_letters else b"%d-0" % now_ms, now_s() + _COUNT_S
        preview, seen = Preview(), set[bytes]()
        for page in self._pages(wanted, until):
            preview.add(item for item in page if item.id not in seen)  # a ticket may come twice
            seen.update(() if of_letters else (item.id for item in page))
            if now_s() > ends_s:
                return DryRun(preview, until, False)
        return DryRun(preview, until, True)

    def begin(
        self, what: str, wanted: LetterFilter | TicketFilter, told: str, by: By, until: bytes, count: int
    ) -> BulkJob:
        job = BulkJob(what, wanted, told, by, until, count)
        with self._lock:
            forgotten = next((one for one in self._jobs if one.is_over), None)
            if len(self._jobs) >= _REMEMBERED and forgotten is not None:
                self._jobs.remove(forgotten)
            self._jobs.append(job)
        self._letters.note(OperatorAction(by, what, job.about), "begun")
        event(log, f"bulk_{what}_started", count=count, filter=told, by=by.who, why=by.why)
        self.wake()
        return job

    def stop_job(self, job: BulkJob) -> None:
        with self._lock:
            if not job.is_over:
                job.state = STOPPED

    # -- the turn

    def run_once(self) -> float:
        waiting = [one for one in reversed(self.jobs) if one.state == RUNNING]
        job = min(waiting, key=lambda one: one.failed_turns, default=None)
        if job is None:
            return _IDLE_S
        try:
            job.pages = job.pages or self._pages(job.wanted, job.until)
            page = next(job.pages, None)
            if page is not None:
                self._change(job, page)
            elif self._ends(job):
                self._note(job)
        except Exception:
            job.pages = None
            job.failed_turns += 1
            raise
        return 0.0

    def _pages(self, wanted: LetterFilter | TicketFilter, until: bytes) -> Iterator[Sequence[DeadLetter | TicketItem]]:
        if isinstance(wanted, LetterFilter):
            return self._letters.all(wanted, until)
        found = (list(map(_item, page)) for page in self._find(wanted) if page)
        return ([item for item in page if not item.head or rank(item.head.encode()) <= rank(until)] for page in found)

    def _change(self, job: BulkJob, page: Sequence[DeadLetter | TicketItem]) -> None:
        heads = {item.id: item.head if isinstance(item, TicketItem) else "" for item in page}
        ids = [one for one in heads if one not in job.touched]
        for at in range(0, len(ids), AT_ONCE):
            if job.state != RUNNING:  # it was stopped
                return
            for outcome in self._outcomes(job, ids[at : at + AT_ONCE], heads):
                self.made_progress()
                if job.is_of_tickets:
                    job.touched.add(outcome.id)
                job.outcomes[outcome.word] += 1
                job.done += 1
                if outcome.word not in _GOOD and len(job.failures) < _NAMED:
                    job.failures.append((outcome.id.decode(errors="replace"), outcome.word))

    def _outcomes(self, job: BulkJob, ids: list[bytes], heads: Mapping[bytes, str]) -> Iterable[LetterResult]:
        if not job.is_of_tickets:
            return self._letters.redrive(ids) if job.what == REDRIVE else self._letters.drop(ids)
        step = self._ruled if job.what == PAUSE else self._ordered
        return (LetterResult(one, step(job, one, heads[one])) for one in ids if job.state == RUNNING)

    def _ordered(self, job: BulkJob, ticket: bytes, head: str) -> str:
        return self._give(TicketOrder(job.what), ticket.decode("utf-8", "surrogateescape"), job.by, head).outcome

    def _ruled(self, job: BulkJob, ticket: bytes, _head: str) -> str:
        by, name = job.by, ticket.decode("utf-8", "surrogateescape")
        rule = Rule(Target.TICKET, name, RuleAction(job.what), reason=by.why, who=by.who)
        try:
            return self._set_rule(rule, by).outcome
        except TooManyRules as full:  # then there is room for none of the others either
            self.stop_job(job)
            self._note(job)
            return str(full)

    def _ends(self, job: BulkJob) -> bool:
        with self._lock:  # it may be stopped at this moment
            was_running, job.state = job.state == RUNNING, DONE if job.state == RUNNING else job.state
        return was_running

    def _note(self, job: BulkJob) -> None:
        told = outcome_of(job.outcomes.elements())
        self._letters.note(OperatorAction(job.by, job.what, job.about), told)
        outcomes = dict(job.outcomes)
        event(log, f"bulk_{job.what}_finished", outcomes=outcomes, filter=job.told, by=job.by.who, why=job.by.why)


def _item(row: Mapping[str, Any]) -> TicketItem:
    error = row.get("last_error") or {}
    name = error_name(error.get("error_type", ""), error.get("error", ""))
    return TicketItem(
        row["ticket_id"].encode("utf-8", "surrogateescape"),
        (row["state"], name, "", error.get("at", "")),
        (row.get("message_ids") or [""])[0],
    )
