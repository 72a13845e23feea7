"""``GET /api/tickets/{id}/events``: what happens to a ticket, as server-sent events, for as long as the client stays.

``GET /api/events?id=`` is the same for any id. The request ends with the head of its answer; the connection then
belongs to the master's feed and holds no thread. Viewers are told everything but what messages say.
"""

from __future__ import annotations

from flask import Blueprint, Response, g, request
from pydantic import BaseModel, Field

from usher.common.http.app import Problem, read_model, unprocessable
from usher.common.http.credentials import Role
from usher.common.http.openapi import tells
from usher.common.http.server.push_sockets import DETACH
from usher.master.policy.explain.ticket_events import parse_position
from usher.master.web.api import TICKET_PROBLEMS, TicketQuery, read_ticket_id
from usher.master.web.ports import MasterPort

_PATH_END = b"/events"
#: What ``parse_position`` takes, for the OpenAPI document.
_POSITION = r"^([0-9]{1,20}-[0-9]{1,20}(_[0-9]{1,20}-[0-9]{1,20}){2}|0|)$"


class _Position(BaseModel):
    """Where a subscription that broke goes on: the id of the last event seen, as in the header Last-Event-ID; 0: all
    that is still there."""

    last_event_id: str = Field("", pattern=_POSITION)


class _FollowedTicket(_Position, TicketQuery):
    """Which ticket, and from where on."""


def events_route(port: MasterPort) -> Blueprint:
    """The two routes."""
    live = Blueprint("live", __name__, url_prefix="/api")

    @live.get("/tickets/<rest:ticket_id>/events")
    @tells(
        "What happens to a ticket from now on, as server-sent events.",
        {200: "text/event-stream"},
        query=_Position,
        problems=TICKET_PROBLEMS,
    )
    def follow(ticket_id: str) -> Response:
        return _followed(port, read_ticket_id(_PATH_END))

    @live.get("/events")
    @tells(
        "The same, for any id: in a path, some may be taken for something else.",
        {200: "text/event-stream"},
        query=_FollowedTicket,
    )
    def follow_by_query() -> Response:
        return _followed(port, read_model(_FollowedTicket, request.args.to_dict()).id)

    return live


def _followed(port: MasterPort, asked: str) -> Response:
    position = _read_position()
    detach = request.environ.get(DETACH)
    if detach is None or not port.can_follow():
        raise Problem(503, "too_many_followers", "no more subscriptions can be open here", headers={"Retry-After": "5"})
    if request.method == "GET":
        with_fields = g.role.may(Role.OPERATOR)
        detach(lambda connection: port.follow(connection, asked, position, with_fields))
    # The first bytes, so that a reader knows at once that it is listened to.
    return Response(iter([b": following\n\n"]), content_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


def _read_position() -> list[bytes] | None:
    """Where a subscription that broke goes on: Last-Event-ID, or the query's last_event_id. None: from now on."""
    given = request.headers.get("Last-Event-ID") or request.args.get("last_event_id")
    if not given:
        return None
    try:
        return parse_position(given)
    except ValueError as wrong:
        raise unprocessable([{"field": "last_event_id", "problem": str(wrong)}]) from None
