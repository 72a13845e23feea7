"""Settings of the master."""

from __future__ import annotations

from typing import Annotated, Literal

import click
from pydantic import AfterValidator, Field

from usher.common.base.durations import duration_s
from usher.common.http.credentials import parse_networks
from usher.common.runtime.settings import Address, CommonSettings, HttpUrl, MaybeAddress, checked_by


def _keep(value: str) -> str:
    if value != "forever":
        try:
            duration_s(value.removesuffix(" archived"))
        except click.BadParameter as wrong:
            raise ValueError(wrong.message) from None
    return value


OutboxUrl = Annotated[
    str,
    Field(description="Database with the outbox, e.g. postgresql+psycopg://user@host/shop or sqlite:////srv/shop.db."),
]
#: Longest life of a lead, in seconds. A lease that lasts longer in Redis dates from before the clock of Redis was set
#: back (elector.py).
LONGEST_LEASE_S = 600


class MasterSettings(CommonSettings):
    bind: Address = Field("127.0.0.1:8700", description="Where the HTTP API and the page listen.")
    advertise_url: HttpUrl = Field(
        "", description="URL under which consumers reach this master. Empty: made from USHER_BIND."
    )
    backlog_limit: int = Field(
        0,
        ge=0,
        le=10**12,
        description="Producers that ask wait while the ticket stream has this many unfinished messages. 0: never.",
    )
    tenant_backlog_limit: int = Field(
        0, ge=0, le=10**12, description="The same for each tenant, of messages that the leader has read. 0: never."
    )
    longest_message_bytes: int = Field(
        16 * 1024 * 1024,
        ge=0,
        le=2**31,
        description="Size of an entry, all fields together, above which it becomes a dead letter unread; 0: no limit.",
    )
    health_hosts: str = Field(
        "127.0.0.1,::1", description="Hosts that health URLs may point to: addresses, networks, names; comma separated."
    )
    leader_lease_seconds: float = Field(
        5.0,
        ge=0.5,
        le=LONGEST_LEASE_S,
        description="Life of the leader lease: a standby takes over this long after the leader died.",
    )
    trim_keep: Annotated[str, AfterValidator(_keep)] = Field(
        "24h",
        description="How long entries are kept that no reader needs, while memory allows: 90m, 24h, 7d. With a second"
        " word, 24h archived, nothing unarchived is ever cut (not of a work stream). forever: never cut any.",
    )
    min_idle_seconds: float = Field(
        0.0, ge=0, le=86_400, description="Least idle time of a pending message that is looked for. 0: two leases."
    )
    sign_on_header: str = Field(
        "X-Forwarded-User",
        pattern=r"^[A-Za-z][A-Za-z0-9-]{0,63}$",
        description="Header in which USHER_PROXIES name people; they must delete it from what clients send.",
    )
    proxies: Annotated[str, checked_by(parse_networks)] = Field(
        "",
        description=(
            "Addresses and networks of proxies in front, comma separated: whoever asks from there is believed of the"
            " address, host, scheme and path prefix asked for (X-Forwarded-*), and of who asks (USHER_SIGN_ON_HEADER)."
        ),
    )
    hosts: str = Field(
        "",
        description=(
            "Host names and addresses that requests may name, comma separated. Empty: any where tokens are asked"
            " for, else any address, localhost and its own names (on loopback)."
        ),
    )

    @property
    def contradictions(self) -> list[str]:
        found = super().contradictions
        if self.tenant_field == "@stream" and self.sources is None:
            found.append("USHER_TENANT_FIELD: @stream needs several streams in USHER_TICKET_STREAM")
        if 0 < self.min_idle_seconds < self.lease_seconds:
            found.append("USHER_MIN_IDLE_SECONDS: a message of a living consumer may be idle for USHER_LEASE_SECONDS")
        if self.tenant_backlog_limit and not self.tenant_field:
            found.append("USHER_TENANT_BACKLOG_LIMIT: there are no tenants without USHER_TENANT_FIELD")
        if self.tenant_weights and not self.tenant_field:
            found.append("USHER_TENANT_WEIGHTS: there are no tenants without USHER_TENANT_FIELD")
        return found


class StreamerSettings(CommonSettings):
    outbox_url: OutboxUrl = ""
    outbox_bind: MaybeAddress = Field(
        "", description="Where the streamer serves its health and metrics (HTTP), e.g. 127.0.0.1:8740. Empty: nowhere."
    )
    outbox_name: str = Field(
        "outbox", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="Name of the outbox, where several feed one stream."
    )
    outbox_refused_policy: Literal["skip", "halt"] = Field(
        "skip",
        description=(
            "After a row that can become no message its ticket goes on (skip), or its later rows wait in the outbox"
            " until the refused one is put back or deleted (halt)."
        ),
    )
    outbox_wait_replicas: int = Field(
        0, ge=0, le=16, description="Rows are kept until this many replicas have their entries (WAIT)."
    )
    outbox_wait_aof: bool = Field(
        False, description="Rows are kept until Redis has their entries on disk (WAITAOF, Redis 7.2 or later)."
    )
