"""Masters and consumers as programs of their own, on whatever Redis a test has made, and what they wrote: logs, and
records of handlers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.hands import (
    Execution,
    Keys,
    NotNow,
    ReplyUnknown,
    ask,
    free_port,
    group_of,
    is_well,
    living_consumers,
    rank,
    read_executions,
)
from tests.process.machine import USHER, environ_for, kill_all_of, processes_of, until
from tests.tuned import TUNED, VARIABLE
from usher import Link

KEYS = Keys("ticket_stream", "concurrency_stream_group")
#: Messages of one round trip of the producer.
_AT_ONCE = 20
#: Short lives, so that a test sees the end of one.
_QUICK = {"USHER_LEASE_SECONDS": "3", "USHER_LEADER_LEASE_SECONDS": "2", "USHER_LOG_FORMAT": "json"}


def logged_ms(record: dict[str, Any]) -> int:
    """When a line was logged, in milliseconds since the epoch."""
    return round(datetime.fromisoformat(record["timestamp"]).timestamp() * 1000)


def _living_child(parent: psutil.Process) -> int | None:
    """A child that works; not the template of processes for suspects."""
    for child in parent.children():
        try:
            if child.status() != psutil.STATUS_ZOMBIE and "handler-process" not in child.cmdline():
                return child.pid
        except psutil.NoSuchProcess:
            continue
    return None


def handler_processes(above: int) -> list[psutil.Process]:
    """The processes under this one that run a handler only. Each leads a group, in the session of its template."""
    found = []
    for process in psutil.Process(above).children(recursive=True):
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            is_ours = "handler-process" in process.cmdline()
            if is_ours and os.getpgid(process.pid) == process.pid != os.getsid(process.pid):
                found.append(process)
    return found


class Crew:
    """Programs of one system, with ``folder`` as their working directory; ``with`` ends them all, however the test
    went."""

    def __init__(self, folder: Path, redis_url: str, **environ: str) -> None:
        self._home = folder
        self.folder = folder / "crew"
        self.records = self.folder / "records"
        self.logs = self.folder / "logs"
        self.records.mkdir(parents=True)
        self.logs.mkdir()
        self._killed_ns: dict[int, int] = {}
        self._began_ns = self._began_ms = 0
        ours = {
            "USHER_REDIS_URL": redis_url,
            "USHER_STATE_DIR": str(self.folder / "state"),
            "USHER_DEMO_FOLDER": str(self.records),
        }
        self._environ = environ_for(self.folder, **(_QUICK | ours | environ))
        self.masters: list[str] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kill_all_of(self.folder)
        for process in self.processes.values():
            process.wait(10)
        until(lambda: not processes_of(self.folder), 10, "all processes are gone")

    # ---- programs ------------------------------------------------------------------------------------------------------------

    def start(
        self, masters: int, consumers: Iterable[str], handler: str = "usher.deploy.demo.handlers:record", **environ: str
    ) -> None:
        """Start all and wait until every consumer is registered, and every master listens, also one that the consumers
        did not need."""
        for _ in range(masters):
            self.start_master()
        names = list(consumers)
        for name in names:
            self.start_consumer(name, handler, **environ)
        self.until(lambda: living_consumers(self.masters) >= set(names), 30, "consumers are registered")
        self.until(
            lambda: all(ask(f"{url}/api/health/live").status == 200 for url in self.masters), 30, "masters listen"
        )

    def start_master(self, stderr: int | None = None) -> None:
        port = free_port()
        self.masters.append(f"http://127.0.0.1:{port}")
        self._start(f"master-{len(self.masters)}", "master", stderr=stderr, USHER_BIND=f"127.0.0.1:{port}")

    def start_consumer(self, name: str, handler: str, stderr: int | None = None, **environ: str) -> None:
        """``stderr``: a descriptor for its log, else a file has it."""
        self._start(
            name,
            "consumer",
            stderr=stderr,
            USHER_CONSUMER_NAME=name,
            USHER_HANDLER=handler,
            USHER_MASTER_URLS=",".join(self.masters),
            **environ,
        )

    def run(self, name: str, *words: str, stderr: int | None = None, **environ: str) -> None:
        """Start another command; what it says is its log."""
        self._start(name, *words, stderr=stderr, **environ)

    def _start(self, name: str, *words: str, stderr: int | None = None, **environ: str) -> None:
        with (self.logs / name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*(TUNED if VARIABLE in self._environ else USHER), *words],
                env=self._environ | environ,
                cwd=self._home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log if stderr is None else stderr,
            )

    def worker_of(self, name: str) -> int:
        """Process id of the worker that does the program's work (its parent only watches it). After one was killed, of
        the next."""
        parent = psutil.Process(self.processes[name].pid)
        found: int = until(lambda: _living_child(parent), 20, f"{name} has a worker")
        return found

    def stop(self, name: str, within_s: float = 20) -> int:
        """SIGTERM, and its exit code."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(within_s)

    def master_at(self, url: str) -> str:
        """The name of the master with this URL."""
        return f"master-{self.masters.index(url) + 1}"

    def is_well(self) -> bool:
        return all(is_well(url)[0] for url in self.masters)

    def kill_worker(self, name: str, number: int = signal.SIGKILL) -> None:
        """Kill the process that runs the handlers; its parent brings a new one."""
        pid = self.worker_of(name)
        os.kill(pid, number)
        self._killed_ns[pid] = time.monotonic_ns()

    def kill_both(self, name: str) -> None:
        """kill -9 of a program whole: nobody brings it back, and its worker, which would drain if it saw its parent go,
        sees nothing."""
        worker = psutil.Process(self.worker_of(name))
        with contextlib.suppress(psutil.NoSuchProcess):  # on a busy machine it may end by itself
            worker.suspend()
        self.processes[name].kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()

    # ---- what they wrote -----------------------------------------------------------------------------------------------------

    def log(self) -> str:
        """All logs, for the message of a failed test."""
        return "\n".join(
            f"== {file.name}\n{file.read_text(errors='replace')[-6000:]}" for file in sorted(self.logs.iterdir())
        )

    def events(self, action: str, of: str = "") -> list[dict[str, Any]]:
        """What was logged under ``action``, by programs whose name begins with ``of``, in order of time."""
        found = []
        for file in sorted(self.logs.glob(f"{of}*")):
            for line in file.read_text(errors="replace").splitlines():
                if (
                    line.startswith("{")
                    and (record := json.loads(line))["message"] == action
                    and (at_ms := logged_ms(record)) >= self._began_ms
                ):
                    found.append(record | {"time_ms": at_ms})
        return sorted(found, key=lambda record: int(record["time_ms"]))

    def executions(self) -> list[Execution]:
        found = (run for run in read_executions(self.records) if run.start_ns >= self._began_ns)
        return sorted(found, key=lambda run: run.start_ns)

    def forget_the_past(self) -> None:
        """From now on only what happens from now on is seen."""
        self._began_ns, self._began_ms = time.monotonic_ns(), time.time_ns() // 1_000_000

    def cut_off_ns(self, run: Execution) -> int | None:
        """When an execution that has no end was ended with its process: by us, or by the process itself."""
        if run.pid in self._killed_ns:
            return self._killed_ns[run.pid]
        ahead_ns = time.time_ns() - time.monotonic_ns()
        left_ns = [
            int(left["time_ms"]) * 1_000_000 - ahead_ns
            for left in self.events("worker_leaves", run.consumer)
            if left["pid"] == run.pid
        ]
        left_ns += [  # a child of its consumer: that saw it end
            int(end["time_ms"]) * 1_000_000 - ahead_ns
            for end in (*self.events("handler_crashed"), *self.events("handler_stuck"))
            if (end["id"], end["attempt"]) == (run.stream_id, run.attempt)
        ]
        # Between that line and its end a process may still begin something.
        return max(left_ns[0], run.start_ns) if left_ns else None

    def handled(self) -> set[str]:
        """Stream ids of messages whose handler has ended."""
        return {run.stream_id for run in self.executions() if run.end_ns is not None}

    def until(self, condition: Callable[[], Any], within_s: float, what: str) -> None:
        """Wait for something; when it does not come, the logs are told."""
        try:
            until(condition, within_s, what)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.log()}") from None

    def wait_until_handled(self, ids: Iterable[str], within_s: float) -> None:
        wanted = set(ids)
        self.until(lambda: wanted <= self.handled(), within_s, f"{len(wanted)} messages are handled")

    def wait_until_settled(self, link: Link, within_s: float = 15) -> None:
        """The group has read all that the stream holds, nothing is pending and nothing is in processing.

        Pending list and index alone would not do: before the leader has read anything, both are empty.
        """

        def is_settled() -> bool:
            newest = ("XREVRANGE", KEYS.stream, "+", "-", "COUNT", 1)
            of_group = ("XINFO", "GROUPS", KEYS.stream), ("GET", KEYS.taken)
            entries, groups, taken, tickets = link.pipeline([newest, *of_group, ("HLEN", KEYS.tickets)])
            facts = group_of(groups, KEYS.group, taken)
            if facts is None or facts[b"pending"] or tickets != 0:
                return False
            return all(rank(entry_id) <= rank(facts[b"last-delivered-id"]) for entry_id, _ in entries)

        self.until(is_settled, within_s, "the group is at the stream's end, pending list and index are empty")


