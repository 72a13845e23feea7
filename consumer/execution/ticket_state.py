"""What a consumer does with one ticket at this moment, for masters that explain it (``GET /api/tickets/{id}``)."""

from __future__ import annotations

from typing import Any

from usher.common.base.clock import now_s, wall_ms
from usher.consumer.execution.lanes import Lanes
from usher.consumer.lifecycle.journal import Journal

#: Messages that an answer names.
_MOST = 200


def describe_ticket(
    ticket: bytes, incarnation: str, journal: Journal, lanes: Lanes, max_attempts: int
) -> dict[str, Any]:
    """``entries``: what runs (``running``), waits for its next attempt (``waiting``), is queued, or is to run apart, in
    that order. A message that has ended and is not acknowledged yet is in none of them. Read in passing: nothing is
    written down for it."""
    now_ms = wall_ms()
    running = journal.running(ticket)
    entries = [
        _entry(left.stream_id, "running", left.before.starts, started_ms=left.start_us // 1000) for left in running
    ]
    with lanes.locked() as board:
        queued, due_s, is_apart = board.look(ticket)
    names = {left.stream_id for left in running}
    first = "apart" if is_apart else "waiting" if due_s is not None else "queued"
    due_ms = now_ms + int(1000 * (due_s - now_s())) if due_s is not None else 0
    for number, message in enumerate(queued[:_MOST]):
        if message.stream_id not in names:
            is_first = number == 0 and not running
            entries.append(
                _entry(
                    message.stream_id,
                    first if is_first else "queued",
                    message.attempt,
                    due_ms=due_ms if is_first else 0,
                )
            )
    return {"incarnation": incarnation, "time_ms": now_ms, "max_attempts": max_attempts, "entries": entries}


def _entry(entry_id: bytes, state: str, attempt: int, started_ms: int = 0, due_ms: int = 0) -> dict[str, Any]:
    return {
        "id": entry_id.decode(),
        "state": state,
        "attempt": attempt,
        "started_ms": started_ms or None,
        "due_ms": due_ms or None,
    }
