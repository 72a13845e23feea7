"""Watchdog: it ends the process when a handler runs past its deadline, instead of letting a second delivery run beside
the hanging first one.

A thread cannot be ended from outside. So the message becomes a suspect, everything that finished is acknowledged, and
the process leaves; its successor, a new incarnation with the same name lock, gets the tickets back at once. The journal
names the message to blame, should Redis not hear of it; whatever else ran was only in the way. The next time it runs in
a child process, which can be ended by itself. It is not charged before that: its handler may yet return, now.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from usher.common.base.errors import OwnershipLost, RedisTrouble
from usher.common.base.log import event
from usher.common.protocol.run_log import CRASHED, encode
from usher.common.redis.client import CommandRefused, Link
from usher.common.runtime.service import Service
from usher.consumer.handlers.message import Message
from usher.consumer.lifecycle.journal import Journal
from usher.consumer.lifecycle.owner_scripts import OwnerScripts
from usher.consumer.policy.acks import Finished

log = logging.getLogger(__name__)

#: Finished messages get this long to be acknowledged before the process leaves.
_FLUSH_S = 0.5
_POLL_S = 0.01


class Watchdog(Service):
    """The service that looks for hanging handlers. ``running`` gives the messages whose handlers have started and not
    ended."""

    name = "watch"

    def __init__(
        self,
        link: Link,
        steps: OwnerScripts,
        running: Callable[[], Iterable[Message]],
        is_flushed: Callable[[], bool],
        journal: Journal,
        limit_s: float,
        run_log_length: int,
        on_hung: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._link = link
        self._steps = steps
        self._running = running
        self._is_flushed = is_flushed
        self._journal = journal
        self._run_log_length = run_log_length
        self._every_s = min(1.0, max(0.02, limit_s / 10))
        self._on_hung = on_hung

    def run_once(self) -> float:
        now = time.monotonic()
        hung = [message for message in self._running() if message.deadline is not None and message.deadline < now]
        if hung:
            self._end(hung)
        return self._every_s

    def _end(self, hung: list[Message]) -> None:
        # First: a handler that raises after all is counted by the executor.
        charged = {message.stream_id: message.known._replace(crashes=message.crashes + 1) for message in hung}
        self._journal.blame(hung)
        for message in hung:
            event(log, "handler_stuck", level=logging.ERROR, **message.facts())
        runs = [
            Finished(message.ticket, message.stream_id, message.fence, message.attempt, message.start_us, 0)
            for message in hung
        ]
        record = encode(self._steps.incarnation, runs, [CRASHED] * len(runs)) if self._run_log_length else b""
        try:
            self._steps.charge(charged, record, self._run_log_length)
            for message in hung:
                self._journal.forget(message)
        except (OwnershipLost, RedisTrouble, CommandRefused) as trouble:  # the process leaves whatever Redis answers
            event(log, "attempt_not_recorded", level=logging.WARNING, why=str(trouble))
        until_s = time.monotonic() + _FLUSH_S
        while not self._is_flushed() and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        self._on_hung(f"{len(hung)} handler(s) ran past USHER_HANDLER_SECONDS")

    def on_end(self) -> None:
        self._link.close()
