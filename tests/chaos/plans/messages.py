"""Messages that are hot, stuck, poison, malformed, or that end their process."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tests.chaos.checker.history import History
from tests.chaos.corpus import HOSTILE
from tests.chaos.injectors.operator import park_and_redrive
from tests.chaos.plans.plan import Plan, rounds
from tests.chaos.rig.cluster import Cluster, Shape
from tests.chaos.rig.producer import Load
from tests.chaos.rig.records import now_ns


def hot_and_stuck(cluster: Cluster, seconds: float) -> None:
    """First a calm half, then one ticket with as much as all others together and one whose handler is stuck."""
    time.sleep(seconds / 2)
    cluster.fault("hot", *(2 * [now_ns()]))
    cluster.producer.send("STUCK", hang_ms=str(int(seconds * 400)))
    for number in range(int(cluster.producer.load.rate * seconds / 2)):
        cluster.producer.send("HOT", work_ms="1")
        if number % 20 == 0:
            cluster.producer.send("STUCK", work_ms="1")
            cluster.counts["parked"] = max(cluster.counts["parked"], cluster.state.pending_by_name().get("master", 0))
        time.sleep(0.4 / cluster.producer.load.rate)


def poison(cluster: Cluster, seconds: float) -> None:
    """Messages that always fail come with the load; the hostile ones (corpus.py) in between."""
    for expect, parts in HOSTILE:
        if cluster.producer.send_raw(expect, *parts) is not None:
            cluster.counts["hostile"] += 1
        time.sleep(seconds / len(HOSTILE))


def hanging(cluster: Cluster, seconds: float) -> None:
    """Messages whose handler never returns: their process is ended each time, and they are given up; what ran beside
    them is not."""
    for number in rounds(seconds, 2.0):
        cluster.producer.send(f"T{number}", "dlq", hang_ms="600000")


def aborting(cluster: Cluster, seconds: float) -> None:
    """Messages whose handler takes the process with it."""
    for number in rounds(seconds, 4.0):
        cluster.producer.send(f"T{number}", "dlq", abort="1000")


def others_go_on(history: History, cluster: Cluster) -> Iterator[str]:
    """L3: with a hot and a stuck ticket, the others' p99 from arrival to start is at most twice what it was, or 100
    ms."""
    began = history.of("fault")[0]["t0"]
    waits: dict[bool, list[int]] = {False: [], True: []}
    for uid, runs in history.starts_of.items():
        if runs[0].ticket not in ("HOT", "STUCK"):
            waits[history.arrivals[uid] > began].append(runs[0].start - history.arrivals[uid])
    before, after = (sorted(waits[late])[int(0.99 * len(waits[late]))] / 1e6 for late in (False, True))
    cluster.counts["p99_before_ms"], cluster.counts["p99_after_ms"] = round(before), round(after)
    if after > max(2 * before, 100.0):
        yield f"L3: the p99 of the others rose from {before:.0f} ms to {after:.0f} ms"


# fmt: off
PLANS: tuple[Plan, ...] = (
    Plan("K11", "hot and stuck tickets", hot_and_stuck, ("parked", "hot"), strict=True,
         shape=Shape(tuned={"TICKET_WINDOW": 8}), load=Load(rate=100, work_ms=10), extra=others_go_on, seconds=4.0,
         varies=False),
    Plan("K12", "poison and malformed", poison, ("dlq", "rejected", "hostile", "double_sends", "repeated"),
         strict=True, load=Load(double_sends=0.05, poison=0.02, fail_before=0.05, fail_after=0.03), seconds=4.0),
    Plan("K12p", "parked and redriven", park_and_redrive,
         ("kill", "kill_leader", "broken", "letters_resumed", "repeated"), strict=True,
         shape=Shape(max_attempts=2, environ={"USHER_DEAD_LETTER_POLICY": "halt"}), load=Load(rate=60),
         drain_s=12.0, varies=False, brief=False),
    Plan("K12h", "hanging handlers", hanging, ("handlers_hung", "dlq", "redelivered"), strict=True,
         shape=Shape(max_attempts=2, environ={"USHER_HANDLER_SECONDS": "0.8"}), load=Load(rate=100, work_ms=20),
         brief=False),
    Plan("K12a", "handlers that end their process", aborting, ("dlq", "redelivered"), strict=True,
         shape=Shape(max_attempts=3), load=Load(rate=100, work_ms=20), seconds=4.0, brief=False),
)
# fmt: on
