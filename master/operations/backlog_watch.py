"""Backlog watch: tells producers that ask for it "not now" while more waits than the limits allow
(USHER_BACKLOG_LIMIT, USHER_TENANT_BACKLOG_LIMIT).

The sign is one key, ``LogKeys.behind``, which any client may look at. It lasts for a few seconds: where no master leads
any more it goes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from usher.common.base.clock import now_s
from usher.common.base.errors import NotNow
from usher.common.base.log import event
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.redis.client import Link
from usher.common.redis.scripts import ScriptRunner
from usher.common.runtime.service import Service
from usher.master.leader.elector import Lead
from usher.master.policy.backlog import BacklogLimits

log = logging.getLogger(__name__)

#: Seconds between two looks, and for which a sign lasts.
_EVERY_S, _LASTS_S = 1.0, 10.0
#: Tenants that a sign names at most, those with most first.
_MOST_TENANTS = 1000
#: Lines of the log about one look.
_TOLD = 10


class BacklogWatch(Service):
    """Service that sets the sign while this master leads. ``waiting``: how many messages are unfinished;
    ``by_tenant``: of those that the leader has read."""

    name = "backlog"

    def __init__(
        self,
        link: Link,
        keys: Keys,
        lead: Lead,
        limits: BacklogLimits,
        waiting: Callable[[], int],
        by_tenant: Callable[[], Mapping[bytes, int]],
    ) -> None:
        super().__init__()
        self._link = link
        self._scripts = ScriptRunner(link)
        self._keys, self._key = keys, LogKeys(keys.stream).behind
        self._lead = lead
        self._limits = limits
        self._waiting = waiting
        self._by_tenant = by_tenant
        self.behind: dict[bytes, int] = {}
        self._said_s = 0.0

    def run_once(self) -> float:
        epoch = self._lead.epoch
        if epoch is None:
            self.behind = {}
            return _EVERY_S
        tenants = self._by_tenant() if self._limits.of_tenant else {}
        found = self._limits.exceeded(self._waiting(), tenants, self.behind)
        before, self.behind = self.behind, dict(sorted(found.items(), key=lambda one: -one[1])[:_MOST_TENANTS])
        for name in sorted(self.behind.keys() - before.keys())[:_TOLD]:
            event(log, "backlog_limit_reached", level=logging.WARNING, tenant=name, waiting=found[name])
        for name in sorted(before.keys() - self.behind.keys())[:_TOLD]:
            event(log, "backlog_limit_left", level=logging.WARNING, tenant=name)
        if self.behind or before or now_s() - self._said_s > _LASTS_S:
            self._say(epoch)
        return _EVERY_S

    def _say(self, epoch: int) -> None:
        group = self._keys.group.encode()
        args = [word for name, number in self.behind.items() for word in (group + b"/" * bool(name) + name, number)]
        script_keys = (self._key, self._keys.leader)
        try:
            self._scripts.run("note_behind", script_keys, (epoch, int(_LASTS_S * 1000), group, *args))
        except NotNow as refused:  # full memory, which tells producers itself
            event(log, "backlog_not_told", level=logging.WARNING, why=str(refused))
        self._said_s = now_s()
