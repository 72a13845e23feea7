"""Handlers of every kind: threads, ``async def``, batches."""

from __future__ import annotations

from dataclasses import replace

from tests.chaos.injectors import programs
from tests.chaos.plans.messages import hanging
from tests.chaos.plans.plan import Plan, gap_s, nothing_more, rounds
from tests.chaos.plans.programs import consumer_kills
from tests.chaos.rig.cluster import HANDLER, Cluster, Shape
from tests.chaos.rig.producer import Load

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


def while_it_runs(plan: Plan) -> Plan:
    """The same faults, while users do all that they can do to tickets at work (talk.py), of handlers that absorb."""
    load = replace(plan.load, tickets=8, skew=0.3, rate=40, work_ms=15, sources=0, talks=True)
    part = 0.0 if "USHER_DEAD_LETTER_POLICY" in plan.shape.environ else 0.03  # else what fails would halt for ever
    load = replace(load, fail_before=part, fail_after=part, poison=part / 6, abort=0.0, die_again=0.0)
    must = ("calls_answered", "interrupts", "behind", "merged", "parts")
    return replace(
        plan,
        name=plan.name + "w",
        load=load,
        shape=replace(plan.shape, handlers=_ABSORBING),
        must=tuple(
            dict.fromkeys((*(name for name in plan.must if not name.startswith(("starts_", "recalled"))), *must))
        ),
        often=("calls_failed", "calls_timed_out", "clears", "over_limit", "starts_absorbing", "starts_absorbing_async"),
        extra=nothing_more if plan.gently else plan.extra,
        drain_s=plan.drain_s + 4.0,
    )


# fmt: off
PLANS: tuple[Plan, ...] = (
    Plan("K12d", "async handlers that hang", hanging, ("handlers_hung", "dlq", "redelivered", "starts_async"),
         strict=True,
         shape=Shape(max_attempts=2, environ={"USHER_HANDLER_SECONDS": "0.8", "USHER_HANDLER": _ASYNC}),
         load=Load(rate=100, work_ms=20), brief=False),
    Plan("K19", "batch handlers of three kinds", consumer_kills,
         ("kill", "redelivered", "starts_batch", "starts_batch_async", "repeated", "dlq"), strict=True,
         shape=Shape(handlers=_BATCHES, max_attempts=3), load=_FAILING, brief=False),
    while_it_runs(Plan("K19", "runs that absorb, talked to", consumer_kills, ("kill", "redelivered", "dlq"), strict=True)),
    Plan("K20", "handler kinds that change", changing_kinds,
         ("kill", "restart", "redelivered", "starts_thread", "starts_async", "starts_batch"), strict=True,
         load=_FAILING, seconds=7.0, varies=False, brief=False),
)
# fmt: on
