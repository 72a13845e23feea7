"""All peers by name, in the order of the table."""

from __future__ import annotations

from common.bench.peers import arq, celery, dramatiq, faststream, floor, huey, nats, rabbitmq, rq, saq, streaq, taskiq

PEERS = {
    peer.name: peer
    for module in (floor, rabbitmq, nats, faststream, taskiq, celery, dramatiq, huey, saq, streaq, arq, rq)
    for peer in (module.PEER, getattr(module, "STRICT", None), getattr(module, "ALONE", None))
    if peer is not None
}
