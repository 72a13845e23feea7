"""How a log is read: a batch of large entries is no more than both sides can hold, one of small ones is whole, and who
waits holds no lock."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.outboxes import STREAM, Outbox, add, read_all, send
from usher.common.base.errors import RedisTrouble
from usher.common.outbox.log_consumer import LogConsumer, LogLost, StreamLog
from usher.common.outbox.store import open_engine, write_to_outbox
from usher.common.redis.client import Link


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each answer of Redis that holds entries."""
    sizes: list[int] = []
    call = Link.call

    def measured(self: Link, *command: Any, **options: Any) -> Any:
        reply = call(self, *command, **options)
        if command[0] in ("XRANGE", "XREVRANGE"):
            sizes.append(sum(len(part) for _, fields in reply for part in fields or ()))
        return reply

    monkeypatch.setattr(Link, "call", measured)
    return sizes


def test_large_records_are_read_a_few_at_a_time_and_each_is_seen(
    sqlite_outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link, answers: list[int]
) -> None:
    large, megabyte = 64, 1_000_000
    for number in range(large):
        link.call("XADD", STREAM, "*", "ticket_id", "T", "uid", f"large {number}", "data", "x" * megabyte)
    send(link, *(f"small {number}" for number in range(300)))
    consumer = consumers(sqlite_outbox)
    assert 0 < consumer.step(add) < large
    read_all(consumer)
    assert consumer.state()[1]["uids"] == [f"large {number}" for number in range(large)] + [
        f"small {number}" for number in range(300)
    ]
    assert max(answers) < 20 * megabyte
    answers.clear()
    consumer.reset(b"+", {})
    assert max(answers) < large * megabyte, "so is the way back, by which a reset knows what lies before its place"


def test_a_batch_of_small_records_is_whole_and_a_few_are_one_answer(
    sqlite_outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link, answers: list[int]
) -> None:
    written = [f"u{number}" for number in range(1300)]
    send(link, *written)
    consumer = consumers(sqlite_outbox)
    assert [consumer.step(add) for _ in range(3)] == [1000, 300, 0]
    assert consumer.state()[1]["uids"] == written
    send(link, *"abc")
    answers.clear()
    assert consumer.step(add) == 3
    assert len(answers) == 1


def test_what_is_cut_between_two_pages_of_a_batch_is_told_by_the_next_read(
    redis_url: str, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = send(link, *(f"u{number}" for number in range(100)))
    log = StreamLog(redis_url, STREAM, "one")
    read, cut = log._range, [ids[60]]

    def reading(start: bytes, count: int) -> Any:
        found = read(start, count)
        if cut:
            link.call("XTRIM", STREAM, "MINID", cut.pop())
        return found

    monkeypatch.setattr(log, "_range", reading)
    assert [entry.id for entry in log.read("one", b"0-0", 100)] == ids[:16]
    with pytest.raises(LogLost):
        log.read("one", ids[15], 100)
    log.close()


def test_while_redis_does_not_answer_the_application_can_write(
    sqlite_outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    """A log consumer that starts then holds no lock of SQLite, of which there is one, for the seconds of its wait."""
    consumers(sqlite_outbox).step(add)
    impatient = open_engine(f"{sqlite_outbox.url}?timeout=0.5", "test")
    with contextlib.ExitStack() as stack:
        stack.callback(impatient.dispose)
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        starting = stack.enter_context(LogConsumer("one", STREAM, sqlite_outbox.engine, redis_url=url))

        def start() -> None:
            with pytest.raises(RedisTrouble):
                starting.step(add)

        waiting = threading.Thread(target=start)
        waiting.start()
        stack.callback(waiting.join)
        asked = stack.enter_context(silent.accept()[0])
        assert asked.recv(1), "it asks, and waits"
        with impatient.begin() as connection:
            write_to_outbox(connection, ticket_id="T", action="a", object="o")
    assert sqlite_outbox.store.waiting() == (1, 0)
