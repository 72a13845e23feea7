"""arq: two processes, 10 jobs at a time each, its default."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from benchmarks.peers.peer import Peer
from benchmarks.rig.recording import PeerJob, record


async def handle(_context: dict[Any, Any], ticket: int, number: int, _body: str) -> None:
    record(ticket, number)


def fill(job: PeerJob) -> None:
    asyncio.run(_fill(job))


async def _fill(job: PeerJob) -> None:
    from arq import create_pool
    from arq.connections import RedisSettings

    pool, body = await create_pool(RedisSettings.from_dsn(job.url)), job.body
    # The queue is sorted by milliseconds, and jobs of the same one by their ids.
    for at, (ticket, number) in enumerate(job.workload()):
        await pool.enqueue_job("handle", ticket, number, body, _job_id=f"{at:09d}")


def worker(job: PeerJob) -> Callable[[], object]:
    from arq.connections import RedisSettings
    from arq.worker import Worker

    # It asks for the running loop's settings when it is made.
    asyncio.set_event_loop(asyncio.new_event_loop())
    settings = RedisSettings.from_dsn(job.url)
    jobs = Worker([handle], redis_settings=settings, max_jobs=job.concurrency, keep_result=0, poll_delay=0.001)
    return jobs.run


PEER = Peer(
    name="arq",
    title="arq",
    distribution="arq",
    requires=("arq>=0.26",),
    keeps="none",
    promise=(
        "No order: jobs run at the same time in each worker. A job may run more than once; after a crash when its mark"
        " expires."
    ),
    source="https://arq-docs.helpmanual.io/",
    configuration="2 processes, max_jobs 10 (the default), results not kept, poll_delay 1 ms instead of 500",
    fill=fill,
    worker=worker,
    concurrency=10,
    share=0.05,
)
PEERS = (
    PEER,
    PEER.alone(
        "one queue, steady state", "In order while nothing fails: one worker with max_jobs 1. Retries come later."
    ),
)
