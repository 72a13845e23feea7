"""Suspects run in a child process of their consumer: nobody waits for them, whatever kind of handler it is, and the
child ends with its consumer."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.hands import pairs
from tests.process.crew import KEYS, Crew, handler_processes, out_of_order
from tests.topologies import figures
from usher import Link

pytestmark = pytest.mark.process

_ATTEMPTS, _SLOW_S = 3, 1.5
_HANDLERS = """
import asyncio
import os
import resource
import time
from pathlib import Path
from usher import batch
from usher.deploy.demo.handlers import record


from usher.deploy.demo.handlers import started


def handle(message):
    does = message.fields.get("does", "")
    if does == "kill":
        started(message)
        time.sleep(float(message.fields["for"]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()
    if does == "wait":
        started(message)
        until = time.monotonic() + 60
        while not Path(f"go-{message.attempt}").exists() and time.monotonic() < until:
            time.sleep(0.02)
        if not message.still_mine():
            raise RuntimeError("not mine")
    record(message)


async def handle_async(message):
    handle(message)
    await asyncio.sleep(0)


@batch(most=10, wait_s=0.01)
def handle_batch(messages):
    for message in messages:
        handle(message)


if os.environ.get("ONLY_ONCE") and "handler-process" in Path("/proc/self/cmdline").read_text():
    raise RuntimeError("there can be only one of me")
"""
FILES = {"suspected.py": _HANDLERS}


def send(link: Link, ticket: str, **fields: str) -> str:
    flat = [part for pair in fields.items() for part in pair]
    return bytes(link.call("XADD", KEYS.stream, "*", "ticket_id", ticket, *flat)).decode()


def letters(link: Link) -> list[dict[bytes, bytes]]:
    return [pairs(fields) for _, fields in link.call("XRANGE", KEYS.dead, "-", "+")]


def limits(**more: str) -> dict[str, str]:
    return {"USHER_MAX_ATTEMPTS": str(_ATTEMPTS), "USHER_CONCURRENCY": "2", "USHER_DEMO_WORK_MS": "1", **more}


def child_of(crew: Crew, name: str) -> psutil.Process:
    """The process in which a suspect of this consumer runs."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = handler_processes(crew.processes[name].pid)
        return bool(found)

    crew.until(is_there, 20, "a child of the consumer")
    return found[0]


@pytest.mark.parametrize(
    "handler", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("handle", "handle_async")), "handle_batch"]
)
def test_a_killer_that_takes_its_time_keeps_nobody_waiting(folder: Path, link: Link, handler: str) -> None:
    with Crew(folder, link.url, **limits(USHER_LEASE_SECONDS="20")) as crew:
        crew.start(1, ["c1"], f"suspected:{handler}")
        killer, behind = send(link, "T", does="kill", **{"for": str(_SLOW_S)}), send(link, "T")
        others: list[str] = []

        def is_over() -> bool:
            others.append(send(link, f"U{len(others) % 7}"))
            return bool(letters(link))

        crew.until(is_over, 60, "the letter")
        crew.wait_until_handled([*others, behind], within_s=30)
        crew.wait_until_settled(link)
        [letter] = letters(link)
        assert (letter[b"usher-id"].decode(), letter[b"usher-attempts"]) == (killer, b"%d" % _ATTEMPTS)
        assert letter[b"usher-error"].startswith(b"its process ended while its handler ran (by SIGABRT")
        executions = crew.executions()
        tries = [run for run in executions if run.stream_id == killer]
        assert [run.attempt for run in tries] == list(range(1, _ATTEMPTS + 1))
        assert len(crew.events("consumer_registered", "c1")) == 2, "it took its consumer along only once"
        assert out_of_order(executions) == []
        if handler != "handle_async":  # it blocks its event loop the first time
            first = tries[0].start_ns
            assert any(first < run.start_ns < first + _SLOW_S * 1e9 for run in executions if run.stream_id != killer)
        for run in tries[1:]:
            beside = [one for one in executions if run.start_ns < one.start_ns < run.start_ns + _SLOW_S * 1e9]
            assert beside, "others start while the suspect runs"
        starts = sorted(run.start_ns for run in executions if run.start_ns > tries[1].start_ns)
        gaps = sorted(later - earlier for earlier, later in itertools.pairwise(starts))
        figures(longest_gap_s=gaps[-1] / 1e9, p99_gap_s=gaps[int(len(gaps) * 0.99)] / 1e9, killer_s=_SLOW_S)


def suspect(crew: Crew, link: Link, name: str = "c1") -> str:
    """A message that waits in a child: it ran when its consumer crashed."""
    entry_id = send(link, "T", does="wait")
    crew.until(lambda: crew.executions(), 20, "it runs")
    crew.kill_worker(name, signal.SIGSEGV)
    crew.until(lambda: len(crew.executions()) == 2, 30, "it runs again")
    return entry_id


def go(crew: Crew, attempt: int) -> None:
    (crew.folder.parent / f"go-{attempt}").touch()


