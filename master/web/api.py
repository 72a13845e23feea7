"""The routes for consumers, and those that show consumers and tickets. Each reads strictly, asks once, and answers;
``usher.common.http.app`` shapes errors."""

from __future__ import annotations

import re
import uuid
from typing import Annotated, Any

from flask import Blueprint, Response, g, request
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema
from typing_extensions import TypedDict

from usher.common.base.log import WARNING, event
from usher.common.http.app import Problem, answer, parse_json, read_body, read_json, read_query, unprocessable
from usher.common.http.auth import caller, must_be_for
from usher.common.http.credentials import Role
from usher.common.http.fields import Fitting, PageLimit, TicketId
from usher.common.http.openapi import tells
from usher.common.protocol.registration import (
    MOST_SLOTS,
    NAME,
    NO_LOCK,
    RETRYING_HEADER,
    WINDOW_HEADER,
    Registration,
    name_of,
)
from usher.common.protocol.stream_id import is_id
from usher.common.runtime.settings import checked_by
from usher.master.dispatch.events import Report
from usher.master.insight.ticket_feed import parse_position
from usher.master.membership.health_url import HealthHosts, UnfitUrl, host_of
from usher.master.messages.fields import MessageFields
from usher.master.verbs.documents import (
    Audit,
    Consumers,
    Deregistered,
    Registered,
    Reported,
    Sources,
    TicketRow,
    Tickets,
)
from usher.master.web.parts import Desk, seen, with_fields

#: The most bytes of a body. 64 KiB would not hold 500 messages of 500 tickets with ids of 256 bytes; this holds 1000.
REGISTER_BODY, ACKNOWLEDGE_BODY = 4096, 512 * 1024
#: The most messages of one report.
MOST_MESSAGES = 1000
_LONGEST_TICKET_ID = 256
_LARGEST_FENCE = 2**63 - 1
_MINIMAL = "return=minimal"
_TICKETS_ON_A_PAGE, _MOST_TICKETS_ON_A_PAGE = 100, 200
_TICKETS_PATH = b"/api/tickets/"
TICKET_PROBLEMS = {404: "unknown_ticket", 422: "ticket ids have 1 to 256 bytes"}

_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_LOCK = re.compile(r"[A-Za-z0-9._:-]{1,200}")
_MESSAGE_IDS = re.compile(rb"[0-9]{1,20}-[0-9]{1,20}(?:\n[0-9]{1,20}-[0-9]{1,20})*")
_CURSOR = re.compile(r"[0-9]{0,19}")


_Name = Annotated[str, Fitting(NAME, "must be 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit")]
_HealthUrl = Annotated[
    str,
    checked_by(host_of),
    WithJsonSchema(
        {
            "type": "string",
            "format": "uri",
            "pattern": "^https?://",
            "maxLength": 512,
            "description": "Its host is in USHER_HEALTH_HOSTS.",
        }
    ),
]
_Uuid = Annotated[str, Fitting(_UUID, "must be 1 to 64 of A-Z a-z 0-9 _ -")]
_Lock = Annotated[str, Fitting(_LOCK, "must be 1 to 200 of A-Z a-z 0-9 . _ : -")]
_Incarnation = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}:[0-9]{1,20}$")]
_TICKET_ID = {"type": "string", "minLength": 1, "maxLength": _LONGEST_TICKET_ID}
#: As bytes, and without a check of each: reports come all the time (``read_report``). Never passed to Redis.
_MessageId = Annotated[bytes, WithJsonSchema({"type": "string", "pattern": "^[0-9]{1,20}-[0-9]{1,20}$"})]
_Cursor = Annotated[str, Fitting(_CURSOR, "must be a cursor from an earlier answer")]


class _Registration(BaseModel):
    """The body of register. An unknown field is refused: a misspelt ``slots`` would silently be 1."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    name: _Name = Field(validation_alias=AliasChoices("name", "consumer_name"))
    health_url: _HealthUrl = Field(validation_alias=AliasChoices("health_url", "healthURL"))
    uuid: _Uuid | None = None
    slots: int = Field(1, ge=1, le=MOST_SLOTS)
    capacity: int = Field(1000, ge=1, le=100_000)
    lock: _Lock = NO_LOCK


class _Deregistration(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    incarnation: _Incarnation


class _ReportItem(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]

    ticket_id: Annotated[bytes, Field(min_length=1, max_length=_LONGEST_TICKET_ID), WithJsonSchema(_TICKET_ID)]
    fence: Annotated[int, Field(ge=0, le=_LARGEST_FENCE)]
    message_ids: Annotated[list[_MessageId], Field(min_length=1, max_length=MOST_MESSAGES)]


class ReportBody(TypedDict):
    """The body of acknowledge; at most 1000 messages. Plain dicts: a model takes three times as long.

    ``ticket_id``: at most 256 bytes; empty for the one message of an item that has no ticket id.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", title="Report")  # type: ignore[misc]

    incarnation: _Incarnation
    tickets: Annotated[list[_ReportItem], Field(max_length=MOST_MESSAGES)]


