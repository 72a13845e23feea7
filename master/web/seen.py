"""Show a caller what it may see of errors: viewers the types of errors and their places in the code, operators their
texts and tracebacks too, which may hold what messages say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flask import g

from usher.common.http.credentials import Role

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
