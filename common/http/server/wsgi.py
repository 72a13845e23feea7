"""Put a WSGI application behind ``usher.common.http.server.server``: a body that is whole or an error, bounds of
requests and of their headers, and a say in how a connection ends."""

from __future__ import annotations

import errno
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from email.utils import formatdate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import orjson
from gunicorn.http.errors import ParseException

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


class _Input:
    """``wsgi.input`` that raises OSError (TimeoutError: it came too slowly) for a body that is cut short: half a form
    may say something else."""

    def __init__(self, environ: WSGIEnvironment) -> None:
        self._body = environ["wsgi.input"]
        self._left = int(environ.get("CONTENT_LENGTH") or 0)
        self._is_chunked = "HTTP_TRANSFER_ENCODING" in environ
        self.is_read = not self._left and not self._is_chunked

    def read(self, size: int = -1) -> bytes:
        try:
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


def exchanges(app: WSGIApplication, most: int, is_ending: Callable[[], bool]) -> WSGIApplication:
    """Wrap ``app``, which calls ``start_response`` before it returns. More than ``most`` requests at a time are 503,
    request lines of more than 2 KiB 414, and headers of more than 8 KiB 431.

    A connection ends with its answer when the answer says ``Connection: close`` (gunicorn drops that header), when the
    body was not read to its end, and when ``is_ending()``. ``environ[DETACH](keeper)`` makes it the keeper's.
    """
    places = threading.BoundedSemaphore(most)

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        if len(environ["REQUEST_METHOD"]) + len(environ["RAW_URI"]) + len("  HTTP/1.1") > _REQUEST_LINE:
            _refuse(environ, "414 URI Too Long", "uri_too_long")
        if _header_bytes(environ) > _HEADERS:
            _refuse(environ, "431 Request Header Fields Too Large", "request_header_fields_too_large")
        if not places.acquire(blocking=False):
            _refuse(environ, "503 Service Unavailable", "too_many_requests_in_flight", {"Retry-After": "1"})
        try:  # a generator: its place is free again when gunicorn has written the answer
            yield from _exchange(app, environ, start_response, is_ending)
        finally:
            places.release()

    return application


def _exchange(
    app: WSGIApplication, environ: WSGIEnvironment, start_response: Any, is_ending: Callable[[], bool]
) -> Iterator[bytes]:
    body = environ["wsgi.input"] = _Input(environ)
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
    wait_s = 0.0 if _Input(environ).is_read else _GOODBYE_S
    _end(environ["gunicorn.socket"], status, headers.items(), [body], wait_s=wait_s)
