"""One trace through real programs: a producer's span, the master's hand-over, the consumer's handler."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from tests.process.crew import Crew
from usher import Link, Producer

pytestmark = pytest.mark.process

FILES = {"shop.py": "def handle(message):\n    pass\n"}
#: What a user's own module does, or opentelemetry-instrument: sets a provider. The spans go into a file of the process.
_SET_UP = """
import os
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
out = open(f"spans-{os.getpid()}.json", "a")
provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + "\\n")))
trace.set_tracer_provider(provider)
"""


def _spans(folder: Path) -> list[dict[str, Any]]:
    lines = [line for file in folder.glob("spans-*.json") for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def test_one_trace_leads_from_the_producer_through_master_and_consumer(folder: Path, link: Link) -> None:
    (folder / "sitecustomize.py").write_text(_SET_UP)  # as opentelemetry-instrument does it
    path = f"{folder}:{':'.join(part for part in sys.path if part)}"
    with Crew(folder, link.url, PYTHONPATH=path) as crew:
        crew.start(1, ["c1"], "shop:handle")
        tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
        with tracer.start_as_current_span("order") as order:
            stream_id = Producer(link).send("42", {"text": "hello"})
        crew.until(
            lambda: {str(span["name"]).split()[0] for span in _spans(folder)} == {"hand_over", "process"},
            30,
            "both spans",
        )
    spans = {str(span["name"]).split()[0]: span for span in _spans(folder)}
    sent_in = order.get_span_context()
    process, hand_over = spans["process"], spans["hand_over"]
    assert process["context"]["trace_id"] == f"0x{sent_in.trace_id:032x}"
    assert process["parent_id"] == f"0x{sent_in.span_id:016x}"
    assert process["attributes"]["messaging.message.id"] == stream_id
    assert [found["context"]["span_id"] for found in hand_over["links"]] == [f"0x{sent_in.span_id:016x}"]
