"""A view of one ticket stream: all that looks at it, and acts on it, over one link. Commands have one, and a master has
one for its routes and pages."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Self

from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.common.runtime.settings import CommonSettings
from usher.master.charts.keeper import ChartReader
from usher.master.insight.explainer import AskOwner, Explainer
from usher.master.insight.live_overview import LiveOverview
from usher.master.insight.stats import StreamStatsReader
from usher.master.insight.status import StatusReader
from usher.master.insight.ticket_history import TicketHistory
from usher.master.messages.fields import MessageFields
from usher.master.operations.action_log import ActionLog, By
from usher.master.operations.dead_letters import DeadLetters
from usher.master.operations.delayed_messages import DelayedView
from usher.master.operations.live_rules import LiveRules
from usher.master.operations.ticket_orders import TicketOrders
from usher.master.policy.board.plans import BoardFacts


class View:
    """``by``: who acts with it; ``within_s``: the time for fields of messages; ``ask_owner``, ``board``, ``pulse``: see
    ``Explainer``. Safe for many threads if the link is."""

    def __init__(
        self,
        settings: CommonSettings,
        link: Link,
        keys: Keys,
        within_s: float = math.inf,
        ask_owner: AskOwner = lambda health_url, ticket_id: None,
        board: Callable[[bytes], BoardFacts | None] = lambda ticket: None,
        pulse: LiveOverview | None = None,
    ) -> None:
        self.settings, self.link, self.keys, self.by = settings, link, keys, By("", "")
        field, lease_ms = settings.work_ticket_field, int(settings.lease_seconds * 1000)
        self.status = StatusReader(link, keys, settings.sources, field)
        self.stats = StreamStatsReader(link, keys, self.status.sources)
        self.fields = MessageFields(link, keys, field, settings.shown_names, within_s)
        self.letters = DeadLetters(link, keys, field)
        self.delayed = DelayedView(link, keys, settings.ticket_field, settings.by_stream)
        self.rules, self.action_log = LiveRules(link, keys), ActionLog(link, keys)
        self.history, self.charts = TicketHistory(link, keys, field), ChartReader(link, keys)
        known = (ask_owner, board, self.status.sources, settings.by_stream, pulse)
        self.explainer = Explainer(link, keys, field, lease_ms, *known)
        self.orders = TicketOrders(link, keys, self.explained, field)

    def explained(self, ticket_id: str) -> dict[str, Any]:
        """Return the explanation of a ticket, as a document."""
        return self.explainer.explain(ticket_id)

    def acting(self, by: By) -> Self:
        """Return the same view for the verbs of a caller."""
        mine = copy.copy(self)
        mine.by = by
        return mine
