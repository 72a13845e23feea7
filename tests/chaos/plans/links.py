"""Links between programs and Redis that lose, hold, delay and cut."""

from __future__ import annotations

import itertools
import time

from tests.chaos.injectors import programs, proxy
from tests.chaos.plans.plan import ALL_LINKS, Plan, rounds
from tests.chaos.rig.cluster import Cluster, Shape
from tests.chaos.rig.producer import Load
from tests.chaos.rig.records import now_ns


def lost_replies(cluster: Cluster, seconds: float) -> None:
    """5 % of all replies of Redis are lost with their connection; for a while, replies of one program do not come at
    all."""
    names = [f"{name}-redis" for name in (*cluster.consumer_names, *cluster.master_names)]
    for number in rounds(seconds, 1.5):
        cluster.proxies.set(proxy.drop_replies(0.05), *names)
        if number % 2:
            time.sleep(0.3)
            cluster.proxies.set(
                cluster.rng.choice((proxy.HALF_OPEN, proxy.LATE, proxy.cut(0.1))), cluster.rng.choice(names)
            )
    cluster.proxies.heal()


def partitions(cluster: Cluster, seconds: float) -> None:
    """Cut one program after the other off from Redis for longer than a lease; links fall silent one by one and come back
    in another order; at last only the ways to the masters are cut, which must cost nothing but speed."""
    rng, lease_s = cluster.rng, cluster.shape.lease_s
    until_s = time.monotonic() + 0.75 * seconds
    for turn in itertools.count():
        if turn % 3 == 2:
            _swizzle(cluster)
        else:
            name = programs.find_leader(cluster) if turn % 3 else programs.at_work(cluster, 1)[0]
            t0 = now_ns()
            # The first one loses the way to Redis for certain: of a half-open one Redis has every acknowledgement, and
            # nothing is repeated.
            modes = (proxy.BLACKHOLE, proxy.LATE, proxy.HALF_OPEN) if turn else (proxy.BLACKHOLE, proxy.LATE)
            cluster.proxies.set(rng.choice(modes), f"{name}-redis")
            time.sleep(1.6 * lease_s)
            cluster.proxies.heal()
            who = cluster.program(name).who if name else ""
            recover = "tickets" if name in cluster.consumer_names else ""
            cluster.fault("isolated", t0, now_ns(), who, recover, bound_s=lease_s + programs.SLACK_S)
        time.sleep(0.4)
        if time.monotonic() > until_s:
            break
    cluster.proxies.set(proxy.BLACKHOLE, *(f"{name}-http" for name in cluster.consumer_names))
    cluster.counts["report_cuts"] += 1
    time.sleep(0.25 * seconds)
    cluster.proxies.heal()


def _swizzle(cluster: Cluster) -> None:
    rng, names = cluster.rng, list(cluster.proxies.links)
    clogged = rng.sample(names, max(2, len(names) // 3))
    for name in clogged:
        cluster.proxies.set(rng.choice((proxy.BLACKHOLE, proxy.RESET, proxy.LATE, proxy.delay(0.05, 0.3))), name)
        time.sleep(0.1)
    for name in rng.sample(clogged, len(clogged)):
        cluster.proxies.set(proxy.PASS, name)
        time.sleep(0.1)
    cluster.counts["swizzles"] += 1


# fmt: off
PLANS: tuple[Plan, ...] = (
    Plan("K5", "half-open links", lost_replies, ("dropped_replies", "in_doubt", "dlq"),
         shape=Shape(proxied=frozenset({"redis"})), load=Load(rate=100, poison=0.08)),
    Plan("K6", "partitions", partitions, ("isolated", "swizzles", "report_cuts", "redelivered", "leader_changes"),
         shape=Shape(proxied=ALL_LINKS), load=Load(rate=100), seconds=6.0, brief=False),
)
# fmt: on
