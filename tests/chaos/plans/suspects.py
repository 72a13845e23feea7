"""Messages that ended a process, or seem to have; and what runs beside them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

from tests.chaos.checker.history import History
from tests.chaos.checker.verdict import Violation
from tests.chaos.injectors import programs, proxy
from tests.chaos.plans.plan import Plan, rounds, wait_until_ended
from tests.chaos.rig.cluster import Cluster, Shape
from tests.chaos.rig.producer import Load
from tests.chaos.rig.records import now_ns

_MOST = 3


def lost_acks(cluster: Cluster, seconds: float) -> None:
    """Messages that end their process until their last attempt, which succeeds; and nobody hears of it: the
    acknowledgement is lost and the process killed, or cut off for longer than a lease, or the answer is lost."""
    ways = itertools.cycle(("killed", "cut off", "answer"))
    threads: list[threading.Thread] = []

    def lose(who: str) -> None:
        """The handler waits for this; what it sends from now on does not arrive."""
        way, link = next(ways), f"{who.partition('/')[0]}-redis"
        cluster.proxies.set(proxy.HALF_OPEN if way == "answer" else proxy.LOSE, link)
        threads.append(threading.Thread(target=_end, args=(cluster, link, way), daemon=True))
        threads[-1].start()

    cluster.sink.on_lose_ack = lose
    uids = {
        cluster.producer.send(f"L{number}", abort=str(_MOST - 1), lose_ack=str(_MOST))
        for number in rounds(seconds, 1.5)
    }
    wait_until_ended(cluster, uids)
    for thread in threads:
        thread.join()


def _end(cluster: Cluster, link: str, way: str) -> None:
    t0, program = now_ns(), cluster.program(link.partition("-")[0])
    worker, who = program.worker, program.who  # a suspect may run in a child of it
    if way == "cut off":
        time.sleep(1.8 * cluster.shape.lease_s)
    else:
        time.sleep(0.2)
        if worker and program.worker == worker:
            cluster.restarter.kill(worker, who)
    cluster.proxies.set(proxy.PASS, link)
    cluster.fault(f"ack_lost_{way.replace(' ', '_')}", t0, now_ns(), who)


def freezing(cluster: Cluster, seconds: float) -> None:
    """Messages whose handler keeps the interpreter for an hour: nothing in its process runs any more."""
    uids = {cluster.producer.send(f"F{number}", "dlq", freeze_ms="3600000") for number in rounds(seconds, 6.0)}
    wait_until_ended(cluster, uids)


def slow_suspects(cluster: Cluster, seconds: float) -> None:
    """Messages that end their process twice, and then take long."""
    uids = {
        cluster.producer.send(f"S{number}", abort=str(_MOST - 1), hang_ms="8000") for number in rounds(seconds, 3.0)
    }
    wait_until_ended(cluster, uids)


def nobody_waits_long(history: History, cluster: Cluster) -> Iterator[str | Violation]:
    """L3: whatever one message does, each message of another ticket starts within the bound of a recovery, and one
    more for what was not noticed at once."""
    # A worker whose interpreter is kept is ended after 3 s at least (common/http/serve.py).
    standing_s = 3.0 if "USHER_HANDLER_SECONDS" in cluster.shape.environ else 0.0
    bound_s = 2 * (standing_s + cluster.shape.lease_s + programs.SLACK_S) + cluster.shape.lease_s
    longest, ticket = max(
        ((runs[0].start - history.arrivals[uid]) / 1e9, runs[0].ticket)
        for uid, runs in history.starts_of.items()
        if runs[0].ticket.startswith("T")
    )
    cluster.counts["longest_wait_ms"] = round(longest * 1000)
    if longest > bound_s:
        yield f"L3: a message of {ticket} waited for {longest:.2f} s; the bound is {bound_s:.2f} s"


def blocked_logs(cluster: Cluster, seconds: float) -> None:
    """Longer than anything may wait, so that who waits for the log is seen."""
    time.sleep(0.5)
    programs.block_logs(cluster, max(seconds, 7.0))


# fmt: off
PLANS: tuple[Plan, ...] = (
    Plan("K12l", "acks lost after the last attempt", lost_acks,
         ("ack_lost_killed", "ack_lost_cut_off", "ack_lost_answer", "redelivered"),
         shape=Shape(max_attempts=_MOST, proxied=frozenset({"redis"})), load=Load(rate=60, work_ms=20), seconds=6.0,
         drain_s=12.0, brief=False),
    Plan("K12f", "handlers that keep the interpreter", freezing, ("starts_frozen", "dlq", "redelivered"),
         shape=Shape(max_attempts=_MOST, environ={"USHER_HANDLER_SECONDS": "1"}), load=Load(rate=60, work_ms=20),
         extra=nobody_waits_long, drain_s=15.0, brief=False),
    Plan("K12n", "neighbours of suspects", slow_suspects, ("cut_short", "redelivered"),
         shape=Shape(max_attempts=_MOST), load=Load(rate=60, work_ms=20), extra=nobody_waits_long, drain_s=15.0,
         brief=False),
    Plan("K21", "log pipes that nobody reads", blocked_logs,
         ("logs_blocked", "full_log_pipes", "effects_while_blocked"), strict=True, shape=Shape(log_pipes=True),
         load=Load(rate=60, work_ms=20), extra=nobody_waits_long, seconds=7.0, brief=False),
)
# fmt: on
