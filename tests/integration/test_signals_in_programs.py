"""Ctrl-C and SIGTERM in programs of users that read on their main thread: an end, and no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.integration.test_reading_loop import KEYS, pending, send, until
from tests.nightly import more
from tests.outboxes import Outbox
from tests.rules import ROOT
from usher import Link

#: As docs/plain-streams.md has it; a handler that takes a moment, and tells that it runs.
_LOOP = """
import sys, time
from usher.common.readers.loop import LoopOptions, MessageReadingLoop
from usher.common.redis.client import Link

def handle(message):
    own = Link(sys.argv[1], "test:effect")
    own.call("HSET", "begun", message.id, 1)
    time.sleep(0.7)
    own.call("HSET", "ended", message.id, 1)

MessageReadingLoop(sys.argv[1], "payments", "billing", handle, LoopOptions(threads=2, idle_s=600.0)).run()
print("the program goes on")
"""

#: As docs/outbox.md has it.
_LOG = """
import sys, time
from usher.common.outbox.log_consumer import LogConsumer
from usher.common.redis.client import Link

own = Link(sys.argv[1], "test:effect")

def handle(records, state, sql):
    for record in records:
        own.call("HSET", "begun", record.id, 1)
        time.sleep(0.7 if "patient" in sys.argv else 600.0)
        state["handled"] = state.get("handled", 0) + 1

with LogConsumer("totals", "payments", sys.argv[2], redis_url=sys.argv[1], batch=1) as consumer:
    consumer.run(handle)
print("the program goes on")
"""

#: As docs/plain-streams.md has it for the stream router.
_ROUTER = """
import sys
from usher.common.redis.client import Link
from usher.common.router.router import StreamRouter
from usher.common.runtime.signals import UntilSignal

own = Link(sys.argv[1], "test:effect")
with UntilSignal() as until, StreamRouter(sys.argv[1]) as router:
    subscription = router.subscribe("payments")
    while not until.came:
        for entry in subscription.take(timeout_s=0.2):
            own.call("HSET", "begun", entry.id, 1)
print("the program goes on")
"""


def _begin(program: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _ended(process: subprocess.Popen[str], *signals: signal.Signals) -> tuple[int, str, str]:
    try:
        for number in signals:
            process.send_signal(number)
        out, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    return process.returncode, out.strip(), errors


@pytest.mark.parametrize("number", [*more(signal.SIGINT), signal.SIGTERM])
def test_a_reading_loop_lets_what_runs_finish_gives_the_rest_back_and_the_program_goes_on(
    redis_url: str, link: Link, number: signal.Signals
) -> None:
    send(link, 9)
    process = _begin(_LOOP, redis_url)
    until(lambda: link.call("HLEN", "begun") == 2)
    code, out, errors = _ended(process, number)
    assert (code, out) == (0, "the program goes on"), errors
    assert "Traceback" not in errors
    assert (link.call("HLEN", "begun"), link.call("HLEN", "ended"), pending(link)) == (2, 2, 7)
    assert [row[0] for row in link.call("XPENDING", KEYS.stream, KEYS.group)[3]] == [b"returned"]


@pytest.mark.parametrize("number", [*more(signal.SIGINT), signal.SIGTERM])
def test_a_log_consumer_stores_the_batch_that_it_handles_and_the_program_goes_on(
    redis_url: str, link: Link, sqlite_outbox: Outbox, number: signal.Signals
) -> None:
    send(link, 3)
    process = _begin(_LOG, redis_url, sqlite_outbox.url, "patient")
    until(lambda: link.call("HLEN", "begun") == 1)
    code, out, errors = _ended(process, number)
    assert (code, out) == (0, "the program goes on"), errors
    assert "Traceback" not in errors
    with sqlite_outbox.engine.connect() as sql:
        assert sql.exec_driver_sql("SELECT state FROM consumer_states").scalars().all() == ['{"handled":1}']


def test_a_second_signal_does_not_wait_for_the_batch_of_which_nothing_is_stored_then(
    redis_url: str, link: Link, sqlite_outbox: Outbox
) -> None:
    send(link, 3)
    process = _begin(_LOG, redis_url, sqlite_outbox.url)
    until(lambda: link.call("HLEN", "begun") == 1)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    code, _, errors = _ended(process, signal.SIGINT)
    assert (code, "KeyboardInterrupt" in errors) == (-signal.SIGINT, True), errors
    with sqlite_outbox.engine.connect() as sql:
        assert sql.exec_driver_sql("SELECT state FROM consumer_states").scalars().all() == []


@pytest.mark.parametrize("number", [*more(signal.SIGINT), signal.SIGTERM])
def test_a_program_with_a_router_leaves_its_loop(redis_url: str, link: Link, number: signal.Signals) -> None:
    send(link, 3)
    process = _begin(_ROUTER, redis_url)
    until(lambda: link.call("HLEN", "begun") == 3)
    assert _ended(process, number) == (0, "the program goes on", "")
