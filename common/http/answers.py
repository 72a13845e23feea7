"""Answers over HTTP: JSON documents, problem documents (RFC 9457) for errors, and those that go on, as server-sent
events: each holds a thread, so there is a constant number of them.

Who does not read what is sent loses the connection: it can come back and say where it was. A client that has gone is
noticed within seconds, though nothing is sent.
"""

from __future__ import annotations

import json
import secrets
import select
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

import orjson
from flask import Response, request

from usher.common.base.clock import now_s
from usher.common.base.errors import UsherError
from usher.common.base.log import DEBUG, WARNING, event

#: How often it is looked whether the client is there, and when one that was idle gets a sign of life.
_LOOK_S, _HEARTBEAT_S = 2.0, 15.0
_MOST_BYTES = 262_144


class Problem(UsherError):
    """An error answer, sent as a problem document (RFC 9457).

    ``title`` is a word for programs, ``detail`` a sentence for people, ``facts`` are further members. Never put input
    into any of them. ``close`` ends the connection: for requests whose body was not read to its end.
    """

    def __init__(
        self,
        status: int,
        title: str = "",
        detail: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        close: bool = False,
        **facts: Any,
    ) -> None:
        self.status = HTTPStatus(status)
        self.title = title or self.status.phrase.lower().replace(" ", "_").replace("-", "_")
        self.detail = detail
        self.headers = dict(headers or {})
        if close:
            self.headers["Connection"] = "close"
        self.facts = facts
        self.request_id = secrets.token_hex(8)
        super().__init__(detail or self.title)


def answer(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    try:
        body = orjson.dumps(document)
    except TypeError:  # orjson cannot encode text that was not UTF-8 in Redis, or whole numbers above 64 bits
        body = json.dumps(document, default=str).encode()
    return Response(body, status, headers, content_type="application/json")


def answer_problem(problem: Problem) -> Response:
    """Return a problem document, and log its request id, at level debug: requests must not flood the log."""
    document: dict[str, Any] = {"type": "about:blank", "title": problem.title, "status": int(problem.status)}
    if problem.detail:
        document["detail"] = problem.detail
    response = answer({**document, **problem.facts, "request_id": problem.request_id}, problem.status, problem.headers)
    response.content_type = "application/problem+json"
    facts: dict[str, Any] = {"title": problem.title, "request_id": problem.request_id}
    event("request_refused", level=DEBUG, status=int(problem.status), **facts)
    return response


class LiveStream:
    """An answer that goes on. ``send`` and ``close`` may be called from any thread. ``unwritten``: bytes that wait for
    the thread that answers, on which ``on_written`` is called whenever nothing waits any more."""

    response: Response

    def __init__(self, on_written: Callable[[], None]) -> None:
        self._on_written = on_written
        self._fresh = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self.unwritten = 0
        self.closed = False

    def send(self, data: bytes) -> None:
        with self._fresh:
            if self.closed:
                return
            self._waiting.append(data)
            self.unwritten += len(data)
            # The first alone may be larger, and would be so again for who comes back for it.
            if self.unwritten - len(self._waiting[0]) > _MOST_BYTES:
                event("reader_too_slow", level=WARNING)
                self._waiting.clear()
                self.closed = True
            self._fresh.notify()

    def close(self) -> None:
        with self._fresh:
            self.closed = True
            self._fresh.notify()

    def frames(self, connection: socket.socket | None) -> Iterator[bytes]:
        poll, idle_since_s = select.poll(), now_s()
        if connection is not None:
            poll.register(connection, select.POLLIN)
        while True:
            with self._fresh:
                if not self._waiting and not self.closed:
                    self._fresh.wait(_LOOK_S)
                data = b"".join(self._waiting)
                self._waiting.clear()
                self.unwritten = 0
            if data:
                yield data
                idle_since_s = now_s()
                if not self.unwritten:
                    self._on_written()
            elif self.closed or poll.poll(0):
                return  # a client has nothing to say here, so what can be read is its end
            elif now_s() - idle_since_s > _HEARTBEAT_S:
                self.send(b":\n\n")


class LiveStreams:
    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._open: dict[LiveStream, str] = {}
        self._ending = False

    def open(
        self, who: str, on_closed: Callable[[], None], on_written: Callable[[], None] = lambda: None
    ) -> LiveStream:
        """Begin an answer to the caller ``who`` ("": callers are not told apart), which is the ``response`` of what is
        returned. Raises Problem 503."""
        live = LiveStream(on_written)
        with self._lock:
            its = Counter(self._open.values())[who] if who else 0
            if self._ending or len(self._open) >= self._most or its >= max(1, self._most // 2):
                why = "this master has no room for another subscription"
                raise Problem(503, "too_many_followers", why, headers={"Retry-After": "5"})
            self._open[live] = who
        frames = live.frames(request.environ.get("gunicorn.socket") if request else None)
        live.response = Response(frames, content_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

        @live.response.call_on_close
        def left() -> None:
            live.closed = True
            with self._lock:
                known = self._open.pop(live, None)
            if known is not None:
                on_closed()

        live.send(b": following\n\n")  # so that the client knows at once that the subscription works
        return live

    def close(self) -> None:
        with self._lock:
            self._ending, all_of_them = True, list(self._open)
        for live in all_of_them:
            live.close()
