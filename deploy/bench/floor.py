"""A process of the raw floor: the same Redis and client library without order, leases or fences.

``python floor.py URL STREAM NAME``: connects, prints "ready", waits for a line, reads and acknowledges until the stream
is empty, prints how many. Plain redis-py (with hiredis) in its usual form.
"""

from __future__ import annotations

import sys

import redis

_COUNT = 500


def main(url: str, stream: str, name: str) -> None:
    client = redis.Redis.from_url(url, protocol=2)
    client.ping()
    _write_floor_result("ready")
    sys.stdin.readline()
    handled = 0
    while found := client.execute_command(
        "XREADGROUP", "GROUP", "floor", name, "COUNT", _COUNT, "STREAMS", stream, ">"
    ):
        ids = [entry_id for entry_id, _ in found[0][1]]
        client.execute_command("XACK", stream, "floor", *ids)
        handled += len(ids)
    _write_floor_result(str(handled))


def _write_floor_result(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
