"""Answers over HTTP: JSON documents, and problem documents (RFC 9457) for errors."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from flask import Response

from usher.common.base.errors import UsherError
from usher.common.base.log import DEBUG, event


class Problem(UsherError):
    """An error answer, sent as a problem document (RFC 9457).

    ``title`` is a word for programs, ``detail`` a sentence for people, ``facts`` are further members. Never put input
    into any of them. ``close`` ends the connection: for requests whose body was not read to its end.
    """

    def __init__(
        self,
        status: int,
        title: str = "",
        detail: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        close: bool = False,
        **facts: Any,
    ) -> None:
        self.status = HTTPStatus(status)
        self.title = title or self.status.phrase.lower().replace(" ", "_").replace("-", "_")
        self.detail = detail
        self.headers = dict(headers or {})
        if close:
            self.headers["Connection"] = "close"
        self.facts = facts
        self.request_id = secrets.token_hex(8)
        super().__init__(detail or self.title)


def answer(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    try:
        body = orjson.dumps(document)
    except TypeError:  # orjson cannot encode text that was not UTF-8 in Redis, or whole numbers above 64 bits
        body = json.dumps(document, default=str).encode()
    return Response(body, status, headers, content_type="application/json")


def answer_problem(problem: Problem) -> Response:
    """Return ``problem`` as a problem document, and log its request id at level debug: a flood of requests must not
    flood the log."""
    document: dict[str, Any] = {"type": "about:blank", "title": problem.title, "status": int(problem.status)}
    if problem.detail:
        document["detail"] = problem.detail
    response = answer({**document, **problem.facts, "request_id": problem.request_id}, problem.status, problem.headers)
    response.content_type = "application/problem+json"
    facts: dict[str, Any] = {"title": problem.title, "request_id": problem.request_id}
    event("request_refused", level=DEBUG, status=int(problem.status), **facts)
    return response
