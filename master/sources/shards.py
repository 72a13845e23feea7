"""Shards: decide which master gathers which shard of the sources (lua/sources/share.lua).

Every running master has an even part, whether it leads or stands by; where sources are merged by id, one has all. The
shards of a master that dies are taken over within the lease; one that stops gives them up at once. Shares only spread
the work: a call for a shard that is no longer ours moves nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from usher.common.base.errors import RedisTrouble, ReplyUnknown
from usher.common.base.log import event
from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SHARDS
from usher.common.redis.client import Link
from usher.common.redis.scripts import ScriptRunner
from usher.common.runtime.service import Service
from usher.master.settings import LONGEST_LEASE_S

log = logging.getLogger(__name__)

_LONGEST_BEAT_S = 1.0
#: Seconds between beats while we are due more shards than we have.
_SHORT_BEAT_S = 0.1


class ShardAssigner(Service):
    """Service that reports that this master runs, and tells ``on_shards`` which shards it holds."""

    name = "share"

    def __init__(
        self,
        link: Link,
        keys: Keys,
        holder: str,
        says: Callable[[], str],
        lease_ms: int,
        on_shards: Callable[[frozenset[int]], None],
    ) -> None:
        super().__init__()
        self._link = link
        self._scripts = ScriptRunner(link)
        self._keys = keys
        self._holder = holder
        self._says = says
        self._lease_ms = lease_ms
        self._on_shards = on_shards
        self._held: frozenset[int] = frozenset()

    def run_once(self) -> float:
        is_due, shards = self._share(self._lease_ms)
        if shards != self._held:
            event(log, "shards_assigned", count=len(shards), before=len(self._held))
            self._held = shards
        self._on_shards(shards)
        beat_s = min(_LONGEST_BEAT_S, self._lease_ms / 3000)
        return min(_SHORT_BEAT_S, beat_s) if is_due else beat_s

    def on_end(self) -> None:
        try:
            self._on_shards(frozenset())
            try:
                self._share(0)
            except ReplyUnknown:  # a connection that broke while it was idle is noticed only now
                self._share(0)
        except RedisTrouble as trouble:  # the others find out when the lease ends
            event(log, "shards_not_released", level=logging.WARNING, problem=str(trouble))
        finally:
            self._link.close()

    def _share(self, lease_ms: int) -> tuple[bool, frozenset[int]]:
        is_due, *shards = self._scripts.run(
            "share", (self._keys.shares,), (self._holder, lease_ms, SHARDS, self._says(), 1000 * LONGEST_LEASE_S)
        )
        return bool(is_due), frozenset(map(int, shards))
