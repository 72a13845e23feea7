"""Tracing with the real OpenTelemetry SDK: what a producer's span becomes at the consumer and at the master."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

from tests.integration.factories import World, fetch, hand_over, plan
from usher.common.base.errors import NotNow, RetryLater
from usher.common.observability import tracing as telemetry
from usher.common.redis.client import Link
from usher.common.sending.producer import Outgoing, Producer
from usher.consumer.handlers.message import Message, OwnLease
from usher.master.assembly.program import HandOverSpans


class Recorder:
    """A tracer, and the spans that have ended."""

    def __init__(self) -> None:
        self._kept = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self.tracer: Tracer = provider.get_tracer("test")

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._kept.get_finished_spans())


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    yield Recorder()


def _sent(link: Link, recorder: Recorder, count: int = 1) -> list[Message]:
    """Messages that were sent in the span ``order``, as a consumer gets them."""
    with recorder.tracer.start_as_current_span("order"):
        Producer(link).send_many([Outgoing("T", {"number": n}) for n in range(count)])
    entries = link.call("XRANGE", "ticket_stream", "-", "+")
    return [Message(b"T", entry_id, 7, flat, OwnLease(60, 0)) for entry_id, flat in entries]


def test_a_handler_runs_in_a_child_of_the_span_that_its_message_was_sent_in(link: Link, recorder: Recorder) -> None:
    [message] = _sent(link, recorder)

    def handle(message: Message) -> None:
        with recorder.tracer.start_as_current_span("inside"):
            pass

    telemetry.traced(handle, recorder.tracer, "ticket_stream", "g", is_async=False, is_batch=False)(message)
    order, inside, process = recorder.spans
    assert (process.name, process.kind.name, process.status.status_code.name) == (
        "process ticket_stream",
        "CONSUMER",
        "UNSET",
    )
    assert (
        process.parent is not None
        and order.context is not None
        and inside.parent is not None
        and process.context is not None
    )
    assert (process.parent.trace_id, process.parent.span_id) == (order.context.trace_id, order.context.span_id)
    assert inside.parent.span_id == process.context.span_id
    assert process.attributes is not None
    assert process.attributes["usher.ticket_id"] == "T"
    assert process.attributes["messaging.message.id"] == message.id
    names = ("messaging.operation.name", "messaging.operation.type", "messaging.consumer.group.name")
    assert [process.attributes[name] for name in names] == ["process", "process", "g"]


def test_an_async_handler_has_its_span_for_as_long_as_it_runs(link: Link, recorder: Recorder) -> None:
    messages = _sent(link, recorder, 2)

    async def handle(message: Message) -> None:
        await asyncio.sleep(0.01)
        with recorder.tracer.start_as_current_span(message.fields["number"]):
            pass

    call = telemetry.traced(handle, recorder.tracer, "s", "g", is_async=True, is_batch=False)

    async def both() -> None:
        await asyncio.gather(*map(call, messages))

    asyncio.run(both())
    parents = {
        span.name: span.parent.span_id for span in recorder.spans if span.parent is not None and span.name in "01"
    }
    processes = {
        span.attributes["messaging.message.id"]: span
        for span in recorder.spans
        if span.name == "process s" and span.attributes
    }
    assert parents == {message.fields["number"]: processes[message.id].context.span_id for message in messages}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("raised", "status", "event"), [(ValueError("no"), "ERROR", "exception"), (RetryLater(1), "UNSET", "retry_later")]
)
def test_what_a_handler_raises_goes_on_and_is_told(
    link: Link, recorder: Recorder, raised: Exception, status: str, event: str
) -> None:
    [message] = _sent(link, recorder)

    def handle(message: Message) -> None:
        raise raised

    with pytest.raises(type(raised)):
        telemetry.traced(handle, recorder.tracer, "s", "g", is_async=False, is_batch=False)(message)
    span = recorder.spans[-1]
    assert (span.status.status_code.name, [told.name for told in span.events]) == (status, [event])
    assert span.attributes is not None
    assert span.attributes.get("error.type") == ("ValueError" if status == "ERROR" else None)


def test_a_batch_call_is_one_span_that_links_to_all(link: Link, recorder: Recorder) -> None:
    messages = _sent(link, recorder, 3)
    result = telemetry.traced(len, recorder.tracer, "s", "g", is_async=False, is_batch=True)(messages)
    assert result == 3
    order, process = recorder.spans
    assert order.context is not None
    assert process.parent is None
    assert [link.context.span_id for link in process.links] == [order.context.span_id] * 3


@pytest.mark.parametrize("told", [None, "", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\udcff"])
def test_a_message_without_a_usable_context_begins_a_trace_of_its_own(recorder: Recorder, told: str | None) -> None:
    flat = [b"ticket_id", b"T"] + ([] if told is None else [b"traceparent", told.encode("utf-8", "surrogateescape")])
    with recorder.tracer.start_as_current_span("of the thread, which has nothing to do with it"):
        telemetry.traced(str, recorder.tracer, "s", "g", is_async=False, is_batch=False)(
            Message(b"T", b"1-1", 1, flat, OwnLease(60, 0))
        )
    assert recorder.spans[0].parent is None


def test_what_a_producer_says_itself_stands_and_without_a_span_nothing_is_added(link: Link, recorder: Recorder) -> None:
    producer = Producer(link)
    with recorder.tracer.start_as_current_span("order"):
        producer.send("T", {"traceparent": "mine"})
    producer.send("T", {"text": "x"})
    first, second = (flat for _, flat in link.call("XRANGE", "ticket_stream", "-", "+"))
    assert first == [b"ticket_id", b"T", b"traceparent", b"mine"]
    assert second == [b"ticket_id", b"T", b"text", b"x"]


def test_where_a_provider_is_set_a_send_is_a_span_and_the_parent_of_the_call(
    link: Link, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "tracer", lambda: recorder.tracer)
    [message] = _sent(link, recorder)
    telemetry.traced(str, recorder.tracer, "s", "g", is_async=False, is_batch=False)(message)
    send, order, process = recorder.spans
    assert (send.name, send.kind.name) == ("send ticket_stream", "PRODUCER")
    assert order.context is not None and send.context is not None
    assert send.parent is not None and send.parent.span_id == order.context.span_id
    assert process.parent is not None and process.parent.span_id == send.context.span_id
    assert send.attributes is not None
    assert send.attributes["messaging.operation.name"] == "send"
    assert send.attributes["messaging.batch.message_count"] == 1


def test_a_send_that_fails_is_an_error_of_its_span(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "tracer", lambda: recorder.tracer)
    away = Producer(Link("redis://127.0.0.1:1/0", "test", 0.2), patience_s=0)
    with pytest.raises(NotNow):
        away.send("T", {})
    [span] = recorder.spans
    assert span.attributes is not None
    assert span.attributes["error.type"] == "usher.common.base.errors.NotNow"


def test_a_hand_over_is_a_span_that_links_to_its_messages(world: World, recorder: Recorder) -> None:
    with recorder.tracer.start_as_current_span("order"):
        context = telemetry.context_fields()
    leader, a = world.elect(), world.join("a")
    world.add(b"5-1", "ticket_id", b"T", "traceparent", context["traceparent"])
    world.add(b"6-1", "ticket_id", b"T")
    fetch(leader, 10)
    planned = plan(a, {b"T": [b"5-1", b"6-1"]})
    began_ns = time.time_ns()
    hand_over(leader, planned)
    HandOverSpans(recorder.tracer, world.link, world.keys)(planned, began_ns)
    order, span = recorder.spans
    assert (span.name, span.start_time) == ("hand_over ticket_stream", began_ns)
    assert order.context is not None
    assert [link.context.span_id for link in span.links] == [order.context.span_id]
    assert span.attributes is not None
    assert span.attributes["messaging.batch.message_count"] == 2


def test_a_span_that_cannot_be_linked_is_a_span_all_the_same(world: World, recorder: Recorder) -> None:
    away = Link("redis://127.0.0.1:1/0", "test", 0.2)
    HandOverSpans(recorder.tracer, away, world.keys)(plan(world.join("a"), {b"T": [b"5-1"]}), time.time_ns())
    assert [len(span.links) for span in recorder.spans] == [0]


def test_read_fields_tells_the_first_value_of_each_entry_and_nothing_else(world: World) -> None:
    world.add(b"5-1", "x", b"one", "x", b"two")
    world.add(b"6-1", "y", b"x")
    args = (100, "1", 1, "x", b"5-1", b"6-1", b"7-1")
    assert world.scripts.run("read_fields", (world.keys.stream,), args) == [[[b"one", 3]], [None], [None]]


def test_a_name_with_dots_is_a_path_unless_it_is_said_to_be_none(world: World) -> None:
    world.add(b"5-1", "x", b'{"y": "one"}')
    found = [world.scripts.run("read_fields", (world.keys.stream,), (9, no, 1, "x.y", b"5-1")) for no in ("1", "")]
    assert found == [[[None]], [[[b"one", 3]]]]


def _runs(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_where_opentelemetry_is_not_installed_nothing_is_done() -> None:
    _runs("""
