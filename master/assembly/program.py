"""The master, put together: the services that lead (``leader_services``), that gather
(``usher.master.sources.services``), and that face people and programs (``http_services``)."""

from __future__ import annotations

import logging

from usher.common.base.clock import now_s
from usher.common.base.log import event
from usher.common.http.serve import Liveness, url_of
from usher.common.observability.metrics import Metrics
from usher.common.runtime.service import Service, stalled
from usher.master.assembly.context import MasterContext
from usher.master.assembly.http_services import HttpServices
from usher.master.assembly.leader_services import LeaderServices
from usher.master.settings import MasterSettings
from usher.master.sources.services import SourceServices

log = logging.getLogger(__name__)

_JOIN_S = 3.0


class MasterProgram:
    """The master as usher.common.http.serve runs it: web application, start, stop."""

    def __init__(self, settings: MasterSettings, redis_url: str) -> None:
        self._settings = settings
        self._place = place = MasterContext(settings, redis_url)
        self._stopping = False
        self._services: list[Service] = []
        metrics = Metrics()
        self._leading = LeaderServices(place, metrics)
        sources = settings.sources
        self._gathering = (
            SourceServices(settings, sources, place.keys, redis_url, place.link) if sources is not None else None
        )
        self._facing = HttpServices(
            place,
            self._leading,
            metrics,
            self._services,
            lambda: self._stopping,
            lambda: self.liveness().stalled,
        )
        self._services += self._leading.services
        if self._gathering is not None:
            self._services += self._gathering.services
        self._services += self._facing.services
        self.app = self._facing.app

    def start(self, port: int, host: str) -> None:
        """Start every role; the elector last, and with it the work."""
        settings = self._settings
        url = settings.advertise_url or url_of(host, port, settings.tls_cert is not None)
        if self._gathering is not None:
            self._gathering.url = url
        self._services.append(self._leading.elector(url))
        event(log, "master_starting", url=url, stream=self._place.keys.stream, group=self._place.keys.group)
        for service in self._services:
            service.start()

    def liveness(self) -> Liveness:
        """Return how long this master may be silent, and whether its elector or dispatcher stands still; they watch the
        work of all others, and Redis gives the lead to another master without them."""
        lease_s, elector = self._settings.leader_lease_seconds, self._services[-1]
        still = stalled([self._leading.dispatcher, elector], now_s(), lease_s)
        return Liveness(max(elector.stalls_after_s, lease_s), still)

    def stop(self) -> None:
        """End the work first, then give the lead up, so that a standby takes over at once and finds nothing moving."""
        self._stopping = True
        *workers, elector = self._services
        for service in workers:
            service.stop()
        for service in workers:
            service.join(_JOIN_S)
        elector.stop()
        elector.join(_JOIN_S)
        self._facing.close()
        self._leading.close()
