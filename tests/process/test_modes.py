"""The whole system on Sentinel and on a cluster: real servers, real programs, a failover or a moving slot in the
middle."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.hands import CommandRefused, near
from tests.process.crew import KEYS, Crew, Producer, ids_in, longest_pause_s, out_of_order, overlaps, repeated
from tests.topologies import SERVICE, Cluster, UnderSentinel, figures
from usher import Link

pytestmark = pytest.mark.process

_MESSAGES, _TICKETS = 2000, 60
_BURST = 1e6
_MOVES = 8


def check_promise(crew: Crew, link: Link) -> None:
    """All that is in the stream is handled, in order, one at a time."""
    there = ids_in(link)
    crew.wait_until_handled(there, within_s=30)
    crew.wait_until_settled(link)
    executions = crew.executions()
    assert out_of_order(executions) == []
    assert overlaps(executions, crew.cut_off_ns) == []
    assert link.call("XLEN", KEYS.dead) == 0


@pytest.mark.slow
def test_sentinel_with_a_failover_in_the_middle(folder: Path) -> None:
    """Replication is asynchronous: the tail of sends and acknowledgements may be lost. What the new master has is
    handled."""
    with UnderSentinel(folder) as pair, Crew(folder, pair.url, USHER_DEMO_WORK_MS="4") as crew:
        crew.start(2, ["c1", "c2"])
        link = Link(pair.url, "test")
        producer = Producer(link, _TICKETS)
        producer.send(_MESSAGES // 4)
        producer.send(_MESSAGES // 4, per_second=_BURST)  # so that much is in processing
        pair.first.kill()
        killed_s = time.monotonic()
        producer.send(_MESSAGES // 2)
        check_promise(crew, link)
        assert pair.second.role() == "master"
        there = set(ids_in(link))
        lost = [entry_id for entry_id in producer.accepted if entry_id not in there]
        executions = crew.executions()
        after = [run.start_ns / 1e9 - killed_s for run in executions if run.start_ns / 1e9 > killed_s + 0.5]
        figures(
            seconds_without_handlers=longest_pause_s(executions),
            first_handler_after_kill_s=after[0],
            accepted=len(producer.accepted),
            accepted_and_lost=len(lost),
            unknown=producer.unknown,
            repeated=len(repeated(executions)),
        )
        assert len(there) > _MESSAGES * 0.8, "the failover is in the middle, not at the end"
        link.close()


def test_cluster_with_a_slot_that_moves_in_the_middle(folder: Path) -> None:
    """Nothing is lost when a slot moves: all that was accepted is handled. It is another server, so what was in flight
    may come again."""
    with Cluster(folder) as cluster, Crew(folder, cluster.url, USHER_DEMO_WORK_MS="4") as crew:
        crew.start(2, ["c1", "c2"])
        link = Link(near(cluster.url, KEYS.stream), "test")
        producer = Producer(link, _TICKETS)
        producer.send(_MESSAGES // 4)
        producer.send(_MESSAGES // 4, per_second=_BURST)
        target = cluster.another_than(cluster.owner_of(KEYS.stream))
        cluster.move_slot_of(KEYS.stream, target)
        producer.send(_MESSAGES // 2)
        check_promise(crew, link)
        assert cluster.owner_of(KEYS.stream) is target
        assert set(producer.accepted) == set(ids_in(link))
        assert len(producer.accepted) == _MESSAGES
        executions = crew.executions()
        figures(seconds_without_handlers=longest_pause_s(executions), repeated=len(repeated(executions)))
        link.close()


@pytest.mark.slow
def test_cluster_whose_slot_moves_again_and_again(folder: Path) -> None:
    """The incarnations go on: the node that has the slot was given all that they know. Each move made every consumer
    start anew: of 7,206 messages 753 ran twice."""
    with Cluster(folder) as cluster, Crew(folder, cluster.url, USHER_DEMO_WORK_MS="4") as crew:
        crew.start(2, ["c1", "c2"])
        link = Link(near(cluster.url, KEYS.stream), "test")
        producer = Producer(link, _TICKETS)
        for _ in range(_MOVES):
            producer.send(_MESSAGES // 8)
            producer.send(_MESSAGES // 8, per_second=_BURST)
            cluster.move_slot_of(KEYS.stream, cluster.another_than(cluster.owner_of(KEYS.stream)))
        producer.send(_MESSAGES // 4)
        check_promise(crew, link)
        assert set(producer.accepted) == set(ids_in(link))
        executions = crew.executions()
        figures(
            moves=_MOVES,
            sent=len(producer.accepted),
            repeated=len(repeated(executions)),
            left=len(crew.events("worker_leaves")),
            seconds_without_handlers=longest_pause_s(executions),
        )
        assert crew.events("worker_leaves") == []
        link.close()


@pytest.mark.parametrize(
    "how", [(), pytest.param(("COORDINATED",), marks=pytest.mark.slow)], ids=["plain", "coordinated"]
)
def test_sentinel_with_a_failover_on_purpose(folder: Path, how: tuple[str, ...]) -> None:
    """Sentinel demotes the former master some 10 s after it has promoted the other one; nobody stays there for as
    long. A coordinated one loses nothing."""
    with UnderSentinel(folder) as pair, Crew(folder, pair.url, USHER_DEMO_WORK_MS="4") as crew:
        crew.start(2, ["c1", "c2"])
        link = Link(pair.url, "test")
        producer = Producer(link, _TICKETS)
        producer.send(_MESSAGES // 4)
        try:
            pair.sentinels[0].link.call("SENTINEL", "FAILOVER", SERVICE, *how)
        except CommandRefused as unknown:
            pytest.skip(f"this server has none: {unknown}")
        producer.send(2 * _MESSAGES, per_second=400)
        check_promise(crew, link)
        assert pair.second.role() == "master"
        there = set(ids_in(link))
        lost = [entry_id for entry_id in producer.accepted if entry_id not in there]
        figures(
            accepted=len(producer.accepted),
            lost=len(lost),
            unknown=producer.unknown,
            repeated=len(repeated(crew.executions())),
            seconds_without_handlers=longest_pause_s(crew.executions()),
        )
        assert len(lost) < (1 if how else len(producer.accepted) // 10), "10 s of 400 a second were 1,659 of 4,529"
        link.close()
