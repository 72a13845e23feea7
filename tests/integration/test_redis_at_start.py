"""What a program that runs for good makes of its Redis when it starts: it waits for one that comes, and for nothing
that waiting does not mend."""

from __future__ import annotations

import re
import time

import pytest

from tests.proxy import Proxy
from usher.common.base.errors import NotNow, StartRefused
from usher.common.redis.client import Link
from usher.common.redis.embedded import free_port
from usher.common.redis.locate import check_at_start

_FULL = (b"-ERR max number of clients reached\r\n", b"-ERR max number of clients + cluster connections reached\r\n")


def test_a_redis_that_is_away_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    check_at_start(f"redis://127.0.0.1:{free_port()}", {})
    assert "redis_unreachable" in caplog.text


@pytest.mark.parametrize("answer", _FULL, ids=["a server", "a node of a cluster"])
def test_a_redis_that_has_all_the_clients_it_may_have_is_waited_for(
    redis_url: str, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with Proxy(redis_url, lambda chunk: answer) as proxy:
        check_at_start(proxy.url, {})
    assert "redis_unreachable" in caplog.text


@pytest.mark.parametrize("password", ["://:wrong@", "://"], ids=["wrong", "none"])
def test_a_wrong_password_is_refused(redis_url: str, password: str) -> None:
    with pytest.raises(StartRefused, match="USHER_REDIS_URL: .*refuses the password or user"):
        check_at_start(re.sub("://.*@", password, redis_url), {})


def test_an_error_for_an_answer_is_refused_and_is_no_connection_that_failed(redis_url: str) -> None:
    url = re.sub("db=0$", "db=9999", redis_url)
    with pytest.raises(StartRefused, match=r"USHER_REDIS_URL: .*out of range"):
        check_at_start(url, {})
    with pytest.raises(NotNow) as refused:
        Link(url, "test").call("PING")
    assert refused.value.kind == "REFUSED"


def test_a_server_that_is_too_old_is_refused(redis_url: str) -> None:
    with (
        Proxy(redis_url, lambda chunk: chunk.replace(b"redis_version:", b"redis_version:0.")) as proxy,
        pytest.raises(StartRefused, match="too old"),
    ):
        check_at_start(proxy.url, {})


def test_a_redis_that_is_too_far_for_a_lease_is_refused_with_the_figures(redis_url: str) -> None:
    """It registered, lost the lease before the first renewal, and so for ever."""

    def late(chunk: bytes) -> bytes:
        time.sleep(0.05)
        return chunk

    with Proxy(redis_url, late) as proxy:
        check_at_start(proxy.url, {"USHER_LEASE_SECONDS": 60.0})
        with pytest.raises(StartRefused, match=r"USHER_LEASE_SECONDS: a lease of 0.5 s .* takes \d+ ms here.*12 times"):
            check_at_start(proxy.url, {"USHER_LEASE_SECONDS": 0.5})