# ---- the promise ----


class Producer:
    """Sends numbered messages, round about, and says which were accepted. What was not sure is not sent again."""

    def __init__(self, link: Link, tickets: int) -> None:
        self._link = link
        self._tickets = tickets
        self._next = 0
        self.accepted: list[str] = []
        self.unknown = 0

    def send(self, count: int, per_second: float = 1000.0, within_s: float = 30) -> None:
        """The next ``count`` messages (a multiple of 20); waits while Redis is away."""
        deadline_s = time.monotonic() + within_s
        for _ in range(0, count, _AT_ONCE):
            self._batch([self._command() for _ in range(_AT_ONCE)], deadline_s)
            time.sleep(_AT_ONCE / per_second)

    def _command(self) -> tuple[Any, ...]:
        self._next += 1
        return ("XADD", KEYS.stream, "*", "ticket_id", f"T{self._next % self._tickets}", "number", self._next)

    def _batch(self, commands: list[tuple[Any, ...]], deadline_s: float) -> None:
        while commands:
            assert time.monotonic() < deadline_s, "Redis did not come back"
            try:
                replies = self._link.pipeline(commands)
            except ReplyUnknown:
                self.unknown += len(commands)
                return
            except NotNow:
                time.sleep(0.05)
                continue
            self.accepted += [reply.decode() for reply in replies if isinstance(reply, bytes)]
            commands = [command for command, reply in zip(commands, replies, strict=True) if isinstance(reply, NotNow)]
            if commands:
                time.sleep(0.05)


