"""Handlers of every kind: threads, ``async def``, batches."""

from __future__ import annotations

import contextlib
import itertools
import threading
from dataclasses import replace

from tests.chaos.injectors import programs
from tests.chaos.plans.messages import hanging
from tests.chaos.plans.plan import Plan, gap_s, rounds
from tests.chaos.plans.programs import consumer_kills
from tests.chaos.rig.cluster import HANDLER, Cluster, Shape
from tests.chaos.rig.producer import Load
from usher import Producer
from usher.common.base.errors import RedisTrouble

_ASYNC = f"{HANDLER}_async"
_BATCHES = tuple(f"tests.chaos.rig.batches:{name}" for name in ("mapped", "partial", "whole"))
_ABSORBING = tuple(f"tests.chaos.rig.batches:{name}" for name in ("absorbing", "absorbing_async"))
_FAILING = Load(rate=120, fail_before=0.05, fail_after=0.05, poison=0.01)


def changing_kinds(cluster: Cluster, seconds: float) -> None:
    """A consumer is killed, or asked to end, and comes back with another kind of handler."""
    kinds = (_BATCHES[0], _ASYNC, *_BATCHES[1:], HANDLER)
    for number in rounds(seconds, gap_s(cluster)):
        name = programs.at_work(cluster, 1)[0]
        cluster.set_handler(name, kinds[number % len(kinds)])
        if number % 2:
            programs.restart_gently(cluster, name)
        else:
            programs.kill_program(cluster, name)
        programs.wait_until_back(cluster, name)


def interrupting(cluster: Cluster, seconds: float) -> None:
    """Consumers are killed while somebody interrupts every ticket, all the time."""
    ended = threading.Event()

    def interrupt() -> None:
        producer = Producer(f"redis://127.0.0.1:{cluster.redis.port}/0")
        for number in itertools.count():
            if ended.wait(0.01):
                break
            with contextlib.suppress(RedisTrouble):
                producer.interrupt(f"T{number % 5}")
        producer.close()

    somebody = threading.Thread(target=interrupt)
    somebody.start()
    try:
        consumer_kills(cluster, seconds)
    finally:
        ended.set()
        somebody.join()


PLANS: tuple[Plan, ...] = (
    Plan(
        "K12d",
        "async handlers that hang",
        hanging,
        ("handlers_hung", "dlq", "redelivered", "starts_async"),
        strict=True,
        shape=Shape(max_attempts=2, environ={"USHER_HANDLER_SECONDS": "0.8", "USHER_HANDLER": _ASYNC}),
        load=Load(rate=100, work_ms=20),
        brief=False,
    ),
    Plan(
        "K19",
        "batch handlers of three kinds",
        consumer_kills,
        ("kill", "redelivered", "starts_batch", "starts_batch_async", "repeated", "dlq"),
        strict=True,
        shape=Shape(handlers=_BATCHES, max_attempts=3),
        load=_FAILING,
        brief=False,
    ),
    Plan(
        "K19a",
        "runs that absorb, interrupted",
        interrupting,
        ("kill", "redelivered", "starts_absorbing", "starts_absorbing_async", "repeated", "dlq"),
        strict=True,
        shape=Shape(handlers=_ABSORBING, max_attempts=3),
        load=replace(_FAILING, rate=80, tickets=5),
        brief=False,
    ),
    Plan(
        "K20",
        "handler kinds that change",
        changing_kinds,
        ("kill", "restart", "redelivered", "starts_thread", "starts_async", "starts_batch"),
        strict=True,
        load=_FAILING,
        seconds=7.0,
        varies=False,
        brief=False,
    ),
)
