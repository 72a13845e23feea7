"""Measure the cost of the programs while nothing happens: commands of Redis, CPU, memory; and the time from their start
to the first handled message."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.rig.system import Rig
from usher.deploy.bench.rig import STREAM, family

_SETTLED_S = 5.0


def idle(seconds: float, masters: int, consumers: int, durable: bool, environ: Mapping[str, str]) -> dict[str, Any]:
    """Run once. Commands are counted one by one, also those in scripts."""
    with Rig(durable, environ) as rig:
        rig.stream.create_group(b"0-0")
        message = rig.link.call("XADD", STREAM, "*", "ticket_id", b"T", "body", b"")
        began = time.monotonic()
        rig.begin(masters, consumers, "usher.deploy.bench.handlers:noop", {})
        rig.wait_until_done(message, 60.0)
        started_s = time.monotonic() - began
        time.sleep(_SETTLED_S)
        before, cpu_before, began = commands_of(rig), rig.cpu(), time.monotonic()
        time.sleep(seconds)
        took, cpu_after = time.monotonic() - began, rig.cpu()
        commands = commands_of(rig) - before
        cpu = {name: cpu_after[name] - cpu_before[name] for name in cpu_after}
        memory = rig.memory()
        return {
            "masters": masters,
            "consumers": consumers,
            "appendonly": durable,
            "seconds": round(took, 2),
            "start_to_handled_seconds": round(started_s, 2),
            "commands_per_second": round(commands.total() / took, 1),
            "commands": {name: round(count / took, 2) for name, count in commands.most_common()},
            "cpu_percent": round(100 * sum(cpu.values()) / took, 2),
            "cpu_seconds": {name: round(spent, 2) for name, spent in cpu.items()},
            "master_mib": max(memory[name] for name in memory if name.startswith("master")),
            "consumer_mib": max(memory[name] for name in memory if name.startswith("consumer")),
            "rss_mib": memory,
            "pss_mib": {name: round(_pss_mib(pid), 1) for name, pid in rig.pids_of_programs().items()},
            "redis": rig.redis_version(),
        }


def _pss_mib(pid: int) -> float:
    """Return the memory of a program in MiB, its processes together, with each shared page divided among the processes
    that share it."""
    return float(sum(member.memory_full_info().pss for member in family(pid))) / 2**20


def commands_of(rig: Rig) -> Counter[str]:
    """Return the calls of each command so far, without the one that asks."""
    found: Counter[str] = Counter()
    for line in rig.link.call("INFO", "commandstats").decode().splitlines():
        name, _, facts = line.removeprefix("cmdstat_").partition(":")
        if facts and name != "info":
            found[name] = int(facts.partition(",")[0].removeprefix("calls="))
    return found
