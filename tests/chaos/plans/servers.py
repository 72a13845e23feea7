"""A Redis that is killed, stands still, loses its tail, is full."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tests.chaos.checker.history import History
from tests.chaos.injectors import programs, redis_faults
from tests.chaos.plans.plan import Plan, rounds
from tests.chaos.rig.cluster import Cluster, Shape


def redis_kills(cluster: Cluster, seconds: float) -> None:
    for _ in rounds(seconds, 2.5):
        redis_faults.kill_redis(cluster, cluster.rng.uniform(0.0, 0.4))


def rewrites_and_kills(cluster: Cluster, seconds: float) -> None:
    for number in rounds(seconds, 2.5):
        redis_faults.rewrite_aof(cluster, kill_within=number % 2 == 0)
        # A silent kill takes longer than a round. What is sent after it shows that the service goes on: a few messages
        # may all stand behind what has piled up of their tickets.
        time.sleep(1.0)


def clock_steps(cluster: Cluster, seconds: float) -> None:
    """Steps of up to an hour, first back, then forward, and so on. Before one back somebody dies: who waits for the end
    of that lease would wait for the hour."""
    for number in rounds(seconds, 2 * cluster.shape.lease_s + programs.SLACK_S):
        if number % 4 == 0:
            programs.kill_consumer(cluster, programs.at_work(cluster, 1)[0], forget_lock=True)
        elif number % 4 == 2:
            programs.kill_leader(cluster)
        # Less far forward than back: else that lease would end in time after all.
        redis_faults.step_clock(cluster, cluster.rng.choice((30, 600) if number % 2 else (-1800, -3600)))


def client_pauses_and_kills(cluster: Cluster, seconds: float) -> None:
    for number in rounds(seconds, 1.5):
        if number % 3 == 1:
            redis_faults.pause_clients(cluster, cluster.rng.uniform(0.3, 1.4) * cluster.shape.lease_s)
        else:
            redis_faults.kill_clients(cluster)


def redis_pauses(cluster: Cluster, seconds: float) -> None:
    for _ in rounds(seconds, 4.0):
        redis_faults.pause_redis(cluster, cluster.rng.uniform(0.5, 2.5) * cluster.shape.lease_s)


def power_losses(cluster: Cluster, seconds: float) -> None:
    for _ in rounds(seconds, 2.5):
        redis_faults.lose_power(cluster, cluster.rng.uniform(0.2, 0.8))


def failovers(cluster: Cluster, seconds: float) -> None:
    for number in rounds(seconds, 3.5):
        redis_faults.fail_over(cluster, gently=number % 2 == 1)


def no_memory(cluster: Cluster, seconds: float) -> None:
    for _ in rounds(seconds, 3.5):
        redis_faults.fill_memory(cluster, 1.5)


def only_the_tail_is_lost(_history: History, cluster: Cluster) -> Iterator[str]:
    """K8: what is lost is the end of what was accepted; a hole in the middle would be a bug."""
    if cluster.counts["lost_in_the_middle"]:
        yield f"{cluster.counts['lost_in_the_middle']} messages survived that were accepted after lost ones"


# fmt: off
PLANS: tuple[Plan, ...] = (
    Plan("K7a", "redis killed, always", redis_kills, ("kill_redis", "turns_failed"), shape=Shape(fsync="always"),
         strict=True, seconds=3.0),
    Plan("K7b", "redis killed, everysec", redis_kills, ("kill_redis", "turns_failed"), strict=True, seconds=3.0,
         brief=False),
    Plan(
        "K7r",
        "append-only file rewritten, kills",
        rewrites_and_kills,
        ("aof_rewrites", "killed_in_rewrite", "kill_redis", "turns_failed"),
        # With everysec Redis writes nothing, and answers, while an fsync is under way, which a rewrite makes slow: what
        # it accepted then is gone after kill -9 (K8 is about such a tail).
        shape=Shape(fsync="always"),
        strict=True,
        brief=False,
    ),
    Plan("K7c", "CLIENT PAUSE, CLIENT KILL", client_pauses_and_kills, ("held_calls", "killed_clients", "in_doubt"),
         seconds=4.5, brief=False),
    Plan("K7p", "redis paused", redis_pauses, ("pause_redis",), seconds=8.0, brief=False),
    Plan("K8", "power loss", power_losses, ("power_loss", "lost_tail"), seconds=5.0, extra=only_the_tail_is_lost),
    Plan("K9", "failover to a replica", failovers, ("failover", "failover_gently"), often=("lost_tail",),
         shape=Shape(is_shipped=True), seconds=9.0, extra=only_the_tail_is_lost, brief=False),
    Plan("K15", "clock of Redis set by an hour", clock_steps,
         ("clock_back", "clock_forward", "kill", "redelivered", "leases_clamped", "incarnations_ended"),
         often=("kill_leader", "leads_clamped"), shape=Shape(has_clock=True), seconds=9.0, drain_s=25.0,
         brief=False),
    Plan("K13", "memory full", no_memory, ("full", "refused_sends", "effects_while_full"), strict=True, brief=False),
)
# fmt: on
