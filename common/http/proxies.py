"""Proxies in front, which are trusted by their addresses: networks in settings, and the address of who asks.

An address that a client says itself is worth nothing; so ``X-Forwarded-For`` is read from its end, which the nearest
proxy has written, and no further than the first address that is no such proxy.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_networks(value: str) -> tuple[Network, ...]:
    """Return addresses and networks, comma separated. Raises ValueError, also for a network of all addresses: whoever
    reaches the port could be anybody then.

    >>> parse_networks("10.0.0.5, fd00::/8")
    (IPv4Network('10.0.0.5/32'), IPv6Network('fd00::/8'))
    """
    try:
        found = tuple(ipaddress.ip_network(one.strip()) for one in value.split(",") if one.strip())
    except ValueError:
        found = ()
    if value and not found:
        raise ValueError("must be addresses and networks like 10.0.0.5,10.1.0.0/24, comma separated")
    if any(network.prefixlen == 0 for network in found):
        raise ValueError("must not be all addresses: whoever reaches the port could say that they are anybody")
    return found


def parse_address(text: str) -> Address | None:
    """Return an address, one of IPv4 in IPv6 as what it is; None for what is none.

    >>> parse_address("::ffff:10.0.0.5"), parse_address("fe80::1%eth0"), parse_address("unknown")
    (IPv4Address('10.0.0.5'), IPv6Address('fe80::1'), None)
    """
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return found.ipv4_mapped or found if found.version == 6 else found


def is_within(text: str, networks: Sequence[Network]) -> bool:
    """Return True if the text is an address of one of these networks."""
    address = parse_address(text)
    return address is not None and any(address in network for network in networks)


def address_of(environ: Mapping[str, Any], proxies: Sequence[Network]) -> str:
    """Return the address of who asks: of the connection, or what the nearest of ``proxies`` says whom it asks for.

    >>> proxies = parse_networks("10.0.0.5,10.0.0.6")
    >>> address_of({"REMOTE_ADDR": "10.0.0.5", "HTTP_X_FORWARDED_FOR": "1.1.1.1, 2.2.2.2, 10.0.0.6"}, proxies)
    '2.2.2.2'
    >>> address_of({"REMOTE_ADDR": "3.3.3.3", "HTTP_X_FORWARDED_FOR": "2.2.2.2"}, proxies)
    '3.3.3.3'
    """
    found: str = environ.get("REMOTE_ADDR", "")
    if not proxies:
        return found
    said: str = environ.get("HTTP_X_FORWARDED_FOR", "")
    for text in reversed(said.split(",")):
        address = parse_address(text.strip())
        if address is None or not is_within(found, proxies):
            break
        found = str(address)
    return found
