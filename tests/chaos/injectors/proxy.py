"""TCP proxies that can delay, hold, cut and lose: one per link, all on one event loop in one thread.

A link that is healed after a hold delivers what was held, late, as TCP does: also a request whose sender has given up
meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

_CHUNK = 65_536
_POLL_S = 0.01


@dataclass(frozen=True)
class Mode:
    """How a link behaves. Probabilities are per chunk (about one request or one reply); delays in seconds."""

    name: str = "pass"
    delay_s: tuple[float, float] = (0.0, 0.0)
    holds_requests: bool = False
    holds_replies: bool = False
    loses_requests: bool = False
    resets: bool = False
    drop_reply: float = 0.0
    cut: float = 0.0


PASS = Mode()
#: Open and silent, both ways.
BLACKHOLE = Mode("blackhole", holds_requests=True, holds_replies=True)
#: Requests arrive, replies do not.
HALF_OPEN = Mode("half_open", holds_replies=True)
#: Requests arrive when the link is healed, however long ago they were sent.
LATE = Mode("late", holds_requests=True)
#: Requests are lost, with their connections.
LOSE = Mode("lose", loses_requests=True)
RESET = Mode("reset", resets=True)


def delay(low_s: float, high_s: float) -> Mode:
    return Mode("delay", delay_s=(low_s, high_s))


def drop_replies(part: float) -> Mode:
    """Requests are done, their replies are lost with the connection."""
    return Mode("drop_reply", drop_reply=part)


def cut(part: float) -> Mode:
    """The connection breaks in the middle of a request or a reply."""
    return Mode("cut", cut=part)


class Link:
    """One proxied link. ``mode`` may be set from any thread."""

    def __init__(self, name: str, upstream_port: int, rng: random.Random, counts: Counter[str]) -> None:
        self.name = name
        self.port = 0
        self._upstream_port = upstream_port
        self._rng = rng
        self._counts = counts
        self._mode = PASS
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def mode(self) -> Mode:
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._mode = mode
        self._counts[f"mode_{mode.name}"] += 1

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in list(self._writers):
            _abort(writer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._counts["connections"] += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        upstream: asyncio.StreamWriter | None = None
        try:
            if self._mode.resets:
                self._counts["resets"] += 1
                return
            replies, upstream = await asyncio.open_connection("127.0.0.1", self._upstream_port)
            self._writers.add(upstream)
            await self._exchange((reader, writer), (replies, upstream))
        except OSError:
            pass  # the server is down: so is the link
        finally:
            for end in (writer, upstream):
                if end is not None:
                    _abort(end)
                    self._writers.discard(end)
            self._tasks.discard(task)

    async def _exchange(
        self,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        forth = asyncio.ensure_future(self._pump(client[0], server[1], is_request=True))
        back = asyncio.ensure_future(self._pump(server[0], client[1], is_request=False))
        try:
            # When replies end (or the client is gone), requests that are held still go out; the other way round nothing
            # is left to do.
            await asyncio.wait((forth, back), return_when=asyncio.FIRST_COMPLETED)
            if back.done() and self._mode.holds_requests:
                await asyncio.wait((forth,))
        finally:
            for half in (forth, back):
                half.cancel()
            await asyncio.gather(forth, back, return_exceptions=True)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, is_request: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := await self._read(source):
                await self._hold(is_request)
                mode = self._mode
                if is_request and mode.loses_requests:
                    self._counts["lost_requests"] += 1
                    return
                if mode.delay_s[1]:
                    self._counts["delayed"] += 1
                    await asyncio.sleep(self._rng.uniform(*mode.delay_s))
                if not is_request and self._rng.random() < mode.drop_reply:
                    self._counts["dropped_replies"] += 1
                    return
                if self._rng.random() < mode.cut:
                    self._counts["cut_messages"] += 1
                    target.write(chunk[: len(chunk) // 2])
                    await target.drain()
                    return
                target.write(chunk)
                await target.drain()

    async def _read(self, source: asyncio.StreamReader) -> bytes:
        """The next chunk; nothing at the end, or when the link is reset."""
        read = asyncio.ensure_future(source.read(_CHUNK))
        try:
            while True:
                done, _ = await asyncio.wait((read,), timeout=0.05)
                if done:
                    return read.result()
                if self._mode.resets:
                    self._counts["resets"] += 1
                    return b""
        finally:
            read.cancel()

    async def _hold(self, is_request: bool) -> None:
        held = False
        while self._mode.holds_requests if is_request else self._mode.holds_replies:
            if not held:
                held = True
                self._counts["held_requests" if is_request else "held_replies"] += 1
            await asyncio.sleep(_POLL_S)


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with a reset, so that nobody waits."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Proxies:
    """All proxied links of a run. ``with Proxies(rng) as proxies: port = proxies.add("c1-redis", 6379).port``."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.counts: Counter[str] = Counter()
        self.links: dict[str, Link] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)

    def __enter__(self) -> Proxies:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for link in self.links.values():
            self._do(link.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def add(self, name: str, upstream_port: int) -> Link:
        """A new link to a loopback port."""
        link = self.links[name] = Link(name, upstream_port, self._rng, self.counts)
        self._do(link.listen())
        return link

    def set(self, mode: Mode, *names: str) -> None:
        """Put the links whose names begin with one of ``names`` (all if none is given) into ``mode``."""
        for name, link in self.links.items():
            if not names or name.startswith(names):
                link.mode = mode

    def heal(self) -> None:
        self.set(PASS)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)
