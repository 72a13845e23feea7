"""``usher.common.http.serve`` and clients that read no answer, send a head without end, or go away in the middle."""

from __future__ import annotations

import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest

from tests.served import Running

_CHILD = "from tests.integration.test_serving import child; child()"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    served = Running(tmp_path, {}, _CHILD)
    try:
        yield served.wait_until_up()
    finally:
        served.kill()


def _is_served_within(running: Running, seconds: float) -> bool:
    began = time.monotonic()
    return running.get().status_code == 200 and time.monotonic() - began < seconds


def test_who_reads_no_answer_over_small_segments_holds_no_thread(tmp_path: Path) -> None:
    running = Running(tmp_path, {}, _CHILD)
    try:
        port = running.wait_until_up().port
        with ExitStack() as connections:
            for _ in range(12):
                connection = connections.enter_context(closing(socket.socket()))
                connection.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536
                )  # loopback's are larger, and with them the server's buffers
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
                connection.connect(("127.0.0.1", port))
                connection.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
            time.sleep(0.2)
            assert _is_served_within(running, 2)
    finally:
        running.kill()


def test_a_head_without_end_is_ended(running: Running) -> None:
    for endless in (b"A: " + b"x" * 13_000, b"A: b\r\n" * 2_200):
        with ExitStack() as connections:
            opened = [connections.enter_context(closing(running.connect())) for _ in range(12)]
            for connection in opened:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n" + endless)
            assert _is_served_within(running, 2)
            for connection in opened:
                assert connection.recv(4096)[:12] in (b"", b"HTTP/1.1 431"), "late, or refused"


def test_a_dozen_half_bodies_delay_nobody(running: Running) -> None:
    post = b"POST /read HTTP/1.1\r\nHost: a\r\ncontent-length:\t012\r\n\r\n"
    with ExitStack() as connections:
        opened = [connections.enter_context(closing(running.connect())) for _ in range(12)]
        for connection in opened:
            connection.sendall(post + b"one\ntwo\n")
        time.sleep(0.2)
        assert _is_served_within(running, 2)
        for connection in opened:
            for rest, told in ((b"four", b'{"length":12}'), (post.replace(b"012", b"4") + b"more", b'{"length":4}')):
                connection.sendall(rest)
                got = b""
                while b"}\n" not in got:
                    got += connection.recv(4096)
                assert told in got


@pytest.mark.parametrize("length", [30, 5000], ids=["small", "large"])
def test_half_a_form_is_none(running: Running, length: int) -> None:
    with closing(running.connect()) as connection:
        kind = "Content-Type: application/x-www-form-urlencoded"
        connection.sendall(
            f"POST /form HTTP/1.1\r\nHost: a\r\n{kind}\r\nContent-Length: {length}\r\n\r\naction=pause&ticket=T-12".encode()
        )
        connection.shutdown(socket.SHUT_WR)
        answered = connection.makefile("rb").read()
    assert answered.startswith(b"HTTP/1.1 400"), "who meant T-1234 does not pause T-12"


@pytest.mark.parametrize(
    "framing",
    ["Content-Length: 60000\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\nea60\r\n"],
    ids=["a length", "chunks"],
)
def test_a_body_that_nobody_asked_for_and_trickles_in_holds_no_thread(running: Running, framing: str) -> None:
    with ExitStack() as connections:
        opened = [connections.enter_context(closing(running.connect())) for _ in range(12)]
        for connection in opened:
            connection.sendall(f"GET / HTTP/1.1\r\nHost: a\r\n{framing}".encode())
        until_s = time.monotonic() + 1
        while time.monotonic() < until_s:
            for connection in opened:
                with suppress(OSError):  # it has been closed
                    connection.sendall(b"b")
            time.sleep(0.01)
        for connection in opened:
            connection.setblocking(False)  # it has ended by now
            answered = connection.makefile("rb").read()
            assert answered is not None and answered.count(b"HTTP/1.1") == 1
            assert answered.startswith(b"HTTP/1.1 200")


def test_who_asks_on_and_on_and_is_gone_costs_nothing(running: Running) -> None:
    worker = psutil.Process(running.worker)
    connection = running.connect()
    connection.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n" * 200)
    time.sleep(1.0)  # what was written fills the buffers, and the rest waits
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()  # a reset
    time.sleep(0.2)
    before = sum(worker.cpu_times()[:2])
    time.sleep(1.5)
    assert sum(worker.cpu_times()[:2]) - before < 0.25
    assert _is_served_within(running, 2)


def test_heads_that_trickle_in_at_the_end_do_not_break_it(running: Running) -> None:
    with ExitStack() as connections:
        trickling = [connections.enter_context(closing(running.connect())) for _ in range(40)]
        answered = [connections.enter_context(closing(running.connect())) for _ in range(4)]
        for connection in answered:
            connection.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(0.2)  # they have a thread each
        running.signal(signal.SIGTERM)
        until_s = time.monotonic() + 0.4
        while time.monotonic() < until_s:
            for connection in trickling:
                try:
                    connection.sendall(b"G")
                except OSError:
                    pass  # it was told 408, or has been closed
        for connection in answered:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    assert running.ended() == 0
    assert not running.records("web_server"), "no traceback of the server"


def test_who_goes_away_before_a_request_is_whole_takes_no_thread(running: Running) -> None:
    worker = psutil.Process(running.get().json()["pid"])
    before = worker.num_threads()
    for half in (b"", b"GET / HT", b"POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nab"):
        with ExitStack() as connections:
            for _ in range(30):
                connections.enter_context(closing(running.connect())).sendall(half)
    assert _is_served_within(running, 2)
    time.sleep(0.1)
    assert worker.num_threads() <= before + 3
