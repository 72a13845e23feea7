"""Programs that are killed, paused, restarted, or lose their lease."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tests.chaos.checker.history import History
from tests.chaos.injectors import programs, redis_faults
from tests.chaos.plans.plan import Plan, calm, gap_s, rounds
from tests.chaos.rig.cluster import Cluster, Shape
from tests.chaos.rig.producer import Load


def consumer_kills(cluster: Cluster, seconds: float) -> None:
    for number in rounds(seconds, gap_s(cluster)):
        programs.kill_consumer(cluster, programs.at_work(cluster, 1)[0], forget_lock=number % 2 == 1)


def zombies(cluster: Cluster, seconds: float) -> None:
    lease_s = cluster.shape.lease_s
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        names = programs.at_work(cluster, len(cluster.consumer_names) - 1)
        programs.pause(
            cluster,
            names,
            min(cluster.rng.uniform(1.5, 5.0) * lease_s, max(1.5 * lease_s, until_s - time.monotonic() - 1)),
        )
        time.sleep(0.5 * lease_s)


def deleted_leases(cluster: Cluster, seconds: float) -> None:
    for _ in rounds(seconds, 1.2):
        redis_faults.delete_lease(cluster, programs.at_work(cluster, 1)[0])


def leader_loss(cluster: Cluster, seconds: float) -> None:
    lease_s = cluster.shape.leader_lease_s
    for number in rounds(seconds, 2 * lease_s + programs.SLACK_S):
        if number % 2:
            programs.kill_leader(cluster)
        else:
            programs.pause_leader(cluster, 1.8 * lease_s)


def rolling_restarts(cluster: Cluster, seconds: float) -> None:
    """Every process once, one after the other, under load; again if there is time."""
    until_s = time.monotonic() + seconds
    while True:
        for name in (*cluster.consumer_names, *cluster.master_names):
            ended = programs.restart_gently(cluster, name)
            cluster.counts["restarts_in_time" if ended else "restarts_by_force"] += 1
            programs.wait_until_back(cluster, name)
        if time.monotonic() > until_s:
            return


def joins_and_leaves(cluster: Cluster, seconds: float) -> None:
    """Consumers come and go all the time, by SIGTERM or kill -9; once the leader goes. What is left can hardly carry the
    load, so what a killed one had goes on later than it could. One is back before another goes."""
    name = ""
    for number in rounds(seconds, 0.9):
        if name:
            programs.wait_until_back(cluster, name)
        [name] = programs.at_work(cluster, 1)
        if number == 3:
            programs.kill_leader(cluster)
        elif cluster.rng.random() < 0.5:
            programs.kill_consumer(cluster, name, forget_lock=cluster.rng.random() < 0.5, busy_s=4.0)
        else:
            programs.restart_gently(cluster, name)


def nothing_redelivered(history: History, _cluster: Cluster) -> Iterator[str]:
    """K0, K10: each entry is started exactly once (by a process that the machine let run)."""
    for uid, runs in history.starts_of.items():
        if len({run.mid for run in runs}) < len(runs) and not history.frozen(
            runs[0].who, runs[0].start - 10**9, runs[-1].start
        ):
            yield f"{uid} was started {len(runs)} times: {[(run.who, run.tok) for run in runs]}"


# fmt: off
PLANS: tuple[Plan, ...] = (
    Plan("K0", "calm", calm, ("messages",), strict=True, seconds=3.0, extra=nothing_redelivered, gently=True),
    Plan("K1", "double sends, failing handlers", calm, ("double_sends", "repeated"), strict=True,
         load=Load(double_sends=0.1, fail_before=0.1, fail_after=0.05), brief=False),
    Plan("K2", "consumer kills", consumer_kills, ("kill", "unproven_kills", "redelivered", "recoveries"), strict=True),
    # Two of three are paused: what is left must be able to carry the load, else it is not recovery that takes long.
    Plan("K3", "zombies", zombies, ("pause", "zombies", "redelivered"), often=("fenced", "refused", "starts_dies"),
         load=Load(rate=60, work_ms=60, die_again=0.04, die_again_ms=3000)),
    Plan("K3d", "leases deleted", deleted_leases, ("lease_deleted", "redelivered", "refused"),
         often=("zombies", "fenced", "starts_dies"),
         load=Load(rate=100, work_ms=60, die_again=0.15, die_again_ms=400), drain_s=15.0, brief=False),
    Plan("K4", "leader killed or paused", leader_loss,
         ("kill_leader", "pause_leader", "leader_changes", "leaders_fenced"), strict=True, seconds=6.0),
    Plan("K10", "rolling restarts", rolling_restarts, ("restart", "drained"), strict=True,
         extra=nothing_redelivered, gently=True, brief=False),
    # Handlers of very different length, and as much work as there is room for: who has joined finds nothing that
    # waits, and others with more than they can run.
    Plan("K22", "consumers join and leave", joins_and_leaves, ("recalled", "kill", "restart", "redelivered"),
         often=("kill_leader", "drained"), shape=Shape(consumers=4, slots=4, environ={"USHER_CAPACITY": "200"}),
         load=Load(rate=40, tickets=400, skew=0.3, work_ms=150, fail_before=0.03), seconds=7.0, drain_s=12.0,
         brief=False),
    Plan("K10b", "drains that are cut short", rolling_restarts, ("restart", "drained_badly", "redelivered"),
         shape=Shape(drain_s=0.1), load=Load(rate=30, tickets=200, skew=0.0, work_ms=400), strict=True,
         brief=False),
)
# fmt: on
