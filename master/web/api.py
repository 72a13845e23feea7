"""The routes below ``/api``, of consumers and of operators; ``usher.common.http.app`` shapes errors. Any master
answers, leader or standby, from Redis; ``Desk`` and ``Parts`` are the running master, as routes and pages see it: safe
for many threads, and all of it may raise RedisTrouble (503).

Viewers see of errors their types and places in the code, operators their texts and tracebacks too, which may hold what
messages say; what messages say is for operators alone. After a change of the rules is answered, nothing is handed over
by the former ones; ``handed_over`` messages had been before, and run to their end.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qs

from flask import Blueprint, Response, g, request
from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from typing_extensions import TypedDict

from usher.common.base.clock import now_s
from usher.common.base.log import WARNING, event
from usher.common.doctor.judgements import DoctorFinding
from usher.common.http.app import Problem, answer, parse_json, read_body, read_json, read_query, unprocessable
from usher.common.http.auth import caller, must_be_for
from usher.common.http.credentials import Role
from usher.common.http.openapi import tells
from usher.common.protocol import registration
from usher.common.protocol.message import LONGEST_NAME, LONGEST_TICKET, check_field_name
from usher.common.protocol.registration import MOST_SLOTS, NO_LOCK, Registration, name_of
from usher.common.protocol.stream_id import is_id
from usher.common.protocol.ticket_states import TicketState
from usher.common.runtime.service import Health, Service, judge
from usher.common.runtime.settings import ConsumerName, checked_by
from usher.master.dispatch.dispatcher import Dispatcher
from usher.master.dispatch.events import Report
from usher.master.insight.live import LiveOverview, TicketFeed, parse_position
from usher.master.insight.stats import Kept, lag_document
from usher.master.insight.status import LONGEST_VALUE, ROWS, MessageFields, StatusReader, examined
from usher.master.leader.elector import Lead
from usher.master.leader.limits import TICKET_WINDOW
from usher.master.membership.consumer_http import HealthHosts, UnfitUrl, parse_url
from usher.master.membership.registry import Membership, NameInUse, RegistrationOver, RegistrationResult
from usher.master.operations.action_log import By
from usher.master.operations.live_rules import TooManyRules
from usher.master.operations.shelves import DelayedRow
from usher.master.policy.trim import Retention
from usher.master.verbs import verbs
from usher.master.verbs.verbs import VERBS, Args, Given, Outcome, StreamId, TicketId, Verb
from usher.master.verbs.view import View

#: Seconds that a report waits for the dispatcher's next turn; then it is answered "not leader" and comes again.
_ANSWER_S = 2.0
#: The most unread reports for which a sender that wants no answers is let go at once.
_MOST_UNREAD = 16


class NotLeader(Problem):
    """``leader_url``: None when there is no leader at the moment."""

    def __init__(self, leader_url: str | None) -> None:
        why, again = "this master is a standby", {"Retry-After": "1"}
        super().__init__(503, "not_leader", why, headers=again, leader_url=leader_url)


class IncarnationFenced(Problem):
    def __init__(self) -> None:
        super().__init__(409, "fenced", "this incarnation has ended; stop its work and register again")


@dataclass
class Desk:
    """The master's side of what consumers ask. ``look_now``: makes the leader look at the registry at once. ``beside``:
    of what else is in this process."""

    membership: Membership
    status: StatusReader
    dispatcher: Dispatcher
    lead: Lead
    services: Sequence[Service]
    look_now: Callable[[], None]
    feed: TicketFeed
    beside: Callable[[], Health] = lambda: Health(())

    def deregister(self, incarnation: str) -> bool:
        """Take a consumer's goodbye; False: the incarnation is unknown. Redis knows whether it has left; this only
        makes the leader look at once."""
        if not self.dispatcher.leads:
            raise NotLeader(self.lead.leader_url)
        known = incarnation in self.dispatcher.board.consumers
        self.look_now()
        return known

    def acknowledge(self, report: Report) -> list[list[str]]:
        """Pass a report to the dispatcher; return ``ok``, ``gone`` or ``stale`` for each id of each item, if answers
        are wanted. Raises NotLeader, IncarnationFenced.

        A caller that wants no answers does not wait as long as the dispatcher keeps up and knows the incarnation: a
        report is a hint, and losing one in a change of leader costs only speed."""
        known = not report.wants_answers and report.incarnation in self.dispatcher.board.consumers
        if not self.dispatcher.leads:
            raise NotLeader(self.lead.leader_url)
        if self.dispatcher.post(report) < _MOST_UNREAD and known:
            return []
        report.answered.wait(_ANSWER_S)
        if report.answers is None:
            raise NotLeader(self.lead.leader_url)
        if report.fenced:
            raise IncarnationFenced
        return report.answers

    def ticket(self, ticket_id: str) -> dict[str, Any] | None:
        """Return the ticket from the index; on the leader also what it has parked of the ticket, where memory has all
        of it. None: it is not in processing."""
        found = self.status.ticket(ticket_id)
        known = self.dispatcher.parked_of(ticket_id.encode())
        if found is None and (known is None or not known.messages):
            return None
        parked = known.messages if known is not None and known.is_exact else None
        return (found or {"ticket_id": ticket_id, "state": TicketState.WAITING, "message_ids": []}) | {"parked": parked}

    def health(self) -> Health:
        own, other = judge(self.services, now_s()), self.beside()
        return Health((*own.reasons, *other.reasons), other.warnings)

    def leading(self) -> dict[str, Any]:
        """From memory, so that health answers when Redis does not."""
        role = "leader" if self.dispatcher.leads else "standby"
        return {"role": role, "leader": role == "leader", "leader_url": self.lead.leader_url, "epoch": self.lead.epoch}


#: Seconds for which findings are shown again: an examination watches clocks for 0.1 s.
_FOUND_FOR_S = 15.0


class Parts(View):
    """Parts that operators look at and act with. ``ask_process``: asks the consumer with a health URL what it runs."""

    def __init__(
        self,
        *of_view: Any,
        overview: LiveOverview,
        retention: Retention | None = None,
        of_master: Sequence[DoctorFinding] = (),
        ask_process: Callable[[str], dict[str, Any] | None] = lambda health_url: None,
    ) -> None:
        super().__init__(*of_view)
        self.overview, self.retention, self.ask_process = overview, retention or Retention(), ask_process
        about = self.link, self.keys, int(self.settings.lease_seconds * 1000), self.settings.sources, of_master
        self.doctor = Kept(_FOUND_FOR_S, lambda: examined(*about))
        overview.on_rest = self.status.forget
        self.bulk = verbs.BulkJobs()


# -- what a caller may see

Rows = list[dict[str, Any]]
_Look = TypeVar("_Look", bound=Callable[..., Any])
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


#: The most bytes of a body. 64 KiB would not hold 500 messages of 500 tickets with ids of 256 bytes; this holds 1000.
REGISTER_BODY, ACKNOWLEDGE_BODY = 4096, 512 * 1024
#: The most messages of one report.
MOST_MESSAGES = 1000
_MINIMAL, _EVENT_STREAM = "return=minimal", "text/event-stream"
TICKET_PROBLEMS = {404: "unknown_ticket", 422: "ticket ids have 1 to 256 bytes"}

_MESSAGE_IDS = re.compile(rb"[0-9]{1,20}-[0-9]{1,20}(?:\n[0-9]{1,20}-[0-9]{1,20})*")


_HEALTH_URL = {"type": "string", "format": "uri", "pattern": "^https?://", "maxLength": 512}
_HEALTH_URL |= {"description": "Its host is in USHER_HEALTH_HOSTS."}
_HealthUrl = Annotated[str, checked_by(parse_url), WithJsonSchema(_HEALTH_URL)]
_Incarnation = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}:[0-9]{1,20}$")]
_TICKET_ID = {"type": "string", "minLength": 1, "maxLength": LONGEST_TICKET}
#: As bytes, and without a check of each: reports come all the time (``read_report``). Never passed to Redis.
_MessageId = Annotated[bytes, WithJsonSchema({"type": "string", "pattern": "^[0-9]{1,20}-[0-9]{1,20}$"})]


def _only_digits(value: object) -> object:
    """Refuse ``1_0``, ``+1`` and digits of other scripts, which Python reads as numbers too."""
    if isinstance(value, str) and not (value.isascii() and value.isdecimal()):
        raise ValueError("must be a whole number above 0")
    return value


#: The length of a page. A larger value means the largest page.
_MOST = AfterValidator(lambda asked: min(asked, 200))
_Limit = Annotated[int, Field(ge=1, le=10**9 - 1), BeforeValidator(_only_digits), _MOST]


class _Registration(Given):
    """The body of register. An unknown field is refused: a misspelt ``slots`` would silently be 1."""

    name: ConsumerName = Field(validation_alias=AliasChoices("name", "consumer_name"))
    health_url: _HealthUrl = Field(validation_alias=AliasChoices("health_url", "healthURL"))
    uuid: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
    slots: int = Field(1, ge=1, le=MOST_SLOTS)
    capacity: int = Field(1000, ge=1, le=100_000)
    lock: str = Field(NO_LOCK, pattern=r"^[A-Za-z0-9._:-]{1,200}$")


class _Deregistration(Given):
    incarnation: _Incarnation


class _ReportItem(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]

    ticket_id: Annotated[bytes, Field(min_length=1, max_length=LONGEST_TICKET), WithJsonSchema(_TICKET_ID)]
    fence: Annotated[int, Field(ge=0, lt=2**63)]
    message_ids: Annotated[list[_MessageId], Field(min_length=1, max_length=MOST_MESSAGES)]


class ReportBody(TypedDict):
    """The body of acknowledge; at most 1000 messages. Plain dicts: a model takes three times as long."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", title="Report")  # type: ignore[misc]

    incarnation: _Incarnation
    tickets: Annotated[list[_ReportItem], Field(max_length=MOST_MESSAGES)]


