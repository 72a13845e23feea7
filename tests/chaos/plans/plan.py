"""A scenario: what is started, what goes wrong, and what must have happened for a run to count.

Times are those of a short run (a lease of one second); every run outlasts the longest timer three times. Faults of one
kind are further apart than the bound within which the one before must be over, so that the bound says something.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.chaos.checker.history import History
from tests.chaos.checker.verdict import Violation
from tests.chaos.injectors import programs
from tests.chaos.rig.cluster import Cluster, Shape
from tests.chaos.rig.producer import Load

Faults = Callable[[Cluster, float], None]
#: What else must hold: texts of violations, or violations of a rule ("V": the fault did not bite).
Extra = Callable[[History, Cluster], Iterator[str | Violation]]
ALL_LINKS = frozenset({"redis", "http", "ping"})


def nothing_more(_history: History, _cluster: Cluster) -> Iterator[str | Violation]:
    yield from ()


@dataclass(frozen=True)
class Plan:
    """A scenario. ``strict``: no overlap of a ticket's executions at all. ``must``: counters that have to be above zero
    in every run; ``often``: in all runs together, when there are many."""

    name: str
    title: str
    faults: Faults
    must: tuple[str, ...] = ()
    often: tuple[str, ...] = ()
    strict: bool = False
    tokens: bool = True
    shape: Shape = field(default_factory=Shape)
    load: Load = field(default_factory=Load)
    seconds: float = 5.0
    drain_s: float = 8.0
    extra: Extra = nothing_more
    gently: bool = False
    brief: bool = True  # part of the short run
    known: str = ""  # why it does not hold yet
    varies: bool = True  # other settings with every seed
    warm_s: float = 0.7


def rounds(seconds: float, gap_s: float) -> Iterator[int]:
    """Yield a number every ``gap_s`` until the time is over, at least one."""
    began = time.monotonic()
    for number in range(max(1, int(seconds / gap_s))):
        time.sleep(max(0.0, began + number * gap_s - time.monotonic()))
        yield number
    time.sleep(max(0.0, began + seconds - time.monotonic()))


def gap_s(cluster: Cluster) -> float:
    """A little more than the bound of a consumer's recovery."""
    return cluster.shape.lease_s + programs.SLACK_S + 0.3


def calm(_cluster: Cluster, seconds: float) -> None:
    time.sleep(seconds)


def wait_until_ended(cluster: Cluster, uids: set[str], within_s: float = 20.0) -> None:
    """Until each has its effect, or its letter."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        ended = {commit["uid"] for commit in cluster.sink.commits()}
        ended |= {letter["uid"] for letter in cluster.state.dead_letters()}
        if uids <= ended:
            return
        time.sleep(0.2)
