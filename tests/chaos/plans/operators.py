"""Operators who delete, trim, empty and destroy under our feet."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tests.chaos.checker.history import History, position
from tests.chaos.injectors import programs, redis_faults
from tests.chaos.plans.plan import Plan, rounds
from tests.chaos.rig.cluster import Cluster, Shape
from tests.chaos.rig.facts import events

_LARGE = "x" * 9000


def operator_errors(cluster: Cluster, seconds: float) -> None:
    """Scripts forgotten; entries deleted that are parked, and that consumers have. Bodies are too large to go with the
    inbox."""
    for number in rounds(seconds, 0.25):
        redis_faults.flush_scripts(cluster)
        for _ in range(12):
            cluster.producer.send("HOT", work_ms="10", pad=_LARGE)
        redis_faults.delete_pending(cluster, 2, "master" if number % 2 else "")


def trim_all(cluster: Cluster, seconds: float) -> None:
    for _ in rounds(seconds, 1.0):
        for _ in range(12):
            cluster.producer.send("HOT", work_ms="10", pad=_LARGE)
        redis_faults.trim_all(cluster)


def cuts_by_producers(cluster: Cluster, seconds: float) -> None:
    """While nobody leads, and so nobody reads, and at once before."""
    for _ in rounds(seconds, cluster.shape.leader_lease_s + programs.SLACK_S + 1.0):
        for _ in range(30):
            cluster.producer.send("HOT", work_ms="10")
        redis_faults.cut_by_producer(cluster, 15)
        programs.kill_leader(cluster)
        time.sleep(0.3)
        redis_faults.cut_by_producer(cluster, 5)


def flush_all(cluster: Cluster, seconds: float) -> None:
    for _ in rounds(seconds, 5.0):
        for _ in range(12):
            cluster.producer.send("HOT", work_ms="10")
        redis_faults.flush_all(cluster)


def destroy_group(cluster: Cluster, seconds: float) -> None:
    for _ in rounds(seconds, 5.0):
        redis_faults.destroy_group(cluster)


def deletions_are_told(history: History, _cluster: Cluster) -> Iterator[str]:
    """K14: an entry that was deleted while it was pending has its effect, or a dead letter that says so."""
    for uid in sorted(history.excused):
        if uid not in history.committed and uid not in history.dead:
            yield f"{uid} was deleted while it was pending, and nobody says so"


def cuts_are_told(history: History, cluster: Cluster) -> Iterator[str]:
    """K14x: of what was cut unread, the number is told; of what was cut when it was read, each has its letter."""
    for uid in {
        uid for record in history.of("deleted") if record["why"] == "MAXLEN, pending" for uid in record["uids"]
    }:
        if uid not in history.committed and uid not in history.dead:
            yield f"{uid} was cut while it was pending, and nobody says so"
    # Counted in the step that finds it; who is killed just then logs no line about it.
    told = int(cluster.state.call("HGET", cluster.state.prefix + "counters", "unread_cut") or 0)
    if told != cluster.counts["cut_unread"]:
        yield f"{cluster.counts['cut_unread']} were cut unread, and {told} are told"


def _ranges(cluster: Cluster, name: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The ranges of ids that masters told when they lost the group: ``lost`` or ``may_repeat``."""
    told = [record[name] for record in events(cluster.logs(), "group_lost")]
    return [(position(first), position(last)) for first, _, last in (text.partition("..") for text in told) if last]


def losses_are_told(history: History, cluster: Cluster) -> Iterator[str]:
    """K14: what FLUSHALL took lies in the range that the alarm tells, but for what nobody had read yet."""
    flushed, ranges = history.of("fault")[0]["t0"], _ranges(cluster, "lost")
    # Entries are read in the order of their ids: what had begun, and what the first leader who found it says, tells how
    # far.
    begun = (history.positions[run.uid] for run in history.executions if run.start < flushed)
    told = (position(record["last_read"]) for record in events(cluster.logs(), "leader_fenced"))
    read = max((*begun, min(told, default=(0, 0))))
    for uid in history.excused - history.committed:
        at = history.positions.get(uid)
        if at is not None and at <= read and not any(first <= at <= last for first, last in ranges):
            yield f"{uid} at {at} was lost, and the alarm tells {ranges}"


def repeats_are_told(history: History, cluster: Cluster) -> Iterator[str]:
    """K14: what is delivered again after the loss of the group lies in the range that the alarm tells."""
    ranges = _ranges(cluster, "may_repeat")
    for uid, runs in history.starts_of.items():
        at = history.positions[uid]
        if len({run.mid for run in runs}) < len(runs) and not any(first <= at <= last for first, last in ranges):
            yield f"{uid} at {at} came again, and the alarm tells {ranges}"


# fmt: off
PLANS: tuple[Plan, ...] = (
    Plan("K14", "SCRIPT FLUSH, XDEL", operator_errors, ("script_flushes", "deleted_pending", "dlq"), strict=True,
         shape=Shape(tuned={"TICKET_WINDOW": 2}), seconds=4.0, extra=deletions_are_told),
    Plan("K14t", "XTRIM", trim_all, ("deleted", "dlq"), strict=True, shape=Shape(tuned={"TICKET_WINDOW": 2}),
         seconds=4.0, brief=False),
    Plan("K14x", "XADD MAXLEN of a producer", cuts_by_producers, ("cut_unread", "cut_pending", "kill_leader"),
         shape=Shape(tuned={"TICKET_WINDOW": 2}, is_shipped=True), extra=cuts_are_told, brief=False),
    Plan("K14f", "FLUSHALL", flush_all, ("flush_all", "deleted", "group_lost"), seconds=3.0, extra=losses_are_told,
         brief=False),
    Plan("K14g", "XGROUP DESTROY", destroy_group, ("destroy_group", "redelivered", "group_lost"), seconds=4.0,
         extra=repeats_are_told, brief=False),
)
# fmt: on
