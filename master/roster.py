"""Roster: which consumers are registered, and whether their leases live. The lease in Redis is the authority, nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from common.keys import Keys
from common.log import event
from common.redis_client import Link
from common.registration import Registration, parse
from common.service import Service
from common.streams import pairs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Member:
    """A registered incarnation. ``state``: live, draining, revoked, or "" when its lease has ended. ``lease_ms`` is what is left of it."""

    registration: Registration
    state: str
    lease_ms: int

    @property
    def alive(self) -> bool:
        return self.state != ""

    @property
    def accepts(self) -> bool:
        return self.state == "live"


def read_roster(link: Link, keys: Keys) -> dict[str, Member]:
    """All registered incarnations by their names in the group."""
    registrations = []
    for name, stored in pairs(link.call("HGETALL", keys.consumers)).items():
        try:
            registrations.append(parse(name, stored))
        except ValueError:
            event(log, "registration_unreadable", level=logging.ERROR, consumer=name)
    leases = [keys.lease(registration.incarnation) for registration in registrations]
    replies = link.pipeline([command for lease in leases for command in (("GET", lease), ("PTTL", lease))])
    members = {}
    for at, registration in enumerate(registrations):
        state, lease_ms = replies[2 * at], replies[2 * at + 1]
        for reply in (state, lease_ms):
            if isinstance(reply, Exception):
                raise reply
        members[registration.incarnation] = Member(registration, (state or b"").decode(), max(0, lease_ms))
    return members


class RosterReader(Service):
    """Reads the roster again and again and tells who asked to know. ``wake`` it after a registration."""

    name = "roster"

    def __init__(self, link: Link, keys: Keys, every_s: float, tell: Callable[[dict[str, Member]], None]) -> None:
        super().__init__()
        self._link = link
        self._keys = keys
        self._every_s = every_s
        self._tell = tell
        self.stalls_after_s = max(10.0, 4 * every_s)

    def run_once(self) -> float:
        self._tell(read_roster(self._link, self._keys))
        return self._every_s

    def on_end(self) -> None:
        self._link.close()
