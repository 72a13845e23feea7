"""A process of the yardstick of ``usher bench latency``: a bare consumer, without order, leases or fences.

``python bare.py URL STREAM NAME FILE``: connects, prints "ready", reads with XREADGROUP BLOCK and acknowledges each
batch until a signal ends it. FILE gets the waits in ns, from a message's due time to its reading. Plain redis-py (with
hiredis) in its usual form.
"""

from __future__ import annotations

import array
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import redis

GROUP = "bare"
_COUNT, _BLOCK_MS = 500, 1000


def main(url: str, stream: str, name: str, file: str) -> None:
    signal.signal(signal.SIGTERM, _end)
    client = redis.Redis.from_url(url, protocol=2)
    client.ping()
    waits = array.array("q")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    try:
        while True:
            found: Any = client.execute_command(
                "XREADGROUP", "GROUP", GROUP, name, "COUNT", _COUNT, "BLOCK", _BLOCK_MS, "STREAMS", stream, ">"
            )
            for _, fields in found[0][1] if found else ():
                waits.append(time.time_ns() - int(fields[b"due_ns"]))
            if found:
                client.execute_command("XACK", stream, GROUP, *(entry_id for entry_id, _ in found[0][1]))
    finally:
        with Path(file).open("wb") as out:
            waits.tofile(out)


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
