"""Build the rules of access to a master from its settings: credentials, host names, rate limits."""

from __future__ import annotations

import logging
from typing import TypedDict
from urllib.parse import urlsplit

from usher.common.base.log import event
from usher.common.doctor.facts import DoctorFinding, DoctorSeverity
from usher.common.http.auth import Doorman
from usher.common.http.credentials import Credentials, Identity, Role, fixed_tokens
from usher.common.http.proxies import parse_networks
from usher.common.http.rate_limits import RateLimits
from usher.common.runtime.settings import is_loopback
from usher.master.membership.health_url import HealthHosts, parse_hosts, redis_ports
from usher.master.settings import MasterSettings

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


log = logging.getLogger(__name__)


class Admission(TypedDict):
    """Arguments of ``usher.master.assembly.web_app.create_app``."""

    doorman: Doorman
    hosts: tuple[str, ...]
    limits: RateLimits


def admission(settings: MasterSettings) -> Admission:
    """Return who may come in, under which host names, and how often. Raises SettingsError."""
    secure = bool(settings.tls_cert) or settings.advertise_url.startswith("https://")
    return Admission(
        doorman=Doorman(
            master_credentials(settings),
            secure=secure,
            prefix=settings.path_prefix,
            sign_on=settings.sign_on,
            proxies=parse_networks(settings.proxies),
        ),
        hosts=hosts_of(settings),
        limits=RateLimits(settings.requests_per_second, settings.registers_per_minute),
    )


def tell_of_sign_on(settings: MasterSettings) -> None:
    """Log that people are signed on by proxies, and by whom: whoever asks from there can be anybody."""
    if (sign_on := settings.sign_on) is not None:
        event(log, "sign_on", level=logging.WARNING, trusted=str(sign_on))


def findings(settings: MasterSettings) -> tuple[DoctorFinding, ...]:
    """Return what the page's doctor says of this master's own doors."""
    if (sign_on := settings.sign_on) is None:
        return ()
    means = "whoever sends requests from these addresses can be anybody on these lists"
    return (DoctorFinding("sign-on by proxies", DoctorSeverity.OK, str(sign_on), means),)


def health_hosts(settings: MasterSettings, redis_url: str) -> HealthHosts:
    """Return the hosts that health URLs may name: never a port of Redis. Raises SettingsError."""
    return parse_hosts(settings.health_hosts, redis_ports(redis_url))


def master_credentials(settings: MasterSettings) -> Credentials:
    """Return the tokens that a master takes. Raises SettingsError."""
    fixed = fixed_tokens(
        {
            "USHER_API_TOKEN": (settings.api_token, Identity(Role.ALL, "api-token")),
            "USHER_OPERATOR_TOKEN": (settings.operator_token, Identity(Role.OPERATOR, "operator-token")),
            "USHER_CONSUMER_TOKEN": (settings.consumer_token, Identity(Role.CONSUMER, "*")),
            "USHER_VIEWER_TOKEN": (settings.viewer_token, Identity(Role.VIEWER, "viewer-token")),
        }
    )
    return Credentials(fixed, None if settings.tokens_file is None else settings.tokens_file.expanduser())


def hosts_of(settings: MasterSettings) -> tuple[str, ...]:
    """Return the host names that a request may be addressed to; empty: any.

    A page of somewhere else can make its own name lead to 127.0.0.1 (DNS rebinding). Where a token is required, that
    gains it nothing.
    """
    named = tuple(host.strip().strip("[]") for host in settings.hosts.split(",") if host.strip())
    own = (settings.bind.rpartition(":")[0].strip("[]"), urlsplit(settings.advertise_url).hostname or "")
    if named:
        return named
    asked = any((*settings.tokens.values(), settings.tokens_file))
    return () if asked or not is_loopback(settings.bind) else tuple(filter(None, (*_LOCAL_NAMES, *own)))
