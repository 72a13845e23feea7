"""RabbitMQ as its documentation orders messages with several consumers: a consistent-hash exchange spreads the tickets
over 16 queues, each with a single active consumer. Each process is the first to subscribe to its half of the queues,
and stands by for the other half."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.peers.peer import Peer
from benchmarks.rig.recording import PeerJob, record

_EXCHANGE = "tickets"
_QUEUES = [f"tickets-{number}" for number in range(16)]
_PREFETCH = 2000
_ACK_WITHIN_S = 0.05
_STAND_BY_AFTER_S = 1.0


def fill(job: PeerJob) -> str:
    import pika

    connection = pika.BlockingConnection(pika.URLParameters(job.url))
    channel = connection.channel()
    channel.exchange_declare(_EXCHANGE, exchange_type="x-consistent-hash", durable=True)
    for queue in _QUEUES:
        channel.queue_declare(queue, durable=True, arguments={"x-single-active-consumer": True})
        channel.queue_bind(queue, _EXCHANGE, routing_key="10")  # a weight
    persistent, body = pika.BasicProperties(delivery_mode=2), job.body
    for ticket, number in job.workload():
        channel.basic_publish(_EXCHANGE, str(ticket), f"{ticket} {number} {body}".encode(), persistent)
    while sum(channel.queue_declare(queue, passive=True).method.message_count for queue in _QUEUES) < job.messages:
        time.sleep(0.05)
    version = connection._impl.server_properties["version"]
    connection.close()
    return f"server {version}"


class _Acks:
    """An acknowledgement for up to ``every`` messages: those of a channel are handled in the order in which they
    come."""

    def __init__(self, connection: Any, channel: Any, every: int) -> None:
        self._connection, self._channel, self._every = connection, channel, every
        self._tag = self._told = 0

    def handled(self, tag: int) -> None:
        if self._tag == self._told and self._every > 1:
            self._connection.call_later(_ACK_WITHIN_S, self._tell)
        self._tag = tag
        if tag - self._told >= self._every:
            self._tell()

    def _tell(self) -> None:
        if self._tag > self._told:
            self._channel.basic_ack(self._tag, multiple=True)
            self._told = self._tag


def worker(job: PeerJob, ack_every: int = 100) -> Callable[[], object]:
    import pika

    connection = pika.BlockingConnection(pika.URLParameters(job.url))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=_PREFETCH)
    acks = _Acks(connection, channel, ack_every)

    def handle(_channel: Any, method: Any, _properties: Any, body: bytes) -> None:
        ticket, number, _ = body.split(b" ", 2)
        record(int(ticket), int(number))
        acks.handled(method.delivery_tag)

    def subscribe(queues: list[str]) -> None:
        for queue in queues:
            channel.basic_consume(queue, handle)

    def run() -> None:
        subscribe(_QUEUES[job.place :: job.processes])
        connection.call_later(
            _STAND_BY_AFTER_S,
            lambda: subscribe([queue for queue in _QUEUES if queue not in _QUEUES[job.place :: job.processes]]),
        )
        channel.start_consuming()

    return run


_CONFIGURATION = (
    "16 durable classic queues behind a consistent-hash exchange, persistent messages, single active consumer, prefetch"
    " 2000, manual acks {}, pika in 2 processes"
)
PEER = Peer(
    name="rabbitmq",
    title="RabbitMQ",
    distribution="pika",
    requires=("pika>=1.3",),
    keeps="per queue",
    promise=(
        "In order per queue while its single active consumer lives. When it fails, what it had in hand comes to the"
        " next one again; nothing stops the old one from going on. Tickets of one queue wait for each other."
    ),
    source="https://www.rabbitmq.com/docs/consumers#single-active-consumer",
    configuration=_CONFIGURATION.format("of up to 100 messages"),
    fill=fill,
    worker=worker,
    server="rabbitmq",
)
_EACH = replace(
    PEER,
    name="rabbitmq-each",
    title="RabbitMQ, an ack per message",
    configuration=_CONFIGURATION.format("of each message, as its tutorials do"),
    worker=partial(worker, ack_every=1),
    share=0.5,
)
PEERS = (PEER, _EACH)
