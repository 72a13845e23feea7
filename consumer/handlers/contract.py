"""The contract of a handler: an AsyncAPI document of the messages that it takes, made of its types. Message fields are
headers, and the field ``body`` is the payload; of a handler of all fields, they are the payload."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from usher.consumer.handlers.decorators import options_of
from usher.consumer.handlers.loader import handler_of
from usher.consumer.handlers.router import Router
from usher.consumer.handlers.typed import asked_type

_CONTENT_TYPES = {"json": "application/json", "msgpack": "application/msgpack", "bytes": "application/octet-stream"}
_MODE: Literal["validation"] = "validation"


class _Kind(NamedTuple):
    """A kind of message: its handler, and the values of a router's field that it has (none: any)."""

    name: str
    function: Callable[..., Any]
    field: str = ""
    values: tuple[str, ...] = ()


def contract_of(target: Any, name: str, stream: str, ticket_field: str) -> dict[str, Any]:
    """Return the document for a handler that reads ``stream``. Raises HandlerUnusable."""
    kinds = {kind.name: kind for kind in _kinds(target, name)}
    types = {key: asked for key, kind in kinds.items() if (asked := asked_type(kind.function)[0]) is not None}
    inputs = [(key, _MODE, TypeAdapter(asked)) for key, asked in types.items()]
    payloads, models = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
    messages = {key: _message(kind, ticket_field, payloads.get((key, _MODE))) for key, kind in kinds.items()}
    return {
        "asyncapi": "3.0.0",
        "info": {"title": f"{name} of {stream}", "version": "1"},
        "channels": {
            "tickets": {
                "address": stream,
                "description": f"A stream in Redis. Messages with the same {ticket_field} are handled in their order.",
                "messages": {key: {"$ref": f"#/components/messages/{key}"} for key in messages},
            }
        },
        "operations": {name: {"action": "receive", "channel": {"$ref": "#/channels/tickets"}}},
        "components": {"messages": messages, "schemas": models.get("$defs", {})},
    }


def _kinds(target: Any, name: str) -> Iterator[_Kind]:
    if not isinstance(target, Router):
        handler_of(target)  # refuses what a consumer would refuse, as the next line but one
        yield _Kind(name, target)
        return
    target.handler_body()
    values: dict[tuple[str, Callable[..., Any]], list[str]] = {}
    for key, function in target.declared().items():
        field, value = key or ("", "")
        values.setdefault((field, function), []).append(value)
    for number, ((field, function), those) in enumerate(values.items()):
        own = getattr(function, "__name__", f"message{number}")
        several = sum(getattr(other, "__name__", "") == own for _, other in values) > 1
        yield _Kind(f"{own}{number}" if several else own, function, field, tuple(those) if field else ())


def _message(kind: _Kind, ticket_field: str, payload: Any) -> dict[str, Any]:
    body = options_of(kind.function).body
    headers: dict[str, Any] = {} if "." in ticket_field else {ticket_field: {"type": "string", "minLength": 1}}
    if kind.field:
        headers[kind.field] = {"enum": list(kind.values)}
    told: dict[str, Any] = {"name": kind.name, "summary": (inspect.getdoc(kind.function) or "").partition("\n")[0]}
    told["headers"] = {"type": "object", "properties": headers, "required": list(headers)}
    if payload is not None:
        told["description"] = _WHERE[body] if isinstance(body, str) else _DECODED
        told["contentType"] = _CONTENT_TYPES.get(body, "") if isinstance(body, str) else ""
        told["payload"] = payload
    return {key: value for key, value in told.items() if value != ""}


_DECODED = "The field `body`, decoded by a function of the consumer."
_WHERE: Mapping[str, str] = {
    "": "The field `body`, as JSON; or, without it, the fields of the message themselves.",
    "json": "The field `body`, as JSON.",
    "fields": "The fields of the message themselves.",
    "msgpack": "The field `body`, as MessagePack.",
    "bytes": "The field `body` as it is.",
}
