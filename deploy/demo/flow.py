"""Send the demo's messages and follow them until the last one is handled."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from usher.common.base.errors import GroupMissing
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.common.sending.pipelined import Sender, batches
from usher.common.sending.workload import NewMessage
from usher.deploy.demo.handlers import RecordReader
from usher.deploy.demo.verdict import DemoVerdict, judge

#: Seconds without a handled message after which the run ends.
PATIENCE_S = 60.0
_POLL_S = 0.1
#: Seconds after which acknowledgements count as missing; they follow the handlers by milliseconds.
_ACKNOWLEDGED_WITHIN_S = 15.0


@dataclass
class Flow:
    """A demo run. ``progress`` gets (sent, ended executions); ``check`` is called all the time and may raise.

    ``kill_at``: after this many messages, kill -9 the process of one consumer; None: never.
    """

    link: Link
    keys: Keys
    ticket_field: str
    records: Path
    progress: Callable[[int, int], object]
    check: Callable[[], None]
    kill_at: int | None = None
    sent: list[tuple[str, str]] = field(default_factory=list)
    killed_ns: dict[int, int] = field(default_factory=dict)
    killed: str = ""

    def __post_init__(self) -> None:
        self._reader = RecordReader(self.records)

    def run(self, messages: Iterable[NewMessage]) -> DemoVerdict:
        began_ns = time.monotonic_ns()
        sender = Sender(self.link, self.keys.stream, self.ticket_field)
        for batch in batches(messages):
            ids = sender.send(batch)
            self.sent += [
                (stream_id.decode(), message.ticket_id) for stream_id, message in zip(ids, batch, strict=True)
            ]
            self._look()
        self._wait_for_handlers()
        unacknowledged = self._wait_for_acknowledgements()
        self._reader.poll()
        executions = list(self._reader.executions())
        last_ns = max((run.end_ns for run in executions if run.end_ns is not None), default=began_ns)
        return judge(
            self.sent,
            executions,
            seconds=(last_ns - began_ns) / 1e9,
            dead=self._dead_letters(),
            killed_ns=self.killed_ns,
            unacknowledged=unacknowledged,
        )

    def _look(self) -> None:
        self.check()
        self._reader.poll()
        self.progress(len(self.sent), self._reader.ended)
        if self.kill_at is not None and self._reader.ended >= self.kill_at:
            self._kill_one()

    def _wait_for_handlers(self) -> None:
        """Wait until every message was handled, or nothing happens any more."""
        moved_s, seen = time.monotonic(), -1
        while not self._all_ended() and time.monotonic() - moved_s < PATIENCE_S:
            self._look()
            if self._reader.ended != seen:
                moved_s, seen = time.monotonic(), self._reader.ended
            time.sleep(_POLL_S)
        self._look()

    def _all_ended(self) -> bool:
        if self._reader.ended < len(self.sent):
            return False
        ended = {run.stream_id for run in self._reader.executions() if run.end_ns is not None}
        return all(stream_id in ended for stream_id, _ in self.sent) or len(self.sent) <= len(ended) + len(
            self._dead_letters()
        )

    def _wait_for_acknowledgements(self) -> int:
        """Return the number of entries still pending in the group, after time for their acknowledgement; all of them if
        there is no group to ask."""
        deadline_s = time.monotonic() + _ACKNOWLEDGED_WITHIN_S
        try:
            while (
                pending := int(self.link.call("XPENDING", self.keys.stream, self.keys.group)[0])
            ) and time.monotonic() < deadline_s:
                self.check()
                time.sleep(_POLL_S)
        except GroupMissing:
            return len(self.sent)
        return pending

    def _dead_letters(self) -> dict[str, str]:
        dead = {}
        for letter_id, fields in self.link.call("XRANGE", self.keys.dead, "-", "+", "COUNT", len(self.sent) + 1):
            named = dict(zip(fields[::2], fields[1::2], strict=False))
            told = (
                named.get(b"usher-" + name, b"").decode(errors="replace") for name in (b"reason", b"error", b"owner")
            )
            dead[named.get(b"usher-id", letter_id).decode()] = " ".join(filter(None, told))
        return dead

    def _kill_one(self) -> None:
        """Kill (-9) the process that runs the handler of one consumer: the first by name that has handled a message."""
        self.kill_at = None
        pids = self._reader.pids()
        if not pids:
            return
        self.killed = min(pids)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[self.killed], signal.SIGKILL)
            self.killed_ns[pids[self.killed]] = time.monotonic_ns()
