"""MessageReadingLoop on a real server: all is handled, given up or given back, whatever the handler, Redis and the
network do."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.proxy import Proxy
from usher.common.base.clock import now_s
from usher.common.base.errors import GiveUp, RetryLater
from usher.common.protocol.keys import Keys
from usher.common.readers.loop import LoopOptions, MessageReadingLoop, ReliableStream, StreamMessage
from usher.common.redis.client import Link
from usher.common.redis.replies import pairs

KEYS = Keys("payments", "billing")
PATIENCE_S = 20.0


class Handled:
    """A handler that counts, and does what it is told with some."""

    def __init__(self, act: Callable[[StreamMessage], Any] = lambda message: None) -> None:
        self.starts: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.attempts: dict[str, list[int]] = {}
        self._act = act
        self._lock = threading.Lock()

    def __call__(self, message: StreamMessage) -> None:
        with self._lock:
            self.starts[message.id] += 1
            self.attempts.setdefault(message.id, []).append(message.attempt)
        self._act(message)
        with self._lock:
            self.done[message.id] += 1


def options(**changes: Any) -> LoopOptions:
    return LoopOptions(**({"block_s": 0.2, "retry_s": 0.01, "claim_every_s": 0.2, "threads": 4} | changes))


def loop_on(url: str, handle: Any, **changes: Any) -> MessageReadingLoop:
    return MessageReadingLoop(url, KEYS.stream, KEYS.group, handle, options(**changes), "test")


def send(link: Link, count: int) -> list[str]:
    replies = link.pipeline([("XADD", KEYS.stream, "*", "number", number) for number in range(count)])
    return [bytes(reply).decode() for reply in replies]


def until(condition: Callable[[], Any], what: Callable[[], Any] = lambda: "") -> None:
    end_s = now_s() + PATIENCE_S
    while not condition():
        assert now_s() < end_s, what()
        time.sleep(0.01)


def pending(link: Link) -> int:
    return int(link.call("XPENDING", KEYS.stream, KEYS.group)[0])


def letters(link: Link) -> list[tuple[str, str, str]]:
    found = [pairs(fields) for _, fields in link.call("XRANGE", KEYS.dead, "-", "+")]
    return sorted(
        (letter[b"usher-id"].decode(), letter[b"usher-reason"].decode(), letter[b"usher-attempts"].decode())
        for letter in found
    )


@pytest.fixture
def opened() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_everything_is_handled_once_and_acknowledged(redis_url: str, link: Link) -> None:
    handled = Handled()
    before = send(link, 700)
    with loop_on(redis_url, handled) as loop:
        after = send(link, 300)
        until(lambda: len(handled.done) == 1000)
        until(lambda: loop.metrics()["done"] == 1000)
        assert loop.health().ok
    assert handled.done == Counter([*before, *after])
    assert set(handled.attempts[before[0]]) == {1}
    assert (pending(link), link.call("XLEN", KEYS.stream)) == (0, 1000)
    assert link.call("XINFO", "CONSUMERS", KEYS.stream, KEYS.group) == [], "it left"


def test_two_loops_share_the_work_and_entries_leave_the_stream_where_that_is_asked_for(
    redis_url: str, link: Link
) -> None:
    one, two = Handled(lambda message: time.sleep(0.002)), Handled(lambda message: time.sleep(0.002))
    with loop_on(redis_url, one, remove=True, queue=20), loop_on(redis_url, two, remove=True, queue=20):
        sent: list[str] = []
        while not (one.done and two.done):
            sent += send(link, 50)
            until(lambda: link.call("XLEN", KEYS.stream) == 0)
    assert one.done + two.done == Counter(sent)


def test_failures_are_tried_again_and_end_as_letters(redis_url: str, link: Link) -> None:
    def act(message: StreamMessage) -> None:
        number = int(message.fields["number"])
        if number == 1 and message.attempt < 3:
            raise ValueError("not yet")
        if number == 2:
            raise GiveUp("never")
        if number == 3:
            raise SystemExit(3)
        if number == 4 and message.attempt < 6:
            raise RetryLater(0.001)

    handled = Handled(act)
    sent = send(link, 50)
    with loop_on(redis_url, handled, max_attempts=3) as loop:
        until(lambda: loop.metrics()["done"] == 48 and loop.metrics()["dead_letters"] == 2, lambda: loop.metrics())
    assert letters(link) == [(sent[2], "gave_up", "1"), (sent[3], "attempts_exhausted", "3")]
    assert handled.attempts[sent[1]] == [1, 2, 3]
    assert handled.attempts[sent[4]] == [1, 2, 3, 4, 5, 6], "to ask for later is no failure"
    assert sum(handled.starts.values()) == 46 + 3 + 1 + 3 + 6
    assert (pending(link), link.call("EXISTS", KEYS.attempts)) == (0, 0)


def test_a_stop_lets_what_runs_finish_and_gives_the_rest_to_others_at_once(
    redis_url: str, link: Link, opened: threading.Event
) -> None:
    first = Handled(lambda message: opened.wait(PATIENCE_S))
    sent = send(link, 30)
    loop = loop_on(redis_url, first, threads=2)
    loop.start()
    until(lambda: len(first.starts) == 2 and loop.metrics()["held"] == 30)
    threading.Timer(0.2, opened.set).start()
    loop.stop()
    assert len(first.done) == 2, "nothing was started after the stop"
    second = Handled()
    with loop_on(redis_url, second, idle_s=600.0) as other:
        until(lambda: other.metrics()["done"] == 28, lambda: other.metrics())
    assert first.done + second.done == Counter(sent)
    assert pending(link) == 0
    assert {attempts[0] for attempts in second.attempts.values()} == {1}, (
        "never started before: nobody is charged for that"
    )


def test_what_a_dead_reader_had_runs_alone_and_its_starts_are_noted_before(redis_url: str, link: Link) -> None:
    sent = send(link, 6)
    dead = ReliableStream(link, KEYS.stream, KEYS.group, "dead")
    dead.ensure_group()
    dead.read_new(5, None)
    dead.charge({sent[0].encode(): 7, sent[1].encode(): 5})
    running, most, noted = 0, 0, []

    def act(message: StreamMessage) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        noted.append(pairs(watcher.call("HGETALL", KEYS.attempts)).get(message.stream_id))
        time.sleep(0.02)
        running -= 1

    watcher = Link(redis_url, "test:watch")
    link.call("XCLAIM", KEYS.stream, KEYS.group, "dead", 0, *sent[:5], "IDLE", 100_000, "JUSTID")
    handled = Handled(act)
    with loop_on(redis_url, handled, idle_s=5.0, threads=4) as loop:
        until(lambda: loop.metrics()["done"] == 5, lambda: loop.metrics())
        until(lambda: loop.metrics()["dead_letters"] == 1)
        until(lambda: link.call("EXISTS", KEYS.attempts) == 0)
    watcher.close()
    assert letters(link) == [(sent[0], "attempts_exhausted", "7")]
    [(_, fields)] = link.call("XRANGE", KEYS.dead, "-", "+")
    assert pairs(fields)[b"usher-error"] == b"its process ended before the end of its last start was stored"
    assert most == 1
    assert sorted(noted, key=str).count(b"1") == 3, "one start of each suspect; the fresh one was not charged"
    assert b"6" in noted, "its last allowed start was noted, and may have returned: it runs again"
    assert handled.starts == Counter(sent[1:])


def test_a_retry_later_that_does_not_say_when_is_a_failure_like_any_other(redis_url: str, link: Link) -> None:
    class Later(RetryLater):
        def __init__(self) -> None:
            pass

    def act(message: StreamMessage) -> None:
        raise Later

    [sent] = send(link, 1)
    with loop_on(redis_url, Handled(act), max_attempts=2) as loop:
        until(lambda: loop.metrics()["dead_letters"] == 1, lambda: loop.metrics())
        assert loop.metrics()["held"] == 0
    assert letters(link) == [(sent, "attempts_exhausted", "2")]


def test_a_handler_of_which_a_call_runs_nothing_is_refused_and_no_message_counts_as_done(
    redis_url: str, link: Link
) -> None:
    async def waits(message: StreamMessage) -> None: ...

    def yields(message: StreamMessage) -> Iterator[None]:
        yield

    class Waits:
        async def __call__(self, message: StreamMessage) -> None: ...

    for handle in (waits, yields, Waits()):
        with pytest.raises(TypeError, match="plain functions"):
            loop_on(redis_url, handle)
    [sent] = send(link, 1)
    with loop_on(redis_url, lambda message: waits(message), max_attempts=2) as loop:  # only what it returns shows it
        until(lambda: loop.metrics()["dead_letters"] == 1, lambda: loop.metrics())
    assert letters(link) == [(sent, "attempts_exhausted", "2")]


def test_messages_in_work_are_touched_and_what_others_took_is_not_started(
    redis_url: str, link: Link, opened: threading.Event
) -> None:
    handled = Handled(lambda message: opened.wait(PATIENCE_S))
    sent = send(link, 3)
    with loop_on(redis_url, handled, idle_s=3.0, threads=1) as loop:
        until(lambda: loop.metrics()["held"] == 3)
        link.call("XCLAIM", KEYS.stream, KEYS.group, loop.reader_name, 0, *sent, "IDLE", 1_000_000, "JUSTID")
        link.call("XCLAIM", KEYS.stream, KEYS.group, "other", 0, sent[2], "JUSTID")
        until(lambda: all(row[2] < 1_000_000 for row in link.call("XPENDING", KEYS.stream, KEYS.group, "-", "+", 10)))
        until(lambda: loop.metrics()["held"] == 2)
        opened.set()
        until(lambda: loop.metrics()["done"] == 2)
    assert handled.done == Counter(sent[:2])


def test_nothing_starts_when_others_may_have_taken_over(redis_url: str, link: Link, opened: threading.Event) -> None:
    handled = Handled(lambda message: opened.wait(PATIENCE_S))
    sent = send(link, 3)
    with Proxy(redis_url) as proxy, loop_on(proxy.url, handled, idle_s=1.0, threads=1) as loop:
        until(lambda: loop.metrics()["held"] == 3 and len(handled.starts) == 1)
        proxy.lead_to("redis://127.0.0.1:1")
        proxy.break_all()
        time.sleep(1.0)
        opened.set()
        until(lambda: handled.done)
        time.sleep(0.3)
        assert len(handled.starts) == 1
        proxy.lead_to(redis_url)
        until(lambda: loop.metrics()["done"] == 3, lambda: loop.metrics())
    assert handled.done == Counter(sent)


def test_a_lost_group_is_made_again_and_nothing_is_lost(redis_url: str, link: Link) -> None:
    handled = Handled()
    with loop_on(redis_url, handled) as loop:
        first = send(link, 20)
        until(lambda: loop.metrics()["done"] == 20)
        until(lambda: pairs(link.call("HGETALL", KEYS.position)).get(b"delivered") == first[-1].encode())
        link.call("XGROUP", "DESTROY", KEYS.stream, KEYS.group)
        second = send(link, 20)
        until(lambda: set(second) <= set(handled.done), lambda: loop.metrics())
        link.call("FLUSHALL")
        third = send(link, 20)
        until(lambda: set(third) <= set(handled.done), lambda: loop.metrics())
    assert handled.done.keys() == {*first, *second, *third}
    assert {handled.done[one] for one in first} == {1}, "it went on where it was"


def test_lost_replies_lose_and_repeat_nothing(redis_url: str, link: Link) -> None:
    handled = Handled()
    count = 0

    def now_and_then(chunk: bytes) -> bytes | None:
        nonlocal count
        count += 1
        return None if count % 4 == 0 and count < 22 else chunk

    with Proxy(redis_url) as proxy:
        proxy.on_reply = now_and_then
        with loop_on(proxy.url, handled, batch=20) as loop:
            sent = send(link, 500)
            until(lambda: len(handled.done) == 500 and pending(link) == 0, lambda: (loop.metrics(), loop.health()))
    assert handled.done == Counter(sent)


@pytest.mark.parametrize("claimed", [False, True])
def test_messages_whose_only_reply_was_lost_are_found_among_the_pending_ones(
    redis_url: str, link: Link, claimed: bool
) -> None:
    """They are pending for the loop, which never saw them; what it took from a dead reader stays suspect."""
    suspects: list[bool] = []
    handled = Handled(lambda message: suspects.append(message.is_suspect))
    sent = [
        bytes(link.call("XADD", KEYS.stream, "*", "body", f"body {number} to be lost")).decode() for number in range(3)
    ]
    if claimed:
        dead = ReliableStream(link, KEYS.stream, KEYS.group, "dead")
        dead.ensure_group()
        dead.read_new(10, None)
        link.call("XCLAIM", KEYS.stream, KEYS.group, "dead", 0, *sent, "IDLE", 10**9, "JUSTID")
    lost: list[bytes] = []

    def loses_the_first(chunk: bytes) -> bytes | None:
        if (
            b"body 1 to be lost" in chunk and not lost
        ):  # XINFO STREAM has the first and the last one; a reply may come in pieces
            lost.append(chunk)
            return None
        return chunk

    with Proxy(redis_url) as proxy:
        proxy.on_reply = loses_the_first
        with loop_on(proxy.url, handled, idle_s=600.0) as loop:
            until(lambda: loop.metrics()["done"] == 3, lambda: loop.metrics())
    assert lost
    assert handled.done == Counter(sent)
    assert suspects == [claimed] * 3


def test_redis_that_is_not_there_is_waited_for() -> None:
    loop = MessageReadingLoop("redis://127.0.0.1:1/0", "s", "g", lambda message: None, options(grace_s=0.0))
    with loop:
        until(lambda: not loop.health().ok)
        assert "cannot be reached" in loop.health().reasons[0]
    assert loop.wait(0)


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"idle_s": 0}, {"block_s": -1}, {"queue": 0}])
def test_options_that_cannot_be_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LoopOptions(**wrong)
