"""Typed handlers, routers, and what runs around a call: what the handler is given, and what is refused at the start."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import msgpack
import pytest
from pydantic import BaseModel, create_model
from typing_extensions import TypedDict

from usher import GiveUp, Invalid, Message, Router, around, batch, handler
from usher.common.base.errors import HandlerUnusable
from usher.consumer.handlers.loader import handler_of
from usher.consumer.isolation.process import CallResult
from usher.consumer.isolation.worker import _problem_of
from usher.testing import message


class Order(BaseModel):
    number: int
    lines: list[str] = []


class Broken(BaseModel):
    line: Nowhere  # type: ignore[name-defined]  # noqa: F821


Fifty = create_model("Fifty", **{f"f{at}": (int, ...) for at in range(50)})  # type: ignore[call-overload]


@dataclass
class Ride:
    number: int


class Row(TypedDict):
    number: int


def called(function: Any, **fields: Any) -> list[Any]:
    """Return what the handler was given, in ``seen``."""
    seen.clear()
    made = handler_of(function)
    result = made.call(message("42", **fields))
    if made.is_async:
        asyncio.run(result)
    return list(seen)


seen: list[Any] = []


def takes_order(order: Order, message: Message) -> None:
    seen.extend((order, message.ticket_id))


def takes_ride(ride: Ride) -> None:
    seen.append(ride)


def takes_row(row: Row) -> None:
    seen.append(row)


async def takes_later(order: Order, message: Any) -> None:
    await asyncio.sleep(0)
    seen.append(order)


def takes_list(orders: list[Order], message) -> None:  # type: ignore[no-untyped-def]
    seen.extend(orders)


class TestValues:
    def test_json_of_the_body_is_validated_before_the_call(self) -> None:
        assert called(takes_order, body={"number": "7", "lines": ["a"]}) == [Order(number=7, lines=["a"]), "42"]
        assert called(takes_ride, body={"number": 7}) == [Ride(7)]
        assert called(takes_row, body={"number": 7}) == [{"number": 7}]
        assert called(takes_later, body={"number": 7}) == [Order(number=7)]
        assert called(takes_list, body=[{"number": 1}, {"number": 2}]) == [Order(number=1), Order(number=2)]

    @pytest.mark.parametrize(
        ("body", "raw", "given"),
        [
            ("json", b'{"number": 7}', Order(number=7)),
            ("msgpack", msgpack.packb({"number": 7}), Order(number=7)),
            (lambda raw: {"number": raw[0]}, b"\x07", Order(number=7)),
        ],
    )
    def test_a_body_is_decoded_as_declared(self, body: Any, raw: bytes, given: Any) -> None:
        @handler(body=body)
        def handle(order: Order, message: Message) -> None:
            seen.append(order)

        assert called(handle, body=raw, number=9) == [given]

    def test_fields_and_bytes_as_declared(self) -> None:
        @handler(body="fields")
        def of_fields(order: Order, message: Message) -> None:
            seen.append(order)

        @handler(body="bytes")
        def of_bytes(raw: bytes, message: Message) -> None:
            seen.append(raw)

        assert called(of_fields, body=b"no json", number=7) == [Order(number=7)]
        assert called(of_bytes, body=b"\xff\x00") == [b"\xff\x00"]

    @pytest.mark.parametrize(
        ("fields", "error"),
        [
            (
                {"body": {"number": "secret", "lines": [1]}},
                "number: Input should be a valid integer, unable to parse string as an integer; lines.0: Input should be"
                " a valid string",
            ),
            ({"body": {}}, "number: Field required"),
            ({}, "number: Field required"),
            ({"body": b"{nonsense"}, "the value: Invalid JSON: key must be a string at line 1 column 2"),
            ({"body": b"\xff\xfe"}, "the value: Invalid JSON: expected value at line 1 column 1"),
            ({"body": b""}, "the value: Invalid JSON: EOF while parsing a value at line 1 column 0"),
        ],
    )
    def test_what_does_not_fit_is_invalid_and_the_fields_are_named_without_values(
        self, fields: dict[str, Any], error: str
    ) -> None:
        with pytest.raises(Invalid) as raised:
            called(takes_order, **fields)
        assert str(raised.value) == error
        assert seen == []

    def test_a_message_that_is_all_wrong_or_nested_too_deep_is_refused_in_few_words(self) -> None:
        def takes(value: Any, message: Message) -> None: ...

        for body, told in ((b"[%s]" % b",".join([b"{}"] * 200), "0.f0: Field required"), (b"[" * 10**6, "recursion")):
            takes.__annotations__["value"] = list[Fifty]
            with pytest.raises(Invalid, match=told) as raised:
                called(takes, body=body)
            assert len(str(raised.value)) <= 2000

    def test_a_decoder_that_fails_makes_it_invalid(self) -> None:
        @handler(body="msgpack")
        def handle(order: Order, message: Message) -> None: ...

        with pytest.raises(Invalid, match="its body cannot be decoded: "):
            called(handle, body=b"\xc1")

    def test_errors_of_the_handlers_own_are_its_own(self) -> None:
        def handle(order: Order, message: Message) -> None:
            Order.model_validate({})

        with pytest.raises(ValueError, match="1 validation error") as raised:
            called(handle, number=1)
        assert not isinstance(raised.value, GiveUp)


class TestRefused:
    def test_what_cannot_be_called_is_said_at_the_start(self) -> None:
        def three(a: int, b: int, c: int) -> None: ...
        def other(order: Order, session: Any, /) -> None: ...
        def unnamed(order, message) -> None: ...  # type: ignore[no-untyped-def]
        def turned(message: Message, order: Order) -> None: ...
        def unknown(order: Nowhere, message: Message) -> None: ...  # type: ignore[name-defined]  # noqa: F821
        def untyped(message: Message) -> None: ...
        def unchecked(order: functools.partial, message: Message) -> None: ...  # type: ignore[type-arg]

        for function, told in [
            (three, "exactly one argument"),
            (unnamed, "its first argument, order, needs a type"),
            (turned, "exactly one argument"),
            (unknown, "its annotations cannot be read: NameError: name 'Nowhere' is not defined"),
            (unchecked, "pydantic cannot check"),
            (handler(body="xml")(takes_order), "body must be json, msgpack"),
            (handler(body="json")(untyped), "body= is for a handler of a typed value"),
            (batch()(takes_list), "a batch handler takes the list of messages"),
        ]:
            with pytest.raises(HandlerUnusable, match=told) as refused:
                handler_of(function)
            assert str(refused.value).startswith("USHER_HANDLER=")
        del takes_list.__usher_batch__  # type: ignore[attr-defined]
        del takes_order.usher_options  # type: ignore[attr-defined]
        handler_of(other)

    def test_what_would_fail_at_every_message_is_said_at_the_start(self) -> None:
        def broken(order: Broken) -> None: ...
        def all_broken(orders: list[Broken], message: Message) -> None: ...
        def union(order: Order | None) -> None: ...
        def several(orders: list[Order]) -> None: ...

        for function, told in [
            (broken, "pydantic cannot check .*Broken.*: name 'Nowhere' is not defined"),
            (all_broken, "pydantic cannot check list"),
            (union, "comes with the message"),
            (several, "comes with the message"),
        ]:
            with pytest.raises(HandlerUnusable, match=told):
                handler_of(function)

    def test_what_is_invalid_is_so_in_a_child_process_too(self) -> None:
        result = CallResult.of(Invalid("number: Field required"), 0.1)
        problem, text = _problem_of(result, True)
        assert isinstance(problem, Invalid)
        assert (text.error, result.told()) == ("Invalid: number: Field required",) * 2
        odd = ValueError("x")
        odd.after_s = "30s"  # type: ignore[attr-defined]
        assert CallResult.of(odd).told() == "raises ValueError: x"


class TestRouter:
    def test_each_value_has_its_handler(self) -> None:
        router = Router()

        @router.on("kind", "paid", "booked")
        def paid(order: Order, message: Message) -> None:
            seen.append(order)

        @router.on("priority", "high")
        def high(message: Message) -> None:
            seen.append("high")

        assert called(router, kind="booked", number=1) == [Order(number=1)]
        assert called(router, priority="high", kind="other") == ["high"]
        with pytest.raises(Invalid, match="no handler is declared for kind='other', priority=None"):
            called(router, kind="other")

        @router.otherwise
        def other(message: Message) -> None:
            seen.append(message.fields["kind"])

        assert called(router, kind="other") == ["other"]
        assert router(message("42", kind="new")) is None

    def test_handlers_are_all_of_one_kind_and_leave_attempts_to_the_router(self) -> None:
        router = Router()
        with pytest.raises(HandlerUnusable, match="the router has no handlers"):
            handler_of(router)
        router.on("kind", "a")(takes_later)
        assert called(router, kind="a", number=1) == [Order(number=1)]
        router.on("kind", "b")(takes_order)
        with pytest.raises(HandlerUnusable, match="are all `def`, or all `async def`"):
            handler_of(router)
        with pytest.raises(ValueError, match="kind=a has a handler already"):
            router.on("kind", "a")
        with pytest.raises(TypeError, match="for which values"):
            router.on("kind")
        with pytest.raises(TypeError, match="takes one message"):
            router.otherwise(batch()(lambda messages: None))
        one = Router()
        one.on("kind", "a")(handler(max_attempts=3)(lambda message: None))
        with pytest.raises(HandlerUnusable, match="attempts and times are of the router"):
            handler_of(one)
        assert handler_of(handler(max_attempts=3)(Router_of(takes_order))).options.max_attempts == 3

    def test_an_object_that_is_called_later_is_awaited_and_what_runs_nothing_is_refused(self) -> None:
        class Later:
            async def __call__(self, one: Message) -> None:
                seen.append("later")

        def generator(one: Message) -> Iterator[None]:
            yield

        assert called(Router_of(Later())) == ["later"]
        for function, told in [(generator, "it is a generator"), (Later, "it is a class")]:
            with pytest.raises(HandlerUnusable, match=told):
                handler_of(Router_of(function))


def Router_of(function: Callable[..., Any]) -> Router:  # noqa: N802
    made = Router()
    made.otherwise(function)
    return made


class TestAround:
    def test_before_after_and_on_error_the_first_outermost(self) -> None:
        def outer(one: Message) -> Iterator[None]:
            seen.append(f"before {one.ticket_id}")
            try:
                yield
            except ValueError as problem:
                seen.append(f"error {problem}")
                raise KeyError("mapped") from problem
            finally:
                seen.append("after")

        @contextlib.contextmanager
        def inner(one: Message) -> Iterator[None]:
            seen.append("inner")
            yield

        @around(outer)
        @around(inner)
        def handle(one: Message) -> None:
            seen.append("handler")
            if "fail" in one.fields:
                raise ValueError("x")

        assert called(handle) == ["before 42", "inner", "handler", "after"]
        with pytest.raises(KeyError, match="mapped"):
            called(handle, fail=1)
        assert seen == ["before 42", "inner", "handler", "error x", "after"]

    def test_it_sees_what_is_invalid_and_what_it_swallows_is_done(self) -> None:
        def ignoring(one: Message) -> contextlib.AbstractContextManager[None]:
            return contextlib.suppress(Invalid)

        @around(ignoring)
        def handle(order: Order, one: Message) -> None: ...

        assert called(handle, number="x") == []

    def test_around_async_handlers_both_kinds_may_be_used(self) -> None:
        async def later(one: Message) -> AsyncIterator[None]:
            await asyncio.sleep(0)
            seen.append("later")
            yield

        def at_once(one: Message) -> Iterator[None]:
            seen.append("at once")
            yield

        @around(later, at_once)
        async def handle(order: Order, one: Message) -> None:
            seen.append(order)

        assert called(handle, number=1) == ["later", "at once", Order(number=1)]
        with pytest.raises(HandlerUnusable, match="cannot wait for it"):
            handler_of(around(later)(lambda one: None))
        with pytest.raises(TypeError, match="functions of a message"):
            around(3)  # type: ignore[arg-type]

    def test_an_async_context_manager_is_one_whatever_makes_it(self) -> None:
        class Held:
            def __init__(self, one: Message) -> None: ...
            async def __aenter__(self) -> None:
                seen.append("held")

            async def __aexit__(self, *raised: object) -> None:
                seen.append("let go")

        async def no_manager(one: Message) -> None: ...

        @around(Held, lambda one: Held(one))
        async def handle(one: Message) -> None:
            seen.append("handler")

        assert called(handle) == ["held", "held", "handler", "let go", "let go"]
        with pytest.raises(HandlerUnusable, match="cannot wait for it"):
            handler_of(around(Held)(lambda one: None))
        with pytest.raises(HandlerUnusable, match="without a yield"):
            handler_of(around(no_manager)(takes_later))
        del takes_later.__usher_around__  # type: ignore[attr-defined]


def test_a_mock_as_handler_is_itself_what_is_called() -> None:
    """It has whatever attribute somebody looks for, also those of a router."""
    stand_in = Mock(return_value=None)
    handler_of(stand_in).call("m")
    stand_in.assert_called_once_with("m")
