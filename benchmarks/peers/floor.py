"""The raw floor: plain redis-py, XREADGROUP and XACK in batches of 500, nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable

from benchmarks.peers.peer import Peer
from benchmarks.rig.recording import PeerJob, record

_PAGE = 1000
_COUNT = 500
_STREAM, _GROUP = "bench", "floor"


def fill(job: PeerJob) -> None:
    import redis

    client, body = redis.Redis.from_url(job.url, protocol=2), job.body
    client.xgroup_create(_STREAM, _GROUP, id="0", mkstream=True)
    pipeline = client.pipeline(transaction=False)
    for ticket, number in job.workload():
        pipeline.xadd(_STREAM, {"ticket_id": ticket, "number": number, "body": body})
        if len(pipeline) == _PAGE:
            pipeline.execute()
    pipeline.execute()


def worker(job: PeerJob) -> Callable[[], object]:
    import redis

    client = redis.Redis.from_url(job.url, protocol=2)
    client.ping()

    def run() -> None:
        read = (
            "XREADGROUP",
            "GROUP",
            _GROUP,
            f"f{os.getpid()}",
            "COUNT",
            _COUNT,
            "BLOCK",
            1000,
            "STREAMS",
            _STREAM,
            ">",
        )
        while True:
            if found := client.execute_command(*read):
                for _, fields in found[0][1]:
                    record(int(fields[b"ticket_id"]), int(fields[b"number"]))
                client.execute_command("XACK", _STREAM, _GROUP, *(entry_id for entry_id, _ in found[0][1]))

    return run


PEERS = (
    Peer(
        name="floor",
        title="raw floor",
        distribution="redis",
        requires=("redis>=8", "hiredis>=3.2"),
        keeps="none",
        promise="No order, no recovery: what this Redis and its client library can do at most.",
        source="https://redis.io/docs/latest/commands/xreadgroup/",
        configuration="2 processes, plain redis-py, XREADGROUP COUNT 500 and one XACK per batch",
        fill=fill,
        worker=worker,
    ),
)
