"""What the HTTP interface needs of the master that runs. ``usher.master.assembly.program`` provides it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any, Protocol

from usher.common.base.errors import UsherError
from usher.common.runtime.health import Health


@dataclass(frozen=True)
class RegisterRequest:
    """A start of a consumer that asks for a generation. See ``usher.common.protocol.registration.Registration`` for the
    fields."""

    name: str
    uuid: str
    health_url: str
    slots: int
    capacity: int
    lock: str


@dataclass(frozen=True)
class RegisterAnswer:
    """``created`` is False when this very start (its uuid) had registered before. ``lease_ms`` is the life of its
    lease, ``left_ms`` what is left of this one. ``ticket_window``: most messages of one ticket that are handed over at
    a time."""

    created: bool
    incarnation: str
    generation: int
    lease_ms: int
    left_ms: int
    ticket_window: int
    leader_url: str | None


#: Ticket and ids of messages, in stream order, that Redis has as acknowledged; what has no ticket id is a ticket of its
#: own (``unkeyed_ticket``).
AckItem = tuple[bytes, list[bytes]]


@dataclass(frozen=True)
class AckReport:
    """What one incarnation has acknowledged. It frees by id and incarnation: doubled, late and reordered reports change
    nothing.

    ``wants_answers``: False when whoever reports needs to know no more than that it was taken.
    """

    incarnation: str
    items: list[AckItem]
    wants_answers: bool = True


class NameHeld(UsherError):
    """The name is held by an incarnation that lives."""

    def __init__(self, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__()


class StartOver(UsherError):
    """This start (its uuid) had registered, and that has ended. A process that lives registers under a new uuid."""


class NotLeader(UsherError):
    """This master is a standby. ``leader_url`` is None when nobody leads at the moment."""

    def __init__(self, leader_url: str | None) -> None:
        self.leader_url = leader_url
        super().__init__()


class IncarnationFenced(UsherError):
    """The leader does not know this incarnation: its lease has ended, or it was never registered. It must stop and
    register as a new one."""


class MasterPort(Protocol):
    """The master, seen from its HTTP interface. Called from several threads. All may raise RedisTrouble (503)."""

    def register(self, asked: RegisterRequest) -> RegisterAnswer:
        """Raises NameHeld, StartOver."""

    def deregister(self, incarnation: str) -> bool:
        """False: it is not known."""

    def acknowledge(self, report: AckReport) -> list[list[str]]:
        """``ok``, ``gone`` or ``stale`` for each id of each item, if answers are wanted. Raises NotLeader,
        IncarnationFenced."""

    def consumers(self) -> list[dict[str, Any]]:
        """Everybody on the roster."""

    def tickets(self, cursor: str, limit: int) -> dict[str, Any]:
        """``{"tickets": [...], "cursor": next or None}``: about ``limit`` tickets in processing. The first cursor is
        ``"0"``."""

    def ticket(self, ticket_id: str) -> dict[str, Any] | None:
        """None: it is not in processing."""

    def audit(self) -> dict[str, Any] | None:
        """What the last audit found; None: none was made."""

    def sources(self) -> dict[str, Any] | None:
        """How the gathering of several ticket streams goes; None when there is one."""

    def can_follow(self) -> bool:
        """Whether one more live subscription to a ticket may begin."""

    def follow(
        self, connection: socket.socket, ticket_id: str, position: list[bytes] | None, with_fields: bool
    ) -> None:
        """``connection`` gets the events of a ticket from now on; with a position first what came after it. It is the
        master's from here on. ``with_fields``: also what its messages say."""

    def health(self) -> Health:
        """Do the services make progress?"""

    def leading(self) -> dict[str, Any]:
        """``{"leader": bool, "leader_url": str | None, "epoch": int | None}``; from memory, so that health answers when
        Redis does not."""
