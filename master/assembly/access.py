"""Who may come in to a master, by its settings: tokens, proxies, host names."""

from __future__ import annotations

from urllib.parse import urlsplit

from usher.common.doctor.judgements import DoctorFinding, DoctorSeverity
from usher.common.http.auth import Doorman
from usher.common.http.credentials import Credentials, Role
from usher.common.http.proxies import parse_networks
from usher.common.runtime.settings import is_loopback
from usher.master.membership.health_url import HealthHosts, parse_hosts, redis_ports
from usher.master.settings import MasterSettings

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def make_doorman(settings: MasterSettings, credentials: Credentials) -> Doorman:
    secure = bool(settings.tls_cert) or settings.advertise_url.startswith("https://")
    proxies = parse_networks(settings.proxies)
    return Doorman(credentials, secure=secure, proxies=proxies, sign_on_header=settings.sign_on_header)


def sign_on(settings: MasterSettings, credentials: Credentials) -> str:
    """Tell which proxies may sign people on, and how many; "" for none. Whoever asks from there can be anybody."""
    if not settings.proxies or not credentials.people:
        return ""
    roles = [person.role for person in credentials.people]
    admitted = f"{roles.count(Role.OPERATOR)} as operators and {roles.count(Role.VIEWER)} as viewers (*: all)"
    return f"{settings.proxies} may say in {settings.sign_on_header} who asks; of these names it admits {admitted}"


def findings(trusted: str) -> tuple[DoctorFinding, ...]:
    means = "whoever sends requests from these addresses can be anybody on these lists"
    return (DoctorFinding("sign-on by proxies", DoctorSeverity.OK, trusted, means),) if trusted else ()


def health_hosts(settings: MasterSettings, redis_url: str) -> HealthHosts:
    """Return the hosts that health URLs may name: never a port of Redis. Raises SettingsError."""
    return parse_hosts(settings.health_hosts, redis_ports(redis_url))


def hosts_of(settings: MasterSettings) -> tuple[str, ...]:
    """Return the host names that a request may be addressed to; empty: any.

    A page of somewhere else can make its own name lead to 127.0.0.1 (DNS rebinding). Where a token is required, that
    gains it nothing.
    """
    named = tuple(host.strip().strip("[]") for host in settings.hosts.split(",") if host.strip())
    own = (settings.bind.rpartition(":")[0].strip("[]"), urlsplit(settings.advertise_url).hostname or "")
    if named:
        return named
    asked = settings.api_token or settings.tokens_file
    return () if asked or not is_loopback(settings.bind) else tuple(filter(None, (*_LOCAL_NAMES, *own)))
