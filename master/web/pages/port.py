"""The parts of the running master that the page needs. ``usher.master.assembly.program`` provides them."""

from __future__ import annotations

from typing import NamedTuple

from usher.master.charts.keeper import ChartReader
from usher.master.insight.diagnostics import SystemDiagnostics
from usher.master.insight.live_overview import LiveOverview
from usher.master.insight.status import StatusReader
from usher.master.insight.ticket_history import TicketHistory
from usher.master.messages.fields import MessageFields
from usher.master.operations.bulk_letters import BulkLetters
from usher.master.operations.dead_letters import DeadLetters
from usher.master.operations.delayed_messages import DelayedView
from usher.master.web.operations import OperationsPort


class PagePort(NamedTuple):
    """The parts of a master that the page shows. All may raise RedisTrouble (503)."""

    pulse: LiveOverview
    status: StatusReader
    story: TicketHistory
    letters: DeadLetters
    bulk: BulkLetters
    facts: SystemDiagnostics
    operations: OperationsPort
    charts: ChartReader
    fields: MessageFields
    delayed: DelayedView
