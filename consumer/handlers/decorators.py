"""Options that a handler declares about itself, by decorators that leave the function as it is."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, overload

from usher.common.base.errors import HandlerUnusable

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
P = ParamSpec("P")

_BATCH = "__usher_batch__"
_MOST, _LONGEST_WAIT_S = 10_000, 60.0


@dataclass(frozen=True)
class BatchOptions:
    """The options of a batch handler's calls: up to ``most`` messages, at most ``per_ticket`` of one ticket, collected
    for up to ``wait_s`` seconds."""

    most: int
    wait_s: float
    per_ticket: int


@overload
def batch(most: F) -> F: ...
@overload
def batch(most: int = 100, wait_s: float = 0.01, per_ticket: int = 1) -> Callable[[F], F]: ...
def batch(most: Any = 100, wait_s: float = 0.01, per_ticket: int = 1) -> Any:
    """Make the handler take a list of messages instead of one. A decorator, with or without parentheses::

        @batch(most=100, wait_s=0.01)
        def handle(messages): ...

    A call starts when there are ``most`` messages, or ``wait_s`` seconds after the first one. Several messages of one
    ticket come only with ``per_ticket`` above 1, and then in their order. (With USHER_ACK_MODE=strict there is never
    more than one.)

    Return None when all messages are done. Return a mapping, or raise ``usher.common.base.errors.PartialFailure``, to
    name those that failed; a later message of the same ticket in the same call is then tried again too, so the handler
    should leave it alone. Any other error (except RetryLater) does not tell which message caused it: each is then tried
    by itself, and fails or succeeds by itself.

    Raises TypeError and ValueError for options that cannot be used.
    """
    if callable(most):  # without parentheses
        return batch()(most)
    if not 1 <= most <= _MOST:
        raise ValueError(f"@batch: most must be 1 to {_MOST:,} (it is {most})")
    if not 0 <= wait_s <= _LONGEST_WAIT_S:
        raise ValueError(f"@batch: wait_s must be 0 to {_LONGEST_WAIT_S:g} seconds (it is {wait_s})")
    if not 1 <= per_ticket <= most:
        raise ValueError(f"@batch: per_ticket must be 1 to most (it is {per_ticket})")
    return functools.partial(_noted, _BATCH, BatchOptions(most, float(wait_s), per_ticket))


def _noted(attribute: str, value: object, function: F) -> F:
    setattr(function, attribute, value)
    return function


def batch_of(handler: Callable[..., Any]) -> BatchOptions | None:
    return declared(handler, _BATCH, BatchOptions)


def declared(handler: Callable[..., Any], attribute: str, kind: type[T]) -> T | None:
    """Return the value of class ``kind`` that a decorator has noted at a function, the function of a
    ``functools.partial``, or the ``__call__`` of an object; None if there is none."""
    while True:
        for place in (handler, getattr(handler, "__call__", None)):  # noqa: B004
            found = getattr(place, attribute, None)
            if isinstance(found, kind):
                return found
        if not isinstance(handler, functools.partial):
            return None
        handler = handler.func


_ATTRIBUTE = "usher_options"


@dataclass(frozen=True, kw_only=True)
class HandlerOptions:
    """A decorator that sets options of one handler; those that are not given (None) are as the settings say. The
    function itself stays as it is.

    ``max_attempts``: starts before the message becomes a dead letter (USHER_MAX_ATTEMPTS). ``backoff_s``: wait in
    seconds before the second start, doubled for each further one (USHER_RETRY_SECONDS), up to ``backoff_cap_s``
    (60). ``deadline_s``: longest that the handler may run before its process is ended; 0: no limit
    (USHER_HANDLER_SECONDS). ``dead_letter_policy``: what a ticket does after a dead letter: skip or halt
    (USHER_DEAD_LETTER_POLICY). ``rate``: messages of each ticket that start per second, evenly spaced; others go on
    meanwhile, and a message that is tried again waits for its turn too. Not with ``@batch``. ``body``: what a typed
    handler's value is made of: ``json`` or ``msgpack`` of the field ``body``, its ``bytes``, all ``fields``, or a
    function of its bytes; as it is: JSON if there is a body, else all fields. ``away``: types of errors that say that
    what the handler needs is away: what fails so waits, uncharged, and is tried one by one. ``settle_s``: a ticket
    begins when nothing has come for so many seconds, at the latest ``settle_max_s`` (ten times as long) after its first
    message; not with ``@batch``. ``message.absorb()`` takes what has come. Raises ValueError for values that no setting
    accepts.
    """

    max_attempts: int | None = None
    backoff_s: float | None = None
    backoff_cap_s: float | None = None
    deadline_s: float | None = None
    dead_letter_policy: str | None = None
    rate: float | None = None
    body: str | Callable[[bytes], Any] = ""
    away: tuple[type[BaseException], ...] | type[BaseException] = ()
    settle_s: float | None = None
    settle_max_s: float | None = None

    def __post_init__(self) -> None:
        types = self.away if isinstance(self.away, tuple) else (self.away,)
        if not all(isinstance(one, type) and issubclass(one, Exception) for one in types):
            raise ValueError(f"away must be types of exceptions (it is {self.away!r})")
        if self.max_attempts is not None and not (type(self.max_attempts) is int and 1 <= self.max_attempts <= 1000):
            raise ValueError(f"max_attempts must be a whole number from 1 to 1000 (it is {self.max_attempts!r})")
        for name in ("backoff_s", "backoff_cap_s", "deadline_s", "settle_s", "settle_max_s"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and 0 <= value <= 86_400):
                raise ValueError(f"{name} must be seconds from 0 to 86400 (it is {value!r})")
        if self.dead_letter_policy not in (None, "skip", "halt"):
            raise ValueError(f"dead_letter_policy must be skip or halt (it is {self.dead_letter_policy!r})")
        if self.rate is not None and not (isinstance(self.rate, (int, float)) and 0.001 <= self.rate <= 1_000_000):
            raise ValueError(f"rate must be messages per second, from 0.001 to 1000000 (it is {self.rate!r})")

    def terms(self) -> bool:
        return self != HandlerOptions(body=self.body)

    def __call__(self, function: F) -> F:
        return _noted(_ATTRIBUTE, self, function)


class _Decorator(Generic[P]):
    def __init__(self, make: Callable[P, HandlerOptions]) -> None:
        self._make: Callable[..., HandlerOptions] = make
        functools.update_wrapper(self, make)

    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> HandlerOptions: ...
    @overload
    def __call__(self, function: F, /) -> F: ...
    def __call__(self, *args: Any, **options: Any) -> Any:
        if args and not callable(args[0]):
            raise TypeError("give the options of @handler by name: @handler(max_attempts=3)")
        made = self._make(**options)
        return made(*args) if args else made


#: ``HandlerOptions``, whose parentheses may be left out.
handler = _Decorator(HandlerOptions)


def given(asked: float | None, setting: float) -> float:
    return setting if asked is None else asked


def options_of(function: Callable[..., Any]) -> HandlerOptions:
    return declared(function, _ATTRIBUTE, HandlerOptions) or HandlerOptions()


Maker = Callable[[Any], Any]

_AROUND = "__usher_around__"


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
        return _noted(_AROUND, (*makers, *(declared(function, _AROUND, tuple) or ())), function)

    return declare


def with_middleware(target: Callable[..., Any], call: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
    """Return ``call`` with what ``@around`` has declared at ``target`` around it; itself if there is nothing. Raises
    HandlerUnusable."""
    makers = declared(target, _AROUND, tuple) or ()
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
                return _unless_error(call(given))

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
            return _unless_error(await call(given))

    return called_later


def _unless_error(returned: Any) -> Any:
    if isinstance(returned, BaseException):
        raise returned
    return returned


def _is_later(maker: Maker) -> bool:
    if inspect.isclass(maker):
        return hasattr(maker, "__aenter__") and not hasattr(maker, "__enter__")
    return inspect.isasyncgenfunction(inspect.unwrap(maker))


def _managing(maker: Maker) -> Maker:
    if inspect.isasyncgenfunction(maker):
        return contextlib.asynccontextmanager(maker)
    return contextlib.contextmanager(maker) if inspect.isgeneratorfunction(maker) else maker
