"""The scenarios: what is started, what goes wrong, and what must have happened for a run to count.

Times are those of a short run (a lease of one second); every run outlasts the longest timer three times. Faults of one
kind are further apart than the bound within which the one before must be over, so that the bound says something.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.chaos.checker.history import History, position
from tests.chaos.corpus import HOSTILE
from tests.chaos.injectors import programs, proxy, redis_faults
from tests.chaos.injectors.operator import park_and_redrive
from tests.chaos.rig.cluster import Cluster, Shape
from tests.chaos.rig.facts import events
from tests.chaos.rig.producer import Load
from tests.chaos.rig.records import now_ns

Faults = Callable[[Cluster, float], None]
Extra = Callable[[History, Cluster], Iterator[str]]


def _nothing_more(_history: History, _cluster: Cluster) -> Iterator[str]:
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
    extra: Extra = _nothing_more
    gently: bool = False
    brief: bool = True  # part of the short run
    known: str = ""  # why it does not hold yet
    varies: bool = True  # other settings with every seed
    warm_s: float = 0.7


def _rounds(seconds: float, gap_s: float) -> Iterator[int]:
    """One round every ``gap_s`` until the time is over, at least one."""
    began = time.monotonic()
    for number in range(max(1, int(seconds / gap_s))):
        time.sleep(max(0.0, began + number * gap_s - time.monotonic()))
        yield number
    time.sleep(max(0.0, began + seconds - time.monotonic()))


def _gap(cluster: Cluster) -> float:
    """A little more than the bound of a consumer's recovery."""
    return cluster.shape.lease_s + programs.SLACK_S + 0.3


# ---- the faults ----


def calm(_cluster: Cluster, seconds: float) -> None:
    time.sleep(seconds)


def consumer_kills(cluster: Cluster, seconds: float) -> None:
    for number in _rounds(seconds, _gap(cluster)):
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
    for _ in _rounds(seconds, 1.2):
        redis_faults.delete_lease(cluster, programs.at_work(cluster, 1)[0])


def leader_loss(cluster: Cluster, seconds: float) -> None:
    lease_s = cluster.shape.leader_lease_s
    for number in _rounds(seconds, 2 * lease_s + programs.SLACK_S):
        if number % 2:
            programs.kill_leader(cluster)
        else:
            programs.pause_leader(cluster, 1.8 * lease_s)


def lost_replies(cluster: Cluster, seconds: float) -> None:
    """5 % of all replies of Redis are lost with their connection; for a while, replies of one program do not come at
    all."""
    names = [f"{name}-redis" for name in (*cluster.consumer_names, *cluster.master_names)]
    for number in _rounds(seconds, 1.5):
        cluster.proxies.set(proxy.drop_replies(0.05), *names)
        if number % 2:
            time.sleep(0.3)
            cluster.proxies.set(
                cluster.rng.choice((proxy.HALF_OPEN, proxy.LATE, proxy.cut(0.1))), cluster.rng.choice(names)
            )
    cluster.proxies.heal()


