"""Measure how fast consumers that join during a backlog take their share of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from benchmarks.rig.system import Rig

_HANDLER = "benchmarks.programs.handlers:taking_its_time"
_PATIENCE_S = 600.0


def rebalance(
    messages: int,
    handler_s: float,
    slow_s: float,
    slots: int,
    joining: int,
    after_s: float,
    durable: bool,
    environ: Mapping[str, str],
) -> dict[str, Any]:
    """Run once: one consumer and a backlog of ``messages``, one per ticket; ``joining`` more consumers after
    ``after_s``. The yardstick is the time that all slots together need for what was left when they had registered.

    ``slow_s``: seconds of every tenth message; 0: as the others.
    """
    with Rig(durable, environ) as rig:
        seconds = [slow_s if slow_s and number % 10 == 3 else handler_s for number in range(messages)]
        last_id = b""
        for number, one in enumerate(seconds):
            last_id = rig.link.call("XADD", rig.keys.stream, "*", "ticket_id", f"T{number}", "seconds", str(one))
        rig.stream.create_group(b"0-0")
        settings = {"USHER_CONCURRENCY": str(slots)}
        rig.start_programs(1, _HANDLER, settings)
        rig.release()
        rig.wait_until_begun()
        time.sleep(after_s)
        rig.begin_consumers(joining, _HANDLER, settings, first=2)
        rig.wait_until_registered()
        joined_s, left = time.monotonic(), _unfinished(rig)
        rig.wait_until_done(last_id, _PATIENCE_S)
        took_s = time.monotonic() - joined_s
        # What runs longest cannot end earlier, however many slots there are.
        ideal_s = max(
            sum(seconds[messages - left :]) / (slots * (1 + joining)), max(seconds[messages - left :] or [0.0])
        )
        return {
            "messages": messages,
            "handler_seconds": handler_s,
            "slow_seconds": slow_s,
            "slots": slots,
            "joining": joining,
            "left": left,
            "seconds": round(took_s, 2),
            "ideal_seconds": round(ideal_s, 2),
            "ratio": round(took_s / ideal_s, 3) if ideal_s else 0.0,
            "appendonly": durable,
            "cpu_seconds": {who: round(spent, 2) for who, spent in rig.cpu().items()},
            "rss_mib": rig.memory(),
            "redis": rig.redis_version(),
        }


def _unfinished(rig: Rig) -> int:
    facts = rig.stream.group_facts()
    return int(facts[b"lag"]) + int(facts[b"pending"])
