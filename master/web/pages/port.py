"""What the page asks of the master that runs. ``master.wiring`` provides it."""

from __future__ import annotations

from typing import NamedTuple

from master.bulk_letters import BulkLetters
from master.dead_letters import DeadLetters
from master.pulse import Pulse
from master.status import StatusReader
from master.system_facts import SystemFacts
from master.ticket_story import TicketStory
from master.web.operations import OperationsPort


class PagePort(NamedTuple):
    """The parts of a master that the page shows. All may raise RedisTrouble (503)."""

    pulse: Pulse
    status: StatusReader
    story: TicketStory
    letters: DeadLetters
    bulk: BulkLetters
    facts: SystemFacts
    operations: OperationsPort
