"""A streamer that kills itself (SIGKILL) at one step: ``python -m tests.process.killed_streamer POINT URL REDIS
STREAM``.

The points are put around the program's own methods from outside; it has no switch for them. ``none`` streams until it
is ended.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from usher.common.outbox.store import OutboxStore
from usher.common.redis.client import Link
from usher.master.settings import StreamerSettings
from usher.master.streamer.cli import run
from usher.master.streamer.program import Streamer, StreamerProgram

#: Point -> (class, method, kill before or after it, which call of it).
POINTS: dict[str, tuple[type, str, str, int]] = {
    "before the rows are read": (OutboxStore, "batch", "before", 2),
    "after the rows are read": (OutboxStore, "batch", "after", 2),
    "before they are added": (Streamer, "emit", "before", 2),
    "after they are added": (Streamer, "emit", "after", 2),
    "before they are removed": (OutboxStore, "remove", "before", 2),
    "in the transaction that removes them": (OutboxStore, "_remove", "after", 2),
    "after they are removed": (OutboxStore, "remove", "after", 2),
    "before rows are set aside": (OutboxStore, "set_aside", "before", 1),
    "after rows are set aside": (OutboxStore, "set_aside", "after", 1),
}


def _put(cls: type, method: str, when: str, which: int) -> None:
    own: Callable[..., Any] = getattr(cls, method)
    calls = 0

    @functools.wraps(own)
    def deadly(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if when == "before" and calls == which:
            os.kill(os.getpid(), signal.SIGKILL)
        result = own(*given)
        if when == "after" and calls == which:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(cls, method, deadly)


def _answer_lost() -> None:
    """Killed between the command and its answer: the batch is in the socket, and nobody reads what Redis says."""
    own = Link._receive
    calls = 0

    def deadly(self: Link, block_s: float) -> Any:
        nonlocal calls
        if "stream" in self._name:
            calls += 1
            if calls == 4:  # the first batch: whether flags are read, EVALSHA, EVAL; the second one: EVALSHA
                os.kill(os.getpid(), signal.SIGKILL)
        return own(self, block_s)

    Link._receive = deadly  # type: ignore[method-assign]


def main(point: str, url: str, redis_url: str, stream: str) -> int:
    if point == "before the answer is read":
        _answer_lost()
    elif point != "none":
        _put(*POINTS[point])
    settings = StreamerSettings(outbox_url=url, ticket_stream=stream, redis_url=redis_url, log_level="warning")
    return run(StreamerProgram(settings, redis_url, batch_rows=10, lease_s=3.0))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
