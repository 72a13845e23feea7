"""The running master, as its HTTP interface sees it: ``Desk`` for consumers, ``Parts`` for operators and the page. Safe
for many threads; all of it may raise RedisTrouble (503). And what of errors a caller may see: viewers their types and
places in the code, operators their texts and tracebacks too, which may hold what messages say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flask import g

from usher.common.base.clock import now_s
from usher.common.base.errors import UsherError
from usher.common.http.credentials import Role
from usher.common.protocol.registration import Registration
from usher.common.protocol.ticket_states import TicketState
from usher.common.runtime.service import Health, Service, judge
from usher.master.dispatch.dispatcher import Dispatcher
from usher.master.dispatch.events import Report
from usher.master.insight.diagnostics import SystemDiagnostics
from usher.master.insight.live_overview import LiveOverview
from usher.master.insight.status import StatusReader
from usher.master.insight.ticket_feed import TicketFeed
from usher.master.leader.elector import Lead
from usher.master.membership.registry import Membership, RegistrationResult
from usher.master.verbs.bulk import BulkJobs
from usher.master.verbs.view import View

#: Seconds that a report waits for the dispatcher's next turn; then it is answered "not leader" and comes again.
_ANSWER_S = 2.0
#: The most unread reports for which a sender that wants no answers is let go at once.
_MOST_UNREAD = 16


class NotLeader(UsherError):
    """This master is a standby. ``leader_url`` is None when there is no leader at the moment."""

    def __init__(self, leader_url: str | None) -> None:
        self.leader_url = leader_url
        super().__init__()


class IncarnationFenced(UsherError):
    """The leader does not know this incarnation: it must stop, and register as a new one."""


class Desk:
    """The master's side of what consumers ask. ``ticket_window``: most messages of one ticket that are handed over at a
    time. ``look_now``: makes the leader look at the registry at once."""

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
        self._membership, self.status, self._dispatcher, self._lead = membership, status, dispatcher, lead
        self._services, self.ticket_window, self._look_now, self.feed = services, ticket_window, look_now, feed
        self.beside: Callable[[], Health] = lambda: Health(())  # of what else is in this process

    def register(self, asked: Registration) -> RegistrationResult:
        """Raises NameInUse, RegistrationOver."""
        registered = self._membership.register(asked)
        self._look_now()
        return registered

    def deregister(self, incarnation: str) -> bool:
        """Take a consumer's goodbye; False: the incarnation is unknown. Redis knows whether it has left; this only
        makes the leader look at once."""
        if not self._dispatcher.leads:
            raise NotLeader(self.leader_url)
        known = incarnation in self._dispatcher.board.consumers
        self._look_now()
        return known

    def acknowledge(self, report: Report) -> list[list[str]]:
        """Pass a report to the dispatcher; return ``ok``, ``gone`` or ``stale`` for each id of each item, if answers
        are wanted. Raises NotLeader, IncarnationFenced.

        A caller that wants no answers does not wait as long as the dispatcher keeps up and knows the incarnation: a
        report is a hint, and losing one in a change of leader costs only speed."""
        known = not report.wants_answers and report.incarnation in self._dispatcher.board.consumers
        if not self._dispatcher.leads:
            raise NotLeader(self.leader_url)
        if self._dispatcher.post(report) < _MOST_UNREAD and known:
            return []
        report.answered.wait(_ANSWER_S)
        if report.answers is None:
            raise NotLeader(self.leader_url)
        if report.fenced:
            raise IncarnationFenced
        return report.answers

    def window(self, incarnation: str) -> int | None:
        """Return how many messages the leader gives this incarnation at a time, at the moment; None: not known."""
        return self._dispatcher.window(incarnation)

    def ticket(self, ticket_id: str) -> dict[str, Any] | None:
        """Return the ticket from the index; on the leader also what it has parked of the ticket, where memory has all
        of it. None: it is not in processing."""
        found = self.status.ticket(ticket_id)
        known = self._dispatcher.parked_of(ticket_id.encode())
        if found is None and (known is None or not known.messages):
            return None
        parked = known.messages if known is not None and known.is_exact else None
        return (found or {"ticket_id": ticket_id, "state": TicketState.WAITING, "message_ids": []}) | {"parked": parked}

    def health(self) -> Health:
        own, other = judge(self._services, now_s()), self.beside()
        return Health((*own.reasons, *other.reasons), other.warnings)

    @property
    def leader_url(self) -> str | None:
        return self._lead.leader_url

    def leading(self) -> dict[str, Any]:
        """From memory, so that health answers when Redis does not."""
        role = "leader" if self._dispatcher.leads else "standby"
        return {"role": role, "leader": role == "leader", "leader_url": self.leader_url, "epoch": self._lead.epoch}


class Parts(View):
    """What operators look at and act with. ``ask_process``: asks the consumer with a health URL what it runs."""

    def __init__(
        self,
        *of_view: Any,
        overview: LiveOverview,
        diagnostics: SystemDiagnostics,
        ask_process: Callable[[str], dict[str, Any] | None] = lambda health_url: None,
    ) -> None:
        super().__init__(*of_view)
        self.overview, self.diagnostics, self.ask_process = overview, diagnostics, ask_process
        overview.on_rest = self.status.forget
        self.bulk = BulkJobs()


# -- what a caller may see

Rows = list[dict[str, Any]]
#: What stands beside the text of an error, of which each has at least one: a start's, a letter's, a followed letter's.
_OF_ERRORS = frozenset(("error_type", "traceback", "owner"))


def sees_texts() -> bool:
    """Return whether the caller of the current request may see the texts of errors, or search in them."""
    return bool(g.role.may(Role.OPERATOR))


def seen(document: Any) -> Any:
    return document if sees_texts() else without_texts(document)


def with_fields(add: Callable[[Rows], Rows], rows: Rows) -> Rows:
    """Return rows with fields of their messages, ``add``ed for who may see what messages say."""
    return add(rows) if sees_texts() else rows


def without_texts(document: Any) -> Any:
    """Return a document without the texts of errors, wherever they are in it.

    >>> without_texts({"letter": {"error": "KeyError: 'bob'", "error_type": "KeyError", "traceback": "..."}})
    {'letter': {'error': 'KeyError', 'error_type': 'KeyError', 'traceback': ''}}
    >>> without_texts({"error": "KeyError in shop.py:4", "tickets": 40})
    {'error': 'KeyError in shop.py:4', 'tickets': 40}
    """
    if isinstance(document, (list, tuple)):
        return [without_texts(part) for part in document]
    if not isinstance(document, dict):
        return document
    if not _OF_ERRORS & document.keys():  # a filter, or the name of what failed
        return {name: without_texts(part) for name, part in document.items()}
    kept = {name: without_texts(part) for name, part in document.items()}
    hidden = {"error": kept.get("error_type", ""), "traceback": ""}
    return kept | {name: text for name, text in hidden.items() if name in kept}
