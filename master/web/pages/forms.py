"""Read what queries and forms of the page ask for: filters of dead letters and of tickets, and reasons. Keep the
messages about what was done."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from flask import request

from usher.common.base.text import label
from usher.common.http.app import Problem, read_model
from usher.master.policy.letters import LetterFilter
from usher.master.policy.rules import LONGEST_REASON
from usher.master.policy.ticket_filter import ORDERS, TicketFilter, parse_states
from usher.master.web.dead_letters import LetterQuery
from usher.master.web.seen import sees_texts

#: Choices of ``younger_than_s``.
AGES = (("", "any age"), ("900", "15 min"), ("3600", "1 h"), ("21600", "6 h"), ("86400", "1 d"), ("604800", "7 d"))
_OF_LETTERS = {
    "ticket": "of ticket {}",
    "reason": "with the reason {}",
    "error": "with the error {}",
    "policy": "under the policy {}",
    "group": "of the kind {}",
    "younger_than_s": "younger than {} s",
    "older_than_s": "older than {} s",
}
_OF_TICKETS = ("state", "consumer", "error", "sort")
_LONGEST, _FLASHES = 400, 200


def asked_filter(given: Mapping[str, str]) -> tuple[dict[str, str], LetterFilter]:
    """Return the texts as they were asked for, and the filter they mean. Raises Problem 422."""
    asked = {name: given.get(name, "") for name in _OF_LETTERS}
    return asked, read_model(LetterQuery, {name: value for name, value in asked.items() if value}).meant()


def in_words(asked: Mapping[str, str]) -> str:
    told = [
        _OF_LETTERS[name].format(label(value) if name == "policy" else value) for name, value in asked.items() if value
    ]
    return ", ".join(told) or "all dead letters"


def asked_tickets(given: Mapping[str, str]) -> tuple[dict[str, str], TicketFilter]:
    """Return the texts as they were asked for, and the filter they mean. Raises Problem 422."""
    asked = {name: given.get(name, "").strip() for name in _OF_TICKETS}
    if asked["sort"] not in ("", *ORDERS) or max(map(len, asked.values())) > _LONGEST:
        raise refused(f"sort is one of {', '.join(ORDERS)}, and no filter is longer than {_LONGEST}")
    try:
        return asked, TicketFilter(parse_states(asked["state"]), asked["consumer"], asked["error"], sees_texts())
    except ValueError as wrong:
        raise refused(str(wrong)) from None


def group_url(group: Mapping[str, Any]) -> str:
    return "/tickets?" + urlencode({"state": group["state"], "error": group["error"]})


def read_why() -> str:
    """Return the reason that a form gives. Raises Problem 422, as the same over JSON does; so read it before anything
    is done."""
    why = request.form.get("why", "").strip()[:LONGEST_REASON]
    if not why.isprintable():
        raise refused("the reason must be one line of text, without control characters")
    return why


def read_form_text(name: str, most: int) -> str:
    value = request.form.get(name, "")
    if not 0 < len(value) <= most:
        raise refused(f"{name} must be text of 1 to {most} characters")
    return value


def refused(why: str) -> Problem:
    return Problem(422, "invalid_fields", why)


class FlashMessages:
    """The last messages of this master. A link to one has only a random name: otherwise a link could make a page show
    any text."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, text: str) -> str:
        name = secrets.token_urlsafe(9)
        with self._lock:
            self._texts[name] = text
            while len(self._texts) > _FLASHES:
                self._texts.popitem(last=False)
        return name

    def get(self, name: str) -> str:
        with self._lock:
            return self._texts.get(name, "")
