"""Tenants and urgent tickets in a running system: what runs before what, counted and not timed."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hands import rank
from tests.process.crew import KEYS, Crew, out_of_order, overlaps
from tests.process.machine import USHER
from usher import Link

pytestmark = pytest.mark.process

_SLOTS = 2


@pytest.fixture
def crew(folder: Path, link: Link) -> Iterator[Crew]:
    environ = {
        "USHER_DEMO_WORK_MS": "10",
        "USHER_CONCURRENCY": str(_SLOTS),
        "USHER_TENANT_FIELD": "customer",
        "USHER_PRIORITY_FIELD": "priority",
    }
    with Crew(folder, link.url, **environ) as made:
        yield made


def _send(link: Link, ticket: str, customer: str, priority: int = 0) -> str:
    fields = ("ticket_id", ticket, "customer", customer, "priority", priority)
    added: bytes = link.call("XADD", KEYS.stream, "*", *fields)
    return added.decode()


def _started_before(crew: Crew, first: str, others: set[str], sent_after: int) -> int:
    """How many of these, beyond those that had started when it was sent, started before ``first``."""
    order = [run.stream_id for run in crew.executions()]
    return len([one for one in order[: order.index(first)] if one in others]) - sent_after


def test_a_quiet_customer_and_an_urgent_ticket_overtake_a_flood(crew: Crew, link: Link) -> None:
    flood = {_send(link, f"F{number}", "loud") for number in range(1200)}
    own = [_send(link, "T", "loud") for _ in range(20)]
    crew.start(1, ["c1"])
    crew.until(lambda: len(crew.handled()) > 100, 60, "the flood runs")
    begun = len(crew.executions())
    quiet = _send(link, "Q", "quiet")
    crew.wait_until_handled([quiet], 60)
    # Between the look and XADD, and until the leader has it, some more start; without turns it would be 1,000.
    assert _started_before(crew, quiet, flood, begun) < 200, crew.log()
    assert not {*own} & crew.handled()
    begun = len(crew.executions())
    own.append(_send(link, "T", "loud", 9))
    crew.wait_until_handled(own, 60)
    assert _started_before(crew, own[-1], flood, begun) < 300, crew.log()
    assert [run.stream_id for run in crew.executions() if run.stream_id in own] == sorted(
        own, key=lambda one: rank(one.encode())
    )
    assert (out_of_order(crew.executions()), overlaps(crew.executions(), crew.cut_off_ns)) == ([], [])


def test_a_limit_of_a_tenant_holds_over_all_consumers_and_is_explained(crew: Crew, link: Link) -> None:
    crew.start(1, ["c1", "c2"])
    command = [*USHER, "slow", "--tenant", "loud", "--concurrency", "1", "--redis-url", link.url]
    named = ["--ticket-stream", KEYS.stream, "--group", KEYS.group]
    told = subprocess.run([*command, *named], capture_output=True, text=True, timeout=60, check=True)
    assert "slow tenant loud: set" in told.stdout, told
    loud = [_send(link, f"L{number}", "loud") for number in range(30)]
    crew.wait_until_handled(loud, 60)
    runs = sorted((run for run in crew.executions() if run.stream_id in loud), key=lambda run: run.start_ns)
    assert all(run.end_ns and run.end_ns <= later.start_ns for run, later in itertools.pairwise(runs))
