"""RQ: two SimpleWorkers, which do not fork for each job as its default worker does."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.peers.peer import Peer
from benchmarks.rig.recording import PeerJob, record

_PAGE = 500


def handle(ticket: int, number: int, _body: str) -> None:
    record(ticket, number)


def fill(job: PeerJob) -> None:
    import redis
    from rq import Queue

    queue, body, page = Queue(connection=redis.Redis.from_url(job.url)), job.body, []
    for ticket, number in job.workload():
        page.append(Queue.prepare_data(handle, args=(ticket, number, body), result_ttl=0))
        if len(page) == _PAGE:
            queue.enqueue_many(page)
            page = []
    queue.enqueue_many(page)


def worker(job: PeerJob) -> Callable[[], object]:
    import redis
    from rq import Queue, SimpleWorker

    connection = redis.Redis.from_url(job.url)
    simple = SimpleWorker([Queue(connection=connection)], connection=connection)
    return lambda: simple.work(logging_level="WARNING")


PEER = Peer(
    name="rq",
    title="RQ",
    distribution="rq",
    requires=("rq>=2",),
    keeps="none",
    promise=(
        "No order with more than one worker. A job is popped before it is registered as running; a crash between"
        " loses it."
    ),
    source="https://github.com/rq/rq/issues/580",
    configuration="two SimpleWorkers (no fork per job), result_ttl=0",
    fill=fill,
    worker=worker,
    share=0.05,
)
PEERS = (
    PEER,
    PEER.alone(
        "one queue, steady state",
        "In order while nothing fails: one worker takes one job at a time. Retries come later.",
    ),
)
