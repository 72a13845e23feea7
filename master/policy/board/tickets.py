"""What the leader remembers of a ticket and of a consumer.

A ticket is in memory only while something of it is in processing or parked:

==============  ====================================================  =====================================
standing        means                                                 leaves it
==============  ====================================================  =====================================
OPEN            may be planned: its parked ids go to its owner, or    -
                to a chosen consumer if it has none
RECOVERING      its owner is dead; all is parked                      the recovery of the owner ends
UNSURE          a hand-over was refused: memory and index differ      its record has been read again
HALTED          it waits for an operator: a parked dead letter, or     redrive, drop, or a record that can be
                a record that cannot be read                          read: compared now and then
ENDING          what is parked of it becomes dead letters             the last of them is written
==============  ====================================================  =====================================
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from usher.master.policy.board.plans import NOBODY


class Standing(enum.Enum):
    OPEN = "open"
    RECOVERING = "recovering"
    UNSURE = "unsure"
    HALTED = "halted"
    ENDING = "ending"


#: For what is asked with every message: a member of an enum costs a look-up in Python 3.11.
OPEN = Standing.OPEN
#: Those of tickets of which more may be read from Redis.
MOVING = (Standing.OPEN, Standing.ENDING)


class BoardTicket:
    """A ticket in memory. ``running``: handed over (or planned) and not acknowledged. ``parked``: under ``master``, or
    only seen yet, in id order.

    ``above``: what of it is above this id is under ``master`` too, and only Redis knows it; None: memory has
    everything. ``waits_for``: the message under ``halted``. ``until``: of an ending ticket, the rank of the last id
    that ends.
    """

    __slots__ = (
        "above",
        "believed",
        "compared_s",
        "home",
        "name",
        "owner",
        "parked",
        "queued",
        "running",
        "standing",
        "until",
        "waits_for",
    )

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.owner: ConsumerLoad | None = None
        self.believed = NOBODY
        self.home = ""  # the name of its last owner, if that one died: it gets the ticket back
        self.running: dict[bytes, None] = {}
        self.parked: deque[bytes] = deque()
        self.standing = OPEN
        self.queued = False
        self.compared_s = 0.0
        self.above: bytes | None = None
        self.waits_for = b""
        self.until = 0


@dataclass(eq=False)
class ConsumerLoad:
    """A consumer's incarnation as the board knows it."""

    incarnation: str
    name: str
    slots: int
    capacity: int
    accepts: bool = True
    in_flight: int = 0
    tickets: dict[bytes, None] = field(
        default_factory=dict
    )  # in the order it got them; a set's order differs from process to process
    waiting: deque[BoardTicket] = field(default_factory=deque)

    @property
    def room(self) -> int:
        return self.capacity - self.in_flight
