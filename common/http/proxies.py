"""Proxies in front, which are trusted by their addresses: what they say of a request's address, host, scheme and path
is taken for the request's own (werkzeug's ``ProxyFix``), and what anybody else says of these is left alone.

A prefix (``X-Forwarded-Prefix: /ops/usher``) is the path at which a proxy serves this program beside others. It is
taken off what is asked, if the proxy has left it on, and stands before every link, redirect and cookie path.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: In the environ of a request that came through such a proxy.
FROM_PROXY = "usher.from_proxy"
_PREFIX = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")


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


def is_within(text: str, networks: Sequence[Network]) -> bool:
    """Return True if the text is an address of one of these networks, or such a one of IPv4 written as IPv6."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    address = (found.ipv4_mapped or found) if found.version == 6 else found
    return any(address in network for network in networks)


def neighbours(text: str) -> str:
    """Return what stands for an address where addresses are counted: whoever has one of IPv6 has all of its /64.

    >>> neighbours("2001:db8::1:2:3"), neighbours("::ffff:10.0.0.1"), neighbours("10.0.0.1"), neighbours("")
    ('2001:db8::/64', '10.0.0.1', '10.0.0.1', '')
    """
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    if found.version == 4 or found.ipv4_mapped:
        return str(found if found.version == 4 else found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))


def behind_proxies(app: WSGIApplication, proxies: Sequence[Network]) -> WSGIApplication:
    from werkzeug.middleware.proxy_fix import ProxyFix  # 3 MiB, and settings need the networks alone

    fixed = ProxyFix(app, x_for=1, x_proto=1, x_host=1, x_prefix=1)

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[Any]:
        if not is_within(environ.get("REMOTE_ADDR", ""), proxies):
            return app(environ, start_response)
        environ[FROM_PROXY] = True
        prefix, path = environ.pop("HTTP_X_FORWARDED_PREFIX", "").rstrip("/"), environ["PATH_INFO"]
        if _PREFIX.fullmatch(prefix):
            environ["HTTP_X_FORWARDED_PREFIX"] = prefix
            if path == prefix or path.startswith(f"{prefix}/"):
                environ["PATH_INFO"] = path[len(prefix) :] or "/"
        return fixed(environ, start_response)

    return application
