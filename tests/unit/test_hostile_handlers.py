"""Exceptions and results of handlers that fight whoever looks at them: the message has its outcome, and the lane goes
on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.test_pools import _run
from usher.common.base.errors import GiveUp, RetryLater
from usher.consumer.execution.pools import AsyncPool, LaneWorker
from usher.consumer.handlers.message import Message


class _ClassIsUnknown(Exception):
    @property
    def __class__(self) -> Any:  # as that of a proxy whose object cannot be had
        raise RuntimeError("nothing is behind it")


class _TextEnds(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class _TimeEnds(RetryLater):
    def __init__(self) -> None: ...

    @property
    def after_s(self) -> float:  # type: ignore[override]
        raise SystemExit(3)


def _in_a_circle() -> Exception:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    return first


def _with_bad_notes() -> Exception:
    made = ValueError("noted")
    made.__notes__ = 5  # type: ignore[assignment]
    return made


def _nested() -> BaseException:
    made: BaseException = ValueError("innermost")
    for _ in range(3000):
        made = BaseExceptionGroup("more", [made])
    return made


_ERRORS: dict[str, Callable[[], BaseException]] = {
    "its class is unknown": _ClassIsUnknown,
    "its text ends the process": _TextEnds,
    "its time ends the process": _TimeEnds,
    "its causes go in a circle": _in_a_circle,
    "its notes are none": _with_bad_notes,
    "groups in groups": _nested,
    "a syntax error of nothing": lambda: SyntaxError("no", (object(), "x", -1, object(), None, None)),  # type: ignore[arg-type]
    "a name that is no text": lambda: type("\ud800" * 100_000, (Exception,), {})("no"),
    "an exit": lambda: SystemExit(object()),
    "Ctrl-C": KeyboardInterrupt,
    "the end of a generator": GeneratorExit,
    "a cancellation": asyncio.CancelledError,
    "given up without a word": lambda: GiveUp(None),  # type: ignore[arg-type]
    "a huge text": lambda: ValueError("x" * 20_000_000),
}


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("error", list(_ERRORS))
def test_an_error_that_fights_who_looks_at_it_is_a_failure_like_any_other(error: str, kind: str) -> None:
    if (error, kind) == ("Ctrl-C", "async def"):
        pytest.skip("asyncio itself ends by it, and the process leaves")

    def handle(_message: Message) -> None:
        raise _ERRORS[error]()

    async def handle_async(_message: Message) -> None:
        raise _ERRORS[error]()

    accounts = _run(
        lambda executor: LaneWorker(0, executor, handle) if kind == "def" else AsyncPool(executor, handle_async, 1)
    )
    assert accounts.done == []
    [bury] = accounts.buried
    for text in (bury.error, bury.error_type, bury.traceback):
        assert len(text.encode()) < 20_000, "it can be stored"


class _Proxy:
    """As a lazy object of a framework, outside of what it stands for."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("nothing is behind it")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("nothing is behind it")


def test_a_result_that_fights_who_looks_at_it_is_done() -> None:
    accounts = _run(lambda executor: LaneWorker(0, executor, lambda _message: _Proxy()))
    assert (accounts.done, accounts.buried) == ([b"1-1"], [])
