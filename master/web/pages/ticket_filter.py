"""Read the page's filter of tickets: from the query of a list, and from the form of a bulk action."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from usher.common.http.app import Problem
from usher.master.policy.ticket_filter import ORDERS, TicketFilter, parse_states
from usher.master.web.seen import sees_texts

_NAMES = ("state", "consumer", "error", "sort")
_LONGEST = 400


def asked_tickets(given: Mapping[str, str]) -> tuple[dict[str, str], TicketFilter]:
    """Return the texts as they were asked for, and the filter they mean. Raises Problem 422."""
    asked = {name: given.get(name, "").strip() for name in _NAMES}
    if asked["sort"] not in ("", *ORDERS) or max(map(len, asked.values())) > _LONGEST:
        raise Problem(
            422, "invalid_fields", f"sort is one of {', '.join(ORDERS)}, and no filter is longer than {_LONGEST}"
        )
    try:
        return asked, TicketFilter(parse_states(asked["state"]), asked["consumer"], asked["error"], sees_texts())
    except ValueError as wrong:
        raise Problem(422, "invalid_fields", str(wrong)) from None


def group_url(group: Mapping[str, Any]) -> str:
    """Return the list of all tickets of a group."""
    return "/tickets?" + urlencode({"state": group["state"], "error": group["error"]})
