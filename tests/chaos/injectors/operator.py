"""An operator: messages that fail for a while are parked, and redriven over HTTP while programs die."""

from __future__ import annotations

import contextlib
import itertools
import time

import requests

from tests.chaos.injectors.programs import find_leader
from tests.chaos.injectors.redis_faults import delete_consumer
from tests.chaos.rig.cluster import Cluster
from tests.chaos.rig.records import now_ns

#: Within this all that was parked has been redriven and handled: a round of the operator, recoveries of two programs,
#: the machine.
_PATIENCE_S = 20.0


def park_and_redrive(cluster: Cluster, seconds: float) -> None:
    """Tickets halt and are redriven all the time, also before what they wait for is repaired; consumers and leaders are
    killed meanwhile."""
    rng, began = cluster.rng, time.monotonic()
    sent: set[str] = set()
    turn = 0
    while time.monotonic() < began + seconds:
        for number in range(3):
            ticket = f"P{rng.randrange(12)}"
            if number == 0:
                sent.add(
                    cluster.producer.send(ticket, broken_until_ns=str(now_ns() + int(rng.uniform(0.3, 1.2) * 1e9)))
                )
            cluster.producer.send(ticket)
        if turn % 8 == 3:
            _kill(cluster, rng.choice(cluster.consumer_names), "kill")
        elif turn % 16 == 10:
            _kill(cluster, find_leader(cluster), "kill_leader")
        _redrive(cluster)
        turn += 1
        time.sleep(0.15)
    redrive_all(cluster, sent)


def delete_consumers(cluster: Cluster, seconds: float) -> None:
    """XGROUP DELCONSUMER, in turn, of who waits (``master``), of the halted, and of a consumer at work, which dies then:
    what it had is pending no more. Nobody may lose it."""
    rng, began = cluster.rng, time.monotonic()
    sent: set[str] = set()
    for turn in itertools.count():
        if time.monotonic() > began + seconds:
            break
        for _ in range(6):
            cluster.producer.send("HOT", work_ms="10")
        if turn % 3 == 0:
            ticket = f"P{rng.randrange(12)}"
            sent.add(cluster.producer.send(ticket, broken_until_ns=str(now_ns() + int(0.4e9))))
            cluster.producer.send(ticket)
        if turn % 4 == 3:
            name = delete_consumer(cluster, ("master", "halted", "")[turn // 4 % 3])
            if ":" in name:
                _kill(cluster, name.partition(":")[0], "kill")
        if turn % 12 == 11:
            _redrive(cluster)
        time.sleep(0.1)
    redrive_all(cluster, sent)


def redrive_all(cluster: Cluster, sent: set[str]) -> None:
    """Until nothing is halted, and all that was ``sent`` to fail for a while has its effect."""
    cluster.counts["broken"] += len(sent)
    until_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until_s:
        _redrive(cluster)
        if cluster.state.pending_by_name().get("halted", 0) == 0 and {c["uid"] for c in cluster.sink.commits()} >= sent:
            return
        time.sleep(0.2)


def _kill(cluster: Cluster, name: str, kind: str) -> None:
    """kill -9. Without a bound for its tickets: one that waits for the operator goes on when that has come by."""
    program = cluster.program(name) if name else None
    if program is not None and program.worker:
        t = now_ns()
        cluster.restarter.kill(program.worker, program.who)
        cluster.fault(kind, t, t, program.who)


def _redrive(cluster: Cluster) -> None:
    """All that tickets wait for, by whichever master is asked first; a call whose answer is lost comes again in the next
    round. What users have cleared stays a letter: it would come behind what they sent since."""
    url = f"http://127.0.0.1:{cluster.http_ports[cluster.rng.choice(cluster.master_names)]}/api/dead-letters/redrive"
    with contextlib.suppress(requests.RequestException, ValueError):
        results = (
            requests.post(url, json={"filter": {"policy": "halt"}, "limit": 500}, timeout=2).json().get("results", ())
        )
        for result in results:
            cluster.counts[f"letters_{result['outcome']}"] += 1
