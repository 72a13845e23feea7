"""Celery with the Redis broker: one worker with a pool of two processes.

Fast as its "Optimizing" page says: no results, several tasks prefetched per process, early acks (both are its
defaults).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.peers.peer import Peer
from benchmarks.rig.recording import PeerJob, record


def _app(job: PeerJob) -> Any:
    from celery import Celery

    app = Celery("bench", broker=job.url)
    app.conf.update(
        task_ignore_result=True,
        worker_prefetch_multiplier=4 if job.concurrency > 1 else 1,
        worker_hijack_root_logger=False,
        worker_send_task_events=False,
        broker_connection_retry_on_startup=True,
    )

    @app.task(name="handle", ignore_result=True)
    def handle(ticket: int, number: int, _body: str) -> None:
        record(ticket, number)

    return app


def fill(job: PeerJob) -> None:
    app = _app(job)
    handle, body = app.tasks["handle"], job.body
    with app.producer_pool.acquire(block=True) as producer:
        for ticket, number in job.workload():
            handle.apply_async((ticket, number, body), producer=producer)


def worker(job: PeerJob) -> Callable[[], object]:
    app = _app(job)
    words = ["worker", "--pool=prefork", f"--concurrency={job.concurrency}", "--loglevel=warning"]
    return lambda: app.worker_main([*words, "--without-gossip", "--without-mingle", "--without-heartbeat"])


PEER = Peer(
    name="celery",
    title="Celery",
    distribution="celery",
    requires=("celery[redis]>=5.4",),
    keeps="none",
    promise=(
        "No order: any free process takes the next task. By default a task is acknowledged before it runs; a crash"
        " loses it."
    ),
    source="https://docs.celeryq.dev/en/stable/userguide/tasks.html",
    configuration=(
        "one worker, prefork pool of 2, prefetch multiplier 4 and early acks (the defaults), no results, no gossip,"
        " mingle, heartbeat"
    ),
    fill=fill,
    worker=worker,
    processes=1,
    concurrency=2,
    share=0.1,
)
PEERS = (
    PEER,
    PEER.alone(
        "one queue, steady state",
        "In order while nothing fails: one process of one worker takes one task at a time. Retries come later.",
    ),
)
