"""Middleware: what runs before and after every call of a handler, and when it raises, as one context manager::

def timed(message):
    began_s = time.monotonic()
    try:
        yield                               # the handler runs here; what it raises is raised here
    except GiveUp: ...
    finally:
        print(message.ticket_id, time.monotonic() - began_s)

@around(timed)
def handle(message): ...
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from usher.common.base.errors import HandlerUnusable
from usher.consumer.handlers.decorators import declared

F = TypeVar("F", bound=Callable[..., Any])
Maker = Callable[[Any], Any]

_ATTRIBUTE = "__usher_around__"


def around(*makers: Maker) -> Callable[[F], F]:
    """Run these around each call of the handler, the first one outermost. A decorator; the function itself stays as it
    is.

    Each is a function of the message (of a batch handler: of the list of messages) that returns a context manager, or
    a generator function with one ``yield``. ``async def`` ones are for ``async def`` handlers. What they raise counts
    as raised by the handler; what they swallow makes the message done.
    """
    for maker in makers:
        if not callable(maker):
            raise TypeError(f"@around takes functions of a message (not {maker!r})")

    def declare(function: F) -> F:
        inner = declared(function, _ATTRIBUTE, tuple) or ()
        setattr(function, _ATTRIBUTE, (*makers, *inner))
        return function

    return declare


def with_middleware(target: Callable[..., Any], call: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
    """Return ``call`` with what ``@around`` has declared at ``target`` around it; itself if there is nothing. Raises
    HandlerUnusable."""
    makers = declared(target, _ATTRIBUTE, tuple) or ()
    if not makers:
        return call
    if any(map(inspect.iscoroutinefunction, makers)):
        raise HandlerUnusable("@around has an `async def` function without a yield: it is no context manager")
    if not is_async and any(map(_is_later, makers)):
        raise HandlerUnusable("@around has an `async` function: a `def` handler cannot wait for it")
    managers = [_managing(maker) for maker in makers]
    if not is_async:

        @functools.wraps(call)
        def called(given: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for make in managers:
                    stack.enter_context(make(given))
                return call(given)

        return called

    @functools.wraps(call)
    async def called_later(given: Any) -> Any:
        async with contextlib.AsyncExitStack() as stack:
            for make in managers:
                manager = make(given)
                if hasattr(manager, "__aenter__"):
                    await stack.enter_async_context(manager)
                else:
                    stack.enter_context(manager)
            return await call(given)

    return called_later


def _is_later(maker: Maker) -> bool:
    """Return whether the context manager that it makes has to be awaited."""
    if inspect.isclass(maker):
        return hasattr(maker, "__aenter__") and not hasattr(maker, "__enter__")
    return inspect.isasyncgenfunction(inspect.unwrap(maker))


def _managing(maker: Maker) -> Maker:
    """Return what makes the context manager."""
    if inspect.isasyncgenfunction(maker):
        return contextlib.asynccontextmanager(maker)
    return contextlib.contextmanager(maker) if inspect.isgeneratorfunction(maker) else maker