def partitions(cluster: Cluster, seconds: float) -> None:
    """One program after the other loses its Redis for longer than a lease; links fall silent one by one and come back
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
            cluster.fault(
                "isolated",
                t0,
                now_ns(),
                who,
                "tickets" if name in cluster.consumer_names else "",
                bound_s=lease_s + programs.SLACK_S,
            )
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


def redis_kills(cluster: Cluster, seconds: float) -> None:
    for _ in _rounds(seconds, 2.5):
        redis_faults.kill_redis(cluster, cluster.rng.uniform(0.0, 0.4))


def redis_pauses(cluster: Cluster, seconds: float) -> None:
    for _ in _rounds(seconds, 4.0):
        redis_faults.pause_redis(cluster, cluster.rng.uniform(0.5, 2.5) * cluster.shape.lease_s)


def power_losses(cluster: Cluster, seconds: float) -> None:
    for _ in _rounds(seconds, 2.5):
        cluster.counts["lost_tail"] += redis_faults.lose_power(cluster, cluster.rng.uniform(0.2, 0.8))


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
    for number in _rounds(seconds, 2.0):
        cluster.producer.send(f"T{number}", "dlq", hang_ms="600000")


def aborting(cluster: Cluster, seconds: float) -> None:
    """Messages whose handler takes the process with it."""
    for number in _rounds(seconds, 4.0):
        cluster.producer.send(f"T{number}", "dlq", abort="1000")


def no_memory(cluster: Cluster, seconds: float) -> None:
    for _ in _rounds(seconds, 3.5):
        redis_faults.fill_memory(cluster, 1.5)


def operator_errors(cluster: Cluster, seconds: float) -> None:
    """Scripts forgotten; entries deleted that are parked, and that consumers have."""
    for number in _rounds(seconds, 0.25):
        redis_faults.flush_scripts(cluster)
        for _ in range(12):
            cluster.producer.send("HOT", work_ms="10")
        redis_faults.delete_pending(cluster, 2, "master" if number % 2 else "")


def trim_all(cluster: Cluster, seconds: float) -> None:
    for _ in _rounds(seconds, 1.0):
        for _ in range(12):
            cluster.producer.send("HOT", work_ms="10")
        redis_faults.trim_all(cluster)


def flush_all(cluster: Cluster, seconds: float) -> None:
    for _ in _rounds(seconds, 5.0):
        for _ in range(12):
            cluster.producer.send("HOT", work_ms="10")
        redis_faults.flush_all(cluster)


def destroy_group(cluster: Cluster, seconds: float) -> None:
    for _ in _rounds(seconds, 5.0):
        redis_faults.destroy_group(cluster)


def gatherers_and_consumers_killed(cluster: Cluster, seconds: float) -> None:
    """kill -9, in turn, of a consumer at work, of the leader, and of the master that stands by: each master gathers
    half of the sources."""
    for number in _rounds(seconds, _gap(cluster)):
        if number % 3 == 0:
            programs.kill_consumer(cluster, programs.at_work(cluster, 1)[0])
        elif number % 3 == 1:
            programs.kill_leader(cluster)
        else:
            programs.kill_standby(cluster)


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


# ---- what else must hold ----


def nothing_redelivered(history: History, _cluster: Cluster) -> Iterator[str]:
    """K0, K10: each entry is started exactly once (by a process that the machine let run)."""
    for uid, runs in history.starts_of.items():
        if len({run.mid for run in runs}) < len(runs) and not history.frozen(
            runs[0].who, runs[0].start - 10**9, runs[-1].start
        ):
            yield f"{uid} was started {len(runs)} times: {[(run.who, run.tok) for run in runs]}"


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


def deletions_are_told(history: History, _cluster: Cluster) -> Iterator[str]:
    """K14: an entry that was deleted while it was pending has its effect, or a dead letter that says so."""
    for uid in sorted(history.excused):
        if uid not in history.committed and uid not in history.dead:
            yield f"{uid} was deleted while it was pending, and nobody says so"


def only_the_tail_is_lost(_history: History, cluster: Cluster) -> Iterator[str]:
    """K8: what is lost is the end of what was accepted; a hole in the middle would be a bug."""
    if cluster.counts["lost_in_the_middle"]:
        yield f"{cluster.counts['lost_in_the_middle']} messages survived that were accepted after lost ones"


def _ranges(cluster: Cluster, name: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The ranges of ids that masters told when they lost the group: ``lost`` or ``may_repeat``."""
    told = [record[name] for record in events(cluster.logs(), "group_lost")]
    return [(position(first), position(last)) for first, _, last in (text.partition("..") for text in told) if last]


def losses_are_told(history: History, cluster: Cluster) -> Iterator[str]:
    """K14: what FLUSHALL took lies in the range that the alarm tells, but for what nobody had read yet."""
    flushed = history.of("fault")[0]["t0"]
    ranges = _ranges(cluster, "lost")
    for uid in history.excused - history.committed:
        at, read = history.positions.get(uid), history.arrivals.get(uid, 0) < flushed - 200_000_000
        if at is not None and read and not any(first <= at <= last for first, last in ranges):
            yield f"{uid} at {at} was lost, and the alarm tells {ranges}"


def repeats_are_told(history: History, cluster: Cluster) -> Iterator[str]:
    """K14: what is delivered again after the loss of the group lies in the range that the alarm tells."""
    ranges = _ranges(cluster, "may_repeat")
    for uid, runs in history.starts_of.items():
        at = history.positions[uid]
        if len({run.mid for run in runs}) < len(runs) and not any(first <= at <= last for first, last in ranges):
            yield f"{uid} at {at} came again, and the alarm tells {ranges}"


_ALL_LINKS = frozenset({"redis", "http", "ping"})

