"""Drain: leave so that nothing has to be delivered again.

The order matters. First Redis refuses further hand-overs to us; then nothing more can come into the inbox, so what is read now is all.
Handlers that run may finish; what finished is acknowledged; every ticket that is quiet goes back whole. What still runs at the end of
the grace time is not touched: the lease ends, and the leader takes it back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.clock import now_s
from common.errors import OwnershipLost, RedisTrouble
from common.log import event
from consumer.acker import Acker
from consumer.batch_reader import BatchReader
from consumer.lane_keeper import LaneKeeper
from consumer.owner_steps import OwnerSteps

log = logging.getLogger(__name__)

_LOOK_S = 0.02


@dataclass(frozen=True)
class Drained:
    """``clean``: nothing of this incarnation is left, and it has deregistered."""

    clean: bool
    given_back: int
    running: int


class Drain:
    """One drain; used once, by one thread, with a connection of its own behind ``steps``."""

    def __init__(self, steps: OwnerSteps, keeper: LaneKeeper, reader: BatchReader, acker: Acker, lease_ms: int) -> None:
        self._steps = steps
        self._keeper = keeper
        self._reader = reader
        self._acker = acker
        self._lease_ms = lease_ms

    def run(self, grace_s: float, say_goodbye: Callable[[], None]) -> Drained:
        """Drain for up to ``grace_s`` seconds, then tell a master. Never raises: what cannot be done is left to the lease."""
        until_s = now_s() + grace_s
        self._keeper.pause()
        given_back = 0
        clean = False
        try:
            self._steps.drain(self._lease_ms)
            self._read_the_rest()
            while True:
                given_back += self._give_back()
                if not self._keeper.running and self._acker.is_flushed and self._steps.deregister():
                    clean = True
                    break
                if now_s() >= until_s:
                    break
                time.sleep(_LOOK_S)
        except (OwnershipLost, RedisTrouble) as trouble:
            event(log, "drain_cut_short", level=logging.WARNING, why=str(trouble))
        drained = Drained(clean, given_back, self._keeper.running)
        event(log, "drained", clean=drained.clean, given_back=drained.given_back, still_running=drained.running)
        say_goodbye()
        return drained

    def _read_the_rest(self) -> None:
        self._reader.stop()
        if not self._reader.join(5.0):
            raise RedisTrouble("the reader does not end")
        self._reader.close()  # ``stop`` broke its connection, and a thread that was not waiting on it has not noticed
        while self._reader.read(None):
            pass

    def _give_back(self) -> int:
        """Give back what neither runs nor has anything waiting to be acknowledged. Returns the number of tickets."""
        if not self._acker.is_flushed:
            return 0
        quiet = self._keeper.quiet()
        if not quiet:
            return 0
        # A lane may have ended a message between our two looks: Redis has its id in processing, so the ticket is not whole and stays for
        # the next look, after the acknowledgement.
        kept = set(self._steps.give_back(quiet))
        given = [ticket for ticket in quiet if ticket not in kept]
        self._keeper.drop_quiet(given)
        return len(given)
