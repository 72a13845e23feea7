"""Router: a handler for each value of a field::

    router = Router()

    @router.on("kind", "paid")
    def paid(order: Paid, message: Message) -> None: ...

    @router.otherwise
    def other(message: Message) -> None: ...

``USHER_HANDLER=orders:router``. All of a ticket's messages stay in their order, whichever handler takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from usher.common.base.callables import unawaitable_reason
from usher.common.base.errors import HandlerUnusable, Invalid
from usher.consumer.handlers.decorators import batch_of, options_of, with_middleware
from usher.consumer.handlers.typed import is_async, typed_call

F = TypeVar("F", bound=Callable[..., Any])


class Router:
    """A handler that calls the one that was declared for the value of a field; the first declaration that fits counts.
    A message for which there is none is given up as ``invalid``."""

    def __init__(self) -> None:
        self._routes: dict[tuple[str, str], Callable[..., Any]] = {}
        self._fields: dict[str, None] = {}  # in the order of their declaration
        self._otherwise: Callable[..., Any] | None = None
        self._calls: dict[Any, Callable[..., Any]] = {}

    def on(self, field: str, *values: str) -> Callable[[F], F]:
        """Declare the handler of messages whose ``field`` has one of these values. A decorator; the function itself
        stays as it is."""
        if not values or not all(isinstance(value, str) for value in values):
            raise TypeError('say for which values, as text: @router.on("kind", "paid")')
        if twice := [value for value in values if (field, value) in self._routes]:
            raise ValueError(f"{field}={twice[0]} has a handler already")

        def declare(function: F) -> F:
            self._fields[field] = None
            self._routes.update({(field, value): self._checked(function) for value in values})
            return function

        return declare

    def otherwise(self, function: F) -> F:
        """Declare the handler of all other messages. A decorator."""
        self._otherwise = self._checked(function)
        return function

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if batch_of(function) is not None:
            raise TypeError("a handler of a router takes one message: @batch cannot be routed")
        return function

    def declared(self) -> dict[tuple[str, str] | None, Callable[..., Any]]:
        """Return the handler for each (field, value), and under None the one for all others."""
        every: dict[Any, Callable[..., Any]] = dict(self._routes)
        if self._otherwise is not None:
            every[None] = self._otherwise
        return every

    def handler_body(self) -> Callable[..., Any]:
        """Return what calls the right handler. Raises HandlerUnusable for handlers that cannot be called."""
        every = self.declared()
        if not every:
            raise HandlerUnusable("the router has no handlers: import the modules that declare them")
        for function in every.values():
            name = getattr(function, "__qualname__", repr(function))
            options = options_of(function)
            if options.terms():
                raise HandlerUnusable(f"{name}: attempts and times are of the router: handler(max_attempts=3)(router)")
            if kind := unawaitable_reason(function, may_be_async=True):
                raise HandlerUnusable(f"{name}: it is {kind}")
            try:
                call = typed_call(function, options.body, False)
                call = with_middleware(function, call, is_async(call))
            except HandlerUnusable as problem:
                raise HandlerUnusable(f"{name}: {problem}") from None
            self._calls.update({key: call for key, one in every.items() if one is function})
        kinds = {is_async(call) for call in self._calls.values()}
        if len(kinds) == 2:
            raise HandlerUnusable("handlers of one router are all `def`, or all `async def`")
        return self._call_later if kinds == {True} else self

    def __call__(self, message: Any) -> Any:
        return self._handler_of(message)(message)

    async def _call_later(self, message: Any) -> Any:
        return await self._handler_of(message)(message)

    def _handler_of(self, message: Any) -> Callable[..., Any]:
        if not self._calls:
            self.handler_body()  # called by a test, and not by a consumer
        for field in self._fields:
            call = self._calls.get((field, message.fields.get(field)))
            if call is not None:
                return call
        if (call := self._calls.get(None)) is None:
            values = ", ".join(f"{field}={message.fields.get(field)!r}" for field in self._fields)
            raise Invalid(f"no handler is declared for {values[:200]}")
        return call
