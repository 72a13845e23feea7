"""taskiq with the stream broker of taskiq-redis: two processes, 100 tasks at a time each, its default."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from benchmarks.peers.peer import Peer
from benchmarks.rig.recording import PeerJob, record


def _task(job: PeerJob) -> Any:
    from taskiq_redis import RedisStreamBroker

    broker = RedisStreamBroker(job.url, consumer_id="0")

    @broker.task(task_name="handle")
    async def handle(ticket: int, number: int, _body: str) -> None:
        record(ticket, number)

    return handle


def fill(job: PeerJob) -> None:
    asyncio.run(_fill(job))


async def _fill(job: PeerJob) -> None:
    handle, body = _task(job), job.body
    await handle.broker.startup()
    for ticket, number in job.workload():
        await handle.kiq(ticket, number, body)
    await handle.broker.shutdown()


def worker(job: PeerJob) -> Callable[[], object]:
    from taskiq.api import run_receiver_task

    broker = _task(job).broker
    return lambda: asyncio.run(run_receiver_task(broker, max_async_tasks=job.concurrency, run_startup=True))


PEER = Peer(
    name="taskiq",
    title="taskiq-redis",
    distribution="taskiq-redis",
    requires=("taskiq>=0.11", "taskiq-redis>=1"),
    keeps="none",
    promise=(
        "No order: tasks run at the same time in each worker. A task is acknowledged after it ran, and claimed when"
        " idle for 10 minutes."
    ),
    source="https://github.com/taskiq-python/taskiq-redis",
    configuration="RedisStreamBroker, 2 processes, max_async_tasks 100, xread_count 100 (the defaults), no results",
    fill=fill,
    worker=worker,
    concurrency=100,
    share=0.2,
)
PEERS = (
    PEER,
    PEER.alone(
        "one queue, steady state",
        "In order while nothing fails: one worker, one task at a time. What is claimed comes later.",
    ),
)
