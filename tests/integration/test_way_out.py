"""A connection to Redis that cannot be made: one line names the setting and what is to be changed in it, whatever the
TLS library says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme

from tests.proxy import Proxy
from tests.tls_front import Papers, TlsFront
from usher.common.base.errors import NotNow, SettingsError, StartRefused
from usher.common.redis.client import Link, check_reachable
from usher.common.redis.tracking import ChangeEar


class Bench:
    """A CA, and a Redis that is put behind TLS."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder
        self.papers = Papers(folder)
        self.behind = urlsplit(redis_url).path
        self.password = urlsplit(redis_url).password

    def told(self, options: str, *, client_too: bool = False) -> str:
        with closing(TlsFront(self.papers, self.behind, client_too=client_too)) as front:
            return self.refused(f"rediss://127.0.0.1:{front.port}/0{options.format(ca=self.papers.ca)}")

    @staticmethod
    def refused(url: str) -> str:
        with pytest.raises((StartRefused, SettingsError)) as refused:
            check_reachable(url)
        assert "\n" not in str(refused.value)
        assert str(refused.value).startswith("USHER_REDIS_URL")
        return str(refused.value)


@pytest.fixture
def bench(tmp_path: Path, redis_url: str) -> Iterator[Bench]:
    yield Bench(tmp_path, redis_url)


_LOOK_AT = "does ssl_ca_certs in the URL name the file with its CA"


def test_what_may_be_wrong_with_tls_is_told(bench: Bench) -> None:
    """TLS itself says only that the connection ended in violation of the protocol, or names no file."""
    other = bench.folder / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    for options in ("", f"?ssl_ca_certs={other}", "?ssl_ca_certs=/nowhere/ca.pem"):
        assert _LOOK_AT in bench.told(options)
    assert _LOOK_AT in bench.told("?ssl_ca_certs={ca}", client_too=True)
    with closing(TlsFront(bench.papers, bench.behind, client_too=True)) as front:
        papers = bench.papers
        check_reachable(
            f"rediss://:{bench.password}@127.0.0.1:{front.port}/0?ssl_ca_certs={papers.ca}&ssl_certfile={papers.cert}&ssl_keyfile={papers.key}"
        )


def test_tls_to_a_server_that_speaks_none_and_the_other_way_round_are_told(bench: Bench, redis_url: str) -> None:
    with Proxy(redis_url) as proxy:
        assert _LOOK_AT in bench.refused(f"rediss://127.0.0.1:{urlsplit(proxy.url).port}/0")
    with closing(TlsFront(bench.papers, bench.behind)) as front:
        assert "reached with rediss instead of redis" in bench.refused(f"redis://127.0.0.1:{front.port}/0")
        ear = ChangeEar(f"redis://127.0.0.1:{front.port}/0", "test", [])
        with pytest.raises(NotNow, match="reached with rediss instead of redis"):
            ear.listen()


@pytest.mark.parametrize(
    "url",
    [
        "rediss://127.0.0.1:1/0?ssl_ca_cert=/etc/own.pem",
        "redis://127.0.0.1:1/0?ssl_ca_cert=/etc/own.pem",
        "rediss+sentinel://127.0.0.1:1/shop?ssl_ca_cert=/etc/own.pem",
        "rediss+cluster://127.0.0.1:1?ssl_ca_cert=/etc/own.pem",
    ],
)
def test_an_option_that_there_is_not_is_an_error_at_once_that_names_it(url: str) -> None:
    """It was a traceback, or with Sentinel one in every turn of every thread."""
    with pytest.raises(ValueError, match="it has no option ssl_ca_cert"):
        Link(url, "test")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://127.0.0.1:1/0?decode_responses=True", "it has no option decode_responses"),
        ("redis://127.0.0.1:1/0?retry_on_timeout=yes", "it has no option retry_on_timeout"),
        ("unix:///tmp/redis.sock?encoding=latin-1", "it has no option encoding"),
        ("rediss://127.0.0.1:1/0?health_check_interval=5", "it has no option health_check_interval"),
        ("redis+sentinel://127.0.0.1:1/shop?decode_responses=1", "it has no option decode_responses"),
        ("rediss+cluster://127.0.0.1:1?decode_responses=1", "it has no option decode_responses"),
        ("redis+sentinel://127.0.0.1:1/shop?sentinel_pasword=x", "it has no option sentinel_pasword"),
        ("redis://127.0.0.1:1/shop", "its path must be the number of a database"),
        ("redis://127.0.0.1:1/1/2", "its path must be the number of a database"),
        ("redis://127.0.0.1:1/1?db=2", "in its path and in the option db"),
        ("redis://127.0.0.1:1?db=1&db=2", "it has the option db twice"),
        ("redis://:1#2@redis.example.com/0", "a password with a ?, a / or a # must have it as %3F, %2F or %23"),
        ("redis://:1?2@redis.example.com/0", "a password with a ?, a / or a # must have it as %3F, %2F or %23"),
        ("redis://:pa/ss@redis.example.com/0", "a password with a ?, a / or a # must have it as %3F, %2F or %23"),
        ("redis+sentinel://:1/2@127.0.0.1:1/shop", "a password with a ?, a / or a # must have it as %3F, %2F or %23"),
        ("redis://127.0.0.1:1/0#x", "it must not have a #"),
    ],
)
def test_what_would_not_be_what_the_url_says_is_an_error_that_names_it(url: str, told: str) -> None:
    """Replies were text, commands were sent twice, or another database or server was used, all in silence."""
    with pytest.raises(ValueError, match=re.escape(told)):
        Link(url, "test")


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:1/", "redis://h?db=3", "unix:///tmp/s@1?db=2&password=x@y", "redis://h/7"]
)
def test_what_a_url_may_have_is_taken(url: str) -> None:
    Link(url, "test").close()


@pytest.mark.parametrize("url", ["redis+sentinel://127.0.0.1:1/shop", "redis+cluster://127.0.0.1:1"])
def test_options_of_tls_without_tls_are_an_error(url: str) -> None:
    """They were ignored: who had written redis for rediss sent everything, passwords too, in the clear."""
    with pytest.raises(ValueError, match="over TLS it begins with rediss"):
        Link(f"{url}?ssl_ca_certs=/etc/own.pem", "test")
