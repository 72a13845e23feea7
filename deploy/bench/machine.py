"""What a figure was measured on, and what processes cost, from /proc."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def facts(redis_version: str) -> dict[str, Any]:
    """The machine, for the ``machine`` object of every bench document."""
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = next(
            (
                line.partition(":")[2].strip()
                for line in cpuinfo.read_text().splitlines()
                if line.startswith("model name")
            ),
            "",
        )
    return {
        "cores": os.cpu_count(),
        "cpu": model or platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "redis": redis_version,
        "load_before": round(os.getloadavg()[0], 2),
    }


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, look = [], [pid]
    while look:
        current = look.pop()
        found.append(current)
        look += children.get(current, [])
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its living descendants so far."""
    total = 0
    for member in family(pid):
        try:
            fields = (Path("/proc") / str(member) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def pss_mib(pid: int) -> float:
    """Memory of the whole family, each shared page divided by the number of processes that share it."""
    total_kib = 0
    for member in family(pid):
        try:
            lines = (Path("/proc") / str(member) / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total_kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total_kib / 1024


def rss_mib(pid: int) -> float:
    """Resident memory of the largest process of the family."""
    sizes = [0.0]
    for member in family(pid):
        try:
            sizes.append(int((Path("/proc") / str(member) / "statm").read_text().split()[1]) * _PAGE / 2**20)
        except OSError:
            continue
    return max(sizes)
