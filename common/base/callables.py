"""Detect user functions whose call does not run their work: what has not run must not count as done. Pure."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any


def unawaitable_reason(function: Callable[..., Any], may_be_async: bool = False) -> str:
    """Describe ``function`` if calling it runs nothing of its body; return "" if calling it does the work."""
    if inspect.isclass(function):
        return "a class: calling it makes an object, and handles nothing"
    for called in (function, getattr(function, "__call__", None)):  # noqa: B004
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            return "a generator (there is a yield in it), so calling it would run nothing of it"
        if inspect.iscoroutinefunction(called) and not may_be_async:
            return "`async def`, so calling it would run nothing of it"
    return ""


def check_done(result: object, wrong: Callable[[str], Exception], way_out: str) -> None:
    """Raise ``wrong`` for a result that shows that the work was not done (a coroutine, a generator, a function).

    A plain function may return one: a decorator around ``async def``, a decorator whose parentheses were forgotten, a
    lambda. A pool's future is not one of them: its work runs whether or not anything waits for it. Raises an error that
    is returned, or its class: ``return RetryLater(5)`` and ``return GiveUp`` are meant so.

    >>> check_done({"a": 1}, TypeError, "wait for it"), check_done(lambda message: None, TypeError, "call it")
    Traceback (most recent call last):
    TypeError: the handler returned 'function', so nothing of the message was done: call it
    """
    if isinstance(result, BaseException) or (isinstance(result, type) and issubclass(result, BaseException)):
        raise result
    is_work = inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)
    if is_work or isinstance(result, (FunctionType, MethodType, functools.partial)):
        if inspect.iscoroutine(result):
            result.close()  # otherwise Python warns later, at an unrelated place, that it was never awaited
        raise wrong(f"the handler returned {type(result).__name__!r}, so nothing of the message was done: {way_out}")
