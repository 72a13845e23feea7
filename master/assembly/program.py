"""The master, put together: the services that lead (``leader_services``), that gather
(``usher.master.sources.services``), and that face people and programs (``facing``)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from usher.common.base.clock import now_s
from usher.common.base.log import event
from usher.common.http.serve import Liveness, url_of
from usher.common.observability.metrics import Metrics
from usher.common.runtime.service import Health, Service, stalled
from usher.master.assembly.leader_services import LeaderServices, MasterContext
from usher.master.settings import MasterSettings

if TYPE_CHECKING:
    from flask import Flask

    from usher.master.assembly.facing import HttpServices

log = logging.getLogger(__name__)

_JOIN_S = 3.0


class MasterProgram:
    """The master as usher.common.http.serve runs it: web application, start, stop. It faces nobody before somebody
    asks, since that takes 10 MiB and a fifth of a second. ``beside``: the health of what else its process runs."""

    def __init__(
        self, settings: MasterSettings, redis_url: str, beside: Callable[[], Health] = lambda: Health(())
    ) -> None:
        self._settings, self._beside = settings, beside
        self.place = place = MasterContext(settings, redis_url)
        self._started = self._stopping = False
        self._metrics = Metrics()
        self.leading = LeaderServices(place, self._metrics)
        self._services = [*self.leading.services]
        self._gathering = None
        if settings.sources is not None:
            from usher.master.sources.services import SourceServices

            self._gathering = SourceServices(settings, settings.sources, place.keys, redis_url, place.link)
            self._services += self._gathering.services
        self._facing: HttpServices | None = None
        self._once = threading.Lock()
        if settings.backlog_limit or settings.tenant_backlog_limit or settings.tokens_file or settings.proxies:
            self._face()  # its services are wanted, or its settings are to be checked

    @property
    def app(self) -> Flask:
        return (self._facing or self._face()).app

    def _face(self) -> HttpServices:
        from usher.master.assembly.facing import HttpServices

        with self._once:
            if self._facing is None:
                of_health = self._services, lambda: self._stopping, lambda: self.liveness().stalled, self._beside
                self._facing = HttpServices(self.place, self.leading, self._metrics, *of_health)
                self._services[:0] = self._facing.services
                for service in self._facing.services if self._started else ():
                    service.start()
            return self._facing

    def start(self, port: int, host: str) -> None:
        settings = self._settings
        url = settings.advertise_url or url_of(host, port, settings.tls_cert is not None)
        if self._gathering is not None:
            self._gathering.url = url
        self._services.append(self.leading.elector(url))
        event(log, "master_starting", url=url, stream=self.place.keys.stream, group=self.place.keys.group)
        with self._once:
            self._started = True
            for service in self._services:
                service.start()

    def liveness(self) -> Liveness:
        """Return how long this master may be silent, and whether its elector or dispatcher stands still; they watch the
        work of all others, and Redis gives the lead to another master without them."""
        lease_s, elector = self._settings.leader_lease_seconds, self._services[-1]
        still = stalled([self.leading.dispatcher, elector], now_s(), lease_s)
        return Liveness(max(elector.stalls_after_s, lease_s), still)

    def resign(self) -> None:
        """End the work first, then give the lead up, so that a standby takes over at once and finds nothing moving."""
        self._stopping = True
        faces = self._facing.services if self._facing is not None else ()
        *workers, elector = (one for one in self._services if one not in faces)
        _end(workers)
        _end([elector])

    def stop(self) -> None:
        self.resign()
        if self._facing is not None:
            _end(self._facing.services)
            self._facing.close()
        self.leading.close()


def _end(services: Sequence[Service]) -> None:
    for service in services:
        service.stop()
    for service in services:
        service.join(_JOIN_S)
