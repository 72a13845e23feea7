"""Change watch: learns from the stream ``changed`` what others have changed.

A consumer that halts its ticket, and an operator who redrives or drops a dead letter, write the ticket's name there; so
do changes of rules and registrations of consumers. ``ChangeWatch`` waits with a plain XREAD (nothing is consumed) and
posts the names to the dispatcher, which reads their records in its next turn. So the leader knows after one round trip;
if a name gets lost, after limits.RECONCILE_S.
"""

from __future__ import annotations

from collections.abc import Callable

from usher.common.protocol.stream_id import ZERO
from usher.common.redis.client import Link
from usher.common.redis.replies import read_inbox_command
from usher.common.runtime.service import Service
from usher.master.dispatch.events import ChangedElsewhere

#: Names read at a time.
_NAMES = 1000


class ChangeWatch(Service):
    """Service that waits for the names of tickets whose records others have changed, and for word of changed rules and
    of consumers that registered with another master."""

    name = "changes"
    _BLOCK_MS = 2000

    def __init__(
        self,
        link: Link,
        changed_key: str,
        tell: Callable[[ChangedElsewhere], object],
        on_registered: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._link = link
        self._key = changed_key
        self._tell = tell
        self._on_registered = on_registered
        # Start with old names: reading a record once more costs next to nothing, missing a name costs time.
        self._after = ZERO

    def run_once(self) -> float:
        self.look(self._BLOCK_MS)
        return 0.0

    def look(self, block_ms: int | None) -> None:
        """Post what has changed since the last look. ``block_ms`` is how long to wait for it; None does not wait."""
        command = read_inbox_command(self._key, self._after, block_ms, _NAMES)
        reply = self._link.call(*command, block_s=(block_ms or 0) / 1000)
        if reply:
            entries = reply[0][1]
            tickets = frozenset(fields[1] for _, fields in entries if fields[0] == b"ticket")
            self._tell(ChangedElsewhere(tickets, any(fields[0] == b"rules" for _, fields in entries)))
            if any(fields[0] == b"consumer" for _, fields in entries):
                self._on_registered()
            self._after = entries[-1][0]

    def interrupt(self) -> None:
        self._link.interrupt()

    def on_end(self) -> None:
        self._link.close()
