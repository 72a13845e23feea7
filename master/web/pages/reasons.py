"""Read the reason that a form gives for an action."""

from __future__ import annotations

from flask import request

from usher.common.http.app import Problem

_LONGEST = 300


def read_why() -> str:
    """Return the reason. Raises Problem 422, as the same over JSON does; so read it before anything is done."""
    why = request.form.get("why", "").strip()[:_LONGEST]
    if not why.isprintable():
        raise Problem(422, "invalid_fields", "the reason must be one line of text, without control characters")
    return why
