"""What a handler declares about itself, by decorators that leave the function as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Never, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_BATCH = "__usher_batch__"
_MOST, _LONGEST_WAIT_S = 10_000, 60.0


@dataclass(frozen=True)
class BatchOptions:
    """How a batch handler is called: with up to ``most`` messages, at most ``per_ticket`` of one ticket, gathered for
    up to ``wait_s``."""

    most: int
    wait_s: float
    per_ticket: int


def batch(most: int = 100, wait_s: float = 0.01, per_ticket: int = 1) -> Callable[[F], F]:
    """Decorator: the handler takes a list of messages instead of one::

        @batch(most=100, wait_s=0.01)
        def handle(messages): ...

    A call begins when there are ``most`` messages, or ``wait_s`` seconds after the first one. Several messages of one
    ticket come only with ``per_ticket`` above 1, and then in their order. (With USHER_ACK_MODE=strict there is never
    more than one.)

    To return None is to be done with all of them. To return a mapping, or to raise
    ``usher.common.base.errors.PartialFailure``, says which ones failed; a later message of the same ticket in the same
    call is then tried again too, so the handler does best to leave it alone. To raise anything else (but RetryLater)
    means that nobody knows whose fault it is: each message is then tried by itself, and fails or succeeds for itself.
    """
    if callable(most):
        raise TypeError("write @batch() with parentheses")
    if not 1 <= most <= _MOST:
        raise ValueError(f"@batch: most must be 1 to {_MOST:,} (it is {most})")
    if not 0 <= wait_s <= _LONGEST_WAIT_S:
        raise ValueError(f"@batch: wait_s must be 0 to {_LONGEST_WAIT_S:g} seconds (it is {wait_s})")
    if not 1 <= per_ticket <= most:
        raise ValueError(f"@batch: per_ticket must be 1 to most (it is {per_ticket})")

    def declare(function: F) -> F:
        setattr(function, _BATCH, BatchOptions(most, float(wait_s), per_ticket))
        return function

    return declare


def batch_of(handler: Callable[..., Any]) -> BatchOptions | None:
    """What ``@batch`` said of a handler; None for one that takes single messages."""
    return declared(handler, _BATCH, BatchOptions)


def declared(handler: Callable[..., Any], attribute: str, kind: type[T]) -> T | None:
    """What a decorator has noted at a function, the function of a ``functools.partial``, or the ``__call__`` of an
    object; None if none has."""
    while True:
        for place in (handler, getattr(handler, "__call__", None)):  # noqa: B004
            found = getattr(place, attribute, None)
            if isinstance(found, kind):
                return found
        if not isinstance(handler, functools.partial):
            return None
        handler = handler.func


_ATTRIBUTE = "usher_options"


@dataclass(frozen=True)
class HandlerOptions:
    """What stands above the settings for one handler; None leaves it to them. Times in seconds."""

    max_attempts: int | None = None
    backoff_s: float | None = None
    backoff_cap_s: float | None = None
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for what no setting would accept."""
        if self.max_attempts is not None and not (type(self.max_attempts) is int and 1 <= self.max_attempts <= 1000):
            raise ValueError(f"max_attempts must be a whole number from 1 to 1000 (it is {self.max_attempts!r})")
        for name in ("backoff_s", "backoff_cap_s", "deadline_s"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and 0 <= value <= 86_400):
                raise ValueError(f"{name} must be seconds from 0 to 86400 (it is {value!r})")


def given(asked: float | None, setting: float) -> float:
    """What was asked for, else the setting."""
    return setting if asked is None else asked


def handler(
    *unused: Never,
    max_attempts: int | None = None,
    backoff_s: float | None = None,
    backoff_cap_s: float | None = None,
    deadline_s: float | None = None,
) -> Callable[[F], F]:
    """Decorator of a handler. What is not given is as the settings say.

    ``max_attempts``: starts before the message becomes a dead letter (USHER_MAX_ATTEMPTS). ``backoff_s``: wait before
    the second one, which doubles with each further one (USHER_RETRY_SECONDS), up to ``backoff_cap_s``
    (USHER_RETRY_CAP_SECONDS). ``deadline_s``: longest it may run before its process is ended; 0: no limit
    (USHER_HANDLER_SECONDS). The function itself stays as it is.
    """
    if unused:
        raise TypeError("write @handler() with parentheses, and its options by name: @handler(max_attempts=3)")
    options = HandlerOptions(max_attempts, backoff_s, backoff_cap_s, deadline_s)

    def mark(function: F) -> F:
        setattr(function, _ATTRIBUTE, options)
        return function

    return mark


def options_of(function: Callable[..., Any]) -> HandlerOptions:
    """What was asked for at the function's definition."""
    return declared(function, _ATTRIBUTE, HandlerOptions) or HandlerOptions()
