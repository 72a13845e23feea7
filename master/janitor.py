"""Janitor: finds what nobody looked for. The idle-message sweep (XAUTOCLAIM) and the reaping of dead incarnations.

It has a thread and a connection of its own; its steps carry the leader's epoch, and what it brings to ``master`` goes to the
dispatcher's mailbox.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from common.errors import Fenced, ReplyUnknown
from common.keys import HALTED, MASTER, Keys
from common.log import event
from common.redis_client import Link
from common.registration import name_of
from common.scripts import ScriptRunner
from common.service import Service
from common.streams import TicketStream
from master.elector import Lead
from master.leader_steps import Found, LeaderSteps
from master.roster import read_roster

log = logging.getLogger(__name__)

#: COUNT of XAUTOCLAIM; it looks at ten times as many entries per call.
_COUNT = 100
#: Calls per turn: 100,000 pending entries are looked through in ten turns.
_CALLS_PER_TURN = 10


class Janitor(Service):
    """Sweeps and reaps while this master leads."""

    name = "sweep"

    def __init__(
        self, link: Link, keys: Keys, lead: Lead, ticket_field: str, min_idle_ms: int, every_s: float, tell: Callable[[int, list[Found]], None]
    ) -> None:
        super().__init__()
        self._link = link
        self._scripts = ScriptRunner(link)
        self._stream = TicketStream(link, keys)
        self._keys = keys
        self._lead = lead
        self._ticket_field = ticket_field
        self._min_idle_ms = min_idle_ms
        self._every_s = every_s
        self._tell = tell
        self._cursor = b"0-0"
        self.stalls_after_s = max(10.0, 4 * every_s)
        self.swept = 0
        self.reaped = 0

    def run_once(self) -> float:
        epoch = self._lead.epoch
        if epoch is not None:
            steps = LeaderSteps(self._scripts, self._keys, epoch, self._ticket_field)
            try:
                self._sweep(steps)
                self._reap(steps)
            except Fenced:
                self._lead.lost(epoch)
            except ReplyUnknown:
                self._lead.doubt(epoch)  # strays may be under `master` that the dispatcher does not know
                raise
        return self._every_s

    def _sweep(self, steps: LeaderSteps) -> None:
        known = list(read_roster(self._link, self._keys))
        for _ in range(_CALLS_PER_TURN):
            swept = steps.sweep(known, self._min_idle_ms, self._cursor, _COUNT)
            self._cursor = swept.cursor
            if swept.strays:
                self.swept += len(swept.strays)
                former = sorted({owner.decode(errors="replace") for _, owner in swept.strays})
                event(log, "strays_found", level=logging.WARNING, count=len(swept.strays), former=",".join(former))
                self._tell(steps.epoch, [found for found, _ in swept.strays])
            if swept.gone:
                event(log, "bodies_gone", level=logging.WARNING, count=len(swept.gone), first=swept.gone[0])
            if swept.cursor == b"0-0":
                return

    def _reap(self, steps: LeaderSteps) -> None:
        """Forget dead incarnations that have nothing pending. Names that are no incarnation of ours are left to their owners."""
        members = read_roster(self._link, self._keys)
        for name, pending in self._stream.group_consumers():
            incarnation = name.decode(errors="replace")
            member = members.get(incarnation)
            if pending or name in (MASTER, HALTED) or ":" not in incarnation or (member is not None and member.alive):
                continue
            stored = member.registration.dump() if member is not None else b""
            if steps.reap(incarnation, name_of(incarnation), stored):
                self.reaped += 1
                event(log, "consumer_reaped", consumer=incarnation)

    def on_end(self) -> None:
        self._link.close()