def ids_in(link: Link) -> list[str]:
    """All entries that the stream holds, in order."""
    return [entry_id.decode() for entry_id, _ in link.call("XRANGE", KEYS.stream, "-", "+")]


def out_of_order(executions: Iterable[Execution]) -> list[str]:
    """First starts of messages that came after the first start of a later one of their ticket. At least once: repeats
    are no matter."""
    furthest: dict[str, int] = {}
    started: set[str] = set()
    found = []
    for run in executions:
        if run.stream_id in started:
            continue
        started.add(run.stream_id)
        place = rank(run.stream_id.encode())
        if place < furthest.get(run.ticket, -1):
            found.append(f"{run.stream_id} of {run.ticket} started after a later one")
        furthest[run.ticket] = max(furthest.get(run.ticket, -1), place)
    return found


def out_of_order_under_a_fence(executions: Iterable[Execution]) -> list[str]:
    """Starts that came after the start of a later message of their ticket under the same fence, repeats included: those
    have a new fence."""
    furthest: dict[tuple[str, int], int] = {}
    found = []
    for run in executions:
        place = rank(run.stream_id.encode())
        if place <= furthest.get((run.ticket, run.fence), -1):
            found.append(f"{run.stream_id} of {run.ticket} started after a later one under the same fence {run.fence}")
        furthest[run.ticket, run.fence] = max(furthest.get((run.ticket, run.fence), -1), place)
    return found


def overlaps(executions: Iterable[Execution], cut_off_ns: Callable[[Execution], int | None]) -> list[str]:
    """Executions that started while another one of their ticket ran. ``cut_off_ns``: when one that has no end was ended
    with its process."""
    by_ticket: dict[str, list[Execution]] = defaultdict(list)
    for run in executions:
        by_ticket[run.ticket].append(run)
    found = []
    for history in by_ticket.values():
        for before, run in itertools.pairwise(history):
            end_ns = before.end_ns if before.end_ns is not None else cut_off_ns(before)
            if end_ns is None or run.start_ns < end_ns:
                found.append(
                    f"{run.stream_id} of {run.ticket} started on {run.consumer} while {before.stream_id} ran on"
                    f" {before.consumer}"
                )
    return found


def repeated(executions: Iterable[Execution]) -> set[str]:
    """Stream ids of messages that were started more than once."""
    seen: set[str] = set()
    again: set[str] = set()
    for run in executions:
        (again if run.stream_id in seen else seen).add(run.stream_id)
    return again


def longest_pause_s(executions: Iterable[Execution]) -> float:
    """The longest time in which no handler started."""
    starts = [run.start_ns for run in executions]
    return max((later - earlier for earlier, later in itertools.pairwise(starts)), default=0) / 1e9
