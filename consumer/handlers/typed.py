"""Typed handlers: ``def handle(order: Order, message: Message)`` is given an ``Order`` that pydantic has made of the
message and found valid. What does not fit is given up as ``invalid``, at its first start: no retry mends it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, get_args, is_typeddict

from usher.common.base.callables import unawaitable_reason
from usher.common.base.errors import GiveUp, HandlerUnusable, Invalid, RetryLater
from usher.common.base.extras import how_to_install
from usher.common.protocol.message import BODY_FIELD, EntryView, first_value
from usher.consumer.handlers.decorators import batch_of, options_of, with_middleware

if TYPE_CHECKING:  # pydantic is imported by who asks for a type: each process for a suspect would pay for it
    from pydantic import TypeAdapter, ValidationError

#: Most fields of a message, and characters in all, that an error names.
_MOST_NAMED, _LONGEST = 20, 2000
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

Reader = Callable[[Any], Any]


def call_of(target: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """Return what calls a handler with a message, or a list of them, with all that it declares about itself; and
    whether the result is to be awaited. Raises HandlerUnusable, without the handler's name, for what cannot be called,
    and where a call runs nothing: every message would count as handled."""
    if kind := unawaitable_reason(target, may_be_async=True):
        way_out = (
            "make an object of it in the module, and name that, or that and a method (shop:orders.handle)"
            if inspect.isclass(target)
            else "parts of a result go out with message.progress"
        )
        raise HandlerUnusable(f"it is {kind}; {way_out}")
    if hasattr(type(target), "handler_body"):  # a router, run_task of usher.django; a Mock has any attribute
        call = target.handler_body()  # type: ignore[attr-defined]
        awaited = is_async(call)
    else:
        call, awaited = _typed_call(target, options_of(target).body, batch_of(target) is not None), is_async(target)
    return with_middleware(target, call, awaited), awaited


def _typed_call(target: Callable[..., Any], body: str | Callable[[bytes], Any], is_batch: bool) -> Callable[..., Any]:
    """Return what calls ``target`` with a message: itself, or, if it asks for a type, a function that validates first.
    ``body``: see ``HandlerOptions``."""
    asked, takes_message = asked_type(target)
    if asked is None:
        if body != "":
            raise HandlerUnusable("body= is for a handler of a typed value: def handle(order: Order, message)")
        return target
    if is_batch:
        raise HandlerUnusable("a batch handler takes the list of messages; validate each in it (TypeAdapter)")
    read = _reader(asked, body)

    @functools.wraps(target)
    def call(message: Any) -> Any:
        value = read(message)
        return target(value, message) if takes_message else target(value)

    return call


def asked_type(target: Callable[..., Any]) -> tuple[Any, bool]:
    """Return the type of the value that ``target`` asks for, or None for one that takes the message alone; and whether
    it takes the message too."""
    try:
        signature = inspect.signature(target)
    except ValueError:  # a builtin without a signature: the first call will show
        return None, True
    needed = [one for one in signature.parameters.values() if one.default is one.empty and one.kind in _POSITIONAL]
    if len(needed) == 2:
        signature = _evaluated(target, signature)
        value, other = (signature.parameters[one.name] for one in needed)
        if other.name != "message" and not _is_message(other.annotation):
            raise HandlerUnusable(_ONE_ARGUMENT)
        if value.annotation is value.empty or _is_message(value.annotation):
            raise HandlerUnusable(f"its first argument, {value.name}, needs a type: def handle(order: Order, message)")
        return value.annotation, True
    try:
        signature.bind(object())
    except TypeError:
        raise HandlerUnusable(_ONE_ARGUMENT) from None
    if len(needed) == 1 and needed[0].annotation is not inspect.Parameter.empty:
        found = _evaluated(target, signature, must=False).parameters[needed[0].name].annotation
        if _is_model(found):
            return found, False
        if any(map(_is_model, get_args(found))):
            raise HandlerUnusable(f"a value of type {found} comes with the message: def handle(value, message)")
    return None, True


def _is_model(found: Any) -> bool:
    if not inspect.isclass(found):
        return False
    if dataclasses.is_dataclass(found) or is_typeddict(found):
        return True
    # what nobody has imported has made no type
    pydantic, extensions = sys.modules.get("pydantic"), sys.modules.get("typing_extensions")
    is_pydantic = pydantic is not None and issubclass(found, pydantic.BaseModel)
    return is_pydantic or (extensions is not None and bool(extensions.is_typeddict(found)))


_ONE_ARGUMENT = "it must take exactly one argument, the message, or a typed value and the message"


def _evaluated(target: Callable[..., Any], signature: inspect.Signature, must: bool = True) -> inspect.Signature:
    try:
        return inspect.signature(target, eval_str=True)
    except Exception as problem:  # an annotation is code of the handler's own
        if must:
            raise HandlerUnusable(f"its annotations cannot be read: {type(problem).__name__}: {problem}") from None
        return signature


def _is_message(annotation: Any) -> bool:
    return annotation is Any or (inspect.isclass(annotation) and issubclass(annotation, EntryView))


def is_async(target: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004


def _reader(asked: Any, body: str | Callable[[bytes], Any]) -> Reader:
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticUserError

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(asked)
        if hasattr(adapter, "rebuild"):  # since pydantic 2.10
            adapter.rebuild(raise_errors=True)
    except (PydanticUserError, NameError, TypeError) as problem:
        raise HandlerUnusable(f"pydantic cannot check {asked!r}: {str(problem).splitlines()[0]}") from None
    make = _maker(adapter, body)

    def read(message: Any) -> Any:
        try:
            return make(message)
        except ValidationError as wrong:
            raise Invalid(_told(wrong)) from None

    return read


def _maker(adapter: TypeAdapter[Any], body: str | Callable[[bytes], Any]) -> Reader:
    makers: dict[str, Reader] = {
        "": lambda message: makers["fields" if first_value(message.flat, BODY_FIELD) is None else "json"](message),
        "json": lambda message: adapter.validate_json(message.body),
        "fields": lambda message: adapter.validate_python(message.fields),
        "bytes": lambda message: adapter.validate_python(message.body),
    }
    if isinstance(body, str) and body in makers:
        return makers[body]
    if body != "msgpack" and not callable(body):
        raise HandlerUnusable(f"body must be json, msgpack, bytes, fields or a function of bytes (it is {body!r})")
    decode = body if callable(body) else _msgpack()

    def decoded(message: Any) -> Any:
        try:
            value = decode(message.body)
        except (GiveUp, RetryLater):
            raise
        except Exception as problem:
            raise Invalid(f"its body cannot be decoded: {type(problem).__name__}: {problem}") from None
        return adapter.validate_python(value)

    return decoded


def _told(wrong: ValidationError) -> str:
    """Name the fields that do not fit, without their values, which a log must not have."""
    errors = wrong.errors(include_url=False, include_context=False, include_input=False)
    named = [
        f"{'.'.join(str(part)[:200] for part in one['loc']) or 'the value'}: {one['msg']}"
        for one in errors[:_MOST_NAMED]
    ]
    more = len(errors) - len(named)
    return "; ".join([*named, *([f"and {more} more"] if more else [])])[:_LONGEST]


def _msgpack() -> Reader:
    try:
        import msgpack
    except ModuleNotFoundError:
        raise HandlerUnusable(f"body='msgpack' needs a library: {how_to_install('msgpack')}") from None
    unpack: Reader = msgpack.unpackb
    return unpack


F = TypeVar("F", bound=Callable[..., Any])


class Router:
    """A handler that calls the one that was declared for the value of a field; the first declaration that fits counts.
    A message for which there is none is given up as ``invalid``. All of a ticket's messages stay in their order,
    whichever handler takes them::

        router = Router()

        @router.on("kind", "paid")
        def paid(order: Paid, message: Message) -> None: ...

        @router.otherwise
        def other(message: Message) -> None: ...
    """

    def __init__(self) -> None:
        self._routes: dict[tuple[str, str] | None, Callable[..., Any]] = {}  # None: all others
        self._fields: dict[str, None] = {}  # in the order of their declaration
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
        self._routes[None] = self._checked(function)
        return function

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if batch_of(function) is not None:
            raise TypeError("a handler of a router takes one message: @batch cannot be routed")
        return function

    def handler_body(self) -> Callable[..., Any]:
        """Return what calls the right handler. Raises HandlerUnusable for handlers that cannot be called."""
        kinds = set[bool]()
        if not self._routes:
            raise HandlerUnusable("the router has no handlers: import the modules that declare them")
        for function in self._routes.values():
            name = getattr(function, "__qualname__", repr(function))
            if options_of(function).terms():
                raise HandlerUnusable(f"{name}: attempts and times are of the router: handler(max_attempts=3)(router)")
            try:
                call, awaited = call_of(function)
            except HandlerUnusable as problem:
                raise HandlerUnusable(f"{name}: {problem}") from None
            self._calls.update({key: call for key, one in self._routes.items() if one is function})
            kinds.add(awaited)
        if len(kinds) == 2:
            raise HandlerUnusable("handlers of one router are all `def`, or all `async def`")
        return self._call_later if kinds == {True} else self

    def usher_kind_of(self, message: Any) -> tuple[str | None, ...]:
        return tuple(message.fields.get(field) for field in self._fields)

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
