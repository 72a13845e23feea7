"""Huey with its Redis storage: one consumer with two worker processes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from benchmarks.peers.peer import Peer
from benchmarks.rig.recording import PeerJob, record


def _task(job: PeerJob) -> Any:
    from huey import RedisHuey

    huey = RedisHuey("bench", url=job.url, results=False)

    @huey.task(name="handle")
    def handle(ticket: int, number: int, _body: str) -> None:
        record(ticket, number)

    return handle


def fill(job: PeerJob) -> None:
    handle, body = _task(job), job.body
    for ticket, number in job.workload():
        handle(ticket, number, body)


def worker(job: PeerJob) -> Callable[[], object]:
    logging.getLogger("huey").setLevel(logging.WARNING)
    consumer = _task(job).huey.create_consumer(workers=job.concurrency, worker_type="process", periodic=False)
    return lambda: consumer.run()


PEER = Peer(
    name="huey",
    title="Huey",
    distribution="huey",
    requires=("huey>=2.5", "redis>=5"),
    keeps="none",
    promise="No order with more than one worker. A task is popped from a list before it runs; a crash loses it.",
    source="https://huey.readthedocs.io/en/latest/consumer.html",
    configuration="one consumer with 2 worker processes, no results, no periodic tasks",
    fill=fill,
    worker=worker,
    processes=1,
    concurrency=2,
    share=0.2,
)
PEERS = (
    PEER,
    PEER.alone(
        "one queue, steady state",
        "In order while nothing fails: one worker takes one task at a time. Retries come later.",
    ),
)
