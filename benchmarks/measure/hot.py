"""Measure one ticket with a million messages and its effect on the other tickets; and the speed of one ticket by
itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.programs.handlers import HOT_TICKET
from benchmarks.rig.system import Rig
from usher.deploy.bench.handlers import DUE_FIELD, FOLDER_VARIABLE, read_waits
from usher.deploy.bench.rig import BenchFailed, seconds_for, send_on_schedule, warm_up

_FLOOD_PAGE = 1000
_PATIENCE_S = 300.0


def hot(
    messages: int, others: int, rate: float, seconds: float, consumers: int, durable: bool, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Run once, three times the same schedule of other tickets: alone (the baseline), while ``messages`` of one ticket
    are sent as fast as Redis takes them, and afterwards, while they are parked and one by one take a millisecond each.

    The stream is a log: messages that are sent after the flood wait until the master has read the flood. That is in the
    second figure, not in the third.
    """
    names = [b"T%d" % (number % others) for number in range(int(rate * seconds))]
    with Rig(durable, environ) as rig:
        folder = rig.folder
        rig.stream.create_group(b"0-0")
        (waits_folder := folder / "waits").mkdir()
        rig.start_programs(
            consumers,
            "benchmarks.programs.handlers:timed_but_hot",
            {FOLDER_VARIABLE: str(waits_folder), "USHER_LOG_LEVEL": "error"},
        )
        rig.release()
        warm_up(rig, 100)
        phases = _Phases(waits_folder)
        send_on_schedule(rig, names, b"x" * 100, rate)
        alone = phases.end("alone", len(names))
        before = rig.memory()
        began = time.monotonic()
        flood = Flood(rig, messages)
        send_on_schedule(rig, names, b"x" * 100, rate, idle=lambda wait_s: None if flood.send() else time.sleep(wait_s))
        while flood.send():
            pass
        sent_s = time.monotonic() - began
        during = phases.end("during the flood", len(names))
        _wait_until_parked(rig)
        parked = int(rig.stream.group_facts()[b"pending"])
        send_on_schedule(rig, names, b"x" * 100, rate)
        after = phases.end("with the flood parked", len(names))
        memory = rig.memory()
        return {
            "messages": messages,
            "others": others,
            "rate": rate,
            "consumers": consumers,
            "appendonly": durable,
            "flood_seconds": round(sent_s, 2),
            "parked": parked,
            "baseline_p50_ms": alone[0],
            "baseline_p99_ms": alone[1],
            "during_p50_ms": during[0],
            "during_p99_ms": during[1],
            "p50_ms": after[0],
            "p99_ms": after[1],
            "max_ms": after[2],
            "p99_ratio": round(after[1] / alone[1], 3),
            "rss_mib_before": before,
            "rss_mib": memory,
            "redis_bytes_per_parked": round((memory["redis"] - before["redis"]) * 1024 * 1024 / max(1, parked)),
            "redis": rig.redis_version(),
        }


def rate_of_one(
    messages: int, strict_messages: int, consumers: int, durable: bool, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Run once: all messages are of one ticket and there before the clock starts. First pipelined, as by default; then
    ``strict_messages`` in a fresh system where the next message starts when Redis has the acknowledgement of the one
    before."""
    pipelined = _one_ticket(messages, {"USHER_ACK_MODE": "pipelined"}, consumers, durable, environ)
    strict = _one_ticket(strict_messages, {"USHER_ACK_MODE": "strict"}, consumers, durable, environ)
    return {
        "messages": messages,
        "strict_messages": strict_messages,
        "consumers": consumers,
        "appendonly": durable,
        "messages_per_second": round(messages / pipelined["seconds"], 1),
        "strict_per_second": round(strict_messages / strict["seconds"], 1),
        "strict_seconds": strict["seconds"],
        "strict_cpu_seconds": strict["cpu_seconds"],
        **pipelined,
    }


def _one_ticket(
    messages: int, given: dict[str, str], consumers: int, durable: bool, environ: Mapping[str, str]
) -> dict[str, Any]:
    with Rig(durable, environ) as rig:
        last_id = rig.fill([HOT_TICKET] * messages, b"x" * 100)
        rig.stream.create_group(b"0-0")
        rig.start_programs(consumers, "usher.deploy.bench.handlers:noop", {"USHER_RUN_LOG_LENGTH": "1000", **given})
        seconds, cpu = seconds_for(rig, last_id)
        return {"seconds": round(seconds, 3), "cpu_seconds": cpu, "rss_mib": rig.memory(), "redis": rig.redis_version()}


class Flood:
    """Sends the hot ticket's messages in pages between the pages of the schedule."""

    def __init__(self, rig: Rig, messages: int) -> None:
        self._rig = rig
        self._left = messages
        self._command = ("XADD", rig.keys.stream, "*", "ticket_id", HOT_TICKET, DUE_FIELD, b"0", "body", b"x" * 100)

    def send(self) -> bool:
        """Send one page; False when all are sent."""
        count = min(_FLOOD_PAGE, self._left)
        self._rig.link.all_of([self._command] * count)
        self._left -= count
        return self._left > 0


class _Phases:
    """Reads the waits of each phase once they have all been written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, int] = {}

    def end(self, name: str, sent: int) -> tuple[float, float, float]:
        """Return (p50, p99, max) in ms of the messages timed since the last end. Some wait in the processes' buffers:
        nine of ten must be there."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while len(waits := self._read()) < 0.9 * sent:
            if time.monotonic() > deadline_s:
                raise BenchFailed(f"{name}: only {len(waits)} of {sent} messages were handled in {_PATIENCE_S:.0f} s")
            time.sleep(0.1)
        time.sleep(0.5)
        waits = sorted(self._read())
        self._seen = {path.name: path.stat().st_size for path in self._folder.iterdir()}
        return tuple(
            round(wait / 1e6, 3) for wait in (waits[len(waits) // 2], waits[int(len(waits) * 0.99)], waits[-1])
        )  # type: ignore[return-value]

    def _read(self) -> list[int]:
        return read_waits(self._folder, self._seen)


def _wait_until_parked(rig: Rig) -> None:
    """Wait until the master has read the whole stream."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while (facts := rig.stream.group_facts())[b"last-delivered-id"] != rig.link.call(
        "XREVRANGE", rig.keys.stream, "+", "-", "COUNT", 1
    )[0][0]:
        if time.monotonic() > deadline_s:
            raise BenchFailed(f"the master did not read it all: {facts}")
        time.sleep(0.1)