PLANS: tuple[Plan, ...] = (
    Plan("K0", "calm", calm, ("messages",), strict=True, seconds=3.0, extra=nothing_redelivered, gently=True),
    Plan(
        "K1",
        "double sends, failing handlers",
        calm,
        ("double_sends", "repeated"),
        strict=True,
        load=Load(double_sends=0.1, fail_before=0.1, fail_after=0.05),
        brief=False,
    ),
    Plan("K2", "consumer kills", consumer_kills, ("kill", "unproven_kills", "redelivered", "recoveries"), strict=True),
    # Two of three are paused: what is left must be able to carry the load, else it is not recovery that takes long.
    Plan(
        "K3",
        "zombies",
        zombies,
        ("pause", "zombies", "redelivered"),
        often=("fenced", "refused"),
        load=Load(rate=60, work_ms=60),
    ),
    Plan(
        "K3d",
        "leases deleted",
        deleted_leases,
        ("lease_deleted", "redelivered", "refused"),
        often=("zombies", "fenced"),
        brief=False,
    ),
    Plan(
        "K4",
        "leader killed or paused",
        leader_loss,
        ("kill_leader", "pause_leader", "leader_changes", "leaders_fenced"),
        strict=True,
        seconds=6.0,
    ),
    Plan(
        "K5",
        "half-open links",
        lost_replies,
        ("dropped_replies", "in_doubt"),
        shape=Shape(proxied=frozenset({"redis"})),
        load=Load(rate=100),
    ),
    Plan(
        "K6",
        "partitions",
        partitions,
        ("isolated", "swizzles", "report_cuts", "redelivered", "leader_changes"),
        shape=Shape(proxied=_ALL_LINKS),
        load=Load(rate=100),
        seconds=6.0,
    ),
    Plan(
        "K7a",
        "redis killed, always",
        redis_kills,
        ("kill_redis", "turns_failed"),
        shape=Shape(fsync="always"),
        strict=True,
        seconds=3.0,
    ),
    Plan("K7b", "redis killed, everysec", redis_kills, ("kill_redis", "turns_failed"), strict=True, seconds=3.0),
    Plan("K7p", "redis paused", redis_pauses, ("pause_redis",), seconds=8.0, brief=False),
    Plan("K8", "power loss", power_losses, ("power_loss", "lost_tail"), seconds=5.0, extra=only_the_tail_is_lost),
    Plan(
        "K10",
        "rolling restarts",
        rolling_restarts,
        ("restart", "drained"),
        strict=True,
        extra=nothing_redelivered,
        gently=True,
    ),
    Plan(
        "K10b",
        "drains that are cut short",
        rolling_restarts,
        ("restart", "drained_badly", "redelivered"),
        shape=Shape(drain_s=0.1),
        load=Load(rate=30, tickets=200, skew=0.0, work_ms=400),
        strict=True,
        brief=False,
    ),
    Plan(
        "K11",
        "hot and stuck tickets",
        hot_and_stuck,
        ("parked", "hot"),
        strict=True,
        shape=Shape(environ={"USHER_TICKET_WINDOW": "8"}),
        load=Load(rate=100, work_ms=10),
        extra=others_go_on,
        seconds=4.0,
        varies=False,
    ),
    Plan(
        "K12",
        "poison and malformed",
        poison,
        ("dlq", "rejected", "hostile", "double_sends", "repeated"),
        strict=True,
        load=Load(double_sends=0.05, poison=0.02, fail_before=0.05, fail_after=0.03),
        seconds=4.0,
    ),
    Plan(
        "K12p",
        "parked and redriven",
        park_and_redrive,
        ("kill", "kill_leader", "broken", "letters_resumed", "repeated"),
        strict=True,
        shape=Shape(max_attempts=2, environ={"USHER_DEAD_LETTER_POLICY": "park"}),
        load=Load(rate=60),
        drain_s=12.0,
        varies=False,
        brief=False,
    ),
    Plan(
        "K12h",
        "hanging handlers",
        hanging,
        ("handlers_hung", "dlq", "redelivered"),
        strict=True,
        shape=Shape(max_attempts=2, environ={"USHER_HANDLER_SECONDS": "0.8"}),
        load=Load(rate=100, work_ms=20),
        brief=False,
    ),
    Plan(
        "K12a",
        "handlers that end their process",
        aborting,
        ("dlq", "redelivered"),
        strict=True,
        shape=Shape(max_attempts=3),
        load=Load(rate=100, work_ms=20),
        seconds=4.0,
        brief=False,
    ),
    Plan("K13", "memory full", no_memory, ("full", "refused_sends", "effects_while_full"), strict=True),
    Plan(
        "K14",
        "SCRIPT FLUSH, XDEL",
        operator_errors,
        ("script_flushes", "deleted_pending", "dlq"),
        strict=True,
        shape=Shape(environ={"USHER_TICKET_WINDOW": "2"}),
        seconds=4.0,
        extra=deletions_are_told,
    ),
    Plan(
        "K14t",
        "XTRIM",
        trim_all,
        ("deleted", "dlq"),
        strict=True,
        shape=Shape(environ={"USHER_TICKET_WINDOW": "2"}),
        seconds=4.0,
        brief=False,
    ),
    Plan("K14f", "FLUSHALL", flush_all, ("flush_all", "deleted", "group_lost"), seconds=3.0, extra=losses_are_told),
    Plan(
        "K14g",
        "XGROUP DESTROY",
        destroy_group,
        ("destroy_group", "redelivered", "group_lost"),
        seconds=4.0,
        extra=repeats_are_told,
        brief=False,
    ),
    Plan(
        "K16",
        "everything",
        everything,
        ("faults",),
        often=(
            "kill",
            "pause",
            "zombies",
            "fenced",
            "redelivered",
            "dropped_replies",
            "leader_changes",
            "dlq",
            "double_sends",
            "kill_arbiter",
        ),
        shape=Shape(proxied=_ALL_LINKS),
        load=Load(rate=100, double_sends=0.05, fail_before=0.05, fail_after=0.03, poison=0.01),
        seconds=6.0,
        drain_s=12.0,
    ),
    Plan(
        "K17",
        "50 streams, masters killed",
        gatherers_and_consumers_killed,
        ("kill", "kill_leader", "kill_standby", "redelivered", "shares_changed"),
        strict=True,
        load=Load(tickets=4, sources=50),
        seconds=7.0,
    ),
)
