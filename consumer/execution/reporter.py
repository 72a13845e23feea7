"""Reporter: it tells the leader over HTTP what Redis has accepted, so that the leader frees tickets and hands over more
at once.

A report is a hint. It frees by message id and incarnation, so doubled, late or reordered reports change nothing, and
lost ones cost only speed: the leader reads quiet tickets again, within 5 s. So a report is tried at every master once,
and then dropped.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable

import orjson

from usher.common.base.clock import now_s
from usher.common.base.log import INFO, WARNING, event
from usher.common.protocol.registration import RETRYING_HEADER
from usher.common.runtime.service import Service
from usher.consumer.lifecycle.master_client import MasterClient, MasterUnavailable

#: Ids per report: what the master accepts at most.
MOST_IDS = 1000
#: Shortest time from one report to the next, unless enough ids wait: freeing a ticket a little later costs nothing
#: while there is room. The longer one applies while this consumer keeps up: then it does no harm that the leader takes
#: it for busier than it is, and leaves its tickets with it.
_PAUSE_S, _CALM_PAUSE_S = 0.1, 0.5
#: Most ids that wait to be reported; beyond it the oldest are dropped, and the leader's reconciler finds them.
_MOST_WAITING = 50_000

#: While nothing ends, the leader is told this often that tickets wait for a retry: it may be another one by now.
_RETRYING_AGAIN_S = 5.0

#: Dropped reports are logged again only after this long, with their number: while no master leads, all are dropped.
_REPEAT_LOG_S = 10.0

#: This program does not read the outcome of each id, so the leader need not send it.
_QUIETLY = {"Prefer": "return=minimal"}

#: (ticket, fence, ids)
Item = tuple[bytes, int, list[bytes]]


class Reporter(Service):
    """The service that sends acknowledgement reports. The acker's thread calls ``add``.

    ``slots``: messages that run at a time. While half of those that it may have beyond these wait to be reported, the
    others keep it busy; the leader says how many these are.
    ``ticket_window``: most messages of one ticket here; the leader hands over more of it when half
    of them are done (master/policy/board/board.py). ``retrying``: counts the tickets that wait for a retry. They
    keep no handler busy: the leader hands over others, so it is told of them even if nothing has ended.
    """

    name = "report"

    def __init__(
        self,
        masters: MasterClient,
        incarnation: str,
        slots: int,
        capacity: int,
        ticket_window: int,
        keeps_up: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        # Masters that do not answer are no reason to call this consumer unwell, and to revoke its lease.
        self.stalls_after_s += masters.longest_s
        self._masters = masters
        self._incarnation = incarnation
        self._items: dict[tuple[bytes, int], list[bytes]] = {}  # ids by ticket and fence
        self._size = 0  # number of ids in _items; _lock guards both
        self._lock = threading.Lock()
        self._keeps_up = keeps_up
        self.retrying: Callable[[], int] = lambda: 0
        self._told_retrying = 0
        self._slots = slots
        self._capacity = capacity
        self.enough = 1
        self._take_window(2 * slots)  # the least that a leader gives
        self._enough_of_one = max(1, ticket_window // 2)
        self._hurry = False
        # This thread may be in the long pause; it was woken from it, once for each report.
        self._calm = self._is_roused = False
        self._last_s = -math.inf
        self._quiet_until_s = -math.inf
        self.dropped = self._told_dropped = 0  # ids, and those of them that the log says

    def add(self, items: Iterable[Item]) -> None:
        with self._lock:
            was_empty = not self._items
            for ticket, fence, ids in items:
                if ids:
                    of_one = self._items.setdefault((ticket, fence), [])
                    of_one += ids
                    self._size += len(ids)
                    self._hurry = self._hurry or len(of_one) >= self._enough_of_one
            self._hurry = self._hurry or self._size >= self.enough
        while self._items and self._size > _MOST_WAITING:
            self._drop(self._take(), "too many ids wait to be reported")
        if is_late := self._calm and not self._keeps_up():
            self._is_roused, self._calm = True, False
        if was_empty or self._hurry or is_late:
            self.wake()

    def run_once(self) -> float:
        retrying = self.retrying()
        if not (self._items or self._must_tell(retrying)):
            return min(_RETRYING_AGAIN_S, self.stalls_after_s / 3) if retrying else self.stalls_after_s / 3
        early_s = self._early_s()
        if early_s > 0:
            return early_s
        self._last_s, self._is_roused = now_s(), False
        report, self._told_retrying = self._take(), retrying
        headers = {**_QUIETLY, RETRYING_HEADER: str(retrying)} if retrying else _QUIETLY
        try:
            answer = self._masters.post("/api/messages/acknowledge", self._body(report), headers)
        except MasterUnavailable as problem:
            self._drop(report, str(problem))
            return _PAUSE_S
        if answer.status in (200, 204):
            self._take_window(answer.window)
        elif answer.status == 409:
            # Ended, by a drain or otherwise: nothing is left to be freed, and the services that must stop learn it from
            # Redis.
            self._drop(report, "this incarnation has ended", INFO)
        else:
            self._drop(report, f"{answer.url} answered {answer.status}")
        return 0.0

    def hear_of_retry(self) -> None:
        if not self._items and self._must_tell(self.retrying()):
            self.wake()

    def _must_tell(self, retrying: int) -> bool:
        return retrying > self._told_retrying or (retrying > 0 and now_s() - self._last_s >= _RETRYING_AGAIN_S)

    def _take_window(self, window: int | None) -> None:
        spare = (self._capacity if window is None else window) - self._slots
        self.enough = min(MOST_IDS, max(1, spare // 2))

    def _early_s(self) -> float:
        self._calm = True  # before the look: an ``add`` that ends the calm meanwhile must wake us
        self._calm = self._keeps_up() and not self._is_roused
        pause_s = 0.0 if self._hurry else _CALM_PAUSE_S if self._calm else _PAUSE_S
        return self._last_s + pause_s - now_s()

    def _take(self) -> list[Item]:
        with self._lock:
            taken, room = list[Item](), MOST_IDS
            while self._items and room:
                of, ids = next(iter(self._items.items()))
                taken.append((*of, ids[:room]))
                if len(ids) > room:
                    self._items[of] = ids[room:]
                else:
                    del self._items[of]
                room -= len(taken[-1][2])
            self._size -= MOST_IDS - room
            self._hurry = self._size >= self.enough
        return taken

    def _body(self, report: list[Item]) -> bytes:
        tickets = [
            {
                "ticket_id": ticket.decode(),
                "fence": fence,
                "message_ids": orjson.Fragment(b'["%b"]' % b'","'.join(ids)),
            }
            for ticket, fence, ids in report
        ]
        return orjson.dumps({"incarnation": self._incarnation, "tickets": tickets})

    def _drop(self, report: list[Item], why: str, level: int = WARNING) -> None:
        self.dropped += sum(len(ids) for _, _, ids in report)
        if self.dropped > self._told_dropped and now_s() >= self._quiet_until_s:
            event("report_dropped", level=level, ids=self.dropped - self._told_dropped, why=why)
            self._told_dropped, self._quiet_until_s = self.dropped, now_s() + _REPEAT_LOG_S

    def on_end(self) -> None:
        self._masters.close()
