"""A process of ``python -m benchmarks consumers``: many consumers that are registered, beat, wait at their inboxes and
answer health questions, and work for so long on the one message that each may have that they want no other.

``python -m benchmarks.programs.simulated_consumers REDIS_URL STREAM GROUP MASTER_URL COUNT``: says "ready" when all are
registered, then one line for each number of messages that they were handed, and of consumers whose health was asked.
To Redis and masters each looks like a real one: two connections of its own, a blocked read of the inbox, the script of
the heartbeat, and a port of its own where its health is asked.
"""

from __future__ import annotations

import asyncio
import http.client
import sys
import time
import uuid
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import hiredis
import orjson

from usher.common.base.clock import now_s
from usher.common.protocol.keys import Keys
from usher.common.protocol.stream_id import ZERO
from usher.common.redis.client import Link
from usher.common.redis.embedded import free_port
from usher.common.redis.replies import parse_inbox, read_command

_BLOCK_MS = 2000
_PATIENCE_S = 30.0
_WELL = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n" + b'{"status":"ok"}'
_HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True)
class _Place:
    """The place where they all work; ``renew`` is the digest of the heartbeat's script, which Redis has."""

    redis_url: str
    keys: Keys
    renew: str


class _Wire(asyncio.Protocol):
    """A connection to Redis: one command at a time."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self._answer: asyncio.Future[Any] | None = None
        self._transport: Any = None

    @classmethod
    async def open(cls, url: str) -> _Wire:
        at, loop = urlsplit(url), asyncio.get_running_loop()
        _, wire = await loop.create_connection(cls, at.hostname or "", at.port or 6379)
        if at.password:
            await wire.call("AUTH", *((unquote(at.username),) if at.username else ()), unquote(at.password))
        return wire

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        if (reply := self._reader.gets()) is not False and self._answer is not None and not self._answer.done():
            self._answer.set_result(reply)

    async def call(self, *words: Any) -> Any:
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(hiredis.pack_command(words))
        reply = await self._answer
        if isinstance(reply, Exception):
            raise reply
        return reply


class _Health(asyncio.Protocol):
    """Answers one member's health questions, over a connection that stays. ``asked``: the ports at which a master
    asked."""

    def __init__(self, asked: set[int]) -> None:
        self._asked = asked

    def connection_made(self, transport: Any) -> None:
        self._transport, self._heard = transport, b""
        self._asked.add(transport.get_extra_info("sockname")[1])

    def data_received(self, data: bytes) -> None:
        self._heard += data
        asked = self._heard.count(_HEAD_END)
        if asked:
            self._heard = self._heard.rpartition(_HEAD_END)[2]
            self._transport.write(_WELL * asked)


class _Member:
    """A simulated consumer, from its registration on."""

    def __init__(self, place: _Place, incarnation: str, lease_ms: int, held: list[bytes]) -> None:
        self._place, self._incarnation, self._lease_ms, self._held = place, incarnation, lease_ms, held

    async def live(self) -> None:
        await asyncio.gather(self._beat(), self._read())

    async def _beat(self) -> None:
        keys, wire = self._place.keys, await _Wire.open(self._place.redis_url)
        words = (
            self._place.renew,
            4,
            keys.lease(self._incarnation),
            keys.stream,
            keys.unproven(self._incarnation),
            keys.changed,
            keys.group,
            self._incarnation,
            self._lease_ms,
            "-",
            1,
        )
        while True:
            state, *_ = await wire.call("EVALSHA", *words)
            if state != b"live":
                raise RuntimeError(f"the lease of {self._incarnation} is {state!r}")
            await asyncio.sleep(self._lease_ms / 3000)

    async def _read(self) -> None:
        inbox, last, wire = self._place.keys.inbox(self._incarnation), ZERO, await _Wire.open(self._place.redis_url)
        while True:
            for record in parse_inbox(await wire.call(*read_command(inbox, last, _BLOCK_MS))):
                last = record.id
                self._held += [entry_id for part in record.parts for entry_id in part.ids]


async def _main(redis_url: str, stream: str, group: str, master_url: str, count: int) -> None:
    keys, loop, held, asked = Keys(stream, group), asyncio.get_running_loop(), list[bytes](), set[int]()
    link = Link(redis_url, "bench:crowd")
    nobody = "nobody:0"
    link.run("renew", (keys.lease(nobody), stream, keys.unproven(nobody), keys.changed), (group, nobody, 1, "-", 1))
    place = _Place(redis_url, keys, link.digest("renew"))
    link.close()
    master = _connected(master_url)
    living = []
    for number in range(count):
        port = free_port()
        await loop.create_server(lambda: _Health(asked), "127.0.0.1", port, reuse_address=True)
        answer = _register(master, f"crowd-{number}", f"http://127.0.0.1:{port}/api/health")
        living.append(loop.create_task(_Member(place, answer["incarnation"], answer["lease_ms"], held).live()))
        await asyncio.sleep(0)
    _write_crowd_status({"ready": count})
    await asyncio.gather(_report_news(held, asked), *living)


async def _report_news(held: list[bytes], asked: set[int]) -> None:
    told: dict[str, int] = {}
    while True:
        await asyncio.sleep(0.1)
        news = {"held": len(held), "asked": len(asked)}
        if news != told:
            told = news
            _write_crowd_status(news)


def _connected(url: str) -> http.client.HTTPConnection:
    """Connect to the master, which may be about to start."""
    at, deadline_s = urlsplit(url), now_s() + _PATIENCE_S
    while True:
        try:
            connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=10.0)
            connection.connect()
            return connection
        except OSError:
            if now_s() > deadline_s:
                raise
            time.sleep(0.1)


def _register(master: http.client.HTTPConnection, name: str, health_url: str) -> dict[str, Any]:
    body = {"name": name, "uuid": uuid.uuid4().hex, "health_url": health_url, "slots": 1, "capacity": 1}
    master.request("POST", "/api/consumers/register", orjson.dumps(body), {"Content-Type": "application/json"})
    response = master.getresponse()
    answer = response.read()
    if response.status != 201:
        raise SystemExit(f"{name} could not be registered: {response.status} {answer.decode(errors='replace')}")
    document: dict[str, Any] = orjson.loads(answer)
    return document


def _write_crowd_status(document: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(document) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])))
