"""All peers by name, in the order of the table."""

from __future__ import annotations

from benchmarks.peers import arq, celery, dramatiq, faststream, floor, huey, nats, rabbitmq, rq, saq, streaq, taskiq

_MODULES = (floor, rabbitmq, nats, faststream, taskiq, celery, dramatiq, huey, saq, streaq, arq, rq)
PEERS = {peer.name: peer for module in _MODULES for peer in module.PEERS}
