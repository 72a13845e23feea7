"""The AsyncAPI document of a handler: what it takes, as its types say."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from usher import Message, Router, handler
from usher.common.base.errors import HandlerUnusable
from usher.consumer.cli import asyncapi
from usher.consumer.handlers.contract import contract_of


class Line(BaseModel):
    item: str


class Paid(BaseModel):
    amount: int
    lines: list[Line]


def a_router() -> Router:
    router = Router()

    @router.on("kind", "paid", "paid_twice")
    @handler(body="json")
    def paid(order: Paid, message: Message) -> None:
        """Book it."""

    @router.otherwise
    def other(message: Message) -> None: ...

    return router


def resolved(document: dict[str, Any], reference: str) -> Any:
    found: Any = document
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found


def test_each_kind_of_a_router_is_a_message_with_its_field_and_its_type() -> None:
    document = contract_of(a_router(), "orders", "shop", "customer")
    assert (document["asyncapi"], document["channels"]["tickets"]["address"]) == ("3.0.0", "shop")
    messages = document["components"]["messages"]
    assert {*messages} == {"paid", "other"}
    paid = messages["paid"]
    assert (paid["summary"], paid["contentType"]) == ("Book it.", "application/json")
    assert paid["headers"]["properties"]["kind"] == {"enum": ["paid", "paid_twice"]}
    assert paid["headers"]["required"] == ["customer", "kind"]
    model = resolved(document, paid["payload"]["$ref"])
    assert model["properties"]["amount"]["type"] == "integer"
    line = resolved(document, model["properties"]["lines"]["items"]["$ref"])
    assert line["required"] == ["item"]
    assert "payload" not in messages["other"]
    for reference in document["channels"]["tickets"]["messages"].values():
        assert resolved(document, reference["$ref"])


def test_models_of_one_name_are_both_told() -> None:
    router = Router()

    def declare(kind: str, form: type) -> None:
        def take(order: Any, message: Message) -> None: ...

        take.__annotations__["order"] = form
        router.on("kind", kind)(take)

    declare("a", type("Order", (BaseModel,), {"__annotations__": {"a": int}}))
    declare("b", type("Order", (BaseModel,), {"__annotations__": {"b": int}}))
    document = contract_of(router, "orders", "shop", "ticket_id")
    forms = [resolved(document, told["payload"]["$ref"]) for told in document["components"]["messages"].values()]
    assert [sorted(form["properties"]) for form in forms] == [["a"], ["b"]]


def test_what_a_consumer_would_refuse_is_refused() -> None:
    with pytest.raises(HandlerUnusable, match="must take exactly one argument"):
        contract_of(lambda: None, "nothing", "shop", "ticket_id")


def test_the_command_prints_it() -> None:
    done = CliRunner().invoke(asyncapi, ["examples.orders:events"])
    assert (done.exit_code, '"asyncapi": "3.0.0"' in done.output) == (0, True)
