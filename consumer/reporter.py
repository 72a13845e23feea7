"""Reporter: tells the leader over HTTP what Redis has accepted, so that it frees tickets and hands over more at once.

A report is a hint. It frees by message id and incarnation, so doubled, late or reordered ones change nothing, and lost ones cost only
speed: the leader reads quiet tickets again. So a report is tried at every master once, and then dropped. Only one that comes too often for
the leader (429) is kept until the time that it tells.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence

import orjson

from common.clock import now_s
from common.log import event
from common.message import ticket_text
from common.service import Service
from consumer.master_client import MasterClient, MasterUnavailable

log = logging.getLogger(__name__)

#: Ids per report: what the master accepts at most.
MOST_IDS = 1000
#: A report does not follow the last one sooner than this, unless enough waits: freeing a ticket a little later costs nothing while there is room.
_PAUSE_S = 0.1
#: Longest pause that a master can ask for: by then the leader's reconciling look has found them.
_LONGEST_WAIT_S = 5.0
#: Ids that may wait to be reported; the oldest are dropped beyond, and the reconciling look of the leader finds them.
_MOST_WAITING = 50_000

Item = tuple[bytes, int, Sequence[bytes]]


class Reporter(Service):
    """Sends acknowledgement reports. ``add`` is called by the acker's thread.

    ``spare``: messages that this consumer may have beyond those that run. While half of them wait to be reported the others keep it busy.
    ``ticket_window``: the same of one ticket; the leader hands more of it over when half of them are done (master/policy/holdings.py).
    """

    name = "report"

    def __init__(self, masters: MasterClient, incarnation: str, spare: int, ticket_window: int) -> None:
        super().__init__()
        self._masters = masters
        self._incarnation = incarnation
        self._items: deque[Item] = deque()
        self._waiting: dict[bytes, int] = {}  # ids in _items by ticket
        self._size = 0  # and in all; the three are guarded by _lock
        self._lock = threading.Lock()
        self._enough = min(MOST_IDS, max(1, spare // 2))
        self._enough_of_one = max(1, ticket_window // 2)
        self._hurry = False
        self._last_s = self._not_before_s = -math.inf
        self.sent = 0
        self.dropped = 0

    def add(self, items: Iterable[Item]) -> None:
        """(ticket, fence, ids) that Redis answered OK or GONE."""
        with self._lock:
            was_empty = not self._items
            for item in items:
                self._items.append(item)
                if self._count(item, 1) >= self._enough_of_one:
                    self._hurry = True
            self._hurry = self._hurry or self._size >= self._enough
        while self._items and self._size > _MOST_WAITING:
            self._drop(self._take(), "too many wait")
        if was_empty or self._hurry:
            self.wake()

    def run_once(self) -> float:
        if not self._items:
            return self.stalls_after_s / 3
        early_s = self._early_s()
        if early_s > 0:
            return early_s
        self._last_s = now_s()
        report = self._take()
        try:
            answer = self._masters.post("/api/messages/acknowledge", self._body(report))
        except MasterUnavailable as problem:
            self._drop(report, str(problem))
            return _PAUSE_S
        if answer.status == 200:
            self.sent += 1
        elif answer.status == 429:
            self._put_back(report)
            wait_s = min(_LONGEST_WAIT_S, max(_PAUSE_S, answer.retry_after_s))
            self._not_before_s = now_s() + wait_s
            return wait_s
        elif answer.status == 409:  # ended, by a drain or otherwise: nothing is left to be freed, and what must stop work learns it from Redis
            self._drop(report, "this incarnation has ended", logging.INFO)
        else:
            self._drop(report, f"{answer.url} answered {answer.status}")
        return 0.0

    def _early_s(self) -> float:
        """Seconds until the next report may go."""
        pause_s = 0.0 if self._hurry else _PAUSE_S
        return max(self._not_before_s, self._last_s + pause_s) - now_s()

    def _count(self, item: Item, sign: int) -> int:
        """The ids of its ticket that wait, when those of ``item`` come (1) or go (-1)."""
        ticket, _, ids = item
        size = sign * len(ids)
        self._size += size
        waiting = self._waiting[ticket] = self._waiting.get(ticket, 0) + size
        if not waiting:
            del self._waiting[ticket]
        return waiting

    def _take(self) -> list[Item]:
        """Items of one report."""
        taken: list[Item] = []
        size = 0
        with self._lock:
            if self._size <= MOST_IDS:  # the usual case: all of them
                taken.extend(self._items)
                self._items.clear()
                self._waiting.clear()
                self._size = 0
            while self._items and size < MOST_IDS:
                item = self._items.popleft()
                room = MOST_IDS - size
                if len(item[2]) > room:
                    self._items.appendleft((item[0], item[1], item[2][room:]))
                    item = (item[0], item[1], item[2][:room])
                taken.append(item)
                size += len(item[2])
                self._count(item, -1)
            self._hurry = self._size >= self._enough or max(self._waiting.values(), default=0) >= self._enough_of_one
        return taken

    def _put_back(self, report: list[Item]) -> None:
        with self._lock:
            self._items.extendleft(reversed(report))
            for item in report:
                self._count(item, 1)

    def _body(self, report: list[Item]) -> bytes:
        tickets = [{"ticket_id": ticket_text(ticket), "fence": fence, "message_ids": list(map(bytes.decode, ids))} for ticket, fence, ids in report]
        return orjson.dumps({"incarnation": self._incarnation, "tickets": tickets})

    def _drop(self, report: list[Item], why: str, level: int = logging.WARNING) -> None:
        count = sum(len(ids) for _, _, ids in report)
        self.dropped += count
        event(log, "report_dropped", level=level, ids=count, why=why)

    def on_end(self) -> None:
        self._masters.close()
