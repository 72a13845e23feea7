"""The state of one ticket in this consumer, for masters that explain it (``GET /api/tickets/{id}``), and what this
process is and runs (``GET /api/running``)."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from usher.common.base.clock import now_s, wall_ms
from usher.consumer.execution.lanes import Lanes
from usher.consumer.lifecycle.journal import Journal

#: Most queued messages that an answer names.
_MOST = 200


def describe_ticket(
    ticket: bytes, incarnation: str, journal: Journal, lanes: Lanes, max_attempts: int
) -> dict[str, Any]:
    """Return the state of ``ticket`` for JSON. ``entries``: messages that run (``running``), wait for the next attempt
    (``waiting``), are queued, or wait for a child process (``apart``), in that order; one that runs in a child process
    says so. A message that has ended and is not acknowledged yet is in none of them. It is read in passing: nothing is
    kept for this."""
    now_ms = wall_ms()
    running = journal.running(ticket)
    with lanes.locked() as board:
        queued, due_s, is_apart = board.look(ticket)
    entries = [
        _entry(left.stream_id, "running", left.before.starts, started_ms=left.start_us // 1000) | {"apart": is_apart}
        for left in running
    ]
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


def describe_process(incarnation: str, handler: str, version: str, journal: Journal) -> dict[str, Any]:
    """Return what this process is, and the messages whose handlers run, the longest first, for JSON."""
    running = sorted(journal.running(), key=lambda left: left.start_us)
    return {
        "incarnation": incarnation,
        "time_ms": wall_ms(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "version": version,
        "handler": handler,
        "memory_bytes": _resident_bytes(),
        "running": [
            {
                "ticket_id": left.ticket.decode(),
                "id": left.stream_id.decode(),
                "attempt": left.before.starts,
                "started_ms": left.start_us // 1000,
            }
            for left in running[:_MOST]
        ],
        "runs": len(running),
    }


def _resident_bytes() -> int | None:
    """Return the memory of this process that is in use; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _entry(entry_id: bytes, state: str, attempt: int, started_ms: int = 0, due_ms: int = 0) -> dict[str, Any]:
    return {
        "id": entry_id.decode(),
        "state": state,
        "attempt": attempt,
        "started_ms": started_ms or None,
        "due_ms": due_ms or None,
    }
