"""Bulk jobs: a verb of a shelf about all items that a filter fits. A dry run counts them; the job goes page by page,
and can be stopped at any time.

What came after the dry run is not touched: letters by their ids, tickets by those of their first messages. What was
done stays done when this master ends in between; the rest can be asked for again. When a reply is lost, or Redis
refuses, the items are read again from the first one: letters that were changed are gone, and their outcome is not
counted; a rule that was set then is replaced by itself.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from usher.common.base.clock import wall_ms
from usher.common.base.log import event
from usher.common.runtime.service import Service
from usher.master.operations.action_log import OperatorAction, counted
from usher.master.verbs.verbs import NO_ROOM, Args, Shelf, Verb
from usher.master.verbs.view import View

#: Most jobs that are remembered, and most items that are named because nothing was done for them.
_REMEMBERED, _NAMED = 20, 200
_IDLE_S = 5.0
RUNNING, DONE, STOPPED = "running", "done", "stopped"


@dataclass
class BulkJob:
    """A bulk job, of the service or of a command. Written by its thread, read by pages; ``told`` is the filter in
    words, ``count`` how many a dry run has found. ``touched``: items that are done, of which a ticket may come
    again."""

    verb: Verb
    shelf: Shelf
    view: View
    args: Args
    wanted: Any
    told: str
    until: bytes
    count: int
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: str = RUNNING
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)
    created_ms: int = field(default_factory=wall_ms)
    touched: dict[bytes, None] = field(default_factory=dict)
    pages: Iterator[Sequence[Any]] | None = None
    failed_turns: int = 0

    @property
    def done(self) -> int:
        return self.outcomes.total()

    @property
    def is_over(self) -> bool:
        return self.state in (DONE, STOPPED)

    @property
    def what(self) -> str:
        return self.verb.noted or self.verb.word.replace("-", "_")

    @property
    def sentence(self) -> str:
        return self.verb.sentence(self.args, list(self.outcomes.elements()))

    def take(self, page: Sequence[Any], run: Callable[..., Iterable[Any]] | None = None) -> Iterator[None]:
        """Do it to the items of a page, in batches, until it is stopped. ``run``: does it in place of the verb's
        function."""
        items = [item for item in {item.id: item for item in page}.values() if item.id not in self.touched]
        for at in range(0, len(items), self.shelf.at_once):
            for result in (run or self.verb.run)(self.view, items[at : at + self.shelf.at_once], self.args):
                self.touched[result.id] = None
                self.outcomes[result.word] += 1
                if result.word not in self.shelf.good and len(self.failures) < _NAMED:
                    why = result.note or result.word
                    self.failures.append((result.id.decode(errors="replace"), why))
                if result.word == NO_ROOM:
                    self.state = STOPPED
                yield
                if self.state != RUNNING:
                    return

    def note(self, outcome: str, what: str = "") -> None:
        action = OperatorAction(self.view.by, what or self.what, f"{self.shelf.noun}s: {self.told}")
        self.view.action_log.note(action, outcome)


class BulkJobs(Service):
    """Service that runs the jobs of one master, one page at a time, oldest first; but a job that fails lets the others
    pass."""

    name = "bulk"

    def __init__(self) -> None:
        super().__init__()
        self._jobs: list[BulkJob] = []
        self._lock = threading.Lock()

    # -- from other threads

    @property
    def jobs(self) -> list[BulkJob]:
        with self._lock:
            return list(reversed(self._jobs))

    def job(self, job_id: str) -> BulkJob | None:
        return next((one for one in self.jobs if one.id == job_id), None)

    def begin(self, verb: Verb, view: View, args: Args, wanted: Any, told: str, until: bytes, count: int) -> BulkJob:
        assert verb.shelf is not None
        job = BulkJob(verb, verb.shelf, view, args, wanted, told, until, count)
        with self._lock:
            forgotten = next((one for one in self._jobs if one.is_over), None)
            if len(self._jobs) >= _REMEMBERED and forgotten is not None:
                self._jobs.remove(forgotten)
            self._jobs.append(job)
        job.note("begun")
        event("bulk_started", what=verb.name, count=count, filter=told, by=view.by.who, why=view.by.why)
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
            job.pages = job.pages or job.shelf.pages(job.view, job.wanted, job.until)
            page = next(job.pages, None)
            if page is not None:
                for _ in job.take(page):
                    self.made_progress()
                if NO_ROOM in job.outcomes:
                    self._note(job)
            elif self._ends(job):
                self._note(job)
        except Exception:
            job.pages = None
            job.failed_turns += 1
            raise
        return 0.0

    def _ends(self, job: BulkJob) -> bool:
        with self._lock:  # it may be stopped at this moment
            was_running, job.state = job.state == RUNNING, DONE if job.state == RUNNING else job.state
        return was_running

    def _note(self, job: BulkJob) -> None:
        job.note(counted(job.outcomes.elements()))
        by, outcomes = job.view.by, dict(job.outcomes)
        event("bulk_finished", what=job.verb.name, outcomes=outcomes, filter=job.told, by=by.who, why=by.why)
