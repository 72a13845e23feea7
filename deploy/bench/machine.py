"""Describe the machine behind a figure, and measure the cost of processes."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil


def facts(redis_version: str) -> dict[str, Any]:
    """Describe the machine, for the ``machine`` object of every bench document."""
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


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants, of which any may end meanwhile; none where it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its living descendants so far, in seconds."""
    return sum(_of_each(pid, lambda member: sum(member.cpu_times()[:2])))


def pss_mib(pid: int) -> float:
    """Return the memory of the whole family in MiB, each shared page divided by the number of processes that share
    it."""
    return sum(_of_each(pid, lambda member: member.memory_full_info().pss)) / 2**20


def rss_mib(pid: int) -> float:
    """Return the resident memory of the largest process of the family in MiB."""
    return max(_of_each(pid, lambda member: member.memory_info().rss), default=0) / 2**20


def _of_each(pid: int, read: Callable[[psutil.Process], float]) -> Iterator[float]:
    """Yield what is read of each process of the family that lives still."""
    for member in family(pid):
        with contextlib.suppress(psutil.Error):
            yield read(member)
