"""What a handler may ask for itself, at its definition: ``@handler(max_attempts=3, deadline_s=30)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from typing_extensions import Never

from consumer.declared import declared

F = TypeVar("F", bound=Callable[..., Any])

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

    ``max_attempts``: starts before the message becomes a dead letter (USHER_MAX_ATTEMPTS). ``backoff_s``: wait before the second one, which
    doubles with each further one (USHER_RETRY_SECONDS), up to ``backoff_cap_s`` (USHER_RETRY_CAP_SECONDS). ``deadline_s``: longest it may
    run before its process is ended; 0: no limit (USHER_HANDLER_SECONDS). The function itself stays as it is.
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
