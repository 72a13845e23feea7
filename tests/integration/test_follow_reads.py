"""``usher tickets follow`` reads what a master sends, over a real connection."""

from __future__ import annotations

import socket
import threading
import time

from tests.integration.routers import PATIENCE_S
from usher.master.cli.status import ServerSentEvent, follow

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n: following\n\n"


def test_a_large_event_is_read_without_copying_it_for_each_of_its_bytes() -> None:
    body = "x" * 300_000

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65_536)
            connection.sendall(_HEAD + b'id: 5-1_0-0_0-0\nevent: entry\ndata: {"body":"' + body.encode() + b'"}\n\n')

    with socket.create_server(("127.0.0.1", 0)) as server:
        master = threading.Thread(target=serve)
        master.start()
        begun_s = time.thread_time()
        events = follow([f"http://127.0.0.1:{server.getsockname()[1]}"], "T", "", "")
        assert next(events) == ServerSentEvent("5-1_0-0_0-0", "entry", {"body": body})
        assert time.thread_time() - begun_s < 8, "it took 25 s when it copied"
        events.close()  # type: ignore[attr-defined]
        master.join(PATIENCE_S)
