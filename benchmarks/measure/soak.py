"""Measure whether programs that live on, and Redis, stay as they are while others are killed: memory, descriptors,
threads, keys; and whether a message was lost, or ran out of order or beside another one of its ticket."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.programs.handlers import NOTES
from benchmarks.rig.system import Rig
from usher.common.doctor.judgements import info_lines
from usher.deploy.bench.rig import STREAM, family

_TICKETS, _BODY, _EVERY_S, _PATIENCE_S = 50, b"x" * 200, 0.1, 120.0
#: These are killed, at random; the others live on.
_KILLED = ("master", "consumer-2", "consumer-3")
#: Part of the run before the slopes are taken: caches fill, logs reach their lengths.
_SETTLED = 0.4


def soak(seconds: float, rate: float, kill_every_s: float, durable: bool, environ: Mapping[str, str]) -> dict[str, Any]:
    """Run once: two masters and three consumers, ``rate`` messages a second."""
    chance = random.Random(1)
    with Rig(durable, environ) as rig:
        rig.stream.create_group(b"0-0")
        minutes = max(seconds / 60, 1.0)
        settings = {"USHER_RUN_LOG_LENGTH": "5000", "USHER_TRIM_KEEP": f"{max(20, int(5 * minutes))}s"}
        settings |= {"USHER_LEASE_SECONDS": "3", "USHER_LEADER_LEASE_SECONDS": "2"}
        rig.begin(2, 3, "benchmarks.programs.handlers:noted", settings)
        rig.wait_until_registered()
        sent, kills, last, samples = Counter[int](), Counter[str](), b"", list[dict[str, float]]()
        began_s, kill_s = time.monotonic(), kill_every_s
        while (now_s := time.monotonic() - began_s) < seconds:
            rig.check()
            commands = []
            for number in range(sent.total(), int(now_s * rate)):
                sent[number % _TICKETS] += 1
                numbers = ("number", sent[number % _TICKETS], NOTES, str(rig.folder), "body", _BODY)
                commands.append(("XADD", STREAM, "*", "ticket_id", number % _TICKETS, *numbers))
            last = rig.link.all_of(commands)[-1] if commands else last
            if now_s >= kill_s:
                kill_s += kill_every_s
                name = chance.choice(_KILLED)
                kills[name] += _kill_worker(rig.pids_of_programs()[name])
            if now_s >= len(samples) * seconds / 60:
                samples.append({"minute": round(now_s / 60, 2)} | _sample(rig))
            time.sleep(_EVERY_S)
        rig.wait_until_done(last, _PATIENCE_S)
        settled = samples[int(_SETTLED * len(samples)) :]
        return {
            "messages": sent.total(),
            "kills": sum(kills.values()),
            **_judge(rig.folder, sent),
            "per_hour": {
                name: round(60 * _slope([one["minute"] for one in settled], [one[name] for one in settled]), 2)
                for name in samples[0]
                if name != "minute"
            },
            "first": settled[0],
            "last": settled[-1],
            "cpu_seconds": {who: round(spent, 1) for who, spent in rig.cpu().items()},
            "redis": rig.redis_version(),
        }


def _kill_worker(pid: int) -> bool:
    workers = psutil.Process(pid).children()
    for worker in workers:
        worker.send_signal(signal.SIGKILL)
    return bool(workers)  # none: it is being started again


def _sample(rig: Rig) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in ("master-2", "consumer-1"):
        members = family(rig.pids_of_programs()[name])
        found[f"{name}_mib"] = round(sum(one.memory_full_info().uss for one in members) / 2**20, 2)
        found[f"{name}_files"] = sum(one.num_fds() for one in members)
        found[f"{name}_threads"] = sum(one.num_threads() for one in members)
    found["redis_mib"] = round(int(info_lines(rig.link.call("INFO", "memory"))["used_memory"]) / 2**20, 2)
    found["redis_keys"] = rig.link.call("DBSIZE")
    return found


def _slope(at: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of the line of least squares."""
    mean_at, mean = sum(at) / len(at), sum(values) / len(values)
    spread = sum((one - mean_at) ** 2 for one in at)
    return sum((one - mean_at) * (value - mean) for one, value in zip(at, values, strict=True)) / (spread or 1.0)


def _judge(folder: Path, sent: Counter[int]) -> dict[str, int]:
    """Count what was lost; what ran again, as what was killed does; and those that started after a later one of their
    ticket had, though they had not before, or while another one ran that ended."""
    runs: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # start, end, number
    for path in folder.glob("notes-*"):
        for line in path.read_text().splitlines():
            ticket, number, start_ns, end_ns = map(int, line.split())
            runs[ticket].append((start_ns, end_ns, number))
    counts = Counter[str](again=0, out_of_order=0, overlapping=0)
    for its in runs.values():
        highest, free_ns, seen = 0, 0, set[int]()
        for start_ns, end_ns, number in sorted(its):
            counts["again"] += number in seen
            counts["out_of_order"] += number not in seen and number < highest
            counts["overlapping"] += start_ns < free_ns
            seen.add(number)
            highest, free_ns = max(highest, number), max(free_ns, end_ns)
    lost = sum(len(set(range(1, count + 1)) - {one for _, _, one in runs[ticket]}) for ticket, count in sent.items())
    return {"lost": lost, **counts}
