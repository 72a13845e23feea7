"""What a reading loop leaves to other readers: the count of failures, what it had not begun, and a name that is no one
else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

from tests.hands import LoopOptions
from tests.integration.test_reading_loop import KEYS, PATIENCE_S, Handled, letters, loop_on, pending, send, until
from tests.proxy import Proxy
from tests.rules import ROOT
from usher import Link, MessageReadingLoop, ReliableStream, RetryLater, StreamMessage

#: A program that makes a loop, and runs it in two children: one ends while the other works.
_FORKS = """
import os, sys, time
from usher.common.readers.loop import LoopOptions, MessageReadingLoop
from usher.common.readers.loop import LoopOptions, MessageReadingLoop
from usher.common.redis.client import Link

def handle(message):
    with Link(sys.argv[1], "test:effect") as own:
        own.call("HINCRBY", "effects", message.id, 1)
    time.sleep(0.1)

loop = MessageReadingLoop(sys.argv[1], "payments", "billing", handle, LoopOptions(threads=2, batch=4, queue=8, block_s=0.2, claim_every_s=0.2))
for most in (8, 40):
    if os.fork() == 0:
        own = Link(sys.argv[1], "test:done")
        with loop:
            while own.call("HLEN", "effects") < most:
                time.sleep(0.02)
        os._exit(0)
for _ in range(2):
    os.wait()
"""


@pytest.mark.parametrize("suspect", [False, True])
def test_whoever_has_a_message_next_is_told_of_failures_and_not_of_starts_that_asked_for_later(
    redis_url: str, link: Link, suspect: bool
) -> None:
    def act(message: StreamMessage) -> None:
        if message.attempt <= 4:
            raise RetryLater(0.001)
        if message.attempt == 5 and not suspect:
            raise ValueError("once")
        raise RetryLater(600.0)

    [sent] = send(link, 1)
    if suspect:
        dead = ReliableStream(link, KEYS.stream, KEYS.group, "dead")
        dead.ensure_group()
        dead.read_new(1, None)
        link.call("XCLAIM", KEYS.stream, KEYS.group, "dead", 0, sent, "IDLE", 10**9, "JUSTID")
    first = Handled(act)
    with loop_on(redis_url, first, max_attempts=2, idle_s=600.0) as loop:
        until(lambda: loop.metrics()["failed"] == 5 + (not suspect))
    assert int(link.call("HGET", KEYS.attempts, sent)) == (not suspect)
    second = Handled()
    with loop_on(redis_url, second, max_attempts=2, idle_s=600.0) as loop:
        until(lambda: loop.metrics()["done"] == 1, lambda: letters(link))
    assert second.starts == Counter([sent])


@pytest.mark.parametrize("claimed", [False, True])
def test_what_a_read_brings_that_a_stop_breaks_off_goes_to_others_at_once_too(
    redis_url: str, link: Link, claimed: bool
) -> None:
    sent = [bytes(link.call("XADD", KEYS.stream, "*", "body", "seen by nobody")).decode() for _ in range(3)]
    if claimed:
        dead = ReliableStream(link, KEYS.stream, KEYS.group, "dead")
        dead.ensure_group()
        dead.read_new(10, None)
        link.call("XCLAIM", KEYS.stream, KEYS.group, "dead", 0, *sent, "IDLE", 10**9, "JUSTID")
    on_its_way = threading.Event()

    def is_late(chunk: bytes) -> bytes | None:
        if chunk.count(b"seen by nobody") == 3:  # XINFO STREAM has the first and the last one
            on_its_way.set()
            time.sleep(1.0)
        return chunk

    first, second = Handled(), Handled()
    with Proxy(redis_url) as proxy:
        proxy.on_reply = is_late
        with loop_on(proxy.url, first, idle_s=600.0):
            assert on_its_way.wait(PATIENCE_S)
    suspects = []
    with loop_on(
        redis_url, lambda message: (suspects.append(message.is_suspect), second(message)), idle_s=600.0
    ) as loop:
        until(lambda: loop.metrics()["done"] == 3)
    assert (first.starts, second.starts, suspects) == (Counter(), Counter(sent), [claimed] * 3)


def test_a_loop_that_is_started_in_several_forked_processes_has_a_name_in_each(redis_url: str, link: Link) -> None:
    """What one gives back when it stops is not what another one works on."""
    send(link, 40)
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, redis_url], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert (link.call("HLEN", "effects"), set(link.call("HVALS", "effects")), pending(link)) == (40, {b"1"}, 0)


def test_a_child_that_a_handler_forks_ends_with_it_and_handles_nothing_more(redis_url: str, link: Link) -> None:
    children: list[int] = []

    def handle(_message: StreamMessage) -> None:
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(2)  # who goes on instead
            sys.exit(3)
        children.append(pid)

    send(link, 3)
    with MessageReadingLoop(redis_url, KEYS.stream, KEYS.group, handle, LoopOptions(threads=1, block_s=0.1)) as loop:
        until(lambda: loop.metrics()["done"] == 3)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [3, 3, 3]
