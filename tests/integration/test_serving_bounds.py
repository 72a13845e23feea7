"""How many connections and requests a program takes at a time: a real server, real sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flask import Flask, request

from tests.served import PATIENCE_S, Running, until
from usher.common.base.log import configure
from usher.common.http.app import Problem, read_body
from usher.common.http.server import server as serving
from usher.common.http.server import sockets as serving_sockets
from usher.common.http.server.server import Bounds
from usher.common.http.server.watch import Liveness

_CHILD = "from tests.integration.test_serving_bounds import child; child()"
_GO = threading.Event()
_ASK = b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n"


class Program:
    """``/wait`` answers when the program ends."""

    def __init__(self) -> None:
        self.app = Flask(__name__)
        self.app.add_url_rule("/", "index", dict)
        self.app.add_url_rule("/read", "read", _read, methods=["POST"])
        self.app.add_url_rule("/wait", "wait", _wait)

    def start(self, port: int, host: str) -> None:
        pass

    def liveness(self) -> Liveness:
        return Liveness(60.0)

    def stop(self) -> None:
        _GO.set()


def _wait() -> dict[str, bool]:
    print("one waits", flush=True)  # noqa: T201
    return {"gone": _GO.wait(PATIENCE_S)}


def _read() -> tuple[dict[str, Any], int]:
    try:
        return {"length": len(read_body(request, 100))}, 200
    except Problem as refused:
        return {}, refused.status


def child() -> None:
    how = json.loads(sys.argv[1])
    configure("bounded", "debug", "json")
    if how.pop("far", False):
        serving_sockets.is_loopback = lambda _address: False  # as if all came from another machine
    serving.serve(Program, "127.0.0.1:0", "bounded", bounds=Bounds(**how))


@contextlib.contextmanager
def _running(folder: Path, **how: Any) -> Iterator[Running]:
    running = Running(folder, how, _CHILD)
    try:
        yield running.wait_until_up()
    finally:
        running.kill()


def _answer(connection: socket.socket) -> bytes:
    """The status line; empty when the connection was closed."""
    got = b""
    with contextlib.suppress(ConnectionError):
        connection.sendall(_ASK % b"/")
        while b"{}" not in got and (more := connection.recv(4096)):
            got += more
    return got.partition(b"\r\n")[0]


def test_more_connections_than_allowed_wait(tmp_path: Path) -> None:
    with _running(tmp_path, connections=3) as running, contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(running.connect()) for _ in range(3)]
        for one in waiting:
            one.sendall(_ASK % b"/wait")
        with running.connect() as fourth:
            fourth.settimeout(1.5)
            with contextlib.suppress(TimeoutError):
                assert _answer(fourth) == b""


def test_more_connections_of_one_address_than_allowed_are_closed_and_room_is_made_again(tmp_path: Path) -> None:
    with _running(tmp_path, per_address=3, far=True) as running, contextlib.ExitStack() as stack:
        three = [stack.enter_context(running.connect()) for _ in range(3)]
        assert [_answer(one) for one in three] == [b"HTTP/1.1 200 OK"] * 3
        with running.connect() as fourth:
            assert _answer(fourth) == b""
        assert _answer(three[0]) == b"HTTP/1.1 200 OK"
        three[0].close()
        ends = time.monotonic() + PATIENCE_S
        while True:
            with running.connect() as again:
                if _answer(again):
                    break
            assert time.monotonic() < ends, running.text()
            time.sleep(0.05)


def test_loopback_is_not_counted(tmp_path: Path) -> None:
    with _running(tmp_path, per_address=1) as running, running.connect() as one, running.connect() as other:
        assert [_answer(one), _answer(other)] == [b"HTTP/1.1 200 OK"] * 2


def test_more_requests_than_allowed_in_flight_are_503_at_once(tmp_path: Path) -> None:
    with _running(tmp_path, in_flight=2) as running, contextlib.ExitStack() as stack:
        _fill(running, stack, 2)
        with running.connect() as third:
            third.sendall(_ASK % b"/")
            refused = third.recv(4096)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1\r\n" in refused
        assert b"application/problem+json" in refused
        assert json.loads(refused.partition(b"\r\n\r\n")[2])["title"] == "too_many_requests_in_flight"


def test_who_is_told_503_holds_no_thread(tmp_path: Path) -> None:
    """There are 8 threads that say so; a second each for those who do not close would be 5 s."""
    with _running(tmp_path, in_flight=2) as running, contextlib.ExitStack() as stack:
        _fill(running, stack, 2)
        began = time.monotonic()
        for one in [stack.enter_context(running.connect()) for _ in range(40)]:
            assert b"503" in _status(one)
        assert time.monotonic() - began < 2


def _fill(running: Running, stack: contextlib.ExitStack, number: int) -> None:
    """Have so many requests wait, and no other one in their places."""
    for _ in range(number):
        stack.enter_context(running.connect()).sendall(_ASK % b"/wait")
    until(lambda: running.text().count("one waits") == number, "all wait", running)


def _status(connection: socket.socket) -> bytes:
    connection.sendall(_ASK % b"/")
    return connection.recv(4096).partition(b"\r\n")[0]


_BEGUN = (
    b"POST /read HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n"
    b"Content-Length: 2\r\n\r\n"
)


def test_slow_bodies_of_one_token_leave_threads_to_all_others(tmp_path: Path) -> None:
    """As many as there are threads stopped a master's HTTP for the 10 s that a body may take."""
    with _running(tmp_path, in_flight=12) as running, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(running.connect()) for _ in range(12)]
        for one in slow:
            one.sendall(_BEGUN % b"one")
        refused = 0
        for one in slow:
            one.settimeout(1.0)
            with contextlib.suppress(TimeoutError):
                assert one.recv(4096).startswith(b"HTTP/1.1 429")
                refused += 1
        assert refused == 12 - 3, "a quarter of the requests in flight"
        began = time.monotonic()
        with running.connect() as other, running.connect() as asks:
            other.sendall(_BEGUN % b"other" + b"{}")
            assert other.recv(4096).startswith(b"HTTP/1.1 200")
            assert _answer(asks) == b"HTTP/1.1 200 OK"
        assert time.monotonic() - began < serving_sockets.REQUEST_S / 2, "while three bodies are awaited"
        for one in slow:
            one.close()
        ends = time.monotonic() + PATIENCE_S
        got = b""
        while b" 200 " not in got:
            assert time.monotonic() < ends, running.text()
            with running.connect() as again:
                again.sendall(_BEGUN % b"one" + b"{}")
                got = again.recv(4096)
