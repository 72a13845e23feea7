"""``GET /api/tickets/{id}/events``: the events of a ticket, as server-sent events, for as long as the client stays.

``GET /api/events?id=`` is the same for any id. The request ends with the head of its answer; the connection then
belongs to the master's feed and holds no thread. Viewers get everything but the contents of messages.
"""

from __future__ import annotations

from flask import Blueprint, Response, g, request
from pydantic import BaseModel, Field

from usher.common.http.app import Problem, read_model, unprocessable
from usher.common.http.auth import caller
from usher.common.http.credentials import Role
from usher.common.http.openapi import tells
from usher.common.http.server.push_sockets import DETACH
from usher.master.policy.explain.ticket_events import parse_position
from usher.master.web.api import TICKET_PROBLEMS, TicketQuery, read_ticket_id
from usher.master.web.ports import MasterPort

_PATH_END = b"/events"
#: The values that ``parse_position`` takes, for the OpenAPI document.
_POSITION = r"^([0-9]{1,20}-[0-9]{1,20}(_[0-9]{1,20}-[0-9]{1,20}){2}|0|)$"


class _Position(BaseModel):
    """The point where a broken subscription continues: the id of the last event seen, as in the header Last-Event-ID;
    0: everything that is still there."""

    last_event_id: str = Field("", pattern=_POSITION)


class _FollowedTicket(_Position, TicketQuery):
    """A ticket, and the point from which to follow it."""


def events_route(port: MasterPort) -> Blueprint:
    """Return the two routes."""
    live = Blueprint("live", __name__, url_prefix="/api")

    @live.get("/tickets/<rest:ticket_id>/events")
    @tells(
        "The events of a ticket from now on, as server-sent events.",
        {200: "text/event-stream"},
        query=_Position,
        problems=TICKET_PROBLEMS,
    )
    def follow(ticket_id: str) -> Response:
        return _followed(port, read_ticket_id(_PATH_END))

    @live.get("/events")
    @tells(
        "The events of a ticket of any id: in a path, some ids may be taken for something else.",
        {200: "text/event-stream"},
        query=_FollowedTicket,
    )
    def follow_by_query() -> Response:
        return _followed(port, read_model(_FollowedTicket, request.args.to_dict()).id)

    return live


def _followed(port: MasterPort, asked: str) -> Response:
    position = _read_position()
    detach, who = request.environ.get(DETACH), caller()
    if detach is None or not port.can_follow(who):
        raise Problem(
            503, "too_many_followers", "this master has no room for another subscription", headers={"Retry-After": "5"}
        )
    if request.method == "GET":
        with_fields = g.role.may(Role.OPERATOR)
        detach(lambda connection: port.follow(connection, who, asked, position, with_fields))
    # The first bytes, so that the client knows at once that the subscription works.
    return Response(iter([b": following\n\n"]), content_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


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
