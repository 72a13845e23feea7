"""The doorbell on a real Redis: rung by entries, set by threads, and never in the way of the work when it breaks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.abuse import check_contract
from tests.integration.factories import World
from tests.integration.routers import PATIENCE_S, until
from tests.proxy import Proxy
from usher.common.base.clock import now_s
from usher.common.base.errors import NotNow
from usher.common.redis.client import Link
from usher.common.runtime.service import Service
from usher.master.dispatch import stream_notifier as doorbell_module
from usher.master.dispatch.stream_notifier import StreamNotifier


@pytest.fixture
def doorbell(world: World) -> Iterator[StreamNotifier]:
    made = StreamNotifier(Link(world.link.url, "test:doorbell"), world.keys.stream)
    yield made
    made.close()


def waits(doorbell: StreamNotifier, timeout_s: float = PATIENCE_S) -> float:
    """Seconds that it waited."""
    began_s = now_s()
    doorbell.wait(timeout_s)
    return now_s() - began_s


def later(step: object) -> threading.Thread:
    def run() -> None:
        time.sleep(0.1)
        assert callable(step)
        step()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_an_entry_rings_it_once_and_is_not_consumed(doorbell: StreamNotifier, world: World) -> None:
    first = world.add(b"1-0", "ticket_id", "T")
    doorbell.arm(first)
    thread = later(lambda: world.add(b"2-0", "ticket_id", "T"))
    assert 0.05 < waits(doorbell) < PATIENCE_S
    thread.join()
    assert doorbell.poll()
    assert doorbell.poll() is None, "it was told"
    assert world.stream.group_facts()[b"last-delivered-id"] == b"0-0"
    assert waits(doorbell, 0.05) < 1, "nothing is asked until it is armed again"
    assert doorbell.poll() is None
    doorbell.arm(first)
    waits(doorbell)
    assert doorbell.poll(), "what was there before it was armed rings too"


def test_it_says_what_comes_next(doorbell: StreamNotifier, world: World) -> None:
    first, second, _ = world.send(b"T", b"1-1", b"2-1", b"3-1")
    doorbell.arm(first)
    waits(doorbell)
    news = doorbell.poll()
    assert news is not None
    assert (news.after, news.id, news.run) == (first, second, doorbell._link.server_run)


def test_a_large_entry_rings_it_though_it_comes_in_parts(doorbell: StreamNotifier, world: World) -> None:
    world.link.call("XADD", world.keys.stream, "*", "ticket_id", "T", "body", b"x" * 8_000_000)
    doorbell.arm(b"0-0")
    until(lambda: waits(doorbell, 1.0) >= 0 and doorbell.poll() is not None)


def test_a_thread_that_sets_it_ends_the_wait_and_the_question_goes_on(doorbell: StreamNotifier, world: World) -> None:
    doorbell.arm(b"0-0")
    thread = later(doorbell.set)
    assert waits(doorbell) < PATIENCE_S
    thread.join()
    assert doorbell.poll() is None
    doorbell.clear()
    world.add(b"1-0", "ticket_id", "T")
    waits(doorbell)
    assert doorbell.poll()


def test_set_before_the_wait_ends_it_at_once_and_clear_takes_it_back(doorbell: StreamNotifier) -> None:
    doorbell.set()
    assert waits(doorbell) < 1
    assert waits(doorbell) < 1, "it is still set"
    doorbell.clear()
    assert waits(doorbell, 0.2) >= 0.19
    doorbell.set()
    doorbell.clear()
    waits(doorbell, 0.01)  # it may end at once, for a byte that nobody needs any more
    assert waits(doorbell, 0.2) >= 0.19


def test_no_wake_up_of_many_threads_is_lost(doorbell: StreamNotifier) -> None:
    """Each posts, then sets it; whoever waits reads what is posted after each wait, as a service does."""
    posted: list[int] = []
    done: list[int] = []
    posts, threads = 2000, 4

    def post() -> None:
        for number in range(posts):
            posted.append(number)
            doorbell.set()

    running = [threading.Thread(target=post) for _ in range(threads)]
    for thread in running:
        thread.start()
    until_s = now_s() + PATIENCE_S
    while len(done) < posts * threads and now_s() < until_s:
        doorbell.clear()
        while posted:
            done.append(posted.pop())
        assert len(done) == posts * threads or waits(doorbell, 5.0) < 4.5, (
            f"{len(posted)} were posted, and nobody was woken"
        )
    for thread in running:
        thread.join()
    assert len(done) == posts * threads


def test_a_connection_that_breaks_is_as_if_it_had_rung_and_is_made_again(
    doorbell: StreamNotifier, world: World
) -> None:
    doorbell.arm(b"0-0")
    waits(doorbell, 0.01)
    clients = world.link.call("CLIENT", "LIST").decode().splitlines()
    (client,) = [line for line in clients if "name=test:doorbell" in line]
    world.link.call("CLIENT", "KILL", "ID", client.split()[0].partition("=")[2])
    assert waits(doorbell) < PATIENCE_S
    assert doorbell.poll()
    assert doorbell.trouble is not None and doorbell.trouble.startswith("stream notifier: ReplyUnknown")
    doorbell.arm(b"0-0")  # too early
    assert waits(doorbell) < PATIENCE_S
    assert doorbell.poll(), "meanwhile the stream is read every so often"
    doorbell.arm(b"0-0")
    waits(doorbell, 0.2)
    assert doorbell.poll() is None, "now it is asked"
    world.add(b"1-0", "ticket_id", "T")
    waits(doorbell)
    assert doorbell.poll()
    assert doorbell.trouble is None


def test_a_broken_bell_that_nobody_asks_again_is_no_trouble_for_ever(
    doorbell: StreamNotifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load it is not asked."""
    doorbell.fail("it broke")
    assert doorbell.trouble == "stream notifier: it broke"
    later_s = now_s() + 60
    monkeypatch.setattr(doorbell_module, "now_s", lambda: later_s)
    assert doorbell.trouble is None


