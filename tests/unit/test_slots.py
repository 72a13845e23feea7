"""What a consumer registers as its slots: the messages that run at once, and so the least that it is given."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from usher import batch
from usher.common.http.server.watch import WorkerEnds
from usher.common.protocol.registration import MOST_SLOTS
from usher.common.runtime.settings import load
from usher.consumer.program import ConsumerProgram
from usher.consumer.settings import ConsumerSettings
from usher.master.policy.board.work_pace import WorkPace


@pytest.mark.parametrize(("most", "slots"), [(None, 8), (1, 8), (100, 800), (10_000, MOST_SLOTS)])
def test_a_batch_handler_runs_as_many_messages_at_once_as_fit_into_its_calls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, most: int | None, slots: int
) -> None:
    def handle(messages: object) -> None: ...

    module = types.ModuleType("handlers_of_test_slots")
    module.handle = handle if most is None else batch(most=most)(handle)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    settings = load(
        ConsumerSettings,
        {
            "USHER_CONSUMER_NAME": "c1",
            "USHER_HANDLER": f"{module.__name__}:handle",
            "USHER_STATE_DIR": str(tmp_path),
        },
    )
    program = ConsumerProgram(settings, "redis://127.0.0.1:1", lambda why: None, lambda why: None, WorkerEnds())
    assert program._ask("http://127.0.0.1:1/api/health").slots == slots


def test_calls_of_many_messages_that_take_long_stay_full() -> None:
    """A call of 100 takes as long as a call of two: a window that follows the rate down would make it two."""
    calls, most, call_s = 8, 100, 2.0
    pace, now = WorkPace(calls * most, 2000, 1.0), 0.0
    pace.began(now)
    for _ in range(20):
        now += call_s
        pace.finished(min(calls * most, pace.window), now)
    assert pace.window >= calls * most
