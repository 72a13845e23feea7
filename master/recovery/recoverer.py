"""Recoverer: brings the pending entries of dead incarnations back to ``master``, a page per turn, so that the living go
on meanwhile.

It has no thread: the dispatcher gives it a turn, because it changes the board.
"""

from __future__ import annotations

import logging
from collections import deque

from usher.common.base.clock import now_s
from usher.common.base.log import event
from usher.master.leader.counters import LeaderCounters
from usher.master.leader.leader_scripts import LeaderScripts, Rejected
from usher.master.leader.validation import partition_entries
from usher.master.policy.board.board import Board

log = logging.getLogger(__name__)

#: Entries taken back by one script call.
PAGE = 500


class Recoverer:
    """Queue of the dead incarnations that are being recovered, first come first."""

    def __init__(self, counts: LeaderCounters | None = None) -> None:
        self._counts = counts or LeaderCounters()
        self._queue: deque[str] = deque()
        self._taken: dict[str, int] = {}
        self._began_s: dict[str, float] = {}
        self._unsure: list[bytes] = []
        self._quiet: set[str] = set()

    def add(self, incarnation: str, *, quietly: bool = False) -> None:
        """Begin to recover an incarnation. ``quietly``: it left after a clean drain, so nothing is pending, and its
        recovery is neither logged nor counted."""
        if incarnation not in self._taken:
            self._queue.append(incarnation)
            self._taken[incarnation] = 0
            self._began_s[incarnation] = now_s()
            if quietly:
                self._quiet.add(incarnation)

    def has(self, incarnation: str) -> bool:
        return incarnation in self._taken

    @property
    def is_busy(self) -> bool:
        """Return whether an incarnation is to be recovered."""
        return bool(self._queue)

    def take_unsure(self) -> list[bytes]:
        """Return the tickets whose records must be read again, each only once."""
        unsure, self._unsure = self._unsure, []
        return unsure

    def turn(self, board: Board, steps: LeaderScripts, rejected: list[Rejected]) -> None:
        """Recover one page of the first incarnation. Entries that can be handed to no consumer are added to
        ``rejected``."""
        if not self._queue:
            return
        incarnation = self._queue[0]
        page = steps.take_back(incarnation, PAGE)
        if page.alive:
            self._forget(incarnation)
            board.keep(incarnation)
            return
        usable, unusable = partition_entries(page.found)
        board.take_in(usable)
        board.learn(steps.marks.read(page.found))
        rejected += unusable
        self._taken[incarnation] += page.size
        if page.size == 0:
            self._end(incarnation, board, steps)

    def _end(self, incarnation: str, board: Board, steps: LeaderScripts) -> None:
        """End a recovery, when the incarnation's list is empty: its tickets are free, except those that a drain or a
        successor has."""
        consumer = board.consumers.get(incarnation)
        freed = steps.free_tickets(incarnation, list(consumer.tickets) if consumer is not None else [])
        if freed is None:
            return  # it was handed something after all; the next turn takes it back
        board.take_in(freed.parked)
        steps.losses.restored(freed.restored)
        if incarnation not in self._quiet:
            seconds = now_s() - self._began_s[incarnation]
            event(log, "consumer_recovered", consumer=incarnation, entries=self._taken[incarnation], seconds=seconds)
            self._counts.recovered(seconds)
        self._forget(incarnation)
        self._unsure += board.recovered(incarnation, freed.others)

    def _forget(self, incarnation: str) -> None:
        self._queue.remove(incarnation)
        self._quiet.discard(incarnation)
        del self._taken[incarnation], self._began_s[incarnation]