import sys
sys.modules["opentelemetry"] = None  # importing it fails, as where it is not installed
import usher.common.sending.producer, usher.consumer.program, usher.master.assembly.program
from usher.common.observability import tracing
assert tracing.tracer() is None and tracing.context_fields() == {}
assert not [name for name in sys.modules if name.startswith("opentelemetry.")]
""")


def test_the_api_alone_makes_no_spans() -> None:
    _runs("""
import opentelemetry.trace
from usher.common.observability import tracing
assert tracing.tracer() is None and tracing.context_fields() == {}
from opentelemetry.sdk.trace import TracerProvider
opentelemetry.trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
assert tracing.tracer() is not None
""")


class _Broken(SpanProcessor):
    """A span processor of a user's that raises at every turn."""

    def on_start(self, *_: object, **__: object) -> None:
        if self.where == "at its start":
            raise RuntimeError("no")

    def on_end(self, *_: object) -> None:
        raise RuntimeError("no")

    def __init__(self, where: str) -> None:
        self.where = where


@pytest.mark.parametrize("where", ["at its start", "at its end"])
def test_a_span_processor_that_raises_fails_no_handler_and_hides_no_error(
    link: Link, recorder: Recorder, where: str
) -> None:
    [message] = _sent(link, recorder)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(_Broken(where))

    def call(does: object) -> None:
        telemetry.traced(
            lambda _: does() if callable(does) else None,  # type: ignore[func-returns-value]
            provider.get_tracer("test"),
            "ticket_stream",
            "g",
            is_async=False,
            is_batch=False,
        )(message)

    def fails() -> None:
        raise ValueError("the handler's own")

    call(None)
    with pytest.raises(ValueError, match="the handler's own"):
        call(fails)
