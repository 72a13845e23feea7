"""All faults at once, in an order that only the seed knows."""

from __future__ import annotations

import time

from tests.chaos.injectors import programs, proxy, redis_faults
from tests.chaos.plans.plan import ALL_LINKS, Plan
from tests.chaos.rig.cluster import Cluster, Shape
from tests.chaos.rig.producer import Load


def everything(cluster: Cluster, seconds: float) -> None:
    """All of it, in an order that only the seed knows."""
    rng = cluster.rng
    redis_links = [f"{name}-redis" for name in (*cluster.consumer_names, *cluster.master_names)]
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        what = rng.choice(
            ("kill", "pause", "leader", "pause_leader", "replies", "partition", "scripts", "arbiter", "redis")
        )
        if what == "kill":
            programs.kill_consumer(cluster, programs.at_work(cluster, 1)[0], forget_lock=rng.random() < 0.5)
        elif what == "pause":
            programs.pause(
                cluster, programs.at_work(cluster, rng.randint(1, 2)), rng.uniform(0.5, 2.5) * cluster.shape.lease_s
            )
        elif what == "leader":
            programs.kill_leader(cluster)
        elif what == "pause_leader":
            programs.pause_leader(cluster, rng.uniform(0.5, 2.0) * cluster.shape.leader_lease_s)
        elif what == "replies":
            cluster.proxies.set(proxy.drop_replies(0.05), *redis_links)
            time.sleep(0.7)
            cluster.proxies.heal()
        elif what == "partition":
            for name in rng.sample(list(cluster.proxies.links), 3):
                cluster.proxies.set(rng.choice((proxy.BLACKHOLE, proxy.RESET, proxy.LATE, proxy.HALF_OPEN)), name)
            time.sleep(rng.uniform(0.2, 1.2))
            cluster.proxies.heal()
        elif what == "arbiter":
            programs.kill_arbiter(cluster, rng.choice((*cluster.consumer_names, *cluster.master_names)))
        elif what == "redis" and rng.random() < 0.5:
            redis_faults.kill_redis(cluster, rng.uniform(0.0, 0.3))
        elif what == "redis":
            redis_faults.pause_redis(cluster, rng.uniform(0.1, 1.5) * cluster.shape.lease_s)
        else:
            redis_faults.flush_scripts(cluster)
        cluster.counts["faults"] += 1
        time.sleep(rng.uniform(0.1, 0.8))


# fmt: off
PLANS: tuple[Plan, ...] = (
    Plan("K16", "everything", everything, ("faults",),
         often=("kill", "pause", "zombies", "fenced", "redelivered", "dropped_replies", "leader_changes", "dlq", "double_sends", "kill_arbiter"),
         shape=Shape(proxied=ALL_LINKS),
         load=Load(rate=100, double_sends=0.05, fail_before=0.05, fail_after=0.03, poison=0.01), seconds=6.0,
         drain_s=12.0),
)
# fmt: on
