"""Dramatiq with the Redis broker: two processes of 8 threads, its default number."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from benchmarks.peers.peer import Peer
from benchmarks.rig.recording import PeerJob, record


def _actor(job: PeerJob) -> Any:
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker

    broker = RedisBroker(url=job.url)
    dramatiq.set_broker(broker)

    @dramatiq.actor(actor_name="handle")
    def handle(ticket: int, number: int, _body: str) -> None:
        record(ticket, number)

    return handle


def fill(job: PeerJob) -> None:
    handle, body = _actor(job), job.body
    for ticket, number in job.workload():
        handle.send(ticket, number, body)


def worker(job: PeerJob) -> Callable[[], object]:
    from dramatiq import Worker

    workers = Worker(_actor(job).broker, worker_threads=job.concurrency)

    def run() -> None:
        workers.start()
        threading.Event().wait()

    return run


PEER = Peer(
    name="dramatiq",
    title="Dramatiq",
    distribution="dramatiq",
    requires=("dramatiq[redis]>=1.17",),
    keeps="none",
    promise="No order: threads take messages of one prefetched queue. A message is acknowledged after it ran.",
    source="https://dramatiq.io/guide.html",
    configuration="2 processes, 8 threads each and the default prefetch (2 per thread), default middleware, no results",
    fill=fill,
    worker=worker,
    concurrency=8,
    share=0.2,
)
PEERS = (
    PEER,
    PEER.alone(
        "one queue, steady state", "In order while nothing fails: one process with one thread. Retries come later."
    ),
)
