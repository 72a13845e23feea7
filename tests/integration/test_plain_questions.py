"""Plain questions, many at a time on one thread; what hostile servers do to them is in test_health_questions."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from master import asker
from master.asker import Asker
from master.plain_questions import Answer, Bounds, PlainQuestions, Question
from master.web.health_url import parse_hosts
from tests.integration.test_health_questions import _WELL, _keep, serving

_BOUNDS = Bounds(connect_s=1.0, read_s=0.5, whole_s=1.0, most_bytes=1024)


@pytest.fixture
def plain() -> Iterator[PlainQuestions]:
    with closing(PlainQuestions()) as plain:
        yield plain


def _to(port: int) -> Question:
    return Question(("127.0.0.1", port), b"GET /api/health HTTP/1.1\r\nHost: x\r\n\r\n")


def _says(*pieces: bytes, pause_s: float = 0.0) -> Callable[[socket.socket], None]:
    def speak(connection: socket.socket) -> None:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause_s)

    return speak


def _silent(connection: socket.socket) -> None:
    connection.recv(1)


def test_one_that_is_silent_holds_up_none_of_the_others(plain: PlainQuestions) -> None:
    with ExitStack() as stack:
        ports = {f"c{number}": stack.enter_context(serving(_keep if number % 5 else _silent))[0] for number in range(40)}
        stack.callback(plain.close)
        began_s = time.monotonic()
        answers = plain.ask({name: _to(port) for name, port in ports.items()}, _BOUNDS, 0.0)
        assert time.monotonic() - began_s < 3 * _BOUNDS.whole_s
        assert {name for name, answer in answers.items() if answer == Answer(200, b"{}")} == {f"c{number}" for number in range(40) if number % 5}
        assert {answer for answer in answers.values() if answer != Answer(200, b"{}")} == {Answer()}


def test_a_connection_is_used_again_and_ends_when_it_is_forgotten(plain: PlainQuestions) -> None:
    closed = threading.Event()

    def until_closed(connection: socket.socket) -> None:
        _keep(connection)
        closed.set()

    with serving(until_closed) as (port, heard):
        for asked_s in range(3):
            assert plain.ask({"a": _to(port)}, _BOUNDS, asked_s)["a"] == Answer(200, b"{}")
        plain.forget(1.0)
        assert len(heard) == 1
        assert not closed.is_set()
        plain.forget(2.0)
        assert closed.wait(10)


def test_two_names_of_one_address_get_their_own_answers(plain: PlainQuestions) -> None:
    with serving(_says(_WELL)) as (port, _):
        assert plain.ask({"a": _to(port), "b": _to(port)}, _BOUNDS, 0.0) == dict.fromkeys("ab", Answer(200, b"{}"))


def test_nobody_there(plain: PlainQuestions) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert plain.ask({"a": _to(port)}, _BOUNDS, 0.0) == {"a": Answer()}


@pytest.mark.parametrize(
    ("pieces", "answer"),
    [
        ((b"HTTP/1.1 200 OK\r\nConnec", b"tion: close\r\n\r", b"\nab", b"c"), Answer(200, b"abc")),
        ((b"HTTP/1.1 200\r\nCONTENT-LENGTH:3\r\n\r\n", b"a", b"bc"), Answer(200, b"abc")),
        ((b"HTTP/1.0 503 X\r\n\r\nno",), Answer(503, b"no")),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + b"a" * 5000,), Answer(200, b"a" * 1024)),
        ((b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * 5000,), Answer(200, b"a" * 1024)),
        ((b"HTTP/1.1 204 No Content\r\n\r\n",), Answer(204)),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",), Answer()),
        ((b"HTTP/1.1 200 OK\r\n",), Answer()),
        ((b"",), Answer()),
        ((b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",), None),
        ((b"HTTP/1.1 100 Continue\r\n\r\n" + _WELL,), None),
        ((b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}",), None),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",), None),
        ((b"SSH-2.0\r\n\r\n",), None),
    ],
)
def test_what_an_answer_is(plain: PlainQuestions, pieces: tuple[bytes, ...], answer: Answer | None) -> None:
    """None: it is left to who reads all of HTTP."""
    with serving(_says(*pieces, pause_s=0.02)) as (port, _):
        assert plain.ask({"a": _to(port)}, _BOUNDS, 0.0) == {"a": answer}


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"x"])
def test_what_comes_behind_an_answer_is_none_to_the_next_question(plain: PlainQuestions, more: bytes) -> None:
    bad = b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n"

    def speak(connection: socket.socket) -> None:
        connection.sendall(bad)
        time.sleep(0.1)
        connection.sendall(more)
        connection.recv(1)

    with serving(speak) as (port, heard):
        for _ in range(2):
            assert plain.ask({"a": _to(port)}, _BOUNDS, 0.0)["a"] == Answer(503)
            time.sleep(0.3)
        assert len(heard) == 2
        plain.close()


def test_what_answers_in_pieces_is_asked_by_the_pool_from_then_on() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    with serving(_says(chunked)) as (port, heard), closing(Asker(parse_hosts("127.0.0.1"), _BOUNDS)) as asking:
        for _ in range(3):
            assert asking.ask({"a": f"http://127.0.0.1:{port}/"}) == {"a": asker.Answer(200, b"{}")}
        assert len(heard) == 1 + 3
