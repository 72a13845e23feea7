"""What ``usher.common.http.server.server`` puts around a WSGI application: its input, and a say in what becomes of the
connection."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gunicorn.http import errors as http_errors

from usher.common.http.server.push_sockets import DETACH
from usher.common.http.server.sockets import Late

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment


class _Input:
    """``wsgi.input``: says 100 Continue when the program wants the body, and speaks in OSErrors (TimeoutError: it came
    too slowly). A body that was cut short is none: half a form may say something else."""

    def __init__(self, environ: WSGIEnvironment) -> None:
        self._body = environ["wsgi.input"]
        self._connection = environ["gunicorn.socket"]
        self._left = int(environ.get("CONTENT_LENGTH") or 0)
        self.awaited = (
            environ.get("HTTP_EXPECT", "").lower() == "100-continue" and environ["SERVER_PROTOCOL"] == "HTTP/1.1"
        )

    def read(self, size: int = -1) -> bytes:
        if self.awaited:
            self.awaited = False
            self._connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            data: bytes = self._body.read(size)
        except Late as late:
            raise TimeoutError("the body did not arrive in time") from late
        except http_errors.ParseException as wrong:
            raise OSError("the body is not framed as HTTP wants it") from wrong
        awaited = self._left if size < 0 else min(size, self._left)
        if len(data) < awaited:
            raise OSError("the body is shorter than its Content-Length")
        self._left -= awaited
        return data


def exchanges(app: WSGIApplication) -> WSGIApplication:
    """``app`` with its ``wsgi.input`` checked, and able to end a connection with the header ``Connection: close``,
    which gunicorn drops, or to keep it for itself (``DETACH``)."""

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        response = start_response.__self__  # type: ignore[attr-defined]
        body = environ["wsgi.input"] = _Input(environ)

        def detach(keeper: Callable[[socket.socket], None]) -> None:
            response.is_chunked = lambda: False
            response.force_close()
            environ["gunicorn.socket"].keeper = keeper

        environ[DETACH] = detach

        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None, /) -> Callable[[bytes], object]:
            # A client whose body was never asked for may send it or not: nothing that follows on the connection can be
            # trusted.
            if body.awaited or ("Connection", "close") in headers:
                response.force_close()
            return start_response(status, headers, exc_info)

        return app(environ, start)

    return application
