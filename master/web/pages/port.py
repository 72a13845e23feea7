"""What the page asks of the master that runs. ``master.wiring`` provides it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from master.bulk_letters import BulkLetters
from master.dead_letters import DeadLetters
from master.pulse import Pulse
from master.status import StatusReader
from master.system_facts import SystemFacts
from master.ticket_story import TicketStory


class Operations(Protocol):
    """What operators may do, and what is told of it. Called from several threads. All may raise RedisTrouble (503) and Problem."""

    def explain(self, ticket_id: str) -> dict[str, Any]:
        """What the ticket waits for: ``state``, ``summary``, ``sentences``, ``entries``, ``owner``, ``fence``, ``parked`` and more."""

    def rules(self) -> list[dict[str, Any]]:
        """``{id, target, value, action, rate_per_second, reason, who, when_ms}`` each."""

    def set_rule(self, rule: dict[str, Any], who: str) -> None:
        """Pause, slow or dead-letter. Raises Problem 422."""

    def lift_rule(self, rule_id: str, who: str, why: str) -> bool:
        """False: there is no such rule."""

    def drain(self, consumer: str, who: str, why: str) -> None:
        """The consumer is given nothing more, and gives back what it has not begun. Raises Problem 404."""

    def resume(self, consumer: str, who: str, why: str) -> None:
        """It gets work again. Raises Problem 404."""

    def actions(self, before: str | None, limit: int) -> tuple[list[dict[str, Any]], str | None]:
        """``{when_ms, who, what, on, why, outcome}`` each, the newest first; and where to go on."""

    def note(self, who: str, what: str, on: str, why: str, outcome: str) -> None:
        """Write a line into the action log."""


class PagePort(NamedTuple):
    """The parts of a master that the page shows."""

    pulse: Pulse
    status: StatusReader
    story: TicketStory
    letters: DeadLetters
    bulk: BulkLetters
    facts: SystemFacts
    operations: Operations
