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
from http import HTTPStatus
from typing import Any, TypeVar

from flask import Flask, Response, request
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from typing_extensions import TypedDict
from werkzeug.routing import Rule

from usher.common.http.answers import answer
from usher.common.http.auth import needed_role, needs
from usher.common.http.credentials import Role

JSON, PROBLEM = "application/json", "application/problem+json"
_PARAMETER = re.compile(r"<(?:([^<>:]+):)?([^<>]+)>")
#: Errors of any route; below, those of routes with a body, and those of routes that require a token.
_ALWAYS = (400, 406, 414, 421, 429, 431, 500, 503)
_OF_BODIES, _OF_TOKENS = (408, 411, 413, 415, 422), (401, 403)
_SHARED = {status: HTTPStatus(status).phrase for status in sorted(_ALWAYS + _OF_BODIES + _OF_TOKENS)}

View = TypeVar("View", bound=Callable[..., Any])
#: A type, and whether it is read or written: its schema may differ.
_Kind = tuple[Any, JsonSchemaMode]


class _Problem(TypedDict):
    """A problem document (RFC 9457); some have further members."""

    type: str
    title: str
    status: int
    request_id: str


@dataclass(frozen=True)
class Operation:
    """The description of a route. ``answers``: status -> type of the JSON document, a content type that is not JSON,
    or None for no content. ``problems``: errors beyond those of every route, status -> title and meaning."""

    summary: str
    answers: Mapping[int, Any]
    body: Any = None
    query: type[BaseModel] | None = None
    problems: Mapping[int, str] = field(default_factory=dict)


def tells(summary: str, answers: Mapping[int, Any], *, role: Role | None = None, **more: Any) -> Callable[[View], View]:
    """Decorate a view with its ``Operation``. ``role``: None: viewer for GET, operator for changes."""

    def mark(view: View) -> View:
        view.usher_operation = Operation(summary, answers, **more)  # type: ignore[attr-defined]
        return view if role is None else needs(role)(view)

    return mark


def add_document(app: Flask, title: str) -> None:
    made = functools.cache(lambda: document(app, title))

    @app.get("/api/openapi.json")
    @tells("This document.", {200: dict[str, Any]})
    def openapi() -> Response:
        servers = {"servers": [{"url": request.script_root}]} if request.script_root else {}
        return answer(made() | servers)


def document(app: Flask, title: str) -> dict[str, Any]:
    """Return the OpenAPI document of all described routes. Raises TypeError for one below ``/api`` that is not."""
    routes = list(_routes(app))
    kinds: dict[_Kind, None] = {(_Problem, "serialization"): None}
    for _, _, operation in routes:
        documents = (kind for kind in operation.answers.values() if kind is not None and not isinstance(kind, str))
        kinds |= {(kind, "serialization"): None for kind in documents}
        kinds |= {} if operation.body is None else {(operation.body, "validation"): None}
    asked = [(kind, mode, TypeAdapter(kind)) for kind, mode in kinds]
    schemas, shared = TypeAdapter.json_schemas(asked, ref_template="#/components/schemas/{model}")
    problem = {"content": {PROBLEM: {"schema": schemas[_Problem, "serialization"]}}}
    paths: dict[str, dict[str, Any]] = {}
    for rule, method, operation in routes:
        told = _operation(operation, schemas, rule, needed_role(app, rule.endpoint, method), problem)
        paths.setdefault(_PARAMETER.sub(r"{\2}", rule.rule), {})[method.lower()] = told
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1", "description": "Errors are problem documents (RFC 9457)."},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": shared["$defs"],
            "responses": {str(status): {"description": said, **problem} for status, said in _SHARED.items()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _routes(app: Flask) -> Iterator[tuple[Rule, str, Operation]]:
    for rule in app.url_map.iter_rules():
        operation: Operation | None = getattr(app.view_functions[rule.endpoint], "usher_operation", None)
        for method in sorted((rule.methods or set()) - {"HEAD", "OPTIONS"}):
            if operation is not None:
                yield rule, method, operation
            elif rule.rule.startswith("/api/"):
                raise TypeError(f"{method} {rule.rule} does not say what it answers: put @tells(...) at its view")


def _operation(
    operation: Operation, schemas: Mapping[_Kind, Any], rule: Rule, role: Role, problem: Mapping[str, Any]
) -> dict[str, Any]:
    shared = [*_ALWAYS, *(_OF_BODIES if operation.body else ()), *(_OF_TOKENS if role is not Role.ANYBODY else ())]
    shared += [422] if operation.query is not None else []
    responses: dict[str, Any] = {str(status): {"$ref": f"#/components/responses/{status}"} for status in shared}
    responses |= {str(status): {"description": said, **problem} for status, said in operation.problems.items()}
    for status, kind in operation.answers.items():
        content: dict[str, Any] = {} if status < 400 else dict(problem["content"])
        if isinstance(kind, str):
            content[kind] = {"schema": {"type": "string"}}
        elif kind is not None:
            content[JSON] = {"schema": schemas[kind, "serialization"]}
        said = "done" if status < 400 else _SHARED[status]
        responses[str(status)] = {"description": said} | ({"content": content} if content else {})
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _in_path(rule, name)}
        for name in sorted(rule.arguments)
    ]
    parameters += [] if operation.query is None else _query(operation.query)
    told: dict[str, Any] = {
        "operationId": rule.endpoint.replace(".", "_"),
        "summary": operation.summary,
        "responses": dict(sorted(responses.items())),
        "parameters": parameters,
        "security": [] if role is Role.ANYBODY else [{"token": []}],
        "x-role": role.value,
    }
    if operation.body is not None:
        content = {JSON: {"schema": schemas[operation.body, "validation"]}}
        told["requestBody"] = {"required": True, "content": content}
    return told


def _in_path(rule: Rule, name: str) -> dict[str, Any]:
    [converter] = [kind for kind, variable in _PARAMETER.findall(rule.rule) if variable == name]
    pattern = rule.map.converters[converter or "default"].regex
    is_any = pattern.startswith("[^") or "\\S" in pattern
    return {"type": "string", "minLength": 1} | ({} if is_any else {"pattern": f"^{pattern}$"})


def _query(model: type[BaseModel]) -> list[dict[str, Any]]:
    schema = model.model_json_schema()
    required = schema.get("required", ())
    parameters = []
    for name, told in schema["properties"].items():
        [plain] = [one for one in told.get("anyOf", [told]) if one.get("type") != "null"]
        kept = {key: value for key, value in plain.items() if key not in ("title", "default")}
        parameters.append({"name": name, "in": "query", "required": name in required, "schema": kept})
    return parameters