def test_a_suspect_that_outlives_the_lease_is_still_ours_and_a_stop_waits_for_it(folder: Path, link: Link) -> None:
    with Crew(folder, link.url, **limits(USHER_LEASE_SECONDS="3")) as crew:
        crew.start(1, ["c1"], "suspected:handle")
        entry_id = suspect(crew, link)
        child = child_of(crew, "c1")
        assert child.pid == crew.executions()[1].pid
        time.sleep(4)  # longer than a lease
        other = send(link, "U")
        crew.wait_until_handled([other], within_s=10)
        os.kill(crew.worker_of("c1"), signal.SIGTERM)
        crew.until(lambda: crew.events("consumer_drained") or not child.is_running() or _draining(link), 10, "drains")
        go(crew, 2)
        crew.until(lambda: crew.events("consumer_drained"), 20, "it has drained")
        crew.wait_until_handled([entry_id], within_s=10)
        crew.wait_until_settled(link)
        assert crew.events("consumer_drained")[-1]["clean"] is True
        assert letters(link) == []
        assert link.call("HGETALL", KEYS.attempts) == []
        assert {run.attempt for run in crew.executions() if run.stream_id == entry_id} == {1, 2}


def _draining(link: Link) -> bool:
    return any(link.call("GET", key) == b"draining" for key in link.call("KEYS", "*lease:*"))


def test_the_child_ends_with_its_consumer_and_nobody_is_charged(folder: Path, link: Link) -> None:
    with Crew(folder, link.url, **limits(USHER_MAX_ATTEMPTS="1")) as crew:
        crew.start(1, ["c1"], "suspected:handle")
        entry_id = suspect(crew, link)
        child = child_of(crew, "c1")
        crew.kill_worker("c1")
        crew.until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 5, "it ends too")
        crew.until(lambda: len(crew.executions()) == 3, 30, "it runs a third time, although it has one attempt")
        go(crew, 3)
        crew.wait_until_handled([entry_id], within_s=10)
        crew.wait_until_settled(link)
        assert letters(link) == []


def test_a_child_that_is_killed_is_charged_and_its_consumer_goes_on(folder: Path, link: Link) -> None:
    """By somebody; when memory is short, it is the first that the kernel takes."""
    with Crew(folder, link.url, **limits()) as crew:
        crew.start(1, ["c1"], "suspected:handle")
        entry_id = suspect(crew, link)
        child = child_of(crew, "c1")
        assert Path(f"/proc/{child.pid}/oom_score_adj").read_text().strip() == "1000"
        child.kill()
        crew.until(lambda: crew.events("handler_crashed", "c1")[1:], 10, "the consumer says so")
        assert crew.events("handler_crashed", "c1")[1]["failures"] == 2
        crew.until(lambda: len(crew.executions()) == 3, 30, "it runs a third time")
        go(crew, 3)
        crew.wait_until_handled([entry_id], within_s=10)
        crew.wait_until_settled(link)
        assert len(crew.events("consumer_registered", "c1")) == 2
        assert letters(link) == []


def test_where_the_handler_cannot_be_loaded_twice_a_suspect_runs_in_company(folder: Path, link: Link) -> None:
    with Crew(folder, link.url, **limits(ONLY_ONCE="1")) as crew:
        crew.start(1, ["c1"], "suspected:handle")
        entry_id = send(link, "T", does="wait")
        crew.until(lambda: crew.executions(), 20, "it runs")
        crew.kill_worker("c1", signal.SIGSEGV)
        crew.until(lambda: len(crew.executions()) == 2, 60, "it runs again")
        refused = crew.events("suspect_not_isolated", "c1")
        assert [event["runs_here"] for event in refused] == [False, False, True]
        assert "there can be only one of me" in refused[0]["why"]
        assert crew.executions()[1].pid == crew.worker_of("c1")
        go(crew, 2)
        crew.wait_until_handled([entry_id], within_s=10)
        crew.wait_until_settled(link)


def test_a_suspect_takes_no_slot_of_the_journal_from_what_runs_beside_it(folder: Path, link: Link) -> None:
    """A killer that is not in the journal would be charged never, and the suspect beside it in its place."""
    with Crew(folder, link.url, **limits(USHER_CONCURRENCY="1")) as crew:
        crew.start(1, ["c1"], "suspected:handle")
        entry_id = suspect(crew, link)
        killer = send(link, "U", does="kill", **{"for": "0"})
        crew.until(lambda: len(crew.events("consumer_registered", "c1")) >= 3, 30, "it has ended its consumer")
        noted = pairs(link.call("HGETALL", KEYS.attempts))
        assert {one.decode(): value.split()[2] for one, value in noted.items()} == {entry_id: b"1", killer: b"1"}
        go(crew, 3)
        crew.wait_until_handled([entry_id], within_s=20)
        crew.until(lambda: letters(link), 30, "the killer's letter")
        crew.wait_until_settled(link)
        assert [letter[b"usher-id"].decode() for letter in letters(link)] == [killer]
        assert len(crew.events("consumer_registered", "c1")) == 3
