"""Allow-list of where a consumer's health URL may point: the master asks it, so anyone who can register could make the
master call anything (SSRF).

The list names literal hosts and never uses flags like ``ipaddress.is_private``: ``::ffff:127.0.0.1`` is not loopback
and ``64:ff9b::7f00:1`` is global to Python 3.11. A URL is accepted only in a form that all parsers read the same way;
other forms that resolvers of C libraries understand (``127.1``, ``0x7f.0.0.1``, ``2130706433``, full-width digits) are
refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from usher.common.base.errors import SettingsError

_LONGEST_URL = 512
#: No userinfo, no fragment, no backslash, nothing outside ASCII: none of them has a place in a health URL.
_URL = re.compile(
    r"(https?)://((\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::([0-9]{1,5}))?)"
    r"((?:/[A-Za-z0-9._~!$&'()*+,;=:%/-]*)?(?:\?[A-Za-z0-9._~!$&'()*+,;=:%/?-]*)?)"
)
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(?:\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")
#: Hosts that C libraries and browsers take for an IPv4 address: the last label is a number, decimal or hexadecimal.
_ENDS_IN_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0[xX][0-9a-fA-F]*)\.?")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: Refused even when a network of the allow-list contains them.
_NEVER: tuple[Network, ...] = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("0.0.0.0/8", "::/128"),  # this host
        *("169.254.0.0/16", "fe80::/10"),  # link-local: metadata of clouds
        *("100.100.100.200/32", "192.0.0.0/24", "fd00:ec2::254/128"),  # metadata elsewhere
        *("224.0.0.0/3", "ff00::/8"),  # multicast
        *("::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16"),  # IPv4 by another way
    )
)


class UnfitUrl(ValueError):
    """A health URL that is refused; the message says why and repeats nothing of it."""


class HealthUrl(NamedTuple):
    """A health URL. ``host``: an address, or a name in lower case. ``named``: host and port as it names them. ``rest``:
    path and query."""

    is_tls: bool
    named: str
    host: Address | str
    port: int
    rest: str


@dataclass(frozen=True)
class HealthHosts:
    """The hosts that health URLs may point to: from USHER_HEALTH_HOSTS, see ``parse_hosts``."""

    networks: tuple[Network, ...]
    names: frozenset[str]
    #: Ports that are never asked: those of our own Redis.
    closed_ports: frozenset[int] = frozenset()

    def check(self, text: str) -> HealthUrl:
        url = parse_url(text)
        if url.port in self.closed_ports:
            raise UnfitUrl("must not point to the port of Redis")
        if isinstance(url.host, str):
            if url.host not in self.names:
                raise UnfitUrl("must point to a host that USHER_HEALTH_HOSTS of the master names")
        elif _never(url.host) or not any(url.host in network for network in self.networks):
            raise UnfitUrl("must point to an address that USHER_HEALTH_HOSTS of the master names")
        return url

    def pin(self, text: str, resolve: Callable[[str, int], Sequence[str]]) -> tuple[HealthUrl, str]:
        """Return the URL and the address to ask. ``resolve`` returns the addresses of a name. It is asked once, all
        addresses are checked, and the connection goes to the first, so that a name that resolves differently at a
        second look leads nowhere. Raises UnfitUrl, and what ``resolve`` raises."""
        url = self.check(text)
        if not isinstance(url.host, str):
            return url, str(url.host)
        addresses = [ipaddress.ip_address(found) for found in resolve(url.host, url.port)]
        if not addresses or any(map(_never, addresses)):
            raise UnfitUrl("must point to a host with addresses that may be asked")
        return url, str(addresses[0])


def parse_hosts(text: str, closed_ports: Iterable[int] = ()) -> HealthHosts:
    """Parse the allow-list, a comma-separated text of addresses, networks and names. Raises SettingsError that names
    every bad part."""
    networks: list[Network] = []
    names = set()
    problems = []
    for part in (part.strip().lower() for part in text.split(",") if part.strip()):
        try:
            networks.append(ipaddress.ip_network(part))
        except ValueError:
            if _NAME.fullmatch(part) and not _ENDS_IN_NUMBER.fullmatch(part):
                names.add(part)
            else:
                problems.append(
                    f"USHER_HEALTH_HOSTS: {part!r} is not an address, a network like 10.0.0.0/8, or a host name"
                )
    if problems:
        raise SettingsError(problems)
    return HealthHosts(tuple(networks), frozenset(names), frozenset(closed_ports))


def parse_url(text: str) -> HealthUrl:
    """Parse a health URL. Raises UnfitUrl for every one that could be read in two ways."""
    found = _URL.fullmatch(text) if len(text) <= _LONGEST_URL else None
    if found is None:
        raise UnfitUrl(
            f"must be a plain http:// or https:// URL of at most {_LONGEST_URL} characters: no user, no fragment, no"
            " spaces"
        )
    scheme, named, written, number, rest = found.groups()
    host, port = written.lower(), int(number or (443 if scheme == "https" else 80))
    if not 1 <= port <= 65_535:
        raise UnfitUrl("must have a port from 1 to 65535")
    address: Address | None = None
    try:
        if host.startswith("["):
            address = ipaddress.IPv6Address(host[1:-1])
        elif _ENDS_IN_NUMBER.fullmatch(host):
            address = ipaddress.IPv4Address(host)
    except ValueError:
        raise UnfitUrl("must write its address in the usual form, like 127.0.0.1 or [::1]") from None
    if address is None and not _NAME.fullmatch(host):
        raise UnfitUrl("must name its host in the usual form")
    return HealthUrl(scheme == "https", named, address or host, port, rest)


def redis_ports(redis_url: str) -> list[int]:
    return [int(port) for port in re.findall(r":([0-9]{1,5})(?=[/,?#]|$)", redis_url.rpartition("@")[2])] or [6379]


def _never(address: Address) -> bool:
    """Return whether no allow-list can open this address."""
    return any(address in network for network in _NEVER)
