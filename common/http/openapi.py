"""Describe routes at their views, and make the OpenAPI document from that.

``@tells(...)`` at a view is the only place that declares a route's models, answers and role; its path and method are
Flask's. The document is made from these at its first use, so it cannot lag behind; a route below ``/api`` without a
declaration makes it fail, and a test.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flask import Flask, Response, request
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from typing_extensions import TypedDict
from werkzeug.routing import Rule

from usher.common.http.auth import needed_role, needs
from usher.common.http.credentials import Role
from usher.common.http.problem import answer

JSON, PROBLEM = "application/json", "application/problem+json"
_VERSION = "3.1.0"
_PARAMETER = re.compile(r"<(?:([^<>:]+):)?([^<>]+)>")
_REFERENCES = "#/components/schemas/{model}"
#: Errors of any route; below, those of routes with a body, and those of routes that require a token.
_ALWAYS = {
    400: "the request is not proper HTTP or JSON",
    406: "answers are JSON",
    421: "not a host name of this service",
    429: "too many requests; Retry-After",
}
_ALWAYS |= {
    414: "path and query too long",
    431: "headers too large",
    500: "a bug; the log has the request id",
    503: "not now; Retry-After",
}
_OF_BODIES = {
    408: "the body came too slowly",
    411: "no length",
    413: "too large",
    415: "not JSON in UTF-8",
    422: "fields that cannot be used",
}
_OF_TOKENS = {401: "no token, or an unknown one", 403: "the token does not allow this"}

_SHARED = _ALWAYS | _OF_BODIES | _OF_TOKENS

View = TypeVar("View", bound=Callable[..., Any])


class _Problem(TypedDict):
    """A problem document (RFC 9457); some have further members."""

    type: str
    title: str
    status: int
    request_id: str


@dataclass(frozen=True)
class Operation:
    """The description of a route. ``answers``: status -> type of the JSON document, a content type that is not JSON,
    or None for no content."""

    summary: str
    answers: Mapping[int, Any]
    body: Any = None
    query: type[BaseModel] | None = None
    problems: Mapping[int, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def tells(
    summary: str,
    answers: Mapping[int, Any],
    *,
    role: Role | None = None,
    body: Any = None,
    query: type[BaseModel] | None = None,
    problems: Mapping[int, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Callable[[View], View]:
    """Decorate a view with its description. ``role``: see ``usher.common.http.auth``; None: viewer for GET, operator
    for changes.

    ``problems``: errors beyond those of every route, status -> title and meaning. ``headers``: the request headers that
    it heeds, and their effect.
    """

    def mark(view: View) -> View:
        view.usher_operation = Operation(  # type: ignore[attr-defined]
            summary, answers, body, query, problems or {}, headers or {}
        )
        return view if role is None else needs(role)(view)

    return mark


def add_document(app: Flask, title: str) -> None:
    made = functools.cache(lambda: document(app, title))

    @tells("This document.", {200: dict[str, Any]})
    def openapi() -> Response:
        servers = {"servers": [{"url": request.script_root}]} if request.script_root else {}
        return answer(made() | servers)

    app.add_url_rule("/api/openapi.json", "openapi", openapi)


def document(app: Flask, title: str) -> dict[str, Any]:
    """Return the OpenAPI document of all routes below ``/api``, and of others that are described. Raises TypeError for
    a route below ``/api`` without a description."""
    schemas = _Schemas()
    problem = {"content": {PROBLEM: {"schema": schemas.of(_Problem, "serialization")}}}
    paths: dict[str, dict[str, Any]] = {}
    for rule, method, view in _routes(app):
        operation: Operation | None = getattr(view, "usher_operation", None)
        if operation is None:
            raise TypeError(f"{method} {rule.rule} does not say what it answers: put @tells(...) at its view")
        told = _operation(operation, schemas, rule, needed_role(app, rule.endpoint, method), problem)
        paths.setdefault(_PARAMETER.sub(r"{\2}", rule.rule), {})[method.lower()] = told
    return {
        "openapi": _VERSION,
        "info": {
            "title": title,
            "version": "1",
            "description": "Errors are problem documents (RFC 9457) with a request id.",
        },
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": dict(sorted(schemas.found.items())),
            "responses": {str(status): {"description": said, **problem} for status, said in sorted(_SHARED.items())},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _routes(app: Flask) -> Iterator[tuple[Rule, str, Any]]:
    for rule in app.url_map.iter_rules():
        view = app.view_functions[rule.endpoint]
        if rule.rule.startswith("/api/") or hasattr(view, "usher_operation"):
            for method in sorted((rule.methods or set()) - {"HEAD", "OPTIONS"}):
                yield rule, method, view


def _operation(
    operation: Operation, schemas: _Schemas, rule: Rule, role: Role, problem: Mapping[str, Any]
) -> dict[str, Any]:
    shared = [
        *_ALWAYS,
        *(_OF_BODIES if operation.body is not None else ()),
        *(() if role is Role.ANYBODY else _OF_TOKENS),
    ]
    shared += [422] if operation.query is not None else []
    responses: dict[str, Any] = {str(status): {"$ref": f"#/components/responses/{status}"} for status in shared}
    responses |= {str(status): {"description": said, **problem} for status, said in operation.problems.items()}
    for status, kind in operation.answers.items():
        if kind is None:
            responses[str(status)] = {"description": "done"}
            continue
        ours = (
            {kind: {"schema": {"type": "string"}}}
            if isinstance(kind, str)
            else {JSON: {"schema": schemas.of(kind, "serialization")}}
        )
        theirs = problem["content"] if str(status) in responses else {}
        responses[str(status)] = {"description": "done" if status < 400 else _SHARED[status], "content": ours | theirs}
    told: dict[str, Any] = {
        "operationId": rule.endpoint.replace(".", "_"),
        "summary": operation.summary,
        "responses": dict(sorted(responses.items())),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _in_path(rule, name)}
        for name in sorted(rule.arguments)
    ]
    if operation.query is not None:
        parameters += _query(operation.query)
    for name, said in operation.headers.items():
        parameters.append(
            {"name": name, "in": "header", "required": False, "description": said, "schema": {"type": "string"}}
        )
    if parameters:
        told["parameters"] = parameters
    if operation.body is not None:
        told["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": schemas.of(operation.body, "validation")}},
        }
    told["security"] = [] if role is Role.ANYBODY else [{"token": []}]
    told["x-role"] = role.value
    return told


def _in_path(rule: Rule, name: str) -> dict[str, Any]:
    [converter] = [kind for kind, variable in _PARAMETER.findall(rule.rule) if variable == name]
    pattern = rule.map.converters[converter or "default"].regex
    return {"type": "string", "minLength": 1} | (
        {} if pattern.startswith("[^") or "\\S" in pattern else {"pattern": f"^{pattern}$"}
    )


def _query(model: type[BaseModel]) -> list[dict[str, Any]]:
    schema = model.model_json_schema()
    required = schema.get("required", ())
    parameters = []
    for name, told in schema["properties"].items():
        [plain] = [one for one in told.get("anyOf", [told]) if one.get("type") != "null"]
        kept = {key: value for key, value in plain.items() if key not in ("title", "default")}
        parameters.append({"name": name, "in": "query", "required": name in required, "schema": kept})
    return parameters


class _Schemas:
    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def of(self, kind: Any, mode: JsonSchemaMode) -> dict[str, Any]:
        schema = TypeAdapter(kind).json_schema(ref_template=_REFERENCES, mode=mode)
        for name, model in schema.pop("$defs", {}).items():
            self._add(name, model)
        name = schema.get("title")
        if schema.get("type") != "object" or not name:
            return schema
        self._add(name, schema)
        return {"$ref": _REFERENCES.format(model=name)}

    def _add(self, name: str, schema: dict[str, Any]) -> None:
        if self.found.setdefault(name, schema) != schema:
            raise TypeError(f"two models are called {name}")
