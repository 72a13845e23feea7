"""A process of the yardsticks: a bare consumer, without order, leases or fences. Plain redis-py (with hiredis) in its
usual form.

``python bare.py URL STREAM GROUP NAME`` connects, prints "ready", waits for a line, reads and acknowledges until the
stream is empty, prints how many (``usher bench throughput``). With a FILE it reads until a signal ends it, and that
gets the waits in ns, from a message's due time to its reading (``usher bench latency``).
"""

from __future__ import annotations

import array
import signal
import sys
import time
from pathlib import Path
from typing import Any

import redis

_COUNT, _BLOCK_MS = 500, 1000


def main(url: str, stream: str, group: str, name: str, file: str = "") -> None:
    asked: list[int] = []
    if file:  # an exception could come within a destructor, and be lost
        signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    client = redis.Redis.from_url(url, protocol=2)
    client.ping()
    print("ready", flush=True)
    read = ("XREADGROUP", "GROUP", group, name, "COUNT", _COUNT, *(("BLOCK", _BLOCK_MS) if file else ()), "STREAMS")
    if not file:
        sys.stdin.readline()
    handled, waits = 0, array.array("q")
    try:
        while not asked and ((found := _page(client, *read, stream, ">")) or file):
            if file:
                waits.extend(time.time_ns() - int(fields[b"due_ns"]) for _, fields in found)
            if found:
                client.execute_command("XACK", stream, group, *(entry_id for entry_id, _ in found))
                handled += len(found)
        print(handled, flush=True)
    finally:
        if file:
            with Path(file).open("wb") as out:
                waits.tofile(out)


def _page(client: redis.Redis, *command: str | int) -> list[Any]:
    found: Any = client.execute_command(*command)
    return found[0][1] if found else []


if __name__ == "__main__":
    main(*sys.argv[1:])
