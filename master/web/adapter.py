"""Adapt the running master to the HTTP interface (``usher.master.web.ports.MasterPort``): answers come from Redis,
memory and the dispatcher."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence
from typing import Any

from usher.common.base.clock import now_s
from usher.common.protocol.registration import Registration
from usher.common.protocol.ticket_states import TicketState
from usher.common.runtime.health import Health, judge
from usher.common.runtime.service import Service
from usher.master.dispatch.dispatcher import Dispatcher
from usher.master.dispatch.events import Report
from usher.master.insight.status import StatusReader
from usher.master.insight.ticket_feed import TicketFeed
from usher.master.leader.elector import Lead
from usher.master.membership.registration import Membership, NameInUse, RegistrationOver
from usher.master.web.ports import (
    AckReport,
    IncarnationFenced,
    NameHeld,
    NotLeader,
    RegisterAnswer,
    RegisterRequest,
    StartOver,
)

#: Seconds that a report waits for the dispatcher's next turn; then it is answered "not leader" and comes again.
_ANSWER_S = 2.0
#: The most unread reports for which a sender that wants no answers is let go at once.
_MOST_UNREAD = 16


class ServicePort:
    """The running master, seen from HTTP. Safe for many threads."""

    def __init__(
        self,
        membership: Membership,
        status: StatusReader,
        dispatcher: Dispatcher,
        lead: Lead,
        services: Sequence[Service],
        ticket_window: int,
        look_now: Callable[[], None],
        feed: TicketFeed,
    ) -> None:
        self._membership = membership
        self._status = status
        self._dispatcher = dispatcher
        self._lead = lead
        self._services = services
        self._ticket_window = ticket_window
        self._look_now = look_now
        self._feed = feed

    def register(self, asked: RegisterRequest) -> RegisterAnswer:
        registration = Registration(asked.name, asked.uuid, asked.health_url, asked.slots, asked.capacity, asked.lock)
        try:
            registered = self._membership.register(registration)
        except NameInUse as held:
            raise NameHeld(math.ceil(held.retry_after_ms / 1000)) from None
        except RegistrationOver:
            raise StartOver from None
        self._look_now()
        mine = registered.registration
        times = (registered.lease_ms, registered.left_ms)
        return RegisterAnswer(
            registered.created, mine.incarnation, mine.generation, *times, self._ticket_window, self._lead.leader_url
        )

    def deregister(self, incarnation: str) -> bool:
        """Take a consumer's goodbye. Redis knows whether it has left; this only makes the leader look at once."""
        if not self._dispatcher.leads:
            raise NotLeader(self._lead.leader_url)
        known = incarnation in self._dispatcher.board.consumers
        self._look_now()
        return known

    def acknowledge(self, report: AckReport) -> list[list[str]]:
        """Pass a report to the dispatcher. A caller that wants no answers does not wait as long as the dispatcher keeps
        up and knows the incarnation: a report is a hint, and losing one in a change of leader costs only speed."""
        known = not report.wants_answers and report.incarnation in self._dispatcher.board.consumers
        if not self._dispatcher.leads:
            raise NotLeader(self._lead.leader_url)
        posted = Report(report.incarnation, report.items, report.wants_answers, retrying=report.retrying)
        if self._dispatcher.post(posted) < _MOST_UNREAD and known:
            return []
        posted.answered.wait(_ANSWER_S)
        if posted.answers is None:
            raise NotLeader(self._lead.leader_url)
        if posted.fenced:
            raise IncarnationFenced
        return posted.answers

    def window(self, incarnation: str) -> int | None:
        return self._dispatcher.window(incarnation)

    def consumers(self) -> list[dict[str, Any]]:
        return self._status.consumers()

    def audit(self) -> dict[str, Any] | None:
        return self._status.audit()

    def tickets(self, cursor: str, limit: int) -> dict[str, Any]:
        return self._status.tickets(cursor, limit)

    def ticket(self, ticket_id: str) -> dict[str, Any] | None:
        """Return the ticket from the index; on the leader also what it has parked of the ticket, where memory has all
        of it."""
        found = self._status.ticket(ticket_id)
        known = self._dispatcher.parked_of(ticket_id.encode())
        if found is None and (known is None or not known.messages):
            return None
        parked = known.messages if known is not None and known.is_exact else None
        return (found or {"ticket_id": ticket_id, "state": TicketState.WAITING, "message_ids": []}) | {"parked": parked}

    def sources(self) -> dict[str, Any] | None:
        return self._status.sources()

    def can_follow(self, who: str) -> bool:
        return self._feed.has_room(who)

    def follow(
        self, connection: socket.socket, who: str, ticket_id: str, position: list[bytes] | None, with_fields: bool
    ) -> None:
        self._feed.follow(connection, who, ticket_id.encode(), position, with_fields)

    def health(self) -> Health:
        return judge(self._services, now_s())

    def leading(self) -> dict[str, Any]:
        return {"leader": self._dispatcher.leads, "leader_url": self._lead.leader_url, "epoch": self._lead.epoch}
