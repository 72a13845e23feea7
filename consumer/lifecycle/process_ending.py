"""End of the process because of handlers that run in it: by the watchdog, or because an operator asked for it.

The messages become suspects, everything that finished is acknowledged, and the process leaves; its successor, a new
incarnation with the same name lock, gets the tickets back at once. The journal names the messages to blame, should
Redis not hear of it; whatever else ran was only in the way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from usher.common.base.clock import wall_ms
from usher.common.base.errors import OwnershipLost, RedisTrouble
from usher.common.base.log import ERROR, WARNING, event
from usher.common.protocol.attempts import Attempts
from usher.common.protocol.keys import Keys
from usher.common.protocol.last_error import LastError
from usher.common.protocol.last_error import encode as encode_error
from usher.common.protocol.run_log import CRASHED, encode, encode_kept
from usher.common.redis.client import CommandRefused, Link
from usher.consumer.handlers.error_trace import own_line
from usher.consumer.lifecycle.journal import Former, Journal
from usher.consumer.lifecycle.owner_scripts import OwnerScripts
from usher.consumer.policy.outcome import Finished
from usher.consumer.policy.quarantine import Left, suspects

#: Finished messages get this long to be acknowledged before the process leaves.
FLUSH_AT_END_S = 0.5
_POLL_S = 0.01


@dataclass
class ProcessEnding:
    """The way to end this process, for one thread at a time. ``leave`` gets the reason."""

    steps: OwnerScripts
    is_flushed: Callable[[], bool]
    journal: Journal
    run_log_length: int
    leave: Callable[[str], None]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def end(self, starts: Sequence[Left], why: str, error: str, stacks: Sequence[str] = ()) -> None:
        """Charge these starts, which have not ended, with an end of their process, and leave. ``error``: what people
        read of each; ``stacks``: where each of them stood."""
        self.journal.blame(starts)
        failures, now_ms = [], wall_ms()
        for one, stack in zip(starts, stacks or [""] * len(starts), strict=True):
            known = one.before
            noted = LastError(error, "", own_line(stack), known.starts, known.failures, at_ms=now_ms)
            after = known._replace(crashes=known.crashes + 1)
            failures.append(_run(one)._replace(known=after, error=encode_error(noted, stack)))
        try:
            with self._lock:
                self.steps.note_failures(failures, self.run_log_length)
            for one in starts:
                self.journal.forget(one)
        except (OwnershipLost, RedisTrouble, CommandRefused) as trouble:  # the process leaves whatever Redis answers
            event("attempt_not_recorded", level=WARNING, why=str(trouble))
        wait_until(self.is_flushed, FLUSH_AT_END_S)
        self.leave(why)


def _run(start: Left) -> Finished:
    times = start.before.starts, start.start_us, 0
    return Finished(start.ticket, start.stream_id, start.fence, *times, outcome=CRASHED)


def wait_until(is_so: Callable[[], bool], most_s: float) -> None:
    until_s = time.monotonic() + most_s
    while not is_so() and time.monotonic() < until_s:
        time.sleep(_POLL_S)


#: Longest time that the leader may take to recover a dead incarnation and still know that its journal was reported.
_NOTED_MS = 3_600_000


def report_crash(url: str, keys: Keys, former: Former, run_log_length: int) -> None:
    """Report the starts that a former process left. A repeat charges no message twice, but the run log has it twice.
    Raises what ``Link.call`` raises."""
    try:
        with Link(url, f"consumer:{former.incarnation}:last") as link:
            noted = note_crash(link, keys, former, run_log_length)
    except CommandRefused as refused:  # Redis will not accept it later either, and we have work to do
        event("attempts_not_recorded", level=ERROR, messages=len(former.left), why=str(refused))
        noted = []
    for left, attempts in noted:
        # But not sure: it may have returned a moment before.
        is_likely = left.is_blamed or (len(former.left) == 1 and not former.is_from_outside)
        facts = left.facts() | attempts._asdict()
        del facts["starts"]  # which is the attempt
        if is_likely:
            event("handler_crashed", level=ERROR, **facts)
        else:
            event("handler_interrupted", level=WARNING, **facts)


def note_crash(link: Link, keys: Keys, former: Former, run_log_length: int) -> list[tuple[Left, Attempts]]:
    suspected = suspects(former.left, former.is_explained, former.is_from_outside, former.by_itself)
    runs = [_run(one) for one in former.left]
    record = encode(former.incarnation, runs, [CRASHED] * len(runs)) if runs and run_log_length else b""
    kept = {run.stream_id: encode_kept(former.incarnation, run, CRASHED) for run in runs}
    args: list[bytes | str | int] = [keys.group, former.incarnation, record, run_log_length, _NOTED_MS]
    for left, attempts in suspected:
        args += (left.stream_id, attempts.starts, attempts.failures, attempts.crashes, attempts.losses)
        args.append(kept[left.stream_id])
    script_keys = (keys.stream, keys.attempts, keys.runs, keys.noted(former.incarnation), keys.errors, keys.failures)
    reply = link.run("note_crash", script_keys, args)
    noted = set(reply[1])
    return [(left, attempts) for left, attempts in suspected if left.stream_id in noted]
