"""The crash report: it writes to Redis what the former process of our name left in its journal, before we take the
name, while none of its messages has run again.

It is not part of the registration: that goes over HTTP to any master, in a body of a few hundred bytes, and a master
has no use for it. We reach Redis ourselves, and hold the name lock, the proof that the former process has ended.
"""

from __future__ import annotations

import logging
from typing import Any

from usher.common.base.log import event
from usher.common.protocol.attempts import Attempts
from usher.common.protocol.keys import Keys
from usher.common.protocol.run_log import CRASHED, encode
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.scripts import ScriptRunner
from usher.consumer.lifecycle.journal import Former
from usher.consumer.policy.acks import Finished
from usher.consumer.policy.quarantine import Left, suspects

log = logging.getLogger(__name__)

#: Longest time that the leader may take to recover a dead incarnation and still know that its journal was reported.
_NOTED_MS = 3_600_000


def report_crash(url: str, keys: Keys, former: Former, run_log_length: int) -> None:
    """Report the starts that a former process left. A repeat charges no message twice, but the run log has it twice.
    Raises what ``Link.call`` raises."""
    link = Link(url, f"consumer:{former.incarnation}:last")
    try:
        noted = note_crash(ScriptRunner(link), keys, former, run_log_length)
    except CommandRefused as refused:  # Redis will not accept it later either, and we have work to do
        event(log, "attempts_not_recorded", level=logging.ERROR, messages=len(former.left), why=str(refused))
        noted = []
    finally:
        link.close()
    for left, attempts in noted:
        # But not sure: it may have returned a moment before.
        is_likely = left.is_blamed or (len(former.left) == 1 and not former.is_from_outside)
        facts: dict[str, Any] = {
            "ticket": left.ticket.decode(),
            "id": left.stream_id.decode(),
            "fence": left.fence,
            "attempt": attempts.starts,
            "failures": attempts.failures,
            "crashes": attempts.crashes,
            "losses": attempts.losses,
        }
        if is_likely:
            event(log, "handler_crashed", level=logging.ERROR, **facts)
        else:
            event(log, "handler_interrupted", level=logging.WARNING, **facts)


def note_crash(scripts: ScriptRunner, keys: Keys, former: Former, run_log_length: int) -> list[tuple[Left, Attempts]]:
    """Call the script; return the attempts that Redis did not know yet."""
    suspected = suspects(former.left, former.is_explained, former.is_from_outside)
    cut_off = former.left if run_log_length else []
    record = encode(former.incarnation, map(_run_of, cut_off), [CRASHED] * len(cut_off)) if cut_off else b""
    args: list[bytes | str | int] = [keys.group, former.incarnation, record, run_log_length, _NOTED_MS]
    for left, attempts in suspected:
        args += (left.stream_id, attempts.starts, attempts.failures, attempts.crashes, attempts.losses)
    reply = scripts.run("note_crash", (keys.stream, keys.attempts, keys.runs, keys.noted(former.incarnation)), args)
    noted = set(reply[1])
    return [(left, attempts) for left, attempts in suspected if left.stream_id in noted]


def _run_of(left: Left) -> Finished:
    return Finished(left.ticket, left.stream_id, left.fence, left.before.starts, left.start_us, 0)
