"""What a handler asks for at its definition."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from usher import Message, batch, handler
from usher.common.base.errors import HandlerUnusable
from usher.common.runtime.settings import load
from usher.consumer.handlers.decorators import BatchOptions, HandlerOptions, batch_of, options_of
from usher.consumer.handlers.loader import load_handler
from usher.consumer.incarnation import terms
from usher.consumer.policy.outcome import RetryPolicy
from usher.consumer.settings import ConsumerSettings


def test_options_and_batches_are_found_at_the_function_of_a_partial_and_at_the_call_of_an_object() -> None:
    @handler(max_attempts=2)
    @batch(most=7)
    def handle(database: object, messages: list[Message]) -> None: ...

    class Orders:
        @handler(max_attempts=2)
        @batch(most=7)
        def __call__(self, messages: list[Message]) -> None: ...

    for found in (partial(handle, None), partial(partial(handle), None), Orders(), partial(Orders())):
        assert options_of(found) == HandlerOptions(max_attempts=2)
        assert batch_of(found) == BatchOptions(7, 0.01, 1)


def test_what_a_partial_asks_for_itself_stands_above_its_function() -> None:
    @handler(max_attempts=2)
    def handle(database: object, message: Message) -> None: ...

    assert options_of(handler(max_attempts=3)(partial(handle, None))) == HandlerOptions(max_attempts=3)


def test_a_handler_says_what_its_tickets_do_after_a_dead_letter_and_how_fast_they_go() -> None:
    @handler(dead_letter_policy="halt", rate=2.5)
    def handle(message: Message) -> None: ...

    assert (options_of(handle).dead_letter_policy, options_of(handle).rate) == ("halt", 2.5)
    assert HandlerOptions().dead_letter_policy is None
    handler(rate=2.5)(batched := batch(most=7)(lambda messages: None))
    with pytest.raises(HandlerUnusable, match="slow the tickets"):
        load_handler_of(batched)


def load_handler_of(function: Callable[..., Any]) -> None:
    """Load it as USHER_HANDLER names it."""
    sys.modules["paced"] = module = ModuleType("paced")
    module.handle = function  # type: ignore[attr-defined]
    try:
        load_handler("paced:handle")
    finally:
        del sys.modules["paced"]


def test_parentheses_may_be_left_out() -> None:
    @handler
    @batch
    def handle(messages: list[Message]) -> int:
        return len(messages)

    assert (handle([]), options_of(handle), batch_of(handle)) == (0, HandlerOptions(), BatchOptions(100, 0.01, 1))
    assert options_of(handler()(handle)) == HandlerOptions()
    assert options_of(handler(handle, max_attempts=3)) == HandlerOptions(max_attempts=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="by name"):
        handler(3)  # type: ignore[call-overload]


def test_what_a_handler_asks_for_stands_above_the_settings() -> None:
    settings = load(
        ConsumerSettings, {"USHER_CONSUMER_NAME": "c1", "USHER_HANDLER": "a:b", "USHER_HANDLER_SECONDS": "7"}
    )
    assert terms(settings, HandlerOptions()) == (RetryPolicy(8, 1.0, 60.0), 7.0)
    assert terms(settings, HandlerOptions(max_attempts=2, backoff_s=0.0, backoff_cap_s=3, deadline_s=0)) == (
        RetryPolicy(2, 0.0, 3),
        0,
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"max_attempts": 1001},
        {"max_attempts": 1.5},
        {"max_attempts": True},
        {"backoff_s": -1},
        {"deadline_s": "1"},
        {"dead_letter_policy": "keep"},
        {"rate": 0},
        {"rate": "1"},
    ],
)
def test_what_no_setting_would_accept_is_refused_at_the_definition(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        handler(**wrong)