def test_it_connects_ever_more_rarely_where_connecting_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(doorbell_module, "now_s", lambda: now[0])
    tries: list[float] = []

    class Hanging:
        server_run = "1"

        def ask(self, *command: object) -> None:
            tries.append(now[0])
            raise NotNow("CONNECT", "timed out")

        def close(self) -> None: ...

    doorbell = StreamNotifier(Hanging(), "s")  # type: ignore[arg-type]
    while now[0] < 160:
        doorbell.arm(b"0-0")
        now[0] += 0.1
    assert 5 <= len(tries) <= 12


def test_an_answer_that_never_comes_is_not_waited_for_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell_module, "_BLOCK_S", 0.1)
    monkeypatch.setattr(doorbell_module, "_LATE_S", 0.3)
    dropped: list[bytes] = []

    def drop(chunk: bytes) -> bytes | None:
        if chunk == b"*-1\r\n":  # the answer to a question that nothing came to
            dropped.append(chunk)
            return b""
        return chunk

    with Proxy(world.link.url, drop) as proxy:
        doorbell = StreamNotifier(Link(proxy.url, "test:doorbell"), world.keys.stream)
        doorbell.arm(b"0-0")
        assert 0.3 < waits(doorbell) < PATIENCE_S
        assert doorbell.poll()
        assert doorbell.trouble == "stream notifier: Redis does not answer"
        assert dropped
        doorbell.close()


def test_a_redis_that_is_away_is_asked_again_in_its_own_time() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        doorbell = StreamNotifier(Link(f"redis://127.0.0.1:{nobody.getsockname()[1]}", "test:doorbell"), "s")
        turns, until_s = 0, now_s() + 1.2
        while now_s() < until_s:
            doorbell.arm(b"0-0")
            waits(doorbell, 5.0)
            turns += doorbell.poll() is not None
        assert 1 <= turns <= 4
        assert doorbell.trouble is not None
        doorbell.close()


def test_a_service_that_waits_on_it_survives_the_abuse_of_the_contract(world: World) -> None:
    class Waiter(Service):
        name = "waiter"

        def __init__(self) -> None:
            self.bell = StreamNotifier(Link(world.link.url, "test:doorbell"), world.keys.stream)
            super().__init__(self.bell)

        def run_once(self) -> float:
            self.bell.arm(b"0-0")
            return 1000.0

        def on_end(self) -> None:
            self.bell.close()

    check_contract(Waiter)


def test_waiting_that_fails_ends_no_thread(doorbell: StreamNotifier, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more_files() -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(doorbell_module, "_pair", no_more_files)
    assert 0 < waits(doorbell) < 5
    assert doorbell.poll()
    assert doorbell.trouble == "stream notifier: OSError: too many open files"
