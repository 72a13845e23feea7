"""Intake over many ticket streams, put together: what a master runs besides when USHER_TICKET_STREAM names several, or a pattern.

Each source has the same group as the work stream; masters share the sources (``sharing``), hear of news (``source_watch``), and move entries
(``gatherer``) to the end of the work stream, which is the ticket stream for all that follows: one leader, one board, and consumers that read
one inbox and one stream with one batched read, woken by Redis, whether there is one source or a hundred thousand. The leader cuts off the
work stream what is done; producers' streams are left to `usher trim` and their owners.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from common.keys import Keys
from common.redis_client import Link
from common.router.push_link import PushLink
from common.service import Service
from common.sources import Sources
from master.gatherer import Gatherer, GatherPlan
from master.settings import MasterSettings
from master.sharing import Sharer
from master.source_ears import PollEar, PushEar
from master.source_watch import Discovery, SourceWatch

_TIMEOUT_S = 5.0


def gathering_services(settings: MasterSettings, sources: Sources, keys: Keys, url: str, make_link: Callable[[str], Link]) -> list[Service]:
    """The services of gathering, in the order of their start."""
    holder = uuid.uuid4().hex[:12]
    plan = GatherPlan(settings.ticket_field, settings.ticket_scope, settings.batch_size)
    gatherer = Gatherer(make_link("gather"), keys, holder, sources, plan)
    says = f"{settings.advertise_url or settings.bind} {settings.ticket_stream}"
    lease_ms = int(settings.leader_lease_seconds * 1000)
    sharer = Sharer(make_link("share"), keys, holder, says, lease_ms, gatherer.hold)
    discovery = Discovery(make_link("discover"), sources, gatherer, settings.discover_seconds)
    push = PushEar(PushLink(url, "master:watch", _TIMEOUT_S), sources.prefixes())
    watch = SourceWatch(push, lambda: PollEar(make_link("watch"), gatherer.mine), sources, gatherer, discovery.scan_now)
    return [gatherer, watch, *([discovery] if sources.patterns else []), sharer]
