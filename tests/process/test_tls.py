"""HTTPS between masters, consumers and commands, with certificates of a CA of our own; and Redis behind TLS."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests

from tests.process.crew import KEYS, Crew, Producer
from tests.process.machine import until
from tests.tls_front import Papers, TlsFront
from tests.tuned import tuned
from usher.common.base.errors import NotNow, SettingsError, StartRefused
from usher.common.http.serve import ServerTls
from usher.common.redis.client import Link
from usher.common.redis.embedded import EmbeddedRedis, free_port
from usher.master.cli.shared import configured

pytestmark = pytest.mark.process

_TOKEN = "t-all"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="usher-t-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def papers(folder: Path) -> Papers:
    return Papers(folder)


@pytest.fixture(scope="module")
def running(folder: Path, papers: Papers) -> Iterator[tuple[Crew, str, Link]]:
    """A master and a consumer that speak HTTPS only."""
    port = free_port()
    url = f"https://127.0.0.1:{port}"
    tls = {
        "USHER_TLS_CERT": str(papers.cert),
        "USHER_TLS_KEY": str(papers.key),
        "USHER_TLS_CA": str(papers.ca),
        "USHER_API_TOKEN": _TOKEN,
    }
    with (
        EmbeddedRedis(folder / "redis", port=None, durable=False) as server,
        Crew(folder, server.url, **tuned(HEALTH_S=0.3), **tls) as crew,
    ):
        crew.run("master-1", "master", USHER_BIND=f"127.0.0.1:{port}")
        consumer = {
            "USHER_CONSUMER_NAME": "c1",
            "USHER_HANDLER": "usher.deploy.demo.handlers:record",
            "USHER_MASTER_URLS": url,
        }
        crew.run("c1", "consumer", **consumer)
        with Link(server.url, "test") as link:
            crew.until(lambda: link.call("HEXISTS", KEYS.consumers, "c1"), 40, "the consumer has registered over HTTPS")
            yield crew, url, link


def test_a_system_works_over_https_and_says_so(running: tuple[Crew, str, Link], papers: Papers) -> None:
    crew, url, link = running
    producer = Producer(link, tickets=7)
    producer.send(100)
    crew.wait_until_handled(producer.accepted, 40)
    assert [event["url"] for event in crew.events("listening", "master")] == [url]
    [registered] = requests.get(f"{url}/api/consumers", headers=_bearer(), verify=str(papers.ca), timeout=10).json()[
        "consumers"
    ]
    assert registered["health_url"].startswith("https://127.0.0.1:")
    # Reports came, and the health URL was asked over HTTPS and was well: nothing was dropped or revoked.
    assert not crew.events("report_dropped")
    assert not crew.events("lease_revoked")
    health = requests.get(registered["health_url"], verify=str(papers.ca), timeout=10)
    assert health.json()["status"] == "ok"
    with pytest.raises(requests.exceptions.SSLError):
        requests.get(f"{url}/api/health", timeout=10)


def _bearer() -> dict[str, str]:
    return {"Authorization": f"Bearer {_TOKEN}"}


def test_a_ticket_is_followed_over_https(running: tuple[Crew, str, Link], papers: Papers) -> None:
    """The connection leaves gunicorn for the feed; what is written to it must still be encrypted."""
    _, url, link = running
    link.call("XADD", KEYS.stream, "*", "ticket_id", "F")
    asked = f"{url}/api/events?id=F&last_event_id=0"
    with requests.get(asked, headers=_bearer(), verify=str(papers.ca), timeout=20, stream=True) as reply:
        lines = reply.iter_lines(chunk_size=1)
        assert next(lines) == b": following"
        assert next(line for line in lines if line == b"event: entry")


def test_the_leader_is_asked_over_https_what_a_ticket_waits_for(
    running: tuple[Crew, str, Link], papers: Papers, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url, link = running
    monkeypatch.setenv("USHER_API_TOKEN", _TOKEN)
    for ca, answers in ((str(papers.ca), True), (None, False)):
        with configured({"redis_url": link.url, "tls_ca": ca}, "test") as at:
            assert at.leader_url() == url
            assert (at.ask_leader("/api/explain?id=42") is not None) == answers
    with (
        configured({"redis_url": link.url, "tls_ca": "/nowhere/ca.pem"}, "test") as at,
        pytest.raises(StartRefused, match="USHER_TLS_CA: there is no"),
    ):
        at.ask_leader("/api/explain?id=42")


def test_what_speaks_no_tls_is_closed_and_what_is_silent_holds_nobody_up(
    running: tuple[Crew, str, Link], papers: Papers
) -> None:
    _, url, _ = running
    port = int(url.rpartition(":")[2])
    with ExitStack() as stack:
        half = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(20)]
        for number, connection in enumerate(half):
            connection.sendall([b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\x16"][number % 3])
        assert requests.get(f"{url}/api/health/live", verify=str(papers.ca), timeout=2).status_code == 200
        assert b"HTTP/" not in half[0].recv(4096)


def test_a_new_certificate_is_taken_up_and_a_broken_one_is_not(tmp_path: Path) -> None:
    papers = Papers(tmp_path)
    tls = ServerTls(papers.cert, papers.key)
    first = tls.get()
    assert tls.get() is first
    papers.cert.write_text("nonsense")
    assert tls.get() is first
    papers.issue()
    assert tls.get() is not first
    with pytest.raises(SettingsError, match="USHER_TLS_CERT"):
        ServerTls(tmp_path / "none", None)


# ---- Redis ----


def test_redis_is_reached_over_tls_and_only_with_a_certificate_that_is_trusted(folder: Path, papers: Papers) -> None:
    with EmbeddedRedis(folder / "tls", port=None, durable=False) as server:
        password, _, rest = server.url.removeprefix("unix://:").partition("@")
        front = TlsFront(papers, rest.partition("?")[0])
        url = f"rediss://:{password}@127.0.0.1:{front.port}/0"
        trusted = Link(f"{url}?ssl_ca_certs={papers.ca}", "test")
        until(lambda: trusted.call("PING") == b"PONG", 10, "PONG over TLS")
        assert trusted.pipeline([("SET", "a", "1"), ("GET", "a")]) == [b"OK", b"1"]
        trusted.close()
        stranger = Link(url, "test")
        with pytest.raises(NotNow, match="certificate verify failed") as refused:
            stranger.call("PING")
        assert password not in str(refused.value)
        stranger.close()
        front.close()
