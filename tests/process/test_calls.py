"""Calls over real processes: each is answered once, whoever is killed, and parts of a result come while it is made."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests

from examples import request_reply
from tests.hands import pairs
from tests.process.crew import KEYS, Crew
from tests.process.machine import ROOT, USHER
from usher import AsyncProducer, CallTimeout, Failed, Link, Producer

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
        message.progress({"part": part, "at": time.time()})
        time.sleep(float(message.fields.get("every", 0)))
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
        assert [one["part"] for one in answers] == [0, 1, 2]
        assert (answers.result["attempt"], answers.run) == (1, 1)
        answers = producer.stream("U", {"does": "abort"}, timeout_s=20)  # the second run is in a process of its own
        assert [(part, answers.run) for part in answers] == [(1, 1), (2, 2)]
        assert answers.result["attempt"] == 3
        for words, code, said in [("n=5", 0, '"attempt"'), ("does=give up", 1, "gave_up"), ("for=3", 124, "goes on")]:
            send = [*USHER, "send", "--ticket", "T", "--wait", "--timeout", "1s", "--redis-url", link.url, words]
            done = subprocess.run(send, capture_output=True, text=True, check=False)
            assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done
        late_s, data = [], []
        producer.send("T", {"parts": 20, "every": 0.02, "for": 0.5}, uid="a/b", follow=True)
        with requests.get(f"{crew.masters[0]}/api/messages/a/b/events", stream=True, timeout=10) as events:
            for line in events.iter_lines(chunk_size=1):
                if line.startswith(b"data: "):
                    data.append(json.loads(line[6:]))
                    late_s.append(time.time() - data[-1]["value"].get("at", 0))
        assert [one["value"].get("part") for one in data] == [*range(20), None]
        assert sorted(late_s[:20])[10] <= 0.02, late_s
        producer.close()


def test_each_call_is_answered_once_whoever_is_killed(folder: Path, link: Link) -> None:
    """The second caller reads nothing, so its stream has all that was ever written to it."""
    rng, key, sent = random.Random(1), "{ticket_stream}:replies:" + "a" * 32, itertools.count(1)

    def hurt(crew: Crew) -> None:
        name = rng.choice(["c1", "c2", "c1", "c2", "master-1", "master-2"])
        if name.startswith("c") and rng.random() < 0.4:  # frozen until its lease is over: a zombie when it goes on
            os.kill(pid := crew.worker_of(name), signal.SIGSTOP)
            time.sleep(3.5)
            os.kill(pid, signal.SIGCONT)
        else:
            crew.kill_worker(name)
            time.sleep(rng.uniform(0.2, 1.5))

    async def call(crew: Crew) -> list[object]:
        producer = AsyncProducer(link.url)
        hurting = asyncio.get_running_loop().run_in_executor(None, lambda: [hurt(crew) for _ in range(12)])
        calls = []
        while not hurting.done():
            fields = {"parts": 2, "every": 0.01, "n": len(calls)}
            calls.append(asyncio.create_task(producer.call(f"T{len(calls) % 40}", fields, timeout_s=60)))
            raw = ("usher_reply", f"{key} {next(sent)}", "ticket_id", f"U{len(calls) % 40}", "parts", 2, "every", 0.01)
            link.call("XADD", KEYS.stream, "*", *raw)
            await asyncio.sleep(0.01)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        await producer.close()
        return list(answers)

    with Crew(folder, link.url, **QUICK, USHER_CONCURRENCY="4") as crew:
        crew.start(2, ["c1", "c2"], "answering:handle")
        answers = asyncio.run(call(crew))
        crew.wait_until_settled(link, 60)
        failed = [one for one in answers if isinstance(one, Failed)]
        assert [one["n"] if isinstance(one, dict) else "" for one in answers if one not in failed] == [
            n for n, one in enumerate(answers) if one not in failed
        ]
        finals, parts = defaultdict(list), defaultdict(list)
        for _, flat in link.call("XRANGE", key, "-", "+"):
            told = pairs(flat)
            if b"part" in told:
                assert int(told[b"call"]) not in finals, "of a run that is over"
                parts[told[b"call"]].append(tuple(int(told[name]) for name in (b"fence", b"attempt", b"part")))
            else:
                finals[int(told[b"call"])].append(told)
        assert set(finals) == set(range(1, next(sent)))
        assert {len(some) for some in finals.values()} == {1}
        assert all(some == sorted(set(some)) for some in parts.values())
        assert len(failed) < len(answers) / 10


def test_the_example_waits_for_an_answer_and_streams_it(
    folder: Path, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", link.url)

    async def ask() -> tuple[Any, list[str]]:
        async with request_reply.lifespan(request_reply.app):
            transport = httpx.ASGITransport(request_reply.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://app/conversations/42/") as client:
                answered, streamed = await asyncio.gather(client.get("answer?ask=Who"), client.get("stream?ask=Why"))
        return answered.json(), streamed.text.split("\n\n")

    with Crew(folder, link.url, PYTHONPATH=str(ROOT)) as crew:
        crew.start(1, ["c1"], "examples.request_reply:answer")
        answered, streamed = asyncio.run(ask())
    assert answered == {"answer": "You asked: Who?", "attempt": 1}
    assert streamed[:3] == ['data: "You"', 'data: "asked:"', 'data: "Why?"']
