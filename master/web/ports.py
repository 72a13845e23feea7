"""The requirements of the HTTP interface on the running master. ``usher.master.assembly.program`` meets them."""

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
    """A registration. ``created`` is False when this very start (its uuid) had registered before. ``lease_ms`` is the
    length of a lease, ``left_ms`` the rest of this one. ``ticket_window``: most messages of one ticket that are handed
    over at a time."""

    created: bool
    incarnation: str
    generation: int
    lease_ms: int
    left_ms: int
    ticket_window: int
    leader_url: str | None


#: A ticket and the ids of its acknowledged messages, in stream order.
AckItem = tuple[bytes, list[bytes]]


@dataclass(frozen=True)
class AckReport:
    """An incarnation's acknowledged messages. They are freed by id and incarnation: doubled, late and reordered reports
    change nothing.

    ``wants_answers``: False when the sender only needs to know that the report was taken. ``retrying``: tickets of it
    that wait for a retry.
    """

    incarnation: str
    items: list[AckItem]
    wants_answers: bool = True
    retrying: int = 0


class NameHeld(UsherError):
    """The name is held by a live incarnation."""

    def __init__(self, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__()


class StartOver(UsherError):
    """This start (its uuid) had registered, and that registration has ended. A live process registers under a new
    uuid."""


class NotLeader(UsherError):
    """This master is a standby. ``leader_url`` is None when there is no leader at the moment."""

    def __init__(self, leader_url: str | None) -> None:
        self.leader_url = leader_url
        super().__init__()


class IncarnationFenced(UsherError):
    """The leader does not know this incarnation: its lease has ended, or it was never registered. It must stop and
    register as a new one."""


class MasterPort(Protocol):
    """The master, seen from its HTTP interface. Safe for many threads. All methods may raise RedisTrouble (503)."""

    def register(self, asked: RegisterRequest) -> RegisterAnswer:
        """Register a start of a consumer. Raises NameHeld, StartOver."""

    def deregister(self, incarnation: str) -> bool:
        """Take a consumer's goodbye; False: the incarnation is unknown."""

    def window(self, incarnation: str) -> int | None:
        """Return how many messages the leader gives this incarnation at a time, at the moment; None: not known."""

    def acknowledge(self, report: AckReport) -> list[list[str]]:
        """Return ``ok``, ``gone`` or ``stale`` for each id of each item, if answers are wanted. Raises NotLeader,
        IncarnationFenced."""

    def consumers(self) -> list[dict[str, Any]]:
        """Return all registered consumers."""

    def tickets(self, cursor: str, limit: int) -> dict[str, Any]:
        """Return ``{"tickets": [...], "cursor": next or None}``: about ``limit`` tickets in processing. The first
        cursor is ``"0"``."""

    def ticket(self, ticket_id: str) -> dict[str, Any] | None:
        """Return the ticket; None: it is not in processing."""

    def audit(self) -> dict[str, Any] | None:
        """Return the summary of the last audit; None: there was none."""

    def sources(self) -> dict[str, Any] | None:
        """Return the progress of gathering several ticket streams; None when there is one."""

    def can_follow(self, who: str) -> bool:
        """Return True when there is room for another live subscription of the caller ``who`` to a ticket."""

    def follow(
        self, connection: socket.socket, who: str, ticket_id: str, position: list[bytes] | None, with_fields: bool
    ) -> None:
        """Take over ``connection`` and send it the events of a ticket from now on; with a position first those after
        it. ``with_fields``: include the contents of messages."""

    def health(self) -> Health:
        """Judge whether the services make progress."""

    def leading(self) -> dict[str, Any]:
        """Return ``{"leader": bool, "leader_url": str | None, "epoch": int | None}``; from memory, so that health
        answers when Redis does not."""
