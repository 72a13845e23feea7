"""Calls over real processes, and parts of a result that come while it is made. Who is killed meanwhile: chaos K19w."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import requests

from examples import request_reply
from tests.process.crew import Crew
from tests.process.machine import ROOT, USHER
from usher import CallTimeout, Failed, Link, Producer

pytestmark = pytest.mark.process

FILES = {
    "answering.py": """
import time
from usher import GiveUp


def handle(message):
    does, attempt = message.fields.get("does"), message.attempt
    if does == "give up":
        raise GiveUp("no such account")
    if does == "abort" and attempt < 3:
        message.progress(attempt)
        time.sleep(0.2)
        os.abort()
    for part in range(int(message.fields.get("parts", 0))):
        message.progress({"part": part, "at": time.time()})
        time.sleep(float(message.fields.get("every", 0)))
    time.sleep(float(message.fields.get("for", 0)))
    made = {"large": "x" * (1 << 20), "bytes": b"\\xff" * 1000}
    return made.get(does, {"n": message.fields.get("n"), "fields": [*message.fields], "attempt": attempt})


async def handle_async(message):
    return handle(message)
"""
}
QUICK = {"USHER_MAX_ATTEMPTS": "3", "USHER_RETRY_SECONDS": "0.05"}


def test_what_a_call_is_answered(folder: Path, link: Link) -> None:
    with Crew(folder, link.url, **QUICK) as crew:
        crew.start(1, ["c1"], "answering:handle_async")
        producer = Producer(link.url)
        assert producer.call("T", {"n": 7}, 10) == {"n": "7", "fields": ["ticket_id", "n"], "attempt": 1}
        assert producer.call("T", {"does": "bytes"}, 10) == b"\xff" * 1000
        with pytest.raises(Failed) as gave_up:
            producer.call("T", {"does": "give up"}, 10)
        assert (gave_up.value.reason, gave_up.value.error) == ("gave_up", "GiveUp: no such account")
        with pytest.raises(Failed, match="attempts_exhausted: ValueError: .* 1,048,578 bytes, and at most 1,048,576"):
            producer.call("T", {"does": "large"}, 10)
        with pytest.raises(CallTimeout, match="the work goes on: message [0-9-]+ is handled all the same"):
            producer.call("T", {"for": 1}, 0.2)
        answers = producer.stream("U", {"does": "abort", "parts": 1}, 20)  # the second run is in a process of its own
        assert [(one if isinstance(one, int) else one["part"], answers.run) for one in answers] == [
            (1, 1),
            (2, 2),
            (0, 3),
        ]
        assert answers.result["attempt"] == 3
        for words, code, said in [("n=5", 0, '"attempt"'), ("does=give up", 1, "gave_up"), ("for=3", 124, "goes on")]:
            send = [*USHER, "send", "--ticket", "T", "--wait", "--timeout", "1s", "--redis-url", link.url, words]
            done = subprocess.run(send, capture_output=True, text=True, check=False)
            assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done
        producer.send_followed("T", {"parts": 20, "every": 0.02, "for": 0.5}, "a/b")
        with requests.get(f"{crew.masters[0]}/api/messages/a/b/events", stream=True, timeout=10) as events:
            lines = [(line, time.time()) for line in events.iter_lines(chunk_size=1) if line.startswith(b"data: ")]
        *parts, result = [(json.loads(line[6:])["json"], at_s) for line, at_s in lines]
        assert ([part["part"] for part, _ in parts], result[0]["attempt"]) == ([*range(20)], 1)
        assert sorted(at_s - part["at"] for part, at_s in parts)[10] <= 0.02
        producer.close()


def test_the_example_waits_for_an_answer_and_streams_it(
    folder: Path, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> list[str]:
        async with (
            request_reply.lifespan(app := request_reply.app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app/conversations/42/") as client,
        ):
            return [(await client.get(f"{what}?ask=Who")).text for what in ("answer", "stream")]

    monkeypatch.setenv("REDIS_URL", link.url)
    with Crew(folder, link.url, PYTHONPATH=str(ROOT)) as crew:
        crew.start(1, ["c1"], "examples.request_reply:answer")
        answered, streamed = asyncio.run(ask())
    assert json.loads(answered) == {"answer": "You asked: Who?", "attempt": 1}
    assert streamed.split("\n\n")[:3] == ['data: "You"', 'data: "asked:"', 'data: "Who?"']
