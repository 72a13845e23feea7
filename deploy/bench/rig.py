"""``usher bench``: throughput and latency of this machine, each against a yardstick of the same run. The system under
measurement has its own Redis, one master and some consumers, which run as in `usher up`; a measurement returns a plain
document."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import click
import psutil
from rich.table import Table

from usher.common.base.durations import Number, option
from usher.common.base.errors import UsherError
from usher.common.base.text import info_lines
from usher.common.cli.masters import somebody_leads
from usher.common.doctor.judgements import version_text
from usher.common.protocol.keys import Keys
from usher.common.protocol.registration import parse
from usher.common.redis.client import Link
from usher.common.redis.embedded import SERVER_VARIABLE
from usher.common.redis.replies import TicketStream
from usher.common.runtime.signals import StopAsked, StopRequest
from usher.deploy.bench.handlers import DUE_FIELD, FOLDER_VARIABLE, WARM, consume, read_waits
from usher.deploy.local.up import trial
from usher.master.cli.shared import console, print_json, table


def facts(redis_version: str) -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cores": os.cpu_count(),
        "cpu": model or platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "redis": redis_version,
        "load_before": round(os.getloadavg()[0], 2),
    }


def family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(pid: int) -> float:
    return sum(_of_each(pid, lambda member: sum(member.cpu_times()[:2])))


def rss_mib(pid: int) -> float:
    return max(_of_each(pid, lambda member: member.memory_info().rss), default=0) / 2**20


def _of_each(pid: int, read: Callable[[psutil.Process], float]) -> Iterator[float]:
    for member in family(pid):
        with contextlib.suppress(psutil.Error):
            yield read(member)


STREAM, GROUP = "bench", "bench_group"
#: Group of the bare consumers, and the stream that they alone read.
_BARE = "bare"
#: Seconds between two questions: was the first entry read, and are all done. The latter takes cores from the measured
#: system (every 5 ms: 2 %).
_BEGUN_S, _DONE_S = 0.001, 0.02
_READY_S = 60.0
#: A leader key without a leader: masters stand by until it is deleted, so that all consumers are there when the clock
#: starts.
_HOLD = "1 bench nobody"


class BenchFailed(UsherError):
    """The run did not end as it should."""


def zipf_tickets(count: int, tickets: int, seed: int) -> list[bytes]:
    """Return ``count`` ticket ids out of ``tickets``, Zipf 1.0: the n-th most frequent comes with probability 1 / (n *
    H)."""
    weights = list(itertools.accumulate(1.0 / rank for rank in range(1, tickets + 1)))
    return [b"T%d" % rank for rank in random.Random(seed).choices(range(tickets), cum_weights=weights, k=count)]


class System:
    """A running system, as a measurement sees it. ``pids``: tells its processes by name, Redis included; ``check`` is
    called while it is waited for, and raises when that is in vain."""

    def __init__(self, link: Link, keys: Keys, pids: Callable[[], dict[str, int]], check: Callable[[], None]) -> None:
        self.link, self.keys, self.pids, self.check = link, keys, pids, check
        self.url = link.url
        self.stream = TicketStream(link, keys)

    def hold(self) -> None:
        """Let no master lead; a leading one loses the lead."""
        self.link.call("SET", self.keys.leader, _HOLD)

    def release(self) -> None:
        self.link.call("DEL", self.keys.leader)

    def wait_until_begun(self, after: bytes = b"0-0") -> None:
        self.wait(lambda: "" if self.stream.last_delivered() != after else "nothing was read", _BEGUN_S)

    def wait_until_done(self, last_id: bytes, patience_s: float, held: int = 0) -> None:
        """Wait until everything up to ``last_id`` (or, of gathered messages, to an id with that end) was read and,
        except ``held``, acknowledged."""

        def left() -> str:
            facts = self.stream.group_facts()
            is_done = facts[b"last-delivered-id"].endswith(last_id) and facts[b"pending"] == held
            return "" if is_done else f"not done: {facts}"

        self.wait(left, _DONE_S, patience_s)

    def wait(self, trouble: Callable[[], str], every_s: float, within_s: float = _READY_S) -> None:
        deadline_s = time.monotonic() + within_s
        while problem := trouble():
            if time.monotonic() > deadline_s:
                raise BenchFailed(f"{problem}, after {within_s:.0f} s")
            self.check()
            time.sleep(every_s)

    def cpu(self) -> dict[str, float]:
        seconds = {"master": 0.0, "consumers": 0.0, "redis": 0.0}
        for name, pid in self.pids().items():
            part = name.partition("-")[0]
            seconds[part if part in seconds else "consumers"] += cpu_seconds(pid)
        return seconds

    def memory(self) -> dict[str, float]:
        return {name: round(rss_mib(pid), 1) for name, pid in self.pids().items()}

    def redis_version(self) -> str:
        return redis_version(self.link)

    def fill(self, tickets: Sequence[bytes], payload: bytes) -> bytes:
        """Add one message per ticket; return the last id."""
        last = b""
        for at in range(0, len(tickets), 1000):
            self.check()
            some = tickets[at : at + 1000]
            last = self.link.all_of([("XADD", STREAM, "*", "ticket_id", one, "body", payload) for one in some])[-1]
        return last


@contextlib.contextmanager
def _system(
    consumers: int, handler: str, no_aof: bool, environ: Mapping[str, str], is_held: bool = False
) -> Iterator[System]:
    """Run one master and the consumers, as `usher up` does, until the block ends, or a signal asks us to end.
    ``is_held``: no master leads before ``release``."""
    asked = {"masters": 1, "consumers": consumers, "handler": f"usher.deploy.bench.handlers:{handler}"}
    asked |= {"ticket_stream": STREAM, "group": GROUP, "log_level": "warning"}
    asked |= {"redis_server": os.environ.get(SERVER_VARIABLE, "")}
    with (
        tempfile.TemporaryDirectory(prefix="usher-bench-", ignore_cleanup_errors=True) as folder,
        StopRequest() as stop,
    ):
        try:
            with trial(Path(folder), stop, lambda _: None, environ, **asked) as (running, link):
                if no_aof:
                    link.call("CONFIG", "SET", "appendonly", "no")
                system = System(link, Keys(STREAM, GROUP), running.pids, stop.check)
                if is_held:
                    system.hold()
                    system.wait(lambda: "a master leads" * somebody_leads(running.settings.urls), 0.05)
                yield system
        except StopAsked:
            sys.exit(stop.exit_code)


def redis_version(link: Link) -> str:
    return version_text(info_lines(link.call("INFO", "server")))


@contextlib.contextmanager
def bare_consumers(system: System, stream: str, count: int, lasts: bool) -> Iterator[list[Connection]]:
    """Start so many bare consumers (``consume``) of a stream, and end them at the exit. Yields a way to each, once all
    are connected."""
    system.link.call("XGROUP", "CREATE", stream, _BARE, "0", "MKSTREAM")
    spawn, pipes = multiprocessing.get_context("spawn"), [multiprocessing.Pipe() for _ in range(count)]
    own = [(system.url, stream, _BARE, f"b{number}", theirs, lasts) for number, (_, theirs) in enumerate(pipes)]
    workers = [spawn.Process(target=consume, args=args, daemon=True) for args in own]
    for worker, (_, theirs) in zip(workers, pipes, strict=True):
        worker.start()
        theirs.close()  # so that we notice its end
    try:
        for ours, _ in pipes:
            ours.recv()
        yield [ours for ours, _ in pipes]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
        system.link.call("XGROUP", "DESTROY", stream, _BARE)


def floor_seconds(system: System, processes: int, count: int) -> float:
    """Measure the raw floor: ``processes`` processes, XREADGROUP > COUNT 500, one XACK per batch, no order at all.
    Returns the seconds for ``count`` entries.

    The clock runs from when all processes are connected until the last one has acknowledged its last batch.
    """
    with bare_consumers(system, STREAM, processes, lasts=False) as workers:
        began = time.monotonic()
        for worker in workers:
            worker.send("go")
        handled = sum(worker.recv() for worker in workers)
        seconds = time.monotonic() - began
    if handled != count:
        raise BenchFailed(f"the floor handled {handled} of {count}")
    return seconds


_SEED = 1
_PATIENCE_S = 300.0


def measure_throughput(
    messages: int, tickets: int, payload: int, consumers: int, no_aof: bool, no_run_log: bool
) -> dict[str, Any]:
    """Run once: the raw floor, then the system, on the same stream of ``messages`` that is there before the clock
    starts.

    The clock runs from the first entry read to the last one acknowledged (the pending list is empty).
    """
    names = zipf_tickets(messages, tickets, _SEED)
    run_log = {"USHER_RUN_LOG_LENGTH": "0" if no_run_log else "1000"}
    with _system(consumers, "noop", no_aof, run_log, is_held=True) as system:
        last_id = system.fill(names, b"x" * payload)
        floor_s = floor_seconds(system, consumers, messages)
        seconds, cpu = seconds_for(system, last_id)
        return {
            "messages": messages,
            "tickets": tickets,
            "payload_bytes": payload,
            "consumers": consumers,
            "appendonly": not no_aof,
            "run_log": not no_run_log,
            "messages_per_second": round(messages / seconds, 1),
            "floor_per_second": round(messages / floor_s, 1),
            "ratio": round(floor_s / seconds, 4),
            "seconds": round(seconds, 3),
            "cpu_seconds": cpu,
            "rss_mib": system.memory(),
            "redis": system.redis_version(),
        }


def seconds_for(system: System, last_id: bytes, first: bytes = b"0-0", held: int = 0) -> tuple[float, dict[str, float]]:
    """Release the programs; return the seconds until all above ``first`` up to ``last_id`` is done, except ``held``,
    and the CPU seconds that it took."""
    before = system.cpu()
    system.release()
    system.wait_until_begun(first)
    began = time.monotonic()
    system.wait_until_done(last_id, _PATIENCE_S, held)
    seconds, after = time.monotonic() - began, system.cpu()
    if system.link.call("XLEN", system.keys.dead):
        raise BenchFailed("messages became dead letters")
    return seconds, {name: round(after[name] - before[name], 2) for name in after}


def warm_up(system: System, payload: int) -> None:
    """Send messages that are not measured, until all of them are done: to all consumers, by the same way as the
    measured ones. Ask each for its health, as a master does a few seconds after the start: that makes its page."""
    tickets = [b"%s-%d" % (WARM, number % 40) for number in range(200)]
    system.wait_until_done(send_on_schedule(system, tickets, b"x" * payload, 200.0), 60.0)
    for stored in system.link.call("HVALS", system.keys.consumers):
        urlopen(parse(b"", stored).health_url, timeout=60.0).close()


def send_on_schedule(
    system: System,
    names: list[bytes],
    payload: bytes,
    rate: float,
    idle: Callable[[float], object] = time.sleep,
    stream: str = STREAM,
) -> bytes:
    """Send message i at i / rate, however slow the system is; a late message is sent at once, with its due time.
    ``idle`` is called in between, with the seconds that are left until then."""
    began_ns = time.time_ns()
    sent, last = 0, b""
    while sent < len(names):
        system.check()
        due = min(len(names), int((time.time_ns() - began_ns) / 1e9 * rate) + 1)
        if due <= sent:
            idle(min(0.05, max(0.0, sent / rate - (time.time_ns() - began_ns) / 1e9)))
            continue
        commands = [
            ("XADD", stream, "*", "ticket_id", names[at], DUE_FIELD, began_ns + int(at / rate * 1e9), "body", payload)
            for at in range(sent, due)
        ]
        sent, last = due, system.link.all_of(commands)[-1]
    return last


def measure_latency(
    rate: float, seconds: float, tickets: int, payload: int, consumers: int, no_aof: bool
) -> dict[str, Any]:
    """Run once: messages on an open-loop schedule to as many bare consumers (``consume``), on a stream of their own;
    then the same schedule to the system. The wait counts from a message's due time to the start of its handler."""
    count, body = int(rate * seconds), b"x" * payload
    names = zipf_tickets(count, tickets, _SEED)
    with (
        tempfile.TemporaryDirectory(prefix="usher-bench-") as waits_folder,
        _system(consumers, "timed", no_aof, {FOLDER_VARIABLE: waits_folder}) as system,
    ):
        with bare_consumers(system, _BARE, consumers, lasts=True) as workers:
            for worker in workers:
                worker.send("go")
            send_on_schedule(system, names, body, rate, stream=_BARE)
            time.sleep(1.0)
            for worker in workers:
                worker.send("end")
            bare = _figures([wait for worker in workers for wait in worker.recv()], count)
        warm_up(system, payload)
        cpu_before, began = system.cpu(), time.monotonic()
        system.wait_until_done(send_on_schedule(system, names, body, rate), 60.0)
        took, cpu_after = time.monotonic() - began, system.cpu()
        version, waits = system.redis_version(), _figures(read_waits(Path(waits_folder)), count)
    return {
        "messages": count,
        "rate": rate,
        "tickets": tickets,
        "payload_bytes": payload,
        "consumers": consumers,
        "appendonly": not no_aof,
        **waits,
        **{f"bare_{name}": figure for name, figure in bare.items()},
        "p50_ratio": round(waits["p50_ms"] / bare["p50_ms"], 2),
        "p99_ratio": round(waits["p99_ms"] / bare["p99_ms"], 2),
        "seconds": round(took, 2),
        "cpu_seconds": {name: round(cpu_after[name] - cpu_before[name], 2) for name in cpu_after},
        "redis": version,
    }