class _TicketsQuery(BaseModel):
    """The query of a list of tickets. With ``id`` the list has only that ticket, if it is in processing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: TicketId | None = None
    cursor: _Cursor = ""
    limit: PageLimit = _TICKETS_ON_A_PAGE


class TicketQuery(BaseModel):
    """A ticket by query: in a path, an id that ends like a route (``x/explain``), or is nothing but dots, may be taken
    for something else on the way."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: TicketId


#: The values that ``parse_position`` takes, for the OpenAPI document.
_POSITION = r"^([0-9]{1,20}-[0-9]{1,20}(_[0-9]{1,20}-[0-9]{1,20}){2}|0|)$"


class _Position(BaseModel):
    """The point where a broken subscription continues: the id of the last event seen, as in the header Last-Event-ID;
    0: everything that is still there."""

    last_event_id: str = Field("", pattern=_POSITION)


class _FollowedTicket(_Position, TicketQuery):
    """A ticket, and the point from which to follow it."""


def routes(desk: Desk, health_hosts: HealthHosts, fields: MessageFields | None = None) -> Blueprint:
    """Return the routes for consumers, and those that show consumers and tickets; with ``fields`` of their messages."""
    api = Blueprint("api", __name__, url_prefix="/api")
    _add_looks(api, desk, fields)
    _add_work(api, desk, health_hosts)
    _add_events(api, desk)
    return api


def _add_work(api: Blueprint, desk: Desk, health_hosts: HealthHosts) -> None:
    @api.post("/consumers/register")
    @tells(
        "Register a start of a consumer: 201 new, 200 the same start again.",
        {201: Registered, 200: Registered},
        body=_Registration,
        role=Role.CONSUMER,
        problems={
            409: "name_in_use: another start of that name lives; Retry-After",
            410: "registration_over: this start has ended",
        },
    )
    def register() -> Response:
        asked = _admitted(health_hosts)
        given = desk.register(asked)
        mine = given.registration
        told = {"incarnation": mine.incarnation, "generation": mine.generation}
        told |= {"lease_ms": given.lease_ms, "left_ms": given.left_ms}
        told |= {"ticket_window": desk.ticket_window, "leader_url": desk.leader_url}
        return answer(told, 201 if given.created else 200)

    @api.post("/consumers/deregister")
    @tells(
        "Report that an incarnation has left.",
        {200: Deregistered},
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
        "Report messages that are acknowledged in Redis, so that the leader frees their tickets at once.",
        {200: Reported, 204: None},
        body=ReportBody,
        headers={"Prefer": "return=minimal (RFC 7240): no answers; 204, perhaps before the tickets are freed."},
        role=Role.CONSUMER,
        problems={409: "fenced: the incarnation has ended; register again"},
    )
    def acknowledge() -> Response:
        prefers = request.headers.get("Prefer", "").split(",")
        minimal = _MINIMAL in {one.partition(";")[0].strip().lower() for one in prefers}
        told = request.headers.get(RETRYING_HEADER, "")
        retrying = int(told) if told.isascii() and told.isdecimal() and len(told) < 7 else 0
        report = read_report(read_body(request, ACKNOWLEDGE_BODY), not minimal, retrying)
        must_be_for(name_of(report.incarnation))
        results = desk.acknowledge(report)
        if not minimal:
            return answer({"results": results})
        # The consumer reports again before half of what it may have is done, so that it need not wait for more.
        window = {} if (messages := desk.window(report.incarnation)) is None else {WINDOW_HEADER: str(messages)}
        taken = Response(status=204, headers={"Preference-Applied": _MINIMAL, **window})
        del taken.headers["Content-Type"]
        return taken


def _add_looks(api: Blueprint, desk: Desk, fields: MessageFields | None) -> None:
    def told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return rows if fields is None else with_fields(fields.add_to_tickets, rows)

    @api.get("/consumers")
    @tells("All registered consumers.", {200: Consumers})
    def consumers() -> Response:
        return answer({"consumers": desk.status.consumers()})

    @api.get("/sources")
    @tells("The progress of gathering several ticket streams; null when there is one.", {200: Sources})
    def sources() -> Response:
        return answer({"sources": desk.status.sources()})

    @api.get("/tickets")
    @tells("A page of tickets in processing, or one by its id.", {200: Tickets}, query=_TicketsQuery)
    def tickets() -> Response:
        asked = read_query(_TicketsQuery)
        if asked.id is not None:
            found = desk.ticket(asked.id)
            return answer(seen({"tickets": told([] if found is None else [found]), "cursor": None}))
        page = desk.status.tickets(asked.cursor or "0", min(asked.limit, _MOST_TICKETS_ON_A_PAGE))
        return answer(seen(page | {"tickets": told(page["tickets"])}))

    @api.get("/tickets/<rest:ticket_id>")
    @tells("One ticket in processing.", {200: TicketRow}, problems=TICKET_PROBLEMS)
    def ticket(ticket_id: str) -> Response:
        found = desk.ticket(read_ticket_id())
        if found is None:
            raise Problem(404, "unknown_ticket", "no ticket of that id is in processing")
        return answer(seen(told([found])[0]))

    @api.get("/audit")
    @tells("The result of the last audit; null when there was none.", {200: Audit})
    def audit() -> Response:
        return answer({"audit": desk.status.proofs()["audit"]})


