"""Read what queries and forms of the page ask for: filters of dead letters and of tickets, and reasons. Keep the
messages about what was done."""

from __future__ import annotations

import datetime
import re
import secrets
import zoneinfo
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlencode

from flask import request
from itsdangerous import BadSignature, URLSafeSerializer

from usher.common.base.durations import moment_ms
from usher.common.http.app import Problem, read_model
from usher.master.insight.status import ORDERS
from usher.master.policy.rules import LONGEST_REASON
from usher.master.verbs.verbs import Ask

#: Choices of ``younger_than_s``.
AGES = (("", "any age"), ("900", "15 min"), ("3600", "1 h"), ("21600", "6 h"), ("86400", "1 d"), ("604800", "7 d"))
#: Most characters of a message about what was done.
_LONGEST = 1000
_ZONE = re.compile(r"[A-Za-z0-9_+-]{1,40}(?:/[A-Za-z0-9_+-]{1,40}){0,2}")
#: The zone of a form that means the master's own.
LOCAL = "local"
T = TypeVar("T", bound=Ask)


def asked_of(ask: type[T], given: Mapping[str, str]) -> T:
    """Return the filter that a query or a form asks for. Raises Problem 422."""
    return read_model(ask, {name: text for name in ask.model_fields if (text := given.get(name, ""))}, False)


def asked_sort(given: Mapping[str, str]) -> str:
    if (sort := given.get("sort", "")) not in ("", *ORDERS):
        raise refused(f"sort is one of {', '.join(ORDERS)}")
    return sort


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
    """Messages about what was done, in the addresses of pages: signed by this master, else a link could make a page
    show any text."""

    def __init__(self) -> None:
        self._signer = URLSafeSerializer(secrets.token_bytes(32))

    def put(self, text: str) -> str:
        return str(self._signer.dumps(text[:_LONGEST]))

    def get(self, signed: str) -> str:
        try:
            return str(self._signer.loads(signed))
        except BadSignature:
            return ""


# -- times


def asked_moment() -> int:
    """Return the time that a form gives, in its zone. Raises Problem 422, with a sentence."""
    text, zone = request.form.get("at", "").strip(), request.form.get("zone", "")
    if not text:
        raise refused("say when they are to be sent: give a time beside the button")
    try:
        return moment_ms(text, None if zone == LOCAL else lambda: _zone(zone))
    except ValueError as wrong:
        raise refused(str(wrong).replace("write e.g.", "write the time as")) from None


def _zone(name: str) -> datetime.tzinfo:
    if name == "UTC":
        return datetime.UTC
    try:
        if not _ZONE.fullmatch(name):
            raise ValueError
        return zoneinfo.ZoneInfo(name)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        raise refused("this master does not know the zone of the time: choose UTC") from None


def local_zone() -> str:
    here = datetime.datetime.now().astimezone()
    return f"{here:%Z} (now UTC{here:%:z})" if here.utcoffset() else ""
