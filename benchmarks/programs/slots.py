"""A process of the yardstick of ``python -m benchmarks scale``: slots that wait like the handler, again and again, with
nothing in between.

``python slots.py KIND SLOTS SECONDS WAIT_S``: prints "ready", waits for a line, and prints how many waits ended per
second. Plain threads or asyncio in their usual form.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time


def on_threads(slots: int, seconds: float, wait_s: float) -> int:
    """Return the number of waits that ended. A slot is a thread."""
    ended = [0] * slots
    until_s = time.monotonic() + seconds

    def run(slot: int) -> None:
        while time.monotonic() < until_s:
            time.sleep(wait_s)
            ended[slot] += 1

    threads = [threading.Thread(target=run, args=(slot,)) for slot in range(slots)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(ended)


async def on_a_loop(slots: int, seconds: float, wait_s: float) -> int:
    """Return the number of waits that ended. A slot is a task."""
    until_s = time.monotonic() + seconds

    async def run() -> int:
        ended = 0
        while time.monotonic() < until_s:
            await asyncio.sleep(wait_s)
            ended += 1
        return ended

    return sum(await asyncio.gather(*(run() for _ in range(slots))))


def main(kind: str, slots: int, seconds: float, wait_s: float) -> None:
    _write_slots_result("ready")
    sys.stdin.readline()
    began = time.monotonic()
    ended = on_threads(slots, seconds, wait_s) if kind == "wait" else asyncio.run(on_a_loop(slots, seconds, wait_s))
    _write_slots_result(str(ended / (time.monotonic() - began)))


def _write_slots_result(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
