"""Progress watch: it tells when no handler ends for long, and takes back what handlers did to their process.

A handler that waits (for a lock, a database, the reader of its output) looks like one that works: the lease is renewed,
and nobody else may have its ticket. So it is said, in the log, in health and in the metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from usher.common.base.clock import now_s
from usher.common.base.log import event
from usher.common.runtime.process_state import ProcessState
from usher.common.runtime.service import Service
from usher.consumer.policy.progress import HandlerProgress

log = logging.getLogger(__name__)

_LOOK_S = 1.0


class ProgressWatch(Service):
    """The service that looks at the handlers from outside. ``handlers``: how many have ended so far, and how many
    run."""

    name = "progress"

    def __init__(self, handlers: Callable[[], tuple[int, int]], state: ProcessState) -> None:
        super().__init__()
        self._handlers = handlers
        self._state = state
        self._progress = HandlerProgress(now_s())

    @property
    def still_s(self) -> float:
        """Return for how long no handler has ended, while some ran."""
        return self._progress.still_s

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what health says of it."""
        if not self._progress.is_unusual:
            return ()
        return (f"no handler has ended for {self.still_s:.0f} s; {self._handlers()[1]} run",)

    def run_once(self) -> float:
        for what in self._state.take_back():
            event(log, "process_state_taken_back", level=logging.WARNING, what=what)
        ended, running = self._handlers()
        self._progress.seen(ended, running, now_s())
        if self._progress.is_to_be_told():
            way_out = "see what they wait for (py-spy dump, usher tickets explain); USHER_HANDLER_SECONDS bounds it"
            for_s = round(self.still_s)
            event(log, "handlers_stand_still", level=logging.WARNING, for_s=for_s, running=running, way_out=way_out)
        return _LOOK_S
