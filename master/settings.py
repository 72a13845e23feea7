"""Settings of the master."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import click
from pydantic import AfterValidator, Field

from usher.common.base.durations import duration_s
from usher.common.http.path_prefix import check_path_prefix
from usher.common.http.proxies import parse_networks
from usher.common.http.sign_on import SignOn, check_header, parse_names
from usher.common.runtime.settings import Address, CommonSettings, MaybeAddress


def _networks(value: str) -> str:
    parse_networks(value)
    return value


def _names(value: str) -> str:
    parse_names(value)
    return value


def _keep(value: str) -> str:
    if value != "forever":
        try:
            duration_s(value)
        except click.BadParameter as wrong:
            raise ValueError(wrong.message) from None
    return value


OutboxUrl = Annotated[
    str,
    Field(description="Database with the outbox, e.g. postgresql+psycopg://user@host/shop or sqlite:////srv/shop.db."),
]
#: Longest life of a lead, in seconds. A lease that lasts longer in Redis dates from before the clock of Redis was set
#: back (elector, lua/sources/share.lua).
LONGEST_LEASE_S = 600


class MasterSettings(CommonSettings):
    """Settings of a master."""

    UNREAD: ClassVar[frozenset[str]] = frozenset({"redis_server"})

    bind: Address = Field("127.0.0.1:8700", description="Where the HTTP API and the page listen.")
    advertise_url: str = Field(
        "", description="URL under which consumers reach this master. Empty: made from USHER_BIND."
    )
    path_prefix: Annotated[str, AfterValidator(check_path_prefix)] = Field(
        "",
        description="Path at which a proxy in front serves this master, e.g. /ops/usher; it may strip it or not. Empty:"
        " none.",
    )
    backlog_limit: int = Field(
        0,
        ge=0,
        le=10**12,
        description="Unfinished messages of the ticket stream from which on producers that ask are told to wait; 0:"
        " never.",
    )
    tenant_backlog_limit: int = Field(
        0, ge=0, le=10**12, description="The same of each tenant, counting what the leader has read; 0: never."
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
        description="How long entries are kept that no reader needs, while memory allows: 90m, 24h, 7d. forever: never"
        " cut any.",
    )
    trim_archived: bool = Field(
        False, description="Cut only entries that are archived too (see `usher trim`); not for a work stream."
    )
    operator_token: str = Field(
        "", description="Bearer token that may look and act, but not speak for consumers. Empty: none."
    )
    consumer_token: str = Field(
        "",
        description="Bearer token that may speak for consumers, and nothing else: their USHER_API_TOKEN. Empty: none.",
    )
    tokens_file: Path | None = Field(
        None, description="File with further tokens, one per line (`usher token new`); mode 0600; read again on change."
    )
    sign_on_proxies: Annotated[str, AfterValidator(_networks)] = Field(
        "",
        description=(
            "Addresses and networks of proxies that sign people on, comma separated: whoever asks from there is"
            " believed to be whom the header names. Empty: nobody is."
        ),
    )
    sign_on_header: Annotated[str, AfterValidator(check_header)] = Field(
        "X-Forwarded-User", description="The header; the proxy must delete it from what clients send."
    )
    sign_on_operators: Annotated[str, AfterValidator(_names)] = Field(
        "", description="Names that may look and act, as the proxy sends them, comma separated; *: all that it names."
    )
    sign_on_viewers: Annotated[str, AfterValidator(_names)] = Field(
        "", description="Names that may look, likewise. Who is in neither list is refused."
    )
    proxies: Annotated[str, AfterValidator(_networks)] = Field(
        "",
        description=(
            "Addresses and networks of proxies in front, comma separated: limits and the log count by the address that"
            " they name in X-Forwarded-For, not by theirs. Empty: by that of the connection."
        ),
    )
    hosts: str = Field(
        "",
        description=(
            "Host names and addresses that requests may name, comma separated. Empty: any where tokens are asked"
            " for, else those of this machine (on loopback)."
        ),
    )
    requests_per_second: float = Field(
        2000, ge=1, le=10**6, description="Most HTTP requests of one token from one address; 429 beyond."
    )
    registers_per_minute: float = Field(
        600, ge=1, le=10**6, description="Most registrations of one token from one address; 429 beyond."
    )
    requests_in_flight: int = Field(
        256, ge=1, le=100_000, description="Most HTTP requests that are being answered or wait for it; 503 beyond."
    )
    connections: int = Field(
        1024, ge=16, le=100_000, description="Most HTTP connections open at a time, live subscriptions not counted."
    )
    connections_per_address: int = Field(
        256,
        ge=1,
        le=100_000,
        description="Most of these from one address; more are closed. Not counted for loopback, where a proxy may be.",
    )
    followers_limit: int = Field(
        5000, ge=0, le=1_000_000, description="Most live subscriptions to tickets that are open at a time."
    )

    @property
    def contradictions(self) -> list[str]:
        found = super().contradictions
        if self.tenant_field == "@stream" and self.sources is None:
            found.append("USHER_TENANT_FIELD: @stream needs several streams in USHER_TICKET_STREAM")
        if self.tenant_backlog_limit and not self.tenant_field:
            found.append("USHER_TENANT_BACKLOG_LIMIT: there are no tenants without USHER_TENANT_FIELD")
        if self.tenant_weights and not self.tenant_field:
            found.append("USHER_TENANT_WEIGHTS: there are no tenants without USHER_TENANT_FIELD")
        return found + self._sign_on_problems()

    def _sign_on_problems(self) -> list[str]:
        names = self.sign_on_operators or self.sign_on_viewers
        if not self.sign_on_proxies:
            return ["USHER_SIGN_ON_PROXIES: nobody is signed on without proxies that are trusted"] if names else []
        found = []
        if not names:
            found.append(
                "USHER_SIGN_ON_PROXIES: name whom to admit in USHER_SIGN_ON_OPERATORS or USHER_SIGN_ON_VIEWERS"
            )
        if not any((*self.tokens.values(), self.tokens_file)):
            found.append(
                "USHER_SIGN_ON_PROXIES: without a token (USHER_API_TOKEN, USHER_TOKENS_FILE, ...) everybody is admitted"
                " without sign-on, and with it consumers need one"
            )
        return found

    @property
    def sign_on(self) -> SignOn | None:
        """The sign-on by proxies; None if there is none."""
        if not self.sign_on_proxies:
            return None
        names = parse_names(self.sign_on_operators), parse_names(self.sign_on_viewers)
        return SignOn(self.sign_on_header, parse_networks(self.sign_on_proxies), *names)


class StreamerSettings(CommonSettings):
    """Settings of a streamer."""

    UNREAD: ClassVar[frozenset[str]] = (
        CommonSettings.UNREAD - {"log_level", "log_format", "tls_cert", "tls_key", "insecure"}
    ) | {"lease_seconds", "tenant_field", "tenant_weights", "priority_field"}

    outbox_url: OutboxUrl = ""
    outbox_bind: MaybeAddress = Field(
        "", description="Where the streamer serves its health and metrics (HTTP), e.g. 127.0.0.1:8740. Empty: nowhere."
    )
    outbox_name: str = Field(
        "outbox", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="Name of the outbox, where several feed one stream."
    )
    outbox_refused_policy: Literal["skip", "park"] = Field(
        "skip",
        description=(
            "After a row that can become no message its ticket goes on (skip), or its later rows wait in the outbox"
            " until the refused one is put back or deleted (park)."
        ),
    )
    outbox_wait_replicas: int = Field(
        0, ge=0, le=16, description="Rows are kept until this many replicas have their entries (WAIT)."
    )
    outbox_wait_aof: bool = Field(
        False, description="Rows are kept until Redis has their entries on disk (WAITAOF, Redis 7.2 or later)."
    )
