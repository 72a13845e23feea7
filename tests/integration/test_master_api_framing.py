"""What no HTTP client sends: requests that two parsers could read in two ways, over raw sockets, to the real server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing

import gunicorn
import pytest
import requests

from tests.integration.test_master_api import ACKNOWLEDGE, CHILD, REGISTER, ask, check_problem, registration, report
from tests.served import Running


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("framing"), {}, CHILD)
    try:
        yield running.wait_until_up()
    finally:
        running.kill()


def _post(headers: bytes, body: bytes = b"", path: bytes = REGISTER.encode(), version: bytes = b"1.1") -> bytes:
    return (
        b"POST "
        + path
        + b" HTTP/"
        + version
        + b"\r\nHost: a\r\nContent-Type: application/json\r\n"
        + headers
        + b"\r\n"
        + body
    )


def _chunked(chunks: bytes) -> bytes:
    return _post(b"Transfer-Encoding: chunked\r\n", chunks)


#: What gunicorn's parser reads in its versions before 27.
_SINCE_27 = ("a trailer that is a framing header",)
#: What ``usher.common.http.app`` finds, beside what test_http_answers.py has.
_FOUND_BY_US = [
    ("no length, but a body", _post(b"", b'{"secret": 1}'), 411),
    ("a length beyond all bounds", _post(b"Content-Length: 99999999999999999999\r\n"), 413),
    ("more than is allowed for a report", _post(b"Content-Length: 524289\r\n", path=ACKNOWLEDGE.encode()), 413),
    ("chunks above the limit", _chunked(b"1000\r\n" + b" " * 4096 + b"\r\n1000\r\n" + b" " * 4096), 413),
    ("one endless chunk", _chunked(b"ffffffff\r\n" + b" " * 9000), 413),
    ("identity before chunked", _post(b"Transfer-Encoding: identity, chunked\r\n", b"0\r\n\r\n"), 400),
    ("a chunk size that is no number", _chunked(b"secret\r\n{}\r\n0\r\n\r\n"), 400),
    ("a signed chunk size", _chunked(b"+2\r\n{}\r\n0\r\n\r\n"), 400),
    ("a chunk that is longer than it says", _chunked(b"1\r\n{}\r\n0\r\n\r\n"), 400),
    ("a trailer that is a framing header", _chunked(b"2\r\n{}\r\n0\r\nContent-Length: 5\r\n\r\n"), 400),
    ("a trailer without a colon", _chunked(b"2\r\n{}\r\n0\r\nsecret\r\n\r\n"), 400),
]


def _exchange(running: Running, sent: bytes, *, half_close: bool = False) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer; the connection must be closed by the server after it."""
    with closing(running.connect()) as connection:
        connection.sendall(sent)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        answered = b""
        while received := connection.recv(65_536):
            answered += received
    answered = answered.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    head, _, body = answered.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:])
    assert len(body) == int(headers["Content-Length"]), "exactly one answer"
    return int(lines[0].split(" ")[1]), headers, body


_IS_OLD = gunicorn.version_info < (27,)


@pytest.mark.parametrize(
    ("sent", "status"),
    [pytest.param(sent, status, id=name) for name, sent, status in _FOUND_BY_US if not (_IS_OLD and name in _SINCE_27)],
)
def test_a_request_that_could_be_read_in_two_ways_ends_its_connection(
    master: Running, sent: bytes, status: int
) -> None:
    got, headers, body = _exchange(master, sent)
    assert got == status
    assert headers["Connection"] == "close"
    assert headers["Cache-Control"] == "no-store"
    check_problem(headers["Content-Type"], json.loads(body), status)
    assert b"secret" not in body
    assert ask(master, "GET", "/api/health").status_code == 200


def test_a_body_that_ends_early_is_400(master: Running) -> None:
    status, headers, _ = _exchange(master, _post(b"Content-Length: 10\r\n", b"{}"), half_close=True)
    assert (status, headers["Connection"]) == (400, "close")


def test_a_header_with_an_underscore_cannot_pretend_to_be_another(master: Running) -> None:
    sent = (
        b"GET /api/health HTTP/1.1\r\nHost: a\r\nSCRIPT_NAME: /secret\r\nContent_Length: 5\r\nConnection: close\r\n\r\n"
    )
    assert _exchange(master, sent)[0] == 200


def test_a_chunked_body_is_read(master: Running) -> None:
    body = json.dumps(registration(name="chunked")).encode()
    chunks = (
        b"".join(b"%x\r\n%s\r\n" % (len(body[at : at + 7]), body[at : at + 7]) for at in range(0, len(body), 7))
        + b"0\r\n\r\n"
    )
    assert _exchange(master, _post(b"Transfer-Encoding: chunked\r\nConnection: close\r\n", chunks))[0] == 201


def test_a_second_request_on_a_connection_is_not_read_from_the_first_ones_body(master: Running) -> None:
    """Smuggling: a refused body must not be taken for a request."""
    inner = b"GET /api/consumers HTTP/1.1\r\nHost: a\r\n\r\n"
    status, headers, _ = _exchange(
        master, _post(b"Content-Length: %d\r\nContent-Encoding: gzip\r\n" % len(inner), inner)
    )
    assert (status, headers["Connection"]) == (415, "close")


def test_a_connection_is_kept_for_the_next_request(master: Running) -> None:
    with requests.Session() as session:
        for _ in range(3):
            answered = session.post(f"http://127.0.0.1:{master.port}{ACKNOWLEDGE}", json=report(), timeout=20)
            assert (answered.status_code, answered.headers["Connection"]) == (200, "keep-alive")