def _add_events(api: Blueprint, desk: Desk) -> None:
    """Server-sent events of a ticket, for as long as the client stays. Viewers get all but what messages say."""

    @api.get("/tickets/<rest:ticket_id>/events")
    @tells(
        "The events of a ticket from now on, as server-sent events.",
        {200: "text/event-stream"},
        query=_Position,
        problems=TICKET_PROBLEMS,
    )
    def follow(ticket_id: str) -> Response:
        return _followed(desk, read_ticket_id(b"/events"))

    @api.get("/events")
    @tells(
        "The events of a ticket of any id: in a path, some ids may be taken for something else.",
        {200: "text/event-stream"},
        query=_FollowedTicket,
    )
    def follow_by_query() -> Response:
        return _followed(desk, read_query(_FollowedTicket).id)

    @api.get("/messages/<rest:uid>/events")
    @tells(
        "What the handler of a message tells that was sent to be followed: progress, then result or failed.",
        {200: "text/event-stream"},
        role=Role.OPERATOR,
    )
    def follow_message(uid: str) -> Response:
        asked, last = read_ticket_id(b"/events", b"/api/messages/"), request.headers.get("Last-Event-ID", "")
        if request.method == "HEAD":
            return Response(content_type="text/event-stream")
        return desk.feed.follow_message(caller(), asked, last if is_id(last) else "0").response


def _followed(desk: Desk, asked: str) -> Response:
    position = _read_position()
    if request.method == "HEAD":
        return Response(content_type="text/event-stream")
    return desk.feed.follow(caller(), asked.encode(), position, g.role.may(Role.OPERATOR)).response


def _read_position() -> list[bytes] | None:
    """Return the point where a broken subscription continues, from Last-Event-ID or the query's last_event_id. None:
    from now on."""
    given = request.headers.get("Last-Event-ID") or request.args.get("last_event_id")
    if not given:
        return None
    try:
        return parse_position(given)
    except ValueError as wrong:
        raise unprocessable([{"field": "last_event_id", "problem": str(wrong)}]) from None


def _admitted(health_hosts: HealthHosts) -> Registration:
    try:
        asked = _read_registration(health_hosts)
        must_be_for(asked.name)
    except Problem as refused:
        _log_refusal(refused)
        raise
    return asked


def _log_refusal(refused: Problem) -> None:
    why = [refused.detail, *(f"{one['field']}: {one['problem']}" for one in refused.facts.get("errors", ()))]
    status, address = int(refused.status), g.address
    event("consumer_refused", level=WARNING, status=status, address=address, why=why)


def _read_registration(health_hosts: HealthHosts) -> Registration:
    asked = read_json(_Registration, REGISTER_BODY)
    try:
        health_hosts.check(asked.health_url)
    except UnfitUrl as unfit:
        raise unprocessable([{"field": "health_url", "problem": str(unfit)}]) from None
    # A client without a uuid is a new start each time it registers: only the end of the lease frees the name.
    return Registration(
        asked.name, asked.uuid or uuid.uuid4().hex, asked.health_url, asked.slots, asked.capacity, asked.lock
    )


def read_report(body: bytes, wants_answers: bool = True, retrying: int = 0) -> Report:
    """Return the report in the body of acknowledge. Raises Problem 400, 422."""
    report = parse_json(ReportBody, body)
    items = [(item["ticket_id"], item["message_ids"]) for item in report["tickets"]]
    ids = [one for _, some in items for one in some]
    joined = b"\n".join(ids)
    # One match for all of them; the count ensures that none contains the separator.
    if ids and (_MESSAGE_IDS.fullmatch(joined) is None or joined.count(b"\n") != len(ids) - 1):
        raise _unfit("tickets.message_ids", "must be stream ids like 1526919030474-55")
    if len(ids) > MOST_MESSAGES:
        raise _unfit("tickets", f"must have at most {MOST_MESSAGES} message_ids together")
    return Report(report["incarnation"], items, wants_answers, retrying=retrying)


def _fits(ticket_id: str) -> bool:
    return 0 < len(ticket_id) <= _LONGEST_TICKET_ID and (
        ticket_id.isascii() or len(ticket_id.encode()) <= _LONGEST_TICKET_ID
    )


def _unfit(field: str, problem: str) -> Problem:
    return unprocessable([{"field": field, "problem": problem}])


def read_ticket_id(behind: bytes = b"", at: bytes = _TICKETS_PATH) -> str:
    """Return the ticket id of the path between ``at`` and ``behind``, from the bytes: Flask's own text has a question
    mark where they are not UTF-8. Raises Problem 404, 422."""
    path = request.environ["PATH_INFO"].encode("latin-1")
    try:
        ticket_id: str = path.removeprefix(at).removesuffix(behind).decode()
    except UnicodeDecodeError:
        raise Problem(404, "unknown_ticket", "ticket ids are UTF-8") from None
    if not _fits(ticket_id):
        raise _unfit("ticket_id", f"must be text of 1 to {_LONGEST_TICKET_ID} bytes")
    return ticket_id
