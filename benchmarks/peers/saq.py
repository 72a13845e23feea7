"""SAQ with its Redis queue: two processes, 10 jobs at a time each, its default."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from benchmarks.peers.peer import Peer
from benchmarks.rig.recording import PeerJob, record


async def handle(_context: Any, *, ticket: int, number: int, body: str) -> None:
    record(ticket, number)


def fill(job: PeerJob) -> None:
    asyncio.run(_fill(job))


async def _fill(job: PeerJob) -> None:
    from saq import Queue

    queue, body = Queue.from_url(job.url), job.body
    await queue.connect()
    for ticket, number in job.workload():
        await queue.enqueue("handle", ticket=ticket, number=number, body=body, ttl=-1)
    await queue.disconnect()


def worker(job: PeerJob) -> Callable[[], object]:
    return lambda: asyncio.run(_work(job))


async def _work(job: PeerJob) -> None:
    from saq import Queue, Worker

    await Worker(Queue.from_url(job.url), [("handle", handle)], concurrency=job.concurrency).start()


PEER = Peer(
    name="saq",
    title="SAQ",
    distribution="saq",
    requires=("saq[hiredis]>=0.22", "typing_extensions>=4.7"),
    keeps="none",
    promise=(
        "No order: jobs run at the same time in each worker. Lost ones are found by a sweep, and run again if they have"
        " retries."
    ),
    source="https://saq-py.readthedocs.io/",
    configuration="2 processes, concurrency 10 (the default), results not kept",
    fill=fill,
    worker=worker,
    concurrency=10,
    share=0.1,
)
PEERS = (
    PEER,
    PEER.alone(
        "one queue, steady state", "In order while nothing fails: one worker with concurrency 1. Retries come later."
    ),
)
