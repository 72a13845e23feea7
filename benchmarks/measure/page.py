"""Measure the load time of a master's pages while it works: ten thousands of tickets wait, messages come in, and a user
clicks around."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.programs.handlers import FAILING, GIVEN_UP, WAITING
from benchmarks.rig.system import Rig
from usher.deploy.bench.rig import BenchFailed
from usher.master.operations.action_log import By
from usher.master.operations.live_rules import LiveRules
from usher.master.policy.rules import Rule, RuleAction, Target

_SETTLES_S, _PATIENCE_S = 3.0, 300.0
#: Messages that wait after the first one of the ticket that is looked at.
_BEHIND = 500
_PAUSE_S, _COMPUTES_S = 0.02, 0.003
_HEADERS = {"Accept": "text/html, */*;q=0.8"}


def page(
    pending: int, letters: int, rate: float, gets: int, consumers: int, durable: bool, environ: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return a row per page and way of asking: with one connection for all its GETs (``keep_alive``), and with a new
    one for each. ``all_p99_ms`` is of all GETs together.

    ``pending`` tickets wait, fail or are held (``_fill``), there are ``letters`` dead letters, and ``rate`` messages of
    other tickets come per second and are done at once. The pages are requested in turn, with a short pause, ``gets``
    times each way; a time is from before the connection to the last byte. ``late_p99_ms`` is the yardstick: the time
    for which a computation of a few milliseconds waited for a core, between the GETs.
    """
    with Rig(durable, environ) as rig:
        rig.stream.create_group(b"0-0")
        capacity = str(min(100_000, pending // consumers + pending // 2 + 2000))
        given = {"USHER_CAPACITY": capacity, "USHER_LEADER_LEASE_SECONDS": "5", "USHER_LOG_LEVEL": "error"}
        given |= {"USHER_RETRY_SECONDS": "3600"}
        log = rig.folder / "log"
        with log.open("w") as told, contextlib.redirect_stderr(told):  # of each letter a traceback
            [url] = rig.start_programs(consumers, "benchmarks.programs.handlers:waiting", given)
        rig.release()
        try:
            _fill(rig, pending, letters)
        except BenchFailed as failed:
            raise BenchFailed(f"{failed}\n{log.read_text()[-2000:]}") from None
        cpu_before, began = rig.cpu(), time.monotonic()
        if rate:
            rig.start("sender", ["send", "--simulate", "1000000000", "--rate", str(rate)], {})
        time.sleep(_SETTLES_S)  # the run log and the pulse have something to show
        host = url.removeprefix("http://")
        pages = list(_pages(rig))
        waits: dict[tuple[str, bool], list[float]] = {}
        sizes: dict[str, int] = {}
        late: list[float] = []
        kept = http.client.HTTPConnection(host, timeout=60)
        for path in pages:  # the very first GET prepares the templates
            _get(kept, path)
        for _ in range(gets):
            for path in pages:
                for keep_alive in (True, False):
                    late.append(_pause())
                    waited_s, sizes[path] = _get(
                        kept if keep_alive else http.client.HTTPConnection(host, timeout=60), path
                    )
                    waits.setdefault((path, keep_alive), []).append(waited_s * 1000)
        kept.close()
        facts = _facts(rig, pending, letters, rate, gets, time.monotonic() - began, cpu_before)
    for name, ms in (("all", [one for some in waits.values() for one in some]), ("late", late)):
        facts |= {f"{name}_{figure}": value for figure, value in _figures(ms).items()}
    return [
        {"page": path, "keep_alive": keep_alive, "bytes": sizes[path], **_figures(ms), **facts}
        for (path, keep_alive), ms in waits.items()
    ]


def _fill(rig: Rig, pending: int, letters: int) -> None:
    """Let half of the tickets fail, a quarter wait for their next attempt, and a rule hold the others; of the letters
    every other one has no ticket, and many kinds are among the rest."""
    by, parked = By("bench", "cli", ""), pending // 4
    LiveRules(rig.link, rig.keys).set(Rule(Target.PATTERN, "parked-*", RuleAction.PAUSE, reason="a measure"), by)
    counts = {WAITING: pending - parked - pending // 2, b"parked": parked, FAILING: pending // 2}
    for begin, count in (counts | {GIVEN_UP: letters - letters // 2}).items():
        rig.fill([begin + b"-%d" % number for number in range(count)], b"x" * 100)
    rig.fill([b""] * (letters // 2), b"no ticket id")
    rig.fill([WAITING + b"-1"] * _BEHIND, b"x" * 100)
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        told = rig.link.pipeline([("HLEN", rig.keys.tickets), ("XLEN", rig.keys.dead), ("HLEN", rig.keys.attempts)])
        if told[:2] == [pending - parked, letters]:
            return
        if time.monotonic() > deadline_s:
            raise BenchFailed(f"after {_PATIENCE_S:.0f} s only so many tickets, letters and tries: {told}")
        time.sleep(0.2)


def _pages(rig: Rig) -> Iterator[str]:
    """Yield every page that can be long."""
    letter, message = (
        bytes(rig.link.call("XREVRANGE", key, "+", "-", "COUNT", 1)[0][0]).decode()
        for key in (rig.keys.dead, rig.keys.stream)
    )
    waiting, failing, given_up = (name.decode() for name in (WAITING, FAILING, GIVEN_UP))
    yield from ("/", "/charts", "/charts?span=24h", "/tickets", f"/tickets?q={waiting}-1", "/tickets?q=body%3Dnone")
    for asked in ("state=retrying", "state=put_off&sort=messages", "state=paused", "sort=attempts", "sort=ticket"):
        yield f"/tickets?{asked}"
    yield from ("/tickets?state=retrying&error=ValueError7", "/tickets?consumer=consumer-1", "/tickets/never-sent")
    yield from (f"/tickets/{ticket}-1" for ticket in (waiting, failing, given_up, "parked"))
    yield from ("/consumers", "/consumers/consumer-1", "/dead-letters", "/dead-letters?error=nothing+has+this")
    yield from (f"/dead-letters?ticket={given_up}-1", "/dead-letters?error=GiveUp7", f"/dead-letters/{letter}")
    yield from (f"/messages/{message}", "/delayed", "/finished", "/rules", "/streams", "/audit", "/doctor", "/actions")
    yield from (f"/api/explain?id={waiting}-1", "/api/consumers", "/api/tickets", "/api/dead-letters", "/api/lag")


def _get(connection: http.client.HTTPConnection, path: str) -> tuple[float, int]:
    """Return seconds, and bytes of the body. The last answer on a connection that is not kept ends it."""
    began = time.perf_counter()
    connection.request("GET", path, headers=_HEADERS)
    answer = connection.getresponse()
    body = answer.read()
    waited_s = time.perf_counter() - began
    if answer.status != 200:
        raise BenchFailed(f"{path}: HTTP {answer.status}")
    return waited_s, len(body)


def _pause() -> float:
    """Pause; return how long we had to wait for a core, in ms."""
    time.sleep(_PAUSE_S)
    began, cpu_s = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu_s < _COMPUTES_S:
        pass
    return (time.perf_counter() - began - _COMPUTES_S) * 1000


def _figures(ms: list[float]) -> dict[str, float]:
    ms = sorted(ms)
    return {
        "p50_ms": round(ms[len(ms) // 2], 1),
        "p99_ms": round(ms[min(len(ms) - 1, int(len(ms) * 0.99))], 1),
        "max_ms": round(ms[-1], 1),
    }


def _facts(
    rig: Rig, pending: int, letters: int, rate: float, gets: int, seconds: float, before: dict[str, float]
) -> dict[str, Any]:
    """Return the facts that hold for all rows."""
    after = rig.cpu()
    return {
        "pending": pending,
        "letters": letters,
        "rate": rate,
        "gets": gets,
        "seconds": round(seconds, 1),
        "entries": rig.link.call("XLEN", rig.keys.stream),
        "cpu_seconds": {name: round(after[name] - before[name], 2) for name in after},
        "redis": rig.redis_version(),
    }
