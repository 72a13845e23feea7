"""Handlers of every kind: threads, ``async def``, batches; and messages without a ticket."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tests.chaos.checker.history import History
from tests.chaos.checker.verdict import Violation
from tests.chaos.injectors import programs
from tests.chaos.plans.messages import hanging
from tests.chaos.plans.plan import Plan, gap_s, rounds
from tests.chaos.plans.programs import consumer_kills
from tests.chaos.rig.cluster import HANDLER, Cluster, Shape
from tests.chaos.rig.handler import unkeyed
from tests.chaos.rig.producer import Load

_ASYNC = f"{HANDLER}_async"
_BATCHES = tuple(f"tests.chaos.rig.batches:{name}" for name in ("mapped", "partial", "whole"))
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


def unkeyed_run_beside_each_other(history: History, _cluster: Cluster) -> Iterator[str | Violation]:
    """K18: messages without a ticket wait for nobody, and go to whoever has room."""
    runs = [run for run in history.executions if run.ticket == unkeyed(run.uid)]
    if len({run.who.partition("/")[0] for run in runs}) < 2:
        yield "all messages without a ticket ran on one consumer"
    if not any(late.start < early.end for early, late in itertools.pairwise(runs)):
        yield "no two messages without a ticket ran at the same time"


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
        "K18",
        "without tickets, kills",
        consumer_kills,
        ("kill", "redelivered", "starts_thread"),
        strict=True,
        shape=Shape(environ={"USHER_UNKEYED": "spread", "USHER_HANDLER": HANDLER}),
        load=Load(unkeyed=0.5, fail_before=0.05),
        extra=unkeyed_run_beside_each_other,
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
