"""A consumer's registration, as it is sent to a master and stored in the ``consumers`` hash.

The stored form is one line, ``generation uuid slots capacity lock health_url``: scripts compare the whole line and
never parse it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NO_LOCK = "-"
#: Most ``slots`` that masters accept.
MOST_SLOTS = 1024
#: Header of the answer to a report: how many messages the leader gives this consumer at a time.
WINDOW_HEADER = "Usher-Window"
#: Header of a report: how many tickets of this consumer wait for a retry. None without it.
RETRYING_HEADER = "Usher-Retrying"
#: Path of a consumer that shares its process with a master: its URL may be good on its own machine alone.
BESIDE = "/consumer/"
#: The evidence of a name lock: the lock (boot id, device, inode), and a moment at which it was held.
_EVIDENCE = re.compile(r"([^:]+:[0-9]+:[0-9]+):([0-9]{1,20})")


@dataclass(frozen=True, slots=True)
class Registration:
    """A single start of a consumer.

    ``uuid`` is made by the process at its start: registering again with it is the same incarnation, so a lost reply is
    no conflict. ``lock`` is the evidence of its name lock (``boot-id:device:inode:moment``), or ``-``: a later holder
    of the same lock proves that this process is dead, or has given this uuid up. ``slots`` messages run at
    once; ``capacity`` messages may be handed over and not yet acknowledged.
    """

    name: str
    uuid: str
    health_url: str
    slots: int
    capacity: int
    lock: str = NO_LOCK
    generation: int = 0

    @property
    def incarnation(self) -> str:
        return f"{self.name}:{self.generation}"

    def dump(self) -> bytes:
        return f"{self.generation} {self.uuid} {self.slots} {self.capacity} {self.lock} {self.health_url}".encode()


def parse(name: bytes, stored: bytes) -> Registration:
    """Parse a field of the ``consumers`` hash. Raises ValueError when the value is not a registration."""
    generation, uuid, slots, capacity, lock, health_url = stored.decode().split(" ", 5)
    return Registration(name.decode(), uuid, health_url, int(slots), int(capacity), lock, int(generation))


def held_later(lock: str, other: str) -> bool:
    """Return True if both pieces of evidence name one lock, and ``lock`` was held after ``other``: then the
    registration with ``other`` is over.

    Equal moments prove nothing, and neither does a lock without a moment.

    >>> held_later("boot:1:2:900", "boot:1:2:800"), held_later("boot:1:2:800", "boot:1:2:900")
    (True, False)
    >>> held_later("boot:1:3:900", "boot:1:2:800")
    False
    """
    mine, others = _EVIDENCE.fullmatch(lock), _EVIDENCE.fullmatch(other)
    return mine is not None and others is not None and mine[1] == others[1] and int(mine[2]) > int(others[2])


def name_of(incarnation: str) -> str:
    return incarnation.rpartition(":")[0]
