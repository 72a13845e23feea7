"""Janitor: forgets dead incarnations once nothing is pending for them, and the attempts and errors of messages that
ended without their owner. Otherwise Redis would keep a name in the group for every restart there ever was, and a field
for every such message."""

from __future__ import annotations

import logging
from collections.abc import Callable

from usher.common.base.errors import Fenced, GroupMissing
from usher.common.base.log import event
from usher.common.protocol.keys import HALTED, MASTER, Keys
from usher.common.protocol.registration import name_of
from usher.common.redis.client import Link
from usher.common.redis.replies import TicketStream
from usher.common.redis.scripts import ScriptRunner
from usher.common.runtime.service import Service
from usher.master.leader.elector import Lead
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.membership.registry import read_registry

log = logging.getLogger(__name__)

#: Attempts, or errors, looked at in one turn, roughly.
_PAGE = 500


class Janitor(Service):
    """Service that reaps while this master leads. Its step carries the epoch, and a lost reply raises no doubt: asking
    again gives the same answer."""

    name = "reap"

    def __init__(
        self,
        link: Link,
        keys: Keys,
        lead: Lead,
        every_s: float,
        in_use: Callable[[str], bool] = lambda incarnation: False,
    ) -> None:
        """Make a janitor. ``in_use``: whether the dispatcher still works with an incarnation; its registration tells a
        loss from a drain."""
        super().__init__()
        self._in_use = in_use
        self._link = link
        self._scripts = ScriptRunner(link)
        self._stream = TicketStream(link, keys)
        self._keys = keys
        self._lead = lead
        self._every_s = every_s
        self._cursor, self._noted, self._next_noted = b"0", keys.attempts, keys.errors
        self.stalls_after_s = max(10.0, 4 * every_s)

    def run_once(self) -> float:
        epoch = self._lead.epoch
        if epoch is not None:
            try:
                steps = LeaderScripts(self._scripts, self._keys, epoch, "")
                self._reap(steps)
                self._cursor, _ = steps.forget_attempts(self._noted, self._cursor, _PAGE)
                if self._cursor == b"0":
                    self._noted, self._next_noted = self._next_noted, self._noted
            except Fenced:
                self._lead.lost(epoch)
            except GroupMissing:
                pass  # the dispatcher notices and makes it again
        return self._every_s

    def _reap(self, steps: LeaderScripts) -> None:
        """Forget the incarnations that are over. Names that are no incarnation of ours are left to their owners; an
        incarnation that died before its first message is in no group."""
        members = read_registry(self._link, self._keys)
        group = {consumer.name: consumer.pending for consumer in self._stream.group_consumers()}
        names = {
            name.decode(errors="replace"): pending for name, pending in group.items() if name not in (MASTER, HALTED)
        }
        for incarnation in names.keys() | members.keys():
            member = members.get(incarnation)
            if (
                names.get(incarnation, 0)
                or ":" not in incarnation
                or (member is not None and member.alive)
                or self._in_use(incarnation)
            ):
                continue
            stored = member.registration.dump() if member is not None else b""
            if steps.reap(incarnation, name_of(incarnation), stored):
                event(log, "consumer_reaped", consumer=incarnation)

    def on_end(self) -> None:
        self._link.close()
