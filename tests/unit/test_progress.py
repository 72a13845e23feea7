"""When it is told that no handler ends, and what of a process is taken back."""

from __future__ import annotations

import os
import sys

from usher.common.runtime.process_state import ProcessState
from usher.consumer.policy.progress import LONG_S, HandlerProgress


def _told(progress: HandlerProgress, ended: int, running: int, start_s: int, seconds: int) -> list[int]:
    """The seconds at which it was told, with a look every second."""
    told = []
    for now_s in range(start_s, start_s + seconds):
        progress.seen(ended, running, float(now_s))
        if progress.is_to_be_told():
            told.append(now_s - start_s)
    return told


def test_handlers_that_stand_still_are_told_after_a_minute_and_then_at_twice_the_time() -> None:
    progress = HandlerProgress(0.0)
    assert _told(progress, 0, 3, 0, 300) == [60, 120, 240]
    assert progress.still_s == 299
    progress.seen(1, 3, 300.0)
    assert (progress.still_s, progress.is_unusual) == (0.0, False)


def test_a_consumer_without_work_is_not_said_to_stand_still() -> None:
    progress = HandlerProgress(0.0)
    assert _told(progress, 7, 0, 0, 1000) == []
    progress.seen(7, 1, 1000.0)
    assert progress.still_s <= 1.0


def test_what_is_usual_here_is_told_once_and_then_no_more() -> None:
    progress = HandlerProgress(0.0)
    assert _told(progress, 0, 1, 0, 100) == [int(LONG_S)]
    assert _told(progress, 1, 1, 100, 250) == []
    assert _told(progress, 2, 1, 350, 1000) == [747], "three times as long as the longest"


def test_what_our_threads_cannot_live_with_is_taken_back_and_told_once() -> None:
    depth, switch_s, stderr = sys.getrecursionlimit(), sys.getswitchinterval(), os.dup(2)
    try:
        state = ProcessState()
        assert state.take_back() == []
        sys.setrecursionlimit(depth - 1)
        sys.setswitchinterval(5.0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        told = state.take_back()
        assert [what.split()[1] for what in told] == ["recursion", "switch", "was"], told
        assert (sys.getrecursionlimit(), sys.getswitchinterval()) == (depth, switch_s)
        assert state.take_back() == []
        sys.setrecursionlimit(depth + 1000)
        sys.setswitchinterval(0.0001)
        assert state.take_back() == [], "more is theirs to set"
    finally:
        os.dup2(stderr, 2)
        sys.setrecursionlimit(depth)
        sys.setswitchinterval(switch_s)
