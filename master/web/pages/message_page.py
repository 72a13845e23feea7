"""The page of one message: what is known of it, and what is not known any more (``usher.master.web.message``)."""

from __future__ import annotations

from flask import Blueprint, request

from usher.common.http.app import Problem
from usher.common.protocol.stream_id import is_id
from usher.master.web.message import message_facts
from usher.master.web.pages.port import PagePort
from usher.master.web.pages.views import render_page


def message_views(port: PagePort) -> Blueprint:
    """Return the page of a message."""
    views = Blueprint("message_views", __name__)

    @views.get("/messages/<message_id>")
    def message(message_id: str) -> str:
        if not is_id(message_id):
            raise Problem(404, "unknown_message", "no message has an id of that form")
        after = request.args.get("after") or None
        if after is not None and not is_id(after):
            raise Problem(422, "invalid_fields", "after is not one from a page")
        facts = message_facts(port, message_id, after)
        return render_page("tickets/message.html", "tickets", message_id=message_id, **facts)

    return views
