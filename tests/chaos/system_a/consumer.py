"""``python -m tests.chaos.system_a.consumer``: reads what was claimed for it, handles it, acknowledges, reports."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import threading
import time
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import redis

from tests.chaos.rig.handler import handle

_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class MessageA:
    """What the handler gets. There is no fence, and nobody counts attempts."""

    fence: int | None = None
    attempt = 1

    def __init__(self, mid: bytes, fields: dict[bytes, bytes]) -> None:
        self.id = mid.decode()
        self.fields = {name.decode(): value.decode() for name, value in fields.items()}
        self.ticket_id = self.fields["ticket_id"]
        self.uid = self.fields.get("uid", self.id)


class ConsumerA:
    """Reads all that is pending for it, handles it with a thread per ticket, and reads again."""

    def __init__(self, url: str, stream: str, group: str, name: str, master_url: str) -> None:
        self._redis = redis.Redis.from_url(url)
        self._stream, self._group, self.name, self._master_url = stream, group, name, master_url
        self._pool = ThreadPoolExecutor(8)

    def register(self, health_url: str) -> None:
        self._post("register", {"name": self.name, "healthURL": health_url})

    def read(self) -> None:
        found = self._redis.xreadgroup(self._group, self.name, {self._stream: "0"}, count=50)
        by_ticket: dict[str, list[MessageA]] = defaultdict(list)
        for mid, fields in found[0][1] if found else ():
            if fields:
                message = MessageA(mid, fields)
                by_ticket[message.ticket_id].append(message)
        if by_ticket:
            list(self._pool.map(self._run, by_ticket.values()))
        else:
            time.sleep(0.01)

    def _run(self, messages: list[MessageA]) -> None:
        with contextlib.suppress(Exception):  # what failed is read again
            for message in messages:
                handle(message)
                self._redis.xack(self._stream, self._group, message.id)
                with contextlib.suppress(OSError):
                    self._post(
                        "acknowledge", {"name": self.name, "ticket_id": message.ticket_id, "message_id": message.id}
                    )

    def _post(self, what: str, body: dict[str, str]) -> None:
        api = "consumers" if what == "register" else "messages"
        request = urllib.request.Request(
            f"{self._master_url}/api/{api}/{what}", json.dumps(body).encode(), method="POST"
        )
        _NO_PROXY.open(request, timeout=2).close()


class _Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def main() -> None:
    environ = os.environ
    names = ("SYSTEM_A_REDIS", "SYSTEM_A_STREAM", "SYSTEM_A_GROUP", "CHAOS_NAME", "SYSTEM_A_MASTER")
    consumer = ConsumerA(*(environ[name] for name in names))
    port = int(environ["SYSTEM_A_PORT"])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), _Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    registered_s = 0.0
    while True:
        with contextlib.suppress(redis.RedisError, OSError):
            if time.monotonic() - registered_s > 1.0:
                consumer.register(f"http://127.0.0.1:{port}/api/health")  # again = update
                registered_s = time.monotonic()
            consumer.read()


if __name__ == "__main__":
    main()
