"""A child that a callback of the router forks ends with it: it reads nothing on its parent's connection."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

import pytest

from usher import Link, StreamRouter


def _returns() -> None: ...


def _raises() -> None:
    raise ValueError("in the child")


@pytest.mark.parametrize(("end", "code"), [(_returns, 0), (_raises, 1), (lambda: sys.exit(3), 3)])
def test_it_ends_with_the_callback(redis_url: str, link: Link, end: Callable[[], None], code: int) -> None:
    ended: list[int] = []
    all_there = threading.Event()

    def callback(_subscription: object, entries: list[object]) -> None:
        for _ in entries:
            if (pid := os.fork()) == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(2)  # who goes on instead
                end()
                return
            ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if len(ended) == 2:
            all_there.set()

    router = StreamRouter(redis_url)
    router.start()
    try:
        router.subscribe("s", on_entries=callback)  # type: ignore[arg-type]
        for entry_id in ("1-1", "2-1"):
            link.call("XADD", "s", entry_id, "f", "v")
        assert all_there.wait(20)
    finally:
        router.stop()
    assert ended == [code] * 2
