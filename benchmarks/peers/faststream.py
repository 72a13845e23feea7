"""FastStream on Redis Streams: two processes in one consumer group, 100 entries per read, one handler at a time
each."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from benchmarks.peers.peer import Peer
from benchmarks.rig.recording import PeerJob, record

_STREAM, _GROUP = "bench", "bench"


def fill(job: PeerJob) -> None:
    asyncio.run(_fill(job))


async def _fill(job: PeerJob) -> None:
    import redis
    from faststream.redis import RedisBroker

    body = job.body
    redis.Redis.from_url(job.url).xgroup_create(_STREAM, _GROUP, id="0", mkstream=True)
    async with RedisBroker(job.url) as broker:
        for ticket, number in job.workload():
            await broker.publish({"ticket": ticket, "number": number, "body": body}, stream=_STREAM)


def worker(job: PeerJob) -> Callable[[], object]:
    from faststream import FastStream
    from faststream.redis import RedisBroker, StreamSub

    broker = RedisBroker(job.url, logger=None)
    stream = StreamSub(_STREAM, group=_GROUP, consumer=f"c{os.getpid()}", last_id=">", max_records=100)

    @broker.subscriber(stream=stream)
    async def handle(ticket: int, number: int, body: str) -> None:
        record(ticket, number)

    # Under `from __future__ import annotations` the annotations are names of builtins; FastStream resolves them.
    return lambda: asyncio.run(FastStream(broker, logger=None).run())


PEER = Peer(
    name="faststream",
    title="FastStream",
    distribution="faststream",
    requires=("faststream[redis]>=0.5",),
    keeps="none",
    promise=(
        "No order between the consumers of a group. Entries are acknowledged after they ran; of a dead consumer they"
        " stay unless claimed."
    ),
    source="https://faststream.ag2.ai/latest/redis/streams/groups/",
    configuration="2 processes in one group, max_records 100, one handler at a time each (the default)",
    fill=fill,
    worker=worker,
    share=0.2,
)
PEERS = (
    PEER,
    PEER.alone(
        "one stream, steady state",
        "In order while nothing fails: one consumer, one handler at a time. What is claimed comes later.",
    ),
)
