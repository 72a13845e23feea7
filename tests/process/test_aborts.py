"""Handlers that take their process with them: exactly these become dead letters, after exactly their attempts; nobody
beside them is charged."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from tests.process.crew import KEYS, Crew, out_of_order
from tests.topologies import figures
from usher.common.protocol.run_log import CRASHED, DONE, RunRecord, decode
from usher.common.redis.client import Link
from usher.common.redis.replies import pairs
from usher.common.runtime.fork_guard import oom_kills

pytestmark = pytest.mark.process

_ATTEMPTS, _MESSAGES, _TICKETS = 3, 1000, 40
_HANDLERS = """
import logging
import os
import resource
import time
from usher.deploy.demo.handlers import record

log = logging.getLogger(__name__)


from usher.deploy.demo.handlers import started


def handle(message):
    if "bad" in message.fields:
        log.warning("it_begins")
        started(message)
        if message.fields["bad"] == "hang":
            time.sleep(600)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()
    record(message)
"""
FILES = {"ending.py": _HANDLERS}


def send(link: Link, bad_at: int, bad: str) -> tuple[list[str], str]:
    """All messages but the bad one, and that."""
    commands = []
    for number in range(_MESSAGES):
        fields = ("bad", bad) if number == bad_at else ()
        commands.append(("XADD", KEYS.stream, "*", "ticket_id", f"T{number % _TICKETS}", "number", number, *fields))
    ids = [reply.decode() for reply in link.pipeline(commands)]
    return [entry_id for entry_id in ids if entry_id != ids[bad_at]], ids[bad_at]


def runs_of(link: Link) -> list[RunRecord]:
    """The whole run log."""
    records = [pairs(fields)[b"batch"] for _, fields in link.call("XRANGE", KEYS.runs, "-", "+")]
    return [run for record in records for run in decode(record)]


def environ(**more: str) -> dict[str, str]:
    """Leases so long that on a slow machine, too, the successor of a process comes before anybody else gets its
    tickets."""
    short = {"USHER_MAX_ATTEMPTS": str(_ATTEMPTS), "USHER_DEMO_WORK_MS": "4", "USHER_CONCURRENCY": "8"}
    return {**short, "USHER_LEASE_SECONDS": "20", **more}


@pytest.mark.parametrize("bad", ["abort", pytest.param("hang", marks=pytest.mark.slow)])
def test_of_a_thousand_messages_the_one_that_ends_its_process_is_given_up_and_no_neighbour_is_charged(
    folder: Path, link: Link, bad: str
) -> None:
    limit = {"USHER_HANDLER_SECONDS": "1"} if bad == "hang" else {}
    with Crew(folder, link.url, **environ(**limit)) as crew:
        crew.start(1, ["c1", "c2"], "ending:handle")
        began_s = time.monotonic()
        good, killer = send(link, 300, bad)
        crew.wait_until_handled(good, within_s=60)
        crew.wait_until_settled(link, within_s=30)
        took_s = time.monotonic() - began_s

        [letter] = [pairs(fields) for _, fields in link.call("XRANGE", KEYS.dead, "-", "+")]
        assert (letter[b"usher-id"].decode(), letter[b"usher-reason"]) == (killer, b"attempts_exhausted")
        assert letter[b"usher-attempts"] == b"%d" % _ATTEMPTS
        why = {"abort": b"its process ended while its handler ran", "hang": b"it ran past its deadline"}
        assert letter[b"usher-error"].startswith(why[bad])
        executions = crew.executions()
        assert [run.attempt for run in executions if run.stream_id == killer] == list(range(1, _ATTEMPTS + 1))
        assert out_of_order(executions) == []
        assert link.call("HGETALL", KEYS.attempts) == []
        crashed = [*crew.events("handler_crashed"), *crew.events("handler_interrupted")]
        assert {event["failures"] for event in crashed if event["id"] != killer} <= {0}
        runs = runs_of(link)
        assert Counter(run.outcome for run in runs if run.id == killer) == {CRASHED: _ATTEMPTS}
        assert {run.id for run in runs if run.outcome == DONE} == set(good)
        lines = crew.events("it_begins")
        assert [(line["id"], line["attempt"], line["ticket"]) for line in lines] == [
            (killer, n, "T20") for n in range(1, _ATTEMPTS + 1)
        ]
        figures(
            seconds=took_s,
            suspects=len({event["id"] for event in crashed}),
            started_again=len(executions) - _MESSAGES - _ATTEMPTS + 1,
        )


def test_kill_9_from_outside_ends_no_message(folder: Path, link: Link) -> None:
    """Nor would it look otherwise to whoever is left: so three kills must stay below the attempts, whomever they
    hit."""
    with Crew(folder, link.url, **environ(USHER_DEMO_WORK_MS="30", USHER_MAX_ATTEMPTS="5")) as crew:
        crew.start(1, ["c1", "c2"], "usher.deploy.demo.handlers:record")
        good, last = send(link, 999, "nothing")
        for kills in range(1, 4):
            crew.until(lambda kills=kills: len(crew.handled()) > 200 * kills, 30, "work goes on")
            crew.kill_worker("c1")
            crew.until(lambda kills=kills: len(crew.events("consumer_registered", "c1")) > kills, 30, "it is back")
        crew.wait_until_handled([*good, last], within_s=60)
        crew.wait_until_settled(link)
        assert link.call("XLEN", KEYS.dead) == 0
        assert link.call("HGETALL", KEYS.attempts) == []
        crashed = [*crew.events("handler_crashed"), *crew.events("handler_interrupted")]
        assert crashed, "something ran when it was killed"
        if oom_kills() is not None:  # the kernel may have done it, for all that is known
            assert {(event["crashes"], event["losses"] > 0) for event in crashed} == {(0, True)}
            assert crew.events("suspect_isolated") == [], "it runs again at once"
        executions = crew.executions()
        assert out_of_order(executions) == []
        starts = {(run.stream_id, run.attempt): run.start_ns for run in executions}
        went_on = [
            (start_ns - ended_ns) / 1e9
            for run in executions
            if run.end_ns is None and (ended_ns := crew.cut_off_ns(run))
            if (start_ns := starts.get((run.stream_id, run.attempt + 1)))
        ]
        figures(interrupted=len(crashed), median_s=sorted(went_on)[len(went_on) // 2], longest_s=max(went_on))
