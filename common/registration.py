"""A consumer's registration: what it sends to a master, and how it stands in the ``consumers`` hash.

The stored form is one line, ``generation uuid slots capacity lock health_url``: scripts compare it whole and never parse it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NO_LOCK = "-"


@dataclass(frozen=True, slots=True)
class Registration:
    """One start of a consumer.

    ``uuid`` is made by the process at its start: registering again with it is the same incarnation, so a lost reply is no conflict.
    ``lock`` is the evidence of its name lock (``boot-id:device:inode``), or ``-``: a successor that holds the same lock proves
    that this process is dead. ``slots`` handlers run at once; ``capacity`` messages may be handed over and not yet acknowledged.
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
        """Its name in the group."""
        return f"{self.name}:{self.generation}"

    def with_generation(self, generation: int) -> Registration:
        return replace(self, generation=generation)

    def dump(self) -> bytes:
        return f"{self.generation} {self.uuid} {self.slots} {self.capacity} {self.lock} {self.health_url}".encode()


def parse(name: bytes, stored: bytes) -> Registration:
    """The registration of a field of the ``consumers`` hash. Raises ValueError when it is not one of ours."""
    generation, uuid, slots, capacity, lock, health_url = stored.decode().split(" ", 5)
    return Registration(name.decode(), uuid, health_url, int(slots), int(capacity), lock, int(generation))


def name_of(incarnation: str) -> str:
    """The consumer's name in an incarnation ``name:generation``."""
    return incarnation.rpartition(":")[0]
