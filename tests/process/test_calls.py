"""Calls over real processes: each is answered once, whoever is killed, and parts of a result come while it is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.crew import Crew
from usher import CallTimeout, Failed, Link, Producer

pytestmark = pytest.mark.process

FILES = {
    "answering.py": """
import asyncio
import os
import time
from usher import GiveUp


def handle(message):
    does = message.fields.get("does")
    if does == "give up":
        raise GiveUp("no such account")
    if does == "hang":
        time.sleep(60)
    if does == "abort" and message.attempt < 3:
        message.progress(message.attempt)
        time.sleep(0.2)
        os.abort()
    if does == "bytes":
        return b"\\xff" * 1000
    if does == "large":
        return "x" * (1 << 20)
    for part in range(int(message.fields.get("parts", 0))):
        message.progress({"part": part})
    time.sleep(float(message.fields.get("for", 0)))
    return {"attempt": message.attempt, "n": int(message.fields.get("n", 0)), "fields": sorted(message.fields)}


async def handle_async(message):
    return handle(message)
"""
}
QUICK = {"USHER_MAX_ATTEMPTS": "3", "USHER_RETRY_SECONDS": "0.05"}


@pytest.mark.parametrize("handler", ["handle", "handle_async"])
def test_what_a_call_is_answered(folder: Path, link: Link, handler: str) -> None:
    with Crew(folder, link.url, **QUICK) as crew:
        crew.start(1, ["c1"], f"answering:{handler}")
        producer = Producer(link.url)
        told = producer.call("T", {"n": 7}, timeout_s=10)
        assert told == {"attempt": 1, "n": 7, "fields": ["n", "ticket_id"]}
        assert producer.call("T", {"does": "bytes"}, timeout_s=10) == b"\xff" * 1000
        with pytest.raises(Failed) as gave_up:
            producer.call("T", {"does": "give up"}, timeout_s=10)
        assert (gave_up.value.reason, gave_up.value.error) == ("gave_up", "GiveUp: no such account")
        with pytest.raises(Failed, match="1,048,578 bytes, and at most 1,048,576") as too_large:
            producer.call("T", {"does": "large"}, timeout_s=10)
        assert too_large.value.reason == "attempts_exhausted"
        with pytest.raises(CallTimeout, match="the work goes on: message [0-9-]+ is handled all the same"):
            producer.call("T", {"for": 1}, timeout_s=0.2)
        answers = producer.stream("T", {"parts": 3}, timeout_s=10)
        assert [*answers] == [{"part": 0}, {"part": 1}, {"part": 2}]
        assert (answers.result["attempt"], answers.run) == (1, 1)
        answers = producer.stream("U", {"does": "abort"}, timeout_s=20)  # the second run is in a process of its own
        assert [(part, answers.run) for part in answers] == [(1, 1), (2, 2)]
        assert answers.result["attempt"] == 3
        producer.close()
