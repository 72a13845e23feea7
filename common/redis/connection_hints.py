"""Hints for failed connections to Redis, where the words of the TLS library leave the cause to be guessed. Pure, except
that it looks whether files are there."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from usher.common.base.log import redacted

#: Options of the URL that name a file or a folder.
_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
#: Errors seen when the server refuses or misses a client certificate, and when it has hung up before its reason was
#: read.
_REFUSED = ("certificate required", "unknown ca", "bad certificate", "handshake failure", "certificate unknown")
_HUNG_UP_OVER_TLS = ("violation of protocol", "connection reset", "broken pipe")
#: Words of the error, in lower case, and their meaning if the URL asks for TLS; the first match counts.
_OVER_TLS = (
    (("certificate has expired",), "the certificate of the server has expired: renew it on the machine of Redis"),
    (
        ("certificate is not yet valid",),
        "the certificate of the server is not valid yet, or the clock of this machine is wrong",
    ),
    (("certificate is not valid for",), "the URL must name the host as the server's certificate does"),
    (
        ("verify failed",),
        "ssl_ca_certs in the URL must name a file with the CA of the server's certificate:"
        " rediss://...?ssl_ca_certs=/etc/ssl/ca.pem",
    ),
    (("key values mismatch",), "ssl_keyfile in the URL is not the key of ssl_certfile"),
    (
        ("pem lib", "no start line", "not enough data", "bad base64"),
        "a file that the URL names is not a PEM file of that kind",
    ),
    (("expired",), "the server says that the certificate in ssl_certfile of the URL has expired"),
    (
        (*_REFUSED, *_HUNG_UP_OVER_TLS),
        "the server may want a client certificate of a CA that it trusts: ssl_certfile and ssl_keyfile in the URL",
    ),
    (
        ("wrong version number", "record layer failure", "handshake operation timed out"),
        "a server without TLS is reached with redis instead of rediss",
    ),
)


def describe_unreachable(url: str, failed: object) -> str:
    """Say that Redis cannot be reached: where, why, and what to do about it."""
    return f"Redis at {redacted(url)} cannot be reached: {failed}{hint_for(url, failed)}"


def hint_for(url: str, failed: object) -> str:
    """Return a hint to append to the error ``failed``; "" if the error says all that is known.

    >>> hint_for("redis://h", "Connection refused"), hint_for("redis://h", "(104, 'Connection reset by peer')")
    ('', ' (a server that speaks TLS is reached with rediss instead of redis)')
    """
    # redis-py words all timeouts alike, and keeps the original one as context.
    words = f"{failed} {getattr(failed, '__context__', '')}".lower()
    hint = ""
    if urlsplit(url).scheme.startswith("rediss"):
        hint = _over_tls(url, words)
    elif not url.startswith("unix") and any(word in words for word in ("connection reset", "connection closed")):
        hint = "a server that speaks TLS is reached with rediss instead of redis"
    return f" ({hint})" if hint else ""


def _over_tls(url: str, words: str) -> str:
    if "no such file" in words or "permission denied" in words:
        named = parse_qs(urlsplit(url).query)
        bad = [f"{option} {path}" for option in _FILES for path in named.get(option, ()) if not _readable(path)]
        return f"in the URL: {', '.join(bad)}" if bad else ""
    words = words.replace("_", " ")
    return next((hint for seen, hint in _OVER_TLS if any(word in words for word in seen)), "")


def _readable(path: str) -> bool:
    try:
        with Path(path).open("rb"):
            return True
    except IsADirectoryError:
        return True
    except OSError:
        return False
