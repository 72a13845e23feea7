"""Drain: leave so that nothing has to be delivered again.

The order matters. First Redis refuses further hand-overs to us; only operators' orders can come into the inbox then,
which is read until the end, and the first read brings all hand-overs. Handlers that run may finish; finished messages
are acknowledged; every quiet ticket is given back whole, with the time at which it is due, if it waits. What the leader
recalls now is given back anyway.
Messages that still run at the end of the grace time are not touched: the lease ends, and the leader takes them back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from usher.common.base.clock import now_s
from usher.common.base.errors import OwnershipLost, RedisTrouble, ServerChanged
from usher.common.base.log import event
from usher.common.redis.client import CommandRefused
from usher.consumer.execution.acker import Acker
from usher.consumer.execution.inbox_reader import InboxReader
from usher.consumer.execution.lanes import Lanes
from usher.consumer.lifecycle.owner_scripts import GiveBack, OwnerScripts

log = logging.getLogger(__name__)

_LOOK_S = 0.02
#: Grace time at the least, in seconds: to refuse hand-overs and to give quiet tickets back.
_LEAST_S = 0.5


@dataclass(frozen=True)
class Drained:
    """The result of a drain. ``clean``: nothing of this incarnation is left, and it has deregistered. ``given_back``:
    tickets. ``running``: lanes that still run."""

    clean: bool
    given_back: int
    running: int


class Drain:
    """A drain, used once, by one thread, with a connection of its own behind ``steps``."""

    def __init__(
        self,
        steps: OwnerScripts,
        lanes: Lanes,
        reader: InboxReader,
        acker: Acker,
        lease_ms: int,
        deregister: Callable[[], bool] | None = None,
    ) -> None:
        self._steps = steps
        self._deregister = deregister or steps.deregister
        self._is_marked = self._reader_ended = self._is_read = False
        self._given_back = 0
        self._lanes = lanes
        self._reader = reader
        self._acker = acker
        self._lease_ms = lease_ms

    def run(self, grace_s: float, say_goodbye: Callable[[], None]) -> Drained:
        """Drain for up to ``grace_s`` seconds, then tell a master. Never raises: the end of the lease settles what
        cannot be done here."""
        until_s = now_s() + max(grace_s, _LEAST_S)
        self._lanes.pause()
        self._acker.hurry()
        clean = False
        trouble = ""
        while not clean:
            try:
                clean = self._step()
            except RedisTrouble as problem:  # not yet: every step may be taken again
                trouble = str(problem)
            except (OwnershipLost, ServerChanged, CommandRefused) as problem:
                trouble = str(problem)
                break
            if clean or now_s() >= until_s:
                break
            time.sleep(_LOOK_S)
        drained = Drained(clean, self._given_back, self._lanes.running)
        facts: dict[str, Any] = {"given_back": drained.given_back, "still_running": drained.running}
        event(log, "consumer_drained", clean=clean, trouble=trouble or "none", **facts)
        say_goodbye()
        return drained

    def _step(self) -> bool:
        if not self._is_marked:
            self._steps.drain(self._lease_ms)
            self._is_marked = True
        self._read_the_rest()  # again and again: orders still come
        self._given_back += self._give_back()
        return self._is_read and not self._lanes.running and self._acker.is_flushed and self._deregister()

    def _read_the_rest(self) -> None:
        if not self._reader_ended:
            self._reader.stop()
            if not self._reader.join(_LOOK_S):
                raise RedisTrouble("the reader has not ended yet")
            # ``stop`` broke its connection, which a thread that was not waiting on it has not noticed.
            self._reader.close()
            self._reader_ended = True
        self._reader.read_rest()
        self._is_read = True

    def _give_back(self) -> int:
        with self._lanes.lock:
            quiet = self._lanes.board.quiet()
        # In this order: a ticket that became quiet by a failure is given back only when Redis knows of the failure, or
        # its next owner would count one attempt less.
        if not quiet or not self._acker.is_settled:
            return 0
        answers = self._steps.give_back(GiveBack(ticket, *of_it) for ticket, of_it in quiet.items())
        given = [ticket for ticket, is_given in zip(quiet, answers, strict=False) if is_given]
        with self._lanes.lock:
            self._lanes.board.drop_quiet(given)
        return len(given)
