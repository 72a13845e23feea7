"""Bulk actions: redrive or drop all dead letters that match a filter, or give an order about all tickets that do, or
set a rule for each of them. They are counted first; the action begins on request, goes page by page, and can be stopped
at any time.

Letters written after the count are not touched. What was done stays done when this master ends in between; the rest can
be asked for again. When a reply is lost, or Redis refuses, the letters are read again from the first one: those that
were changed are gone, and their outcome is not counted; a rule that was set then is replaced by itself.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from usher.common.base.clock import wall_ms
from usher.common.base.log import event
from usher.common.base.text import pluralize
from usher.common.protocol.last_error import error_name
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
COUNTING, READY, RUNNING, DONE, STOPPED = "counting", "ready", "running", "done", "stopped"
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


@dataclass
class BulkJob:
    """A bulk action. Written by the service's thread, read by pages; ``told`` is the filter in words. ``heads``: the
    tickets that were counted and are not done, each with its first message: an order is about that one alone, a rule is
    about the ticket."""

    what: str
    wanted: LetterFilter | TicketFilter
    told: str
    who: str
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    why: str = ""
    state: str = COUNTING
    preview: Preview = field(default_factory=Preview)
    until: bytes = b""
    done: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)
    created_ms: int = field(default_factory=wall_ms)
    heads: dict[bytes, str] = field(default_factory=dict)
    pages: Iterator[Sequence[DeadLetter | TicketItem]] | None = None
    failed_turns: int = 0

    @property
    def is_of_tickets(self) -> bool:
        return isinstance(self.wanted, TicketFilter)

    @property
    def counted(self) -> str:
        """Return in words how many it touches."""
        return pluralize(self.preview.count, "ticket" if self.is_of_tickets else "dead letter")

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
        """The jobs, newest first."""
        with self._lock:
            return list(reversed(self._jobs))

    def job(self, job_id: str) -> BulkJob | None:
        return next((one for one in self.jobs if one.id == job_id), None)

    def prepare(self, what: str, wanted: LetterFilter | TicketFilter, told: str, who: str) -> BulkJob:
        """Add a job that counts what it would do, and then waits to be run."""
        job = BulkJob(what, wanted, told, who)
        with self._lock:
            forgotten = next((one for one in self._jobs if one.state != RUNNING), None)
            if len(self._jobs) >= _REMEMBERED and forgotten is not None:
                self._jobs.remove(forgotten)
            self._jobs.append(job)
        self.wake()
        return job

    def run(self, job: BulkJob, who: str, why: str) -> bool:
        """Begin a job. Return False when it is not ready, or was begun before."""
        with self._lock:
            if job.state != READY:
                return False
            job.who, job.why, job.pages, job.state = who, why, None, RUNNING
        event(log, f"bulk_{job.what}_started", count=job.preview.count, filter=job.told, by=who, why=why)
        self.wake()
        return True

    def stop_job(self, job: BulkJob) -> None:
        with self._lock:
            if not job.is_over:
                job.state = STOPPED

    # -- the turn

    def run_once(self) -> float:
        waiting = [one for one in reversed(self.jobs) if one.state in (COUNTING, RUNNING)]
        job = min(waiting, key=lambda one: one.failed_turns, default=None)
        if job is None:
            return _IDLE_S
        try:
            self._go_on(job)
        except Exception:
            job.pages = None
            job.failed_turns += 1
            if job.state == COUNTING:
                job.preview, job.heads = Preview(), {}
            raise
        return 0.0

    def _go_on(self, job: BulkJob) -> None:
        """Do one page of a job."""
        if not job.until:
            job.until = self._letters.last_id()
        if job.pages is None:
            job.pages = self._pages(job)
        page = next(job.pages, None)
        with self._lock:
            state = job.state  # the job may have been stopped while the page was read
        if page is None:
            self._ends(job, state)
        elif state == COUNTING:
            fresh = [item for item in page if item.id not in job.heads]  # a ticket may come twice
            job.heads.update({item.id: item.head for item in fresh if isinstance(item, TicketItem)})
            job.preview.add(fresh)
        elif state == RUNNING:
            self._change(job, page)

    def _pages(self, job: BulkJob) -> Iterator[Sequence[DeadLetter | TicketItem]]:
        if isinstance(job.wanted, LetterFilter):
            return self._letters.all(job.wanted, job.until)
        return (list(map(_item, page)) for page in self._find(job.wanted) if page)

    def _change(self, job: BulkJob, page: Sequence[DeadLetter | TicketItem]) -> None:
        ids = [item.id for item in page if not isinstance(item, TicketItem) or self._is_meant(job, item)]
        for at in range(0, len(ids), AT_ONCE):
            if job.state != RUNNING:  # it was stopped
                return
            for outcome in self._outcomes(job, ids[at : at + AT_ONCE]):
                self.made_progress()
                job.heads.pop(outcome.id, None)
                job.outcomes[outcome.word] += 1
                job.done += 1
                if outcome.word not in _GOOD and len(job.failures) < _NAMED:
                    job.failures.append((outcome.id.decode(errors="replace"), outcome.word))

    def _outcomes(self, job: BulkJob, ids: list[bytes]) -> Iterable[LetterResult]:
        if not job.is_of_tickets:
            return self._letters.redrive(ids) if job.what == REDRIVE else self._letters.drop(ids)
        by, step = By(job.who, "http", job.why), self._ruled if job.what == PAUSE else self._ordered
        return (LetterResult(one, step(job, one, by)) for one in ids if job.state == RUNNING)

    def _is_meant(self, job: BulkJob, item: TicketItem) -> bool:
        return item.id in job.heads and (job.what == PAUSE or job.heads[item.id] == item.head)

    def _ordered(self, job: BulkJob, ticket: bytes, by: By) -> str:
        order = TicketOrder(job.what)
        return self._give(order, ticket.decode("utf-8", "surrogateescape"), by, job.heads[ticket]).outcome

    def _ruled(self, job: BulkJob, ticket: bytes, by: By) -> str:
        name = ticket.decode("utf-8", "surrogateescape")
        rule = Rule(Target.TICKET, name, RuleAction(job.what), reason=by.why, who=by.who)
        try:
            return self._set_rule(rule, by).outcome
        except TooManyRules as full:  # then there is room for none of the others either
            self.stop_job(job)
            self._note(job)
            return str(full)

    def _ends(self, job: BulkJob, state: str) -> None:
        with self._lock:
            job.pages = None
            if not job.is_over:
                job.state = READY if state == COUNTING else DONE
        if state == RUNNING:
            self._note(job)

    def _note(self, job: BulkJob) -> None:
        """Say in the action log and in the log what became of a job that ran."""
        on = f"{job.counted}: {job.told}"
        self._letters.note(
            OperatorAction(By(job.who, "http", job.why), job.what, on), outcome_of(job.outcomes.elements())
        )
        event(log, f"bulk_{job.what}_finished", outcomes=dict(job.outcomes), filter=job.told, by=job.who, why=job.why)


def _item(row: Mapping[str, Any]) -> TicketItem:
    error = row.get("last_error") or {}
    name = error_name(error.get("error_type", ""), error.get("error", ""))
    return TicketItem(
        row["ticket_id"].encode("utf-8", "surrogateescape"),
        (row["state"], name, "", error.get("at", "")),
        (row.get("message_ids") or [""])[0],
    )
