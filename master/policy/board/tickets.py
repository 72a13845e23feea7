"""Tickets and consumers in memory, and the tickets whose turn comes next. Pure.

A ticket is in memory only while something of it is in processing or parked:

==============  ====================================================  =====================================
standing        meaning                                               ends with
==============  ====================================================  =====================================
OPEN            may be planned: its parked ids go to its owner, or    -
                to a chosen consumer if it has none
RECOVERING      its owner is dead; all is parked                      the recovery of the owner
WAITING         it was given back until a time                        that time, by Redis' clock
UNSURE          others have changed its record                        a new read of its record
HALTED          it waits for an operator: a dead letter (halt), or    redrive, drop, or a record that can be
                a record that cannot be read                          read: compared now and then
==============  ====================================================  =====================================
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from usher.common.protocol.stream_id import ZERO, rank
from usher.master.policy.board.plans import NOBODY


class Standing(enum.Enum):
    OPEN = "open"
    RECOVERING = "recovering"
    WAITING = "waiting"
    UNSURE = "unsure"
    HALTED = "halted"


#: For checks made with every message: a member of an enum costs a look-up in Python 3.11.
OPEN = Standing.OPEN


@dataclass(slots=True, eq=False)
class BoardTicket:
    """A ticket in memory. ``running``: handed over (or planned) and not acknowledged. ``parked``: under ``master``, or
    only read yet, in id order.

    ``waits_for``: of a halted one, the message under ``halted``. ``until``: of a waiting one, when it is due, in ms of
    Redis' clock. ``queued``: it is runnable, or waits in one place, and in no other, until it is tried again.
    ``marks``: None while neither tenants nor priorities are configured."""

    name: bytes
    owner: ConsumerLoad | None = None
    believed: bytes = NOBODY
    home: str = ""  # name of who gets it next: its last owner, if that one died, or who it was asked back for
    running: dict[bytes, None] = field(default_factory=dict)
    parked: deque[bytes] = field(default_factory=deque)
    standing: Standing = OPEN
    queued: bool = False
    compared_s: float = 0.0
    waits_for: bytes = b""
    until: int = 0
    marks: TicketMarks | None = None

    @property
    def unfinished(self) -> int:
        return len(self.running) + len(self.parked) + bool(self.waits_for)

    @property
    def tenant(self) -> bytes:
        return b"" if self.marks is None else self.marks.tenant

    @property
    def priority(self) -> int:
        return 0 if self.marks is None else self.marks.priority(self)


@dataclass(slots=True, eq=False)
class TicketMarks:
    """Tenant and urgency of a ticket. ``turn``: its place in the queue of its tenant (``turns.py``); None: it is not
    there. ``line``: the queue in which it has, or had, its place. ``since``: when it began to wait for its turn, as
    time and number; None: it does not."""

    tenant: bytes = b""
    since: tuple[float, int] | None = None
    turn: object = None
    line: Any = None
    _last: dict[int, bytes] = field(default_factory=dict)  # priority -> its last message of that priority

    def learn(self, tenant: bytes, priority: int, entry_id: bytes) -> None:
        self.tenant = tenant
        if priority and (priority not in self._last or rank(entry_id) > rank(self._last[priority])):
            self._last[priority] = entry_id

    def priority(self, ticket: BoardTicket) -> int:
        """Return the highest priority of which the ticket's last message waits: what stands before that one is as
        urgent."""
        for priority in sorted(self._last, reverse=True):
            last = self._last.get(priority, ZERO)  # other threads look, too
            if last in ticket.running:
                continue
            if ticket.parked and rank(last) >= rank(ticket.parked[0]):
                return priority
            self._last.pop(priority, None)
        return 0


#: Tickets that a consumer may have per handler slot, however slow it is: one runs, one is ready to run.
_TICKETS_PER_SLOT = 2
#: Messages that a consumer may have of each of its tickets, whatever its pace.
_FOLLOWING = 64
#: Slow start: for each message that is finished, the window may grow by so many.
_GROWTH = 3


class WorkPace:
    """How many messages a consumer is given at a time. What has been handed over stays where it is until it is done or
    recalled, however many consumers start afterwards; so a consumer is given about as much as it finishes in ``work_s``
    seconds, and never less than keeps its handlers busy.

    The window of one consumer, which follows the rate at which it finishes messages while it has any.

    The rate is the quotient of two sums that decay alike, with ``work_s`` as their time constant: messages finished,
    and seconds with work.
    """

    __slots__ = ("_busy_s", "_capacity", "_finished", "_since_s", "_work_s", "tickets", "window")

    def __init__(self, slots: int, capacity: int, work_s: float) -> None:
        """Begin a pace. ``slots``: handlers that run at once. ``capacity``: most messages, whatever the rate.
        ``work_s``: infinite for no other bound than the capacity."""
        self.tickets = _TICKETS_PER_SLOT * slots
        self._capacity = capacity
        self._work_s = work_s
        self._finished = self._busy_s = 0.0
        self._since_s: float | None = None  # it has work whose begin nobody saw: at a takeover
        #: Messages that the consumer may have.
        self.window = capacity if work_s == math.inf else min(capacity, self.tickets)

    def began(self, now_s: float) -> None:
        """Note that the consumer, which had nothing, is given something: seconds before it count for nothing."""
        self._since_s = now_s

    def left_s(self, in_flight: int, now_s: float) -> float:
        """Return the seconds of work that so many messages are, or, if that is more, since something was finished;
        infinite while no pace is known."""
        if self._since_s is None or not self._finished:
            return math.inf
        return max(now_s - self._since_s, in_flight * self._busy_s / self._finished)

    def finished(self, count: int, now_s: float) -> None:
        """Note that so many messages were finished since the last call, or since ``began``."""
        if self._work_s == math.inf:
            return
        since_s, self._since_s = self._since_s, now_s
        if since_s is None:
            return
        busy_s = max(0.0, now_s - since_s)
        decay = math.exp(-busy_s / self._work_s)
        self._finished = self._finished * decay + count
        self._busy_s = self._busy_s * decay + busy_s
        done_s = self._busy_s / self._finished  # per message
        target = self._capacity if done_s * self._capacity <= self._work_s else int(self._work_s / done_s)
        self.window = min(self._capacity, max(self.tickets, min(target, self.window + _GROWTH * count)))


@dataclass(eq=False)
class ConsumerLoad:
    """A consumer's incarnation in memory. ``retrying``: tickets of it that wait for a retry, as it says. ``waiting``:
    tickets of it that wait for room here."""

    incarnation: str
    name: str
    slots: int
    capacity: int
    accepts: bool
    pace: WorkPace
    in_flight: int = 0
    retrying: int = 0
    # In the order in which it got them: a set's order differs from process to process.
    tickets: dict[bytes, None] = field(default_factory=dict)
    waiting: OrderedDict[BoardTicket, None] = field(default_factory=OrderedDict)

    @property
    def room(self) -> int:
        """Number of messages that it may yet be handed: up to its pace, and one each of as many tickets as keep its
        handlers busy. Messages of one ticket run one after the other, so they alone do not; those that wait for a
        retry do not either."""
        pace = self.pace
        room = pace.window - self.in_flight + self.retrying
        if room < (more := pace.tickets - self.busy_tickets):
            room = more
        return min(room, self.capacity - self.in_flight)

    @property
    def busy_tickets(self) -> int:
        return max(0, len(self.tickets) - self.retrying)

    def room_for(self, ticket: BoardTicket) -> int:
        """Return how many messages of this ticket it may yet be handed. The pace keeps nothing of an urgent one back:
        the consumer must have the urgent message to know what is to run first; nor the next ones of a ticket that it
        has, which nobody else may run, and which a run may absorb."""
        if ticket.marks is not None and ticket.priority:
            return self.capacity - self.in_flight
        room, most = self.pace.window + self.retrying, self.capacity
        room = (room if room < most else most) - self.in_flight
        if ticket.owner is None and self.room <= 0:
            return room
        return max(room, min(_FOLLOWING - len(ticket.running), most - self.in_flight))


#: Number of tickets that found no consumer, from which on no other is tried.
_ENOUGH = 200


class RunQueue:
    """Queue of the tickets that may be planned: runnable ones in the order of their turns, and unassigned ones, for
    which no consumer had room, until that changes."""

    def __init__(self, ticket_window: int) -> None:
        # A ticket that fills its window is refilled in halves: each refill writes its record anew.
        self._refill_at = ticket_window // 2
        self._runnable: deque[BoardTicket] = deque()
        self._unassigned: deque[BoardTicket] = deque()

    @property
    def has_runnable(self) -> bool:
        """Return whether some ticket may be planned. One that found no consumer means that none has room: of very
        many, the others need not ask."""
        return bool(self._runnable) and len(self._unassigned) < _ENOUGH

    @property
    def is_waiting(self) -> bool:
        return bool(self._runnable or self._unassigned)

    def waiting(self) -> Iterator[BoardTicket]:
        yield from (*self._runnable, *self._unassigned)

    def add(self, ticket: BoardTicket) -> None:
        """Make a ticket runnable if some of it may be planned and it does not wait elsewhere."""
        if ticket.queued or ticket.standing is not OPEN or not ticket.parked or len(ticket.running) > self._refill_at:
            return
        if ticket.owner is not None and not ticket.owner.accepts:
            return  # it waits until its draining owner is done with it
        ticket.queued = True
        self._line_up(ticket)

    def _line_up(self, ticket: BoardTicket) -> None:
        self._runnable.append(ticket)

    def next_runnable(self) -> BoardTicket | None:
        """Take out the next ticket that may be planned. A caller that puts it aside sets ``queued`` until ``retry``."""
        while self._runnable and len(self._unassigned) < _ENOUGH:
            ticket = self._runnable.popleft()
            ticket.queued = False
            if ticket.standing is OPEN and ticket.parked:
                return ticket
        return None

    def wait_unassigned(self, ticket: BoardTicket) -> None:
        ticket.queued = True
        self._unassigned.append(ticket)

    def retry_unassigned(self) -> None:
        """Make the tickets that found no consumer runnable, before the others: one has room, or accepts work."""
        if self._unassigned:
            self.retry_first(self._unassigned)

    def retry_first(self, waiting: deque[BoardTicket] | list[BoardTicket]) -> None:
        """Make tickets that waited runnable, before the others: these came later."""
        behind = len(self._runnable)
        self.retry(waiting)
        self._runnable.rotate(len(self._runnable) - behind)

    def retry(self, waiting: deque[BoardTicket] | list[BoardTicket] | OrderedDict[BoardTicket, None]) -> None:
        """Make tickets that waited runnable, as far as they may still be planned. They no longer wait there."""
        for ticket in waiting:
            ticket.queued = False
            self.add(ticket)
        waiting.clear()
