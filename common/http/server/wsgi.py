"""Put a WSGI application behind ``usher.common.http.server.server``: a body that is whole or an error, bounds of
requests and of their headers, and a say in how a connection ends."""

from __future__ import annotations

import contextlib
import errno
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from email.utils import formatdate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import orjson
from gunicorn.http.errors import ParseException

from usher.common.http.problem import TooManyBodies
from usher.common.http.server.push_sockets import DETACH
from usher.common.http.server.sockets import Bounded

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

#: Seconds for a client to read an answer that it got before its body was read.
_GOODBYE_S = 1.0
#: Most bytes of all header lines of a request; gunicorn bounds each line, and their number.
_HEADERS = 8 * 1024
#: Most bytes of method, path and query. gunicorn reads up to 8,190, so that the answer is ours up to there.
_REQUEST_LINE = 2048


class _Readers:
    """The bodies that are being read: ``most`` at a time of one token at one address, so that a slow sender leaves
    threads to the others. Log-ins have no token: a limit of theirs would lock out all who come through one proxy."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._callers: Counter[tuple[str, str]] = Counter()  # guarded by self._lock

    @contextlib.contextmanager
    def reading(self, caller: tuple[str, str]) -> Iterator[None]:
        if not caller[1]:
            yield
            return
        with self._lock:
            if self._callers[caller] >= self._most:
                raise TooManyBodies("this caller sends other bodies")
            self._callers[caller] += 1
        try:
            yield
        finally:
            with self._lock:
                self._callers[caller] -= 1
                if not self._callers[caller]:
                    del self._callers[caller]


class _Input:
    """``wsgi.input`` that raises OSError (TimeoutError: it came too slowly) for a body that is cut short: half a form
    may say something else."""

    def __init__(self, environ: WSGIEnvironment, readers: _Readers) -> None:
        self._body = environ["wsgi.input"]
        self._readers = readers
        self._caller = environ.get("REMOTE_ADDR", ""), environ.get("HTTP_AUTHORIZATION", "")
        self._left = int(environ.get("CONTENT_LENGTH") or 0)
        self._is_chunked = "HTTP_TRANSFER_ENCODING" in environ
        self.is_read = _has_no_body(environ)

    def read(self, size: int = -1) -> bytes:
        try:
            with self._readers.reading(self._caller):
                data: bytes = self._body.read(size)
        except ParseException as wrong:
            raise OSError("the body is not framed as HTTP wants it") from wrong
        if self._is_chunked:
            self.is_read = size < 0 or len(data) < size
            return data
        awaited = self._left if size < 0 else min(size, self._left)
        if len(data) < awaited:
            raise OSError("the body is shorter than its Content-Length")
        self._left -= awaited
        self.is_read = not self._left
        return data


def exchanges(app: WSGIApplication, most: int, bodies: int, is_ending: Callable[[], bool]) -> WSGIApplication:
    """Wrap ``app``, which calls ``start_response`` before it returns. More than ``most`` requests at a time are 503,
    request lines of more than 2 KiB 414, and headers of more than 8 KiB 431. A caller (token and address) that sends
    more than ``bodies`` bodies at a time gets TooManyBodies from ``wsgi.input``.

    A connection ends with its answer when the answer says ``Connection: close`` (gunicorn drops that header), when the
    body was not read to its end, and when ``is_ending()``. ``environ[DETACH](keeper)`` makes it the keeper's.
    """
    places, readers = threading.BoundedSemaphore(most), _Readers(bodies)

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        if len(environ["REQUEST_METHOD"]) + len(environ["RAW_URI"]) + len("  HTTP/1.1") > _REQUEST_LINE:
            _refuse(environ, "414 URI Too Long", "uri_too_long")
        if _header_bytes(environ) > _HEADERS:
            _refuse(environ, "431 Request Header Fields Too Large", "request_header_fields_too_large")
        if not places.acquire(blocking=False):
            _refuse(environ, "503 Service Unavailable", "too_many_requests_in_flight", {"Retry-After": "1"})
        try:  # a generator: its place is free again when gunicorn has written the answer
            yield from _exchange(app, environ, start_response, readers, is_ending)
        finally:
            places.release()

    return application


def _exchange(
    app: WSGIApplication,
    environ: WSGIEnvironment,
    start_response: Any,
    readers: _Readers,
    is_ending: Callable[[], bool],
) -> Iterator[bytes]:
    body = environ["wsgi.input"] = _Input(environ, readers)
    keepers: list[Callable[[Any], None]] = []
    environ[DETACH] = keepers.append
    started: list[tuple[str, list[tuple[str, str]]]] = []

    def start(status: str, headers: list[tuple[str, str]], _exc_info: Any = None) -> None:
        started.append((status, headers))

    answer: Any = app(environ, start)  # type: ignore[arg-type]
    try:
        status, headers = started[-1]
        if keepers or not body.is_read or ("Connection", "close") in headers or is_ending():
            _end(environ["gunicorn.socket"], status, headers, answer, keepers, 0.0 if body.is_read else _GOODBYE_S)
        start_response(status, headers)
        yield from answer
    finally:
        if hasattr(answer, "close"):
            answer.close()


def _end(
    connection: Bounded,
    status: str,
    headers: Iterable[tuple[str, str]],
    body: Iterable[bytes],
    keepers: Iterable[Callable[[Any], None]] = (),
    wait_s: float = _GOODBYE_S,
) -> NoReturn:
    """Write the whole answer, and end gunicorn's part in the connection: by the error that says, to any server, that
    the client has gone."""
    lines = [f"{name}: {value}\r\n" for name, value in headers if name != "Connection"]
    head = f"HTTP/1.1 {status}\r\nConnection: close\r\nDate: {formatdate(usegmt=True)}\r\n{''.join(lines)}\r\n"
    connection.sendall(head.encode("latin-1") + b"".join(body))
    for keeper in keepers:
        keeper(connection.give_away())
    if wait_s and not connection.given_away:
        connection.linger(wait_s)
    raise ConnectionResetError(errno.ECONNRESET, "the answer is written")


def _has_no_body(environ: WSGIEnvironment) -> bool:
    return not int(environ.get("CONTENT_LENGTH") or 0) and "HTTP_TRANSFER_ENCODING" not in environ


def _header_bytes(environ: WSGIEnvironment) -> int:
    """Count the bytes of the header lines. gunicorn has dropped those whose name has an underscore, and joined those of
    one name with a comma."""
    lines = (
        len(name.removeprefix("HTTP_")) + len(": \r\n") + len(value)
        for name, value in environ.items()
        if name.startswith("HTTP_") or name in ("CONTENT_TYPE", "CONTENT_LENGTH")
    )
    return sum(lines)


def _refuse(
    environ: WSGIEnvironment, status: str, title: str, more: Mapping[str, str] = MappingProxyType({})
) -> NoReturn:
    """Answer before the program is asked. Who has sent a whole request is not waited for: the thread may be a spare
    one."""
    facts = {"type": "about:blank", "title": title, "status": int(status[:3]), "request_id": secrets.token_hex(8)}
    body = orjson.dumps(facts)
    headers = {
        "Content-Type": "application/problem+json",
        **more,
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Content-Length": str(len(body)),
    }
    wait_s = 0.0 if _has_no_body(environ) else _GOODBYE_S
    _end(environ["gunicorn.socket"], status, headers.items(), [body], wait_s=wait_s)
