"""Many streams, gathered into one."""

from __future__ import annotations

from tests.chaos.injectors import programs, redis_faults
from tests.chaos.plans.plan import Plan, gap_s, rounds
from tests.chaos.plans.programs import deleted_leases
from tests.chaos.plans.servers import no_memory
from tests.chaos.rig.cluster import Cluster
from tests.chaos.rig.producer import Load


def gatherers_and_consumers_killed(cluster: Cluster, seconds: float) -> None:
    """kill -9, in turn, of a consumer at work, of the leader, and of the master that stands by: each master gathers
    half of the sources."""
    for number in rounds(seconds, gap_s(cluster)):
        if number % 3 == 0:
            programs.kill_consumer(cluster, programs.at_work(cluster, 1)[0])
        elif number % 3 == 1:
            programs.kill_leader(cluster)
        else:
            programs.kill_leader(cluster, standby=True)


def sources_and_group_destroyed(cluster: Cluster, seconds: float) -> None:
    """In turn: the group of ten sources, the group of the work stream, two sources themselves."""
    for number in rounds(seconds, 2.0):
        if number % 3 == 0:
            redis_faults.destroy_source_groups(cluster, 10)
        elif number % 3 == 1:
            redis_faults.destroy_group(cluster)
        else:
            redis_faults.delete_sources(cluster, 2)


# fmt: off
PLANS: tuple[Plan, ...] = (
    Plan("K17", "50 streams, masters killed", gatherers_and_consumers_killed,
         ("kill", "kill_leader", "kill_standby", "redelivered", "shares_changed"), strict=True,
         load=Load(tickets=4, sources=50), seconds=7.0),
    Plan("K17m", "50 streams, memory full", no_memory, ("full", "refused_sends", "effects_while_full", "OOM"),
         strict=True, load=Load(tickets=4, sources=50), brief=False),
    Plan("K17d", "50 streams, leases deleted", deleted_leases,
         ("lease_deleted", "redelivered", "refused", "starts_dies"), often=("zombies", "fenced"),
         load=Load(rate=100, tickets=4, sources=50, work_ms=60, die_again=0.15, die_again_ms=400), drain_s=15.0,
         brief=False),
    Plan("K17g", "sources and work group destroyed", sources_and_group_destroyed,
         ("destroyed_source_groups", "destroy_group", "deleted_sources", "group_lost", "redelivered"),
         load=Load(tickets=4, sources=50), seconds=6.0, brief=False),
)
# fmt: on