class _Query(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Page(_Query):
    limit: _Limit = 100


class _TicketsQuery(_Page):
    """The query of a list of tickets. With ``id`` the list has only that ticket, if it is in processing."""

    id: TicketId | None = None
    cursor: str = Field("", pattern=r"^[0-9]{0,19}$")


class TicketQuery(_Query):
    """A ticket by query: in a path, an id that ends like a route (``x/explain``), or is nothing but dots, may be taken
    for something else on the way."""

    id: TicketId


class _Behind(_Query):
    cursor: StreamId | None = None

    @property
    def behind(self) -> bytes | None:
        return None if self.cursor is None else self.cursor.encode()


class _ActionsQuery(_Behind, _Page):
    pass


class LetterQuery(_ActionsQuery, verbs.LetterAsk):
    model_config = ConfigDict(strict=False)  # every value is text


class _DelayedQuery(_Page, verbs.DelayedAsk):
    model_config = ConfigDict(strict=False)

    cursor: Annotated[str, Field(max_length=80)] | None = None


class _FindQuery(_Query):
    """A field and its value; the value may have any bytes, percent-encoded."""

    field: str = Field(min_length=1, max_length=LONGEST_NAME)
    value: str = Field(max_length=LONGEST_VALUE)
    cursor: str | None = Field(None, max_length=120)
    limit: _Limit = ROWS


#: The values that ``parse_position`` takes, for the OpenAPI document.
_POSITION = r"^([0-9]{1,20}-[0-9]{1,20}(_[0-9]{1,20}-[0-9]{1,20}){2}|0|)$"


class _Position(_Query):
    """The point where a broken subscription continues: the id of the last event seen, as in the header Last-Event-ID;
    0: everything that is still there."""

    last_event_id: str = Field("", pattern=_POSITION)


class _FollowedTicket(_Position, TicketQuery):
    pass


def routes(desk: Desk, health_hosts: HealthHosts, fields: MessageFields | None = None) -> Blueprint:
    api = Blueprint("api", __name__, url_prefix="/api")
    _add_looks(api, desk, fields)
    _add_work(api, desk, health_hosts)
    _add_events(api, desk)
    return api


def _add_work(api: Blueprint, desk: Desk, health_hosts: HealthHosts) -> None:
    @api.post("/consumers/register")
    @tells(
        "Register a start of a consumer: 201 new, 200 the same start again.",
        {201: verbs.Registered, 200: verbs.Registered},
        body=_Registration,
        role=Role.CONSUMER,
        problems={
            409: "name_in_use: another start of that name lives; Retry-After",
            410: "registration_over: this start has ended",
        },
    )
    def register() -> Response:
        given = _registered(desk, _admitted(health_hosts))
        mine = given.registration
        told: dict[str, Any] = {"lease_ms": given.lease_ms, "left_ms": given.left_ms}
        told |= {"incarnation": mine.incarnation, "generation": mine.generation}
        told |= {"ticket_window": TICKET_WINDOW, "leader_url": desk.lead.leader_url}
        return answer(told, 201 if given.created else 200)

    @api.post("/consumers/deregister")
    @tells(
        "Report that an incarnation has left.",
        {200: verbs.Deregistered},
        body=_Deregistration,
        role=Role.CONSUMER,
        problems={404: "unknown_incarnation"},
    )
    def deregister() -> Response:
        incarnation = read_json(_Deregistration, REGISTER_BODY).incarnation
        must_be_for(name_of(incarnation))
        if not desk.deregister(incarnation):
            raise Problem(404, "unknown_incarnation")
        return answer({"incarnation": incarnation})

    @api.post("/messages/acknowledge")
    @tells(
        "Report messages that are acknowledged in Redis, so that the leader frees their tickets at once."
        " With `Prefer: return=minimal` (RFC 7240): 204, without answers, perhaps before that.",
        {200: verbs.Reported, 204: None},
        body=ReportBody,
        role=Role.CONSUMER,
        problems={409: "fenced: the incarnation has ended; register again"},
    )
    def acknowledge() -> Response:
        prefers = request.headers.get("Prefer", "").split(",")
        minimal = _MINIMAL in {one.partition(";")[0].strip().lower() for one in prefers}
        retrying = request.headers.get(registration.RETRYING_HEADER, 0, int)
        retrying = retrying if 0 <= retrying < 1_000_000 else 0
        report = read_report(read_body(request, ACKNOWLEDGE_BODY), not minimal, retrying)
        must_be_for(name_of(report.incarnation))
        results = desk.acknowledge(report)
        if not minimal:
            return answer({"results": results})
        taken = Response(status=204, headers={"Preference-Applied": _MINIMAL})
        # The consumer reports again before half of what it may have is done, so that it need not wait for more.
        if (messages := desk.dispatcher.window(report.incarnation)) is not None:
            taken.headers[registration.WINDOW_HEADER] = str(messages)
        del taken.headers["Content-Type"]
        return taken


def looks(api: Blueprint) -> Callable[..., Callable[[_Look], _Look]]:
    """Return a decorator for functions that answer a GET, of what the query asks and the places in the path."""

    def look(path: str, kind: Any, query: type[BaseModel] | None = None, **more: Any) -> Callable[[_Look], _Look]:
        def add(find: _Look) -> _Look:
            def answered(**places: str) -> Response:
                found = find(*([] if query is None else [read_query(query)]), **places)
                return found if isinstance(found, Response) else answer(found)

            told = tells(" ".join((find.__doc__ or "").split()), {200: kind}, query=query, **more)
            api.add_url_rule(path, find.__name__, told(answered))
            return find

        return add

    return look


def _add_looks(api: Blueprint, desk: Desk, fields: MessageFields | None) -> None:
    look = looks(api)

    def told(rows: Rows) -> Rows:
        return rows if fields is None else with_fields(fields.add_to_tickets, rows)

    @look("/consumers", verbs.Consumers)
    def consumers() -> Any:
        """All registered consumers."""
        return {"consumers": desk.status.consumers()}

    @look("/sources", verbs.Sources)
    def sources() -> Any:
        """The progress of gathering several ticket streams; null when there is one."""
        return {"sources": desk.status.sources()}

    @look("/tickets", verbs.Tickets, _TicketsQuery)
    def tickets(asked: _TicketsQuery) -> Any:
        """A page of tickets in processing, or one by its id."""
        if asked.id is not None:
            found = desk.ticket(asked.id)
            return seen({"tickets": told([] if found is None else [found]), "cursor": None})
        page = desk.status.tickets(asked.cursor or "0", asked.limit)
        return seen(page | {"tickets": told(page["tickets"])})

    @look("/tickets/<rest:ticket_id>", verbs.TicketRow, problems=TICKET_PROBLEMS)
    def ticket(ticket_id: str) -> Any:
        """Show one ticket in processing."""
        found = desk.ticket(fitting(ticket_id))
        if found is None:
            raise Problem(404, "unknown_ticket", "no ticket of that id is in processing")
        return seen(told([found])[0])

    @look("/audit", verbs.Audit)
    def audit() -> Any:
        """The result of the last audit; null when there was none."""
        return {"audit": desk.status.proofs()["audit"]}


def _add_events(api: Blueprint, desk: Desk) -> None:
    """Server-sent events of a ticket, for as long as the client stays. Viewers get all but what messages say."""
    look = looks(api)

    @look("/tickets/<rest:ticket_id>/events", _EVENT_STREAM, _Position, problems=TICKET_PROBLEMS)
    def follow(asked: _Position, ticket_id: str) -> Any:
        """The events of a ticket from now on, as server-sent events."""
        return followed(asked, fitting(ticket_id))

    @look("/events", _EVENT_STREAM, _FollowedTicket)
    def follow_by_query(asked: _FollowedTicket) -> Any:
        """The events of a ticket of any id: in a path, some ids may be taken for something else."""
        return followed(asked, asked.id)

    @look("/messages/<rest:uid>/events", _EVENT_STREAM, role=Role.OPERATOR)
    def follow_message(uid: str) -> Any:
        """Send what the handler of a followed message tells: progress, then result or failed."""
        asked, last = fitting(uid), request.headers.get("Last-Event-ID", "")
        if request.method == "HEAD":
            return Response(content_type=_EVENT_STREAM)
        return desk.feed.follow_message(caller(), asked, last if is_id(last) else "0").response

    def followed(asked: _Position, ticket_id: str) -> Response:
        """Answer with events from the point where a broken subscription continues, if it says one, else from now on."""
        given = request.headers.get("Last-Event-ID") or asked.last_event_id
        try:
            position = parse_position(given) if given else None
        except ValueError as wrong:
            raise unfit("last_event_id", wrong) from None
        if request.method == "HEAD":
            return Response(content_type=_EVENT_STREAM)
        return desk.feed.follow(caller(), ticket_id.encode(), position, sees_texts()).response


def _admitted(health_hosts: HealthHosts) -> Registration:
    try:
        asked = read_json(_Registration, REGISTER_BODY)
        try:
            health_hosts.check(asked.health_url)
        except UnfitUrl as wrong:
            raise unfit("health_url", wrong) from None
        must_be_for(asked.name)
    except Problem as refused:
        why = [refused.detail, *(f"{one['field']}: {one['problem']}" for one in refused.facts.get("errors", ()))]
        event("consumer_refused", level=WARNING, status=int(refused.status), address=g.address, why=why)
        raise
    # A client without a uuid is a new start each time it registers: only the end of the lease frees the name.
    return Registration(**asked.model_dump() | {"uuid": asked.uuid or uuid.uuid4().hex})


def _registered(desk: Desk, asked: Registration) -> RegistrationResult:
    try:
        given = desk.membership.register(asked)
    except NameInUse as held:
        later = {"Retry-After": str(max(1, math.ceil(held.retry_after_ms / 1000)))}
        raise Problem(409, "name_in_use", str(held), headers=later) from None
    except RegistrationOver:
        why = "the registration under this uuid has ended; register under a new one"
        raise Problem(410, "registration_over", why) from None
    desk.look_now()
    return given


def read_report(body: bytes, wants_answers: bool = True, retrying: int = 0) -> Report:
    """Raises Problem 400, 422."""
    report = parse_json(ReportBody, body)
    items = [(item["ticket_id"], item["message_ids"]) for item in report["tickets"]]
    ids = [one for _, some in items for one in some]
    joined = b"\n".join(ids)
    # One match for all of them; the count ensures that none contains the separator.
    if ids and (_MESSAGE_IDS.fullmatch(joined) is None or joined.count(b"\n") != len(ids) - 1):
        raise unfit("tickets.message_ids", "must be stream ids like 1526919030474-55")
    if len(ids) > MOST_MESSAGES:
        raise unfit("tickets", f"must have at most {MOST_MESSAGES} message_ids together")
    return Report(report["incarnation"], items, wants_answers, retrying=retrying)


def unfit(field: str, problem: object) -> Problem:
    return unprocessable([{"field": field, "problem": str(problem)}])


def fitting(ticket_id: str) -> str:
    """Return the ticket id of a path. Raises Problem 404, 422."""
    try:  # Flask's text has a question mark where the bytes of the path are not UTF-8
        request.environ["PATH_INFO"].encode("latin-1").decode()
    except UnicodeDecodeError:
        raise Problem(404, "unknown_ticket", "ticket ids are UTF-8") from None
    if len(ticket_id.encode()) > LONGEST_TICKET:
        raise unfit("ticket_id", f"must be text of 1 to {LONGEST_TICKET} bytes")
    return ticket_id


#: The most bytes of a body: 500 ids of letters fit.
BODY = 32 * 1024
#: Seconds that the search for the delayed messages of one ticket may take.
_FIND_S = 0.5


def operator_routes(parts: Parts) -> Blueprint:
    api = Blueprint("operators", __name__, url_prefix="/api")
    _add_shelves(api, parts)
    look = looks(api)

    @look("/tickets/<rest:ticket_id>/explain", verbs.Explanation, problems={422: TICKET_PROBLEMS[422]})
    def explain(ticket_id: str) -> Any:
        """The reason why a ticket waits, and until when."""
        return seen(parts.explain(fitting(ticket_id)))

    @look("/explain", verbs.Explanation, TicketQuery)
    def explain_by_query(asked: TicketQuery) -> Any:
        """The explanation of a ticket of any id: in a path, some ids may be taken for something else."""
        return seen(parts.explain(asked.id))

    @look("/lag", verbs.Lag)
    def lag() -> Any:
        """Plain numbers for autoscalers, such as KEDA's metrics-api scaler."""
        return lag_document(parts.stats.read())

    @look("/rules", verbs.Rules)
    def rules() -> Any:
        """The live rules."""
        book = parts.rules.read()
        return {"rules": [rule.shown() for rule in book.rules], "version": int(book.version or 0)}

    @look("/actions", verbs.Actions, _ActionsQuery)
    def actions(asked: _ActionsQuery) -> Any:
        """Actions of operators, newest first."""
        lines, cursor = parts.action_log.page(asked.behind, asked.limit)
        return {"actions": lines, "cursor": cursor}

    @look("/consumers/<name>/process", verbs.Consumers, problems={404: "unknown_consumer"})
    def consumer(name: str) -> Any:
        """Show one consumer: where it runs, and what it runs at this moment, as it says itself."""
        return {"consumers": consumer_shown(parts, parts.status.consumers(), name)}

    for word in ("interrupt", "clear"):
        _add_order(api, parts, word)
    for one in VERBS.values():
        if one.route:
            _add_verb(api, parts, one)
    return api


def _add_shelves(api: Blueprint, parts: Parts) -> None:
    look = looks(api)

    @look("/dead-letters", verbs.Letters, LetterQuery)
    def list_letters(asked: LetterQuery) -> Any:
        """A page of dead letters, oldest first."""
        page = parts.letters.page(asked.meant(sees_texts()), asked.behind, asked.limit)
        rows = with_fields(parts.fields.add_to_letters, [letter.row() for letter in page.letters])
        return {"dead_letters": seen(rows), "cursor": None if page.cursor is None else page.cursor.decode()}

    @look("/dead-letters/<stream_id:letter_id>", verbs.LetterRow, problems={404: "unknown_dead_letter"})
    def show_letter(letter_id: str) -> Any:
        """Show one dead letter; for operators with the text of its error, traceback and fields."""
        found = parts.letters.get(letter_id.encode())
        if found is None:
            raise Problem(404, "unknown_dead_letter", "no dead letter has that id")
        told = found[0].whole(found[1])
        return told if sees_texts() else seen(told) | {"message_fields": None}

    @look("/delayed", verbs.DelayedList, _DelayedQuery)
    def list_delayed(asked: _DelayedQuery) -> Any:
        """A page of delayed messages, the earliest first."""
        delayed = parts.delayed
        try:
            page = delayed.page(asked.cursor, asked.limit, asked.ticket or "", _FIND_S)
        except ValueError as wrong:
            raise unfit("cursor", wrong) from None
        counts = {name: count for name, count in delayed.counts().items() if name != "first_ms"}
        told = {"delayed": [shown(row) for row in page.rows], "cursor": page.cursor, "time_ms": delayed.now_ms()}
        return told | counts

    @look("/find", verbs.Found, _FindQuery, role=Role.OPERATOR)
    def find(asked: _FindQuery) -> Any:
        """Messages with a value in a field, unfinished or dead: a page, and how far the search came."""
        return find_messages(parts.fields, asked.field, query_bytes("value"), asked.cursor, asked.limit)

    @look("/messages/<stream_id:message_id>", verbs.MessageShown, _Behind, problems={404: "unknown_message"})
    def show(asked: _Behind, message_id: str) -> Any:
        """Tell where a message is, its executions, error and dead letter; for operators what it says."""
        facts = message_facts(parts, message_id, asked.cursor)
        of_run = verbs.ExecutionRow.__annotations__
        runs = [{name: run[name] for name in of_run if name in run} for run in facts["executions"]]
        return {name: facts[name] for name in verbs.MessageShown.__annotations__} | {"executions": runs}


def consumer_shown(parts: Parts, rows: Rows, name: str) -> Rows:
    """Raises Problem 404."""
    if not (mine := [row for row in rows if row["name"] == name]):
        raise Problem(404, "unknown_consumer", "no consumer of that name is registered")
    return [row | {"process": parts.ask_process(str(row.get("health_url", "")))} for row in mine]


def shown(row: DelayedRow) -> dict[str, Any]:
    """Return a row as the caller of the current request may see it."""
    return vars(row) if sees_texts() else vars(row) | {"fields": None}


def find_messages(
    fields: MessageFields, field: str, value: bytes, cursor: str | None, most: int = ROWS
) -> dict[str, Any]:
    try:
        check_field_name(field)
    except ValueError as wrong:
        raise unfit("field", wrong) from None
    if len(value) > LONGEST_VALUE:
        raise unfit("value", f"at most {LONGEST_VALUE:,} bytes can be looked for")
    try:
        return fields.find(field, value, cursor, most)
    except ValueError:
        raise unfit("cursor", "must be a cursor from an earlier answer") from None


def query_bytes(name: str) -> bytes:
    """Return a value of the query as it was sent: Flask's own text has a question mark for bytes that are not UTF-8."""
    asked = parse_qs(request.query_string.decode("latin-1"), encoding="latin-1")
    return asked.get(name, [""])[0].encode("latin-1")


def message_facts(parts: Parts, message_id: str, after: str | None) -> dict[str, Any]:
    """Return what the caller may see of a message, named as in ``MessageShown``; of its executions those behind
    ``after``; and ``now``: what the explanation of its ticket says of an unfinished one. Raises Problem 404 when
    nothing is known of it."""
    # Before the letters: what is given up is no longer pending in the step that writes its letter.
    facts = parts.history.message(message_id)
    letter, waiting = parts.letters.of_message(message_id.encode()), parts.delayed.chosen([message_id])
    facts |= parts.history.executions(message_id, after, letter.runs if letter else ())
    is_there, runs = facts["bytes"] is not None, facts["executions"]
    if not (is_there or letter or waiting or facts["state"] or runs) and facts["cursor"] is None:
        raise Problem(
            404,
            "unknown_message",
            "nothing is known of a message of that id: not in the stream, the delayed messages, the dead letters or the"
            " run log; it may have been trimmed",
        )
    delayed, dead_letter = shown(waiting[0]) if waiting else None, letter and letter.row()
    found = [part.get("ticket_id") for part in (facts, dead_letter, delayed, *runs[:1]) if part]
    ticket_id = next(filter(None, found), None)
    now = _now(parts, ticket_id, message_id) if is_there and ticket_id else {}
    entry = now.get("row")
    state = "delayed" if delayed else entry["state"] if entry else "dead_letter" if letter else facts["state"]
    facts |= {"state": str(state or ("over" if is_there else "gone")), "ticket_id": ticket_id, "now": now}
    facts |= {"entry": entry, "sentences": now["sentences"] if now.get("is_first") else []}
    facts |= {"delayed": delayed, "dead_letter": dead_letter, "fields": facts["fields"] if sees_texts() else None}
    return dict(seen(facts))


def _now(parts: Parts, ticket_id: str, message_id: str) -> dict[str, Any]:
    """Return what its ticket's explanation says of an unfinished message; without a ``row`` it is done, or given up."""
    try:
        explained = parts.explain(ticket_id)
    except ValueError:
        return {}  # what is no ticket id
    row = next((one for one in explained["entries"] if one["id"] == message_id), None)
    facts = {"summary": explained["summary"], "owner": explained["owner"], "ticket_state": explained["state"]}
    is_first = bool(explained["entries"]) and explained["entries"][0]["id"] == message_id
    return facts | {"row": row, "is_first": is_first, "sentences": explained["sentences"]}


def _add_order(api: Blueprint, parts: Parts, word: str) -> None:
    verb = VERBS["tickets order"]

    def view(ticket_id: str) -> Response:
        about = {"ticket_id": fitting(ticket_id), "order": word} | read_json(verbs.OrderArgs, BODY).model_dump()
        return _answered(performed(parts, verb, verbs.NewOrder(**about)))

    told = VERBS[f"tickets {word}"].help
    tells(told, verb.answers, problems=verb.problems, body=verbs.OrderArgs, role=Role.PRODUCER)(view)
    api.add_url_rule(f"/tickets/<rest:ticket_id>/{word}", f"{word}_ticket", view, methods=["POST"])


def _add_verb(api: Blueprint, parts: Parts, verb: Verb) -> None:
    method, path = verb.route.split()
    is_query = method == "DELETE"

    def view(**places: str) -> Response:
        args = read_query(verb.args) if is_query else read_json(verb.args, BODY)
        return _answered(performed(parts, verb, args, **places))

    asked: dict[str, Any] = {"query" if is_query else "body": verb.args}
    tells(verb.help, verb.answers, problems=verb.problems, **asked)(view)
    api.add_url_rule(path, verb.name.replace(" ", "_"), view, methods=[method])


def _answered(outcome: Outcome) -> Response:
    if outcome.problem:
        raise Problem(outcome.status, outcome.problem, outcome.text)
    return answer(outcome.document, outcome.status)


def performed(parts: Parts, verb: Verb, args: Args, /, **places: str) -> Outcome:
    """Do a verb for the caller of the current request. Raises Problem 409, 422."""
    try:
        return verb.perform(acting_in(parts, args.reason), args, **places)
    except verbs.Unfit as wrong:
        raise unfit(wrong.field, wrong) from None
    except TooManyRules as full:
        raise Problem(409, "too_many_rules", str(full)) from None


def acting_in(parts: Parts, reason: str = "") -> Parts:
    """Return what verbs act with for the sender of this request."""
    return parts.acting(By(str(g.get("who", "operator")), "http", reason))
