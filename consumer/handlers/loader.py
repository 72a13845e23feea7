"""Find the handler that USHER_HANDLER names (``module:function``). Only local configuration names a handler, never the
network."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from usher.common.base.callables import check_done
from usher.common.base.errors import HandlerUnusable
from usher.common.base.log import WARNING, event
from usher.common.base.text import format_error
from usher.common.observability import tracing
from usher.consumer.handlers.decorators import BatchOptions, HandlerOptions, batch_of, options_of
from usher.consumer.handlers.error_trace import raised_at
from usher.consumer.handlers.message import Message
from usher.consumer.handlers.typed import call_of


@dataclass(frozen=True)
class Handler:
    """A handler and the way to call it: on a thread, or on the event loop if ``is_async``; with a list of messages if
    it has ``batch`` options."""

    call: Callable[[Any], Any]
    is_async: bool
    options: HandlerOptions = field(default_factory=HandlerOptions)
    batch: BatchOptions | None = None
    kind_of: Callable[[Message], object] = lambda message: ""  # messages of one kind need the same


def load_handler(spec: str) -> Handler:
    """Import ``module:function``; the current folder is searched too. Raises HandlerUnusable, which says what to
    mend."""
    module_name, colon, attribute = spec.partition(":")
    if not colon or not module_name or not attribute:
        raise HandlerUnusable(f"USHER_HANDLER must look like module:function (it is {spec!r})")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a handler's project must not shadow the libraries
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as problem:
        raise HandlerUnusable(_describe_import_error(spec, module_name, problem)) from problem
    target: Any = module
    for part in attribute.split("."):
        target = getattr(target, part, None)
        if target is None:
            raise HandlerUnusable(f"USHER_HANDLER={spec}: {module_name}{_imported(module)} has no {attribute}")
    return handler_of(target, spec)


def code_of(spec: str) -> str:
    """Name the code of a handler, by what stands in the files of its package that are loaded: a deploy changes it."""
    package = spec.partition(":")[0].partition(".")[0]
    loaded = [one for name, one in list(sys.modules.items()) if name.partition(".")[0] == package]
    digest = hashlib.sha256()
    for file in sorted({found for one in loaded if (found := getattr(one, "__file__", None))}):
        with suppress(OSError):
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:7]


def handler_of(target: Any, spec: str = "") -> Handler:
    """Return the handler that ``target`` is, named by ``spec``. Raises HandlerUnusable, which says what to mend."""
    spec = spec or f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', repr(target))}"
    if not callable(target):
        raise HandlerUnusable(f"USHER_HANDLER={spec}: {spec.partition(':')[2]} is not a function")
    options, batched = options_of(target), batch_of(target)
    if (options.rate, options.settle_s) != (None, None) and batched is not None:
        raise HandlerUnusable(
            f"USHER_HANDLER={spec}: @handler(rate=..., settle_s=...) is for a handler of single messages; slow the"
            " tickets of a @batch handler with `usher slow`"
        )
    try:
        call, awaited = call_of(target)
    except HandlerUnusable as problem:
        raise HandlerUnusable(f"USHER_HANDLER={spec}: {problem}") from None
    # What a call sets in its context ends with it. A coroutine runs in that of its task, which pools change.
    run = call if awaited else lambda given: copy_context().run(call, given)
    return Handler(run, awaited, options, batched, getattr(target, "usher_kind_of", lambda message: ""))


def with_spans(handler: Handler, stream: str, group: str) -> Handler:
    """Return the handler with a span around each call, if its module or the process that started us has set
    OpenTelemetry up; else the handler as it is."""
    tracer = tracing.tracer()
    if tracer is None:
        return handler
    is_batch = handler.batch is not None
    call = tracing.traced(handler.call, tracer, stream, group, is_async=handler.is_async, is_batch=is_batch)
    return replace(handler, call=call)


_WAITS = (
    "let USHER_HANDLER name an 'async def' function (a decorator around one must be 'async def' too), or let the"
    " handler wait for the result itself"
)


def check_ran(result: object) -> None:
    """Raise HandlerUnusable when a handler's return value shows that nothing of it ran (common/base/callables.py), and
    what is an error itself. For a pool's future only log a warning, once."""
    try:
        check_done(result, HandlerUnusable, _WAITS)
        is_future = isinstance(result, Future)
    except Exception as problem:  # or a stand-in for an object that cannot be had; it runs nothing later
        if problem is result or issubclass(type(result), type) or type(problem) is HandlerUnusable:
            raise
        return
    if is_future:
        _tell_of_future()


@functools.cache
def _tell_of_future() -> None:
    """Warn of a returned future, once in a process. Its work runs, so the message is done; but its outcome, a failure
    or an end of the process, is lost."""
    what = "the message counts as done at once, and its ticket's next one starts, whatever becomes of the future"
    way_out = "let the handler do the work itself (USHER_CONCURRENCY), or wait: return future.result()"
    event("handler_returned_future", level=WARNING, what=what, way_out=way_out)


def _describe_import_error(spec: str, module_name: str, problem: BaseException) -> str:
    missing = getattr(problem, "name", None) or ""
    if isinstance(problem, ModuleNotFoundError) and missing == module_name.partition(".")[0]:
        way_out = "install its project, or name its folder in PYTHONPATH"
        return f"USHER_HANDLER={spec}: there is no module {missing!r} in {os.getcwd()} or on the Python path: {way_out}"
    at = raised_at(problem)  # of its own code; the text of a SyntaxError has the line
    return f"USHER_HANDLER={spec} cannot be imported: {format_error(problem)}{f' ({at})' if at else ''}"


def _imported(module: ModuleType) -> str:
    """Return the file that the module came from, and the file of that name here that it hides; "" when it came from the
    current folder."""
    file = getattr(module, "__file__", None)
    here = os.path.join(os.getcwd(), *module.__name__.split("."))
    hidden = next((path for path in (f"{here}.py", os.path.join(here, "__init__.py")) if os.path.exists(path)), "")
    if file is not None and hidden and os.path.samefile(file, hidden):
        return ""
    other = f", which comes before {hidden}: give that another name" if hidden else ""
    return f" ({file or 'a part of Python itself'}{other})"