def _figures(found: list[int], count: int) -> dict[str, float]:
    waits = sorted(found)
    if len(waits) < count * 0.9:
        raise BenchFailed(f"only {len(waits)} of {count} messages were timed")
    p50, p99, most = (
        round(wait / 1e6, 3) for wait in (waits[len(waits) // 2], waits[int(len(waits) * 0.99)], waits[-1])
    )
    return {"timed": len(waits), "p50_ms": p50, "p99_ms": p99, "max_ms": most}


RUNS = option("--runs", "Runs; the headline figures are medians.", click.IntRange(1, 50), 3)
TICKETS = option("--tickets", "Different tickets (Zipf 1.0, seeded).", click.IntRange(min=1), 10_000)
PAYLOAD = option("--payload", "Bytes of payload per message.", click.IntRange(min=0), 100)
CONSUMERS = option("--consumers", "Consumer processes.", click.IntRange(1, 32), 2)
VOLATILE = option(
    "--no-aof", "Without append-only file. Default: appendonly yes, appendfsync everysec, as shipped.", is_flag=True
)
#: Its commands are those of `python -m benchmarks`, too, which has no option for all.
JSON = click.option(
    "--json",
    "as_json",
    is_flag=True,
    hidden=True,
    callback=lambda ctx, _parameter, value: value or "json" in (ctx.find_root().obj or ()),
)


@click.group()
def bench() -> None:
    """Measure this machine. Everything runs in a temporary folder with a Redis of its own; nothing that runs already is
    touched. USHER_REDIS_SERVER=/usr/bin/redis-server has it measured with that one."""


@bench.command()
@option("--messages", "Messages per run.", click.IntRange(min=1000), 200_000)
@TICKETS
@PAYLOAD
@CONSUMERS
@RUNS
@VOLATILE
@option("--no-run-log", "Without the run log, to see what it costs.", is_flag=True)
@JSON
def throughput(runs: int, as_json: bool, **asked: Any) -> None:
    """Measure messages per second with a handler that does nothing, and the raw floor (2 processes, XREADGROUP + XACK,
    no order) beside it."""
    headline = ("messages_per_second", "floor_per_second", "ratio")
    report(lambda: measure_throughput(**asked), runs, headline, as_json)


@bench.command()
@option("--rate", "Messages per second.", Number(min=1), 1000.0)
@option("--seconds", "Length of a run.", Number(min=1), 10.0)
@TICKETS
@PAYLOAD
@CONSUMERS
@RUNS
@VOLATILE
@JSON
def latency(runs: int, as_json: bool, **asked: Any) -> None:
    """Measure the time from XADD (when it was due) to the start of the handler, at a fixed rate, and beside it the time
    to bare consumers (XREADGROUP BLOCK, no order) of the same Redis."""
    headline = ("p50_ms", "p99_ms", "bare_p50_ms", "bare_p99_ms", "p99_ratio")
    report(lambda: measure_latency(**asked), runs, headline, as_json)


def report(run: Callable[[], dict[str, Any]], count: int, headline: Sequence[str], as_json: bool) -> None:
    document: dict[str, Any] = {"machine": facts(""), "runs": []}
    try:
        for number in range(1, count + 1):
            click.echo(f"usher: run {number} of {count}", err=True)
            document["runs"].append(run())
    except BenchFailed as failed:
        click.echo(f"usher: {failed}", err=True)
        sys.exit(1)
    document["machine"]["redis"], *_ = [one.pop("redis") for one in document["runs"]]
    document |= {name: statistics.median(one[name] for one in document["runs"]) for name in headline}
    if as_json:
        print_json(document)
        return
    named = [name.replace("_", " ") for name in headline]
    rows = [
        [
            number,
            *(f"{one[name]:,}" for name in headline),
            "  ".join(map("{0[0]} {0[1]}".format, one["cpu_seconds"].items())),
        ]
        for number, one in enumerate(document["runs"], 1)
    ]
    rows.append(["median", *(f"{document[name]:,}" for name in headline), ""])
    print_table(table("", ("run", *named, "CPU seconds"), rows, named), document["machine"])


def print_table(shown: Table, facts: dict[str, Any]) -> None:
    console().print(shown)
    click.echo(f"{facts['cores']} cores, {facts['cpu']}, Python {facts['python']}, {facts['redis']}")
