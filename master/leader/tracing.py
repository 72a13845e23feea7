"""Tracing of hand-overs: a span per hand_over call, linked to the messages that were handed over. Only where
OpenTelemetry is set up (``usher.common.observability.tracing``).

The master knows ids and tickets, not bodies: one more call per recorded batch reads the messages' trace contexts.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from usher.common.base.errors import RedisTrouble
from usher.common.base.log import event
from usher.common.observability.tracing import FIELD, links_to
from usher.common.protocol.keys import Keys
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.scripts import ScriptRunner
from usher.master.policy.board.plans import HandOverPlan

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)

#: As many links as OpenTelemetry keeps per span by default.
_MOST_LINKS = 128


class HandOverSpans:
    """Callback for ``LeaderCounters.on_handed_over``; used by the dispatcher's thread, with a link of its own."""

    def __init__(self, tracer: Tracer, link: Link, keys: Keys) -> None:
        self._tracer = tracer
        self._scripts = ScriptRunner(link)
        self._link = link
        self._keys = keys

    def __call__(self, plan: HandOverPlan, began_ns: int) -> None:
        """Record a hand-over that began at ``began_ns`` and has ended. Never raises: tracing must not hold up the
        work."""
        attributes: dict[str, str | int] = {
            "messaging.system": "usher",
            "messaging.operation.name": "hand_over",
            "messaging.destination.name": self._keys.stream,
            "messaging.consumer.group.name": self._keys.group,
        }
        attributes |= {"messaging.batch.message_count": plan.size, "usher.consumers": len(plan.targets)}
        span = self._tracer.start_span(f"hand_over {self._keys.stream}", attributes=attributes, start_time=began_ns)
        try:
            if span.is_recording():
                for link in links_to(self._contexts(plan)):
                    span.add_link(link.context)
        except (RedisTrouble, CommandRefused) as trouble:
            event(log, "span_without_links", level=logging.DEBUG, why=str(trouble))
        finally:
            span.end()

    def _contexts(self, plan: HandOverPlan) -> list[str | None]:
        ids = [entry_id for target in plan.targets for part in target.parts for entry_id in part.ids][:_MOST_LINKS]
        values = self._scripts.run("read_field", (self._keys.stream,), (FIELD, *ids))
        return [None if value is None else value.decode(errors="replace") for value in values]

    def close(self) -> None:
        self._link.close()
