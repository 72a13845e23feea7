"""CPU pinning: it keeps a process whose handlers wait on threads on one CPU.

Threads of one Python process take turns at its interpreter lock, so a second CPU brings them nothing, and has a cost: a
thread that wakes up there while another one holds the lock finds it taken, goes back to sleep and is woken once more.
With 64 slots that wait 10 ms, two of three messages meet this (``perf sched``). The cost is the difference of ``python
-m benchmarks scale --consumers 1 --slots 128`` with and without ``--pin-cpu``.
"""

from __future__ import annotations

import logging
import os

from usher.common.base.errors import StartRefused
from usher.common.base.log import event
from usher.consumer.policy.cpus import cpu_for

log = logging.getLogger(__name__)


def pin_to_cpu(name: str) -> int:
    """Keep this process, and all that it starts from now on, on one CPU. Return its number. Raises StartRefused where
    the system cannot do that."""
    if not hasattr(os, "sched_setaffinity"):
        raise StartRefused("USHER_PIN_CPU: this system cannot keep a process on a CPU (Linux can); leave it off")
    cpu = cpu_for(name, os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, {cpu})
    except OSError as problem:
        raise StartRefused(
            f"USHER_PIN_CPU: this process cannot be kept on CPU {cpu}: {problem}; leave it off"
        ) from problem
    event(log, "pinned_to_cpu", cpu=cpu)
    return cpu
