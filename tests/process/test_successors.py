"""A consumer that is started while another process still has its name: it takes over when that ends, however it
ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from tests.hands import CRASHED
from tests.process.crew import KEYS, Crew
from tests.process.test_aborts import runs_of
from tests.topologies import figures
from usher import Link

pytestmark = pytest.mark.process

#: So long that who waits for the lease to end is told apart.
_LEASE_S, _AT_ONCE_S = 30, 8


def start_next(crew: Crew, process: str, **environ: str) -> None:
    """Start a consumer with the name c1."""
    ours = {
        "USHER_CONSUMER_NAME": "c1",
        "USHER_HANDLER": "usher.deploy.demo.handlers:record",
        "USHER_MASTER_URLS": crew.masters[0],
    }
    crew.run(process, "consumer", **(ours | environ))


def _registered(crew: Crew, name: str, times: int, within_s: float) -> float:
    """Seconds until ``name`` has logged that it is registered for so many times."""
    began_s = time.monotonic()
    crew.until(lambda: len(crew.events("consumer_registered", name)) >= times, within_s, f"{name} is registered")
    return time.monotonic() - began_s


def test_who_waits_for_a_name_takes_it_when_its_holder_is_killed_and_so_does_who_comes_after_that(
    folder: Path, link: Link
) -> None:
    """It was not the holder of the name's lock when it began: it is now."""
    environ = {"USHER_LEASE_SECONDS": str(_LEASE_S), "USHER_DEMO_WORK_MS": "60000"}
    with Crew(folder, link.url, **environ) as crew:
        crew.start(1, ["c1"])
        [entry_id] = [link.call("XADD", KEYS.stream, "*", "ticket_id", "T", "number", 1).decode()]
        crew.until(lambda: len(crew.executions()) == 1, 20, "its handler runs")
        start_next(crew, "second")
        crew.until(lambda: crew.events("name_in_use", "second"), 20, "the second one waits")
        crew.kill_both("c1")
        second_s = _registered(crew, "second", 1, _LEASE_S + 10)
        assert [event["id"] for event in crew.events("handler_crashed", "second")] == [entry_id], (
            "it told what its predecessor was running"
        )
        crew.until(lambda: len(crew.executions()) == 2, 10, "the ticket goes on")
        crew.kill_worker("second")
        third_s = _registered(crew, "second", 2, _LEASE_S + 10)
        figures(second_s=second_s, third_s=third_s)
        assert max(second_s, third_s) < _AT_ONCE_S * max(1.0, min(3.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def _when(crew: Crew, action: str) -> int:
    """When c1 logged that for the last time."""
    return max((event["time_ms"] for event in crew.events(action, "c1")), default=0)


def test_what_a_former_process_was_running_is_told_once_however_many_come_after_it(folder: Path, link: Link) -> None:
    """Those that find no master begin no journal of their own, and left its."""
    with Crew(folder, link.url, USHER_DEMO_WORK_MS="60000") as crew:
        crew.start(1, ["c1"])
        link.call("XADD", KEYS.stream, "*", "ticket_id", "T", "number", 1)
        crew.until(lambda: len(crew.executions()) == 1, 20, "its handler runs")
        crew.kill_both("master-1")
        for times in range(1, 4):
            crew.kill_worker("c1")
            crew.until(lambda times=times: len(crew.events("consumer_starting", "c1")) > times, 20, "it is back")
            crew.until(lambda: _when(crew, "service_retrying") >= _when(crew, "consumer_starting"), 20, "it has asked")
        assert [run.outcome for run in runs_of(link)] == [CRASHED]


def test_a_consumer_that_died_before_the_clock_of_redis_was_set_back_keeps_neither_its_tickets_nor_its_name(
    folder: Path, link: Link
) -> None:
    """Its lease would last for as long as the step."""
    with Crew(folder, link.url, USHER_DEMO_WORK_MS="2000") as crew:
        crew.start(1, ["c1"])
        entry_id = link.call("XADD", KEYS.stream, "*", "ticket_id", "T", "number", 1).decode()
        crew.until(lambda: len(crew.executions()) == 1, 20, "its handler runs")
        crew.kill_both("c1")
        [incarnation] = [event["consumer"] for event in crew.events("consumer_registered", "c1")]
        assert link.call("PEXPIRE", KEYS.lease(incarnation), 7_200_000) == 1
        start_next(crew, "elsewhere", USHER_STATE_DIR=str(folder / "elsewhere"))
        crew.wait_until_handled([entry_id], within_s=40)
        crew.wait_until_settled(link)


_POOL = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from usher.deploy.demo.handlers import record

_pool = []


def handle(message):
    if not _pool:  # its children are forked, outlive us, and wait for ever
        _pool.append(ProcessPoolExecutor(1, get_context("fork")))
        _pool[0].submit(os.getpid).result()
    record(message)
"""


def test_a_child_that_a_killed_consumer_left_behind_is_waited_for_as_long_as_its_lease(
    folder: Path, link: Link
) -> None:
    (folder / "pooled.py").write_text(_POOL)
    lease_s = 10
    with Crew(folder, link.url, USHER_LEASE_SECONDS=str(lease_s), USHER_CONCURRENCY="1") as crew:
        crew.start(1, ["c1"], "pooled:handle")
        entry_id = link.call("XADD", KEYS.stream, "*", "ticket_id", "T", "number", 1).decode()
        crew.wait_until_handled([entry_id], within_s=30)
        assert psutil.Process(crew.worker_of("c1")).children(), "it has a pool"
        crew.kill_worker("c1")
        took_s = _registered(crew, "c1", 2, lease_s + 20)
        figures(with_the_child_of_its_predecessor_s=took_s)
        assert lease_s / 2 < took_s < 2 * lease_s


def test_who_leaves_when_all_is_done_leaves_no_journal(folder: Path, link: Link) -> None:
    """Names that never come back would fill the state folder."""
    with Crew(folder, link.url) as crew:
        crew.start(1, ["c1"])
        entry_id = link.call("XADD", KEYS.stream, "*", "ticket_id", "T", "number", 1).decode()
        crew.wait_until_handled([entry_id], within_s=20)
        assert list(folder.rglob("c1.journal")), "it has one while it works"
        assert crew.stop("c1") == 0
        assert [event["clean"] for event in crew.events("consumer_drained", "c1")] == [True]
        assert not list(folder.rglob("c1.journal"))
