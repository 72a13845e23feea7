"""MasterContext: the shared context of a master's parts. Each of them gets the few values that it needs from here,
never the settings as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.master.membership.health_url import HealthHosts, parse_hosts, redis_ports
from usher.master.settings import MasterSettings


@dataclass(frozen=True)
class MasterContext:
    """Settings, Redis, and the keys of the stream that is worked on. Raises SettingsError."""

    settings: MasterSettings
    redis_url: str
    keys: Keys = field(init=False)
    #: The hosts where consumers may be asked.
    hosts: HealthHosts = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", Keys(self.settings.work_stream, self.settings.group))
        object.__setattr__(self, "hosts", parse_hosts(self.settings.health_hosts, redis_ports(self.redis_url)))

    @property
    def lease_ms(self) -> int:
        return int(self.settings.lease_seconds * 1000)

    def link(self, role: str, timeout_s: float = 5.0) -> Link:
        return Link(self.redis_url, f"master:{role}", timeout_s)
