"""Tracing with OpenTelemetry, if the user has set it up. Otherwise nothing is imported, and nothing is done per
message.

Spans and their attributes are those of OpenTelemetry's conventions for messaging. The trace context of a message is its
field ``traceparent`` (W3C), from any producer: ``usher.common.sending.producer`` adds that of its span ``send``, or,
without a provider, of the current span; a producer in another language adds its own. The consumer's span of a handler
call is a child of it; the master's span of a hand-over, which covers many messages, links to them.

The user sets OpenTelemetry up: ``opentelemetry-instrument usher master``, or a tracer provider that the handler's
module sets. A process that has not imported ``opentelemetry.trace`` has no provider and no current span, so only that
import is checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from usher.common.base.errors import RetryLater
from usher.common.base.log import WARNING, event
from usher.common.base.text import format_error

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, Tracer

#: The field of a message that names the span it was sent in, and the field that may accompany it.
FIELD = "traceparent"
_STATE = "tracestate"
_GROUP = "messaging.consumer.group.name"


def tracer() -> Tracer | None:
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or isinstance(trace.get_tracer_provider(), (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
        return None
    made: Tracer = trace.get_tracer("usher")
    return made


def context_fields() -> dict[str, str]:
    """Return the fields that pass the current span on to a message's readers; {} when there is no such span."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not trace.get_current_span().get_span_context().is_valid:
        return {}
    fields: dict[str, str] = {}
    _propagator().inject(fields)
    return fields


def sending(stream: str, count: int) -> AbstractContextManager[None]:
    """Return what runs around a send of ``count`` messages: a span, if a tracer provider is set."""
    of = tracer()
    if of is None:
        return nullcontext()
    return _CallSpan(lambda: _begin(of, "send", stream, {"messaging.batch.message_count": count}))


def traced(
    call: Callable[[Any], Any], of: Tracer, stream: str, group: str, *, is_async: bool, is_batch: bool
) -> Callable[[Any], Any]:
    def begin(given: Any) -> AbstractContextManager[Span]:
        facts: dict[str, Any] = {_GROUP: group}
        if is_batch:
            links = links_to([message.fields.get(FIELD) for message in given])
            return _begin(of, "process", stream, facts | {"messaging.batch.message_count": len(given)}, links=links)
        facts |= {"messaging.message.id": given.id, "usher.ticket_id": given.ticket_id}
        facts |= {"usher.fence": given.fence, "usher.attempt": given.attempt}
        return _begin(of, "process", stream, facts, context=_parent(given.fields))

    def handle(given: Any) -> Any:
        with _CallSpan(lambda: begin(given)):
            return call(given)

    async def handle_async(given: Any) -> Any:
        with _CallSpan(lambda: begin(given)):
            return await call(given)

    return handle_async if is_async else handle


def links_to(contexts: Sequence[str | None]) -> list[Link]:
    """Return links to the spans that these values of ``traceparent`` name; values that name none are left out."""
    from opentelemetry import trace

    found = [trace.get_current_span(_parent({FIELD: context})).get_span_context() for context in contexts if context]
    return [trace.Link(context) for context in found if context.is_valid]


class _CallSpan:
    """The span around a call of a handler, or a send. RetryLater is not an error of it. What a sampler or a span
    processor raises is logged: the call has nothing to do with it."""

    __slots__ = ("_begin", "_begun", "_span")

    def __init__(self, begin: Callable[[], AbstractContextManager[Span]]) -> None:
        self._begin = begin

    def __enter__(self) -> None:
        self._begun: AbstractContextManager[Span] | None = None
        try:
            begun = self._begin()
            self._span = begun.__enter__()
            self._begun = begun
        except Exception as problem:
            event("span_failed", level=WARNING, problem=format_error(problem))

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, trace: Any) -> None:
        if self._begun is None:
            return
        from opentelemetry.trace import Status, StatusCode

        try:
            if isinstance(raised, RetryLater):
                self._span.add_event("retry_later")
            elif raised is not None:
                self._span.record_exception(raised)
                of = type(raised)
                name = of.__qualname__ if of.__module__ == "builtins" else f"{of.__module__}.{of.__qualname__}"
                self._span.set_attribute("error.type", name)
                self._span.set_status(Status(StatusCode.ERROR, type(raised).__name__))
            self._begun.__exit__(kind, raised, trace)
        except Exception as problem:
            if problem is not raised:
                event("span_failed", level=WARNING, problem=format_error(problem))


def _begin(
    of: Tracer, operation: str, stream: str, facts: Mapping[str, Any], **more: Any
) -> AbstractContextManager[Span]:
    from opentelemetry.trace import SpanKind

    attributes = {
        "messaging.system": "usher",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,  # they are called the same in OpenTelemetry's conventions
        "messaging.destination.name": stream,
        **facts,
    }
    return of.start_as_current_span(
        f"{operation} {stream}",
        kind=SpanKind.PRODUCER if operation == "send" else SpanKind.CONSUMER,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
        **more,
    )


def _parent(fields: Mapping[str, str]) -> Context:
    from opentelemetry.context import Context

    return _propagator().extract({name: fields[name] for name in (FIELD, _STATE) if name in fields}, context=Context())


def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()
