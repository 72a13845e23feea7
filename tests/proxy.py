"""A TCP proxy in front of a real redis-server that can lose, delay or alter what Redis answers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from redis.connection import parse_url

_CHUNK = 65_536
_NARROW_CHUNK = 8192


class Proxy:
    """Listens on loopback and forwards to the server of ``upstream_url``; ``with Proxy(url) as proxy: Link(proxy.url,
    ...)``.

    ``on_reply`` gets what comes from Redis, one whole reply or several, and returns what the client is to see; None
    breaks the connection instead. Whole, because Redis 6.2 writes one nested reply in up to four pieces, and who reads
    fast gets them one by one.
    """

    def __init__(
        self,
        upstream_url: str,
        on_reply: Callable[[bytes], bytes | None] = lambda chunk: chunk,
        bytes_per_s: float = 0.0,
    ) -> None:
        """``bytes_per_s``: how fast requests go through; 0: at once. It may be changed; None: not at all."""
        self._upstream = parse_url(upstream_url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.bytes_per_s: float | None = bytes_per_s
        if bytes_per_s:  # else the system takes megabytes on the way
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _NARROW_CHUNK)
        self.on_reply = on_reply
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        secret = self._upstream.get("password")
        self.url = f"redis://{f':{secret}@' if secret else ''}127.0.0.1:{self._listener.getsockname()[1]}/0"

    def __enter__(self) -> Proxy:
        self._run(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.break_all()
        for thread in self._threads:
            thread.join(10)

    def lead_to(self, upstream_url: str) -> None:
        """New connections go to another server; those that are open stay where they are."""
        self._upstream = parse_url(upstream_url)

    def break_all(self) -> None:
        """Break every connection that is open now."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _run(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = self._connect()
            except OSError:  # Redis is down: so is the proxy
                client.close()
                continue
            self._sockets += [client, server]
            self._run(self._forward, client, server, _chunks(client), self._narrow)
            self._run(self._forward, server, client, _whole_replies(server), lambda chunk: self.on_reply(chunk))

    def _narrow(self, chunk: bytes) -> bytes | None:
        if self.bytes_per_s is None:
            return None if self._closed.wait(60) else chunk
        if self.bytes_per_s:
            time.sleep(len(chunk) / self.bytes_per_s)
        return chunk

    def _connect(self) -> socket.socket:
        if "path" in self._upstream:
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._upstream["path"])
            return server
        return socket.create_connection((self._upstream["host"], self._upstream["port"]))

    def _forward(
        self,
        source: socket.socket,
        target: socket.socket,
        chunks: Iterator[bytes],
        change: Callable[[bytes], bytes | None],
    ) -> None:
        with contextlib.suppress(OSError):
            for chunk in chunks:
                changed = change(chunk)
                if changed is None:
                    break
                target.sendall(changed)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        # Both directions end here, one of them twice: closing a socket twice is fine.
        source.close()


def _chunks(source: socket.socket) -> Iterator[bytes]:
    while chunk := source.recv(_CHUNK):
        yield chunk


def _whole_replies(server: socket.socket) -> Iterator[bytes]:
    """What Redis sends, in chunks that end where a reply ends; what is left at the end comes as it is."""
    gathered = b""
    for chunk in _chunks(server):
        gathered += chunk
        end = 0
        while (next_end := _reply_end(gathered, end)) is not None:
            end = next_end
        if end:
            yield gathered[:end]
            gathered = gathered[end:]
    if gathered:
        yield gathered


def _reply_end(gathered: bytes, at: int) -> int | None:
    """Where the reply that begins ``at`` ends, None if that has not come yet. RESP2 and RESP3."""
    missing = 1
    while missing:
        line_end = gathered.find(b"\r\n", at)
        if line_end < 0:
            return None
        kind, size, at = gathered[at], gathered[at + 1 : line_end], line_end + 2
        missing -= 1
        if kind in b"$=!" and size != b"-1":
            at += int(size) + 2
        elif kind in b"*~>" and size != b"-1":
            missing += int(size)
        elif kind in b"%|":
            missing += 2 * int(size) + (kind == ord("|"))  # attributes come before what they belong to
    return at if at <= len(gathered) else None
