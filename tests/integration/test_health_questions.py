"""Asking health URLs: hostile servers, names that lead elsewhere, and a canary that must hear nothing."""

from __future__ import annotations

import gc
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.tls_front import Papers, TlsFront
from usher.common.observability.metrics import Webhook
from usher.common.protocol.keys import Keys
from usher.common.protocol.registration import Registration
from usher.common.redis.client import Link
from usher.master.leader.elector import Lead
from usher.master.membership import consumer_http as asker
from usher.master.membership.consumer_http import (
    ConsumerHttpClient,
    HealthHosts,
    OwnerQuestion,
    UnfitUrl,
    parse_hosts,
    redis_ports,
)
from usher.master.membership.health_checker import BOUNDS, HealthChecker
from usher.master.membership.registry import RegisteredConsumer
from usher.master.policy.explain import OwnerTold

_WELL = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@contextmanager
def serving(speak: Callable[[socket.socket], None]) -> Iterator[tuple[int, list[bytes]]]:
    """A server that does what ``speak`` does with each connection; its port, and what it was asked."""
    heard: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    heard.append(connection.recv(65_536))
                    speak(connection)
                except OSError:
                    pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], heard
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def _checker(hosts: HealthHosts, whole_s: float) -> HealthChecker:
    asking = ConsumerHttpClient(hosts, BOUNDS._replace(whole_s=whole_s))
    return HealthChecker(Link("redis://127.0.0.1:1/0", "x"), Keys("s", "g"), Lead(), 1.0, 3, asking, dict, 15_000, set)


def _ask(url: str, hosts: HealthHosts | None = None, more: int = 0, whole_s: float = BOUNDS.whole_s) -> bool:
    """What is found of one consumer that registered ``url``, asked as often more."""
    checker = _checker(hosts or parse_hosts("127.0.0.1,::1,good"), whole_s)
    member = RegisteredConsumer(Registration("a", "u", url, 1, 1), "live")
    try:
        answers = [checker._ask_all({"a:1": member}) for _ in range(1 + more)]
    finally:
        checker.on_end()
    assert all(answer == answers[0] for answer in answers)
    return not answers[0]["a:1"]


@pytest.fixture
def canary() -> Iterator[tuple[int, list[bytes]]]:
    with serving(lambda connection: connection.sendall(_WELL)) as listening:
        yield listening


def test_who_answers_200_is_well_and_is_told_nothing_about_us() -> None:
    with serving(lambda connection: connection.sendall(_WELL)) as (port, heard):
        assert _ask(f"http://127.0.0.1:{port}/api/health?x=1", more=1)
        assert _ask(f"http://127.0.0.1:{port}?x=1")
    assert [one.partition(b"\r")[0] for one in heard] == [b"GET /api/health?x=1 HTTP/1.1"] * 2 + [b"GET /?x=1 HTTP/1.1"]
    assert b"authorization" not in heard[0].lower() and b"cookie" not in heard[0].lower()


def _endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 500 X\r\n\r\n")
    while True:
        connection.sendall(b"x" * 65_536)


def _drip(connection: socket.socket) -> None:
    for _ in range(600):
        connection.sendall(b"H" if _ == 0 else b"T")
        time.sleep(0.1)


def _drip_body(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    _drip(connection)


def _drip_body_closing(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    _drip(connection)


def _drip_headers(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    _drip(connection)


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def _negative_chunk(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n")
    _endless(connection)


def _wrong_length(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\nTransfer-Encoding: y\r\n\r\n")


@pytest.mark.parametrize(
    "speak",
    [
        _endless,
        _drip,
        _drip_body,
        _drip_body_closing,
        _drip_headers,
        _reset,
        lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\n" + b"X: " + b"a" * 70_000 + b"\r\n\r\n"),
        lambda connection: connection.sendall(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n"),
        lambda connection: connection.sendall(b"+OK\r\n"),
        _wrong_length,
        _negative_chunk,
    ],
    ids=[
        "endless", "drip", "drip-body", "drip-body-closing", "drip-headers", "reset", "long-header", "503", "redis",
        "wrong-length", "negative-chunk",
    ],
)  # fmt: skip
def test_a_hostile_server_is_a_silent_one_and_holds_nobody_up(
    speak: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asker, "_LOOK_S", 0.1)
    with serving(speak) as (port, _):
        began_s = time.monotonic()
        well = _ask(f"http://127.0.0.1:{port}/", whole_s=0.6)
        took_s = time.monotonic() - began_s
    assert not well or speak is _wrong_length
    assert took_s < 30  # the drip alone would take a minute


def _contexts() -> int:
    """All that there are, but for those of urllib's openers: other parts of this process make them at any time."""
    gc.collect()
    objects = gc.get_objects()
    openers = {id(one.__dict__.get("_context")) for one in objects if type(one) is urllib.request.HTTPSHandler}
    # Not isinstance: a lazy object of somebody's, which that asks for its class, begins to work.
    return sum(issubclass(type(one), ssl.SSLContext) and id(one) not in openers for one in objects)


def test_certificates_are_checked_for_the_name_and_all_connections_share_what_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asker, "_resolve", lambda _name, _port: ["127.0.0.1"])
    papers = Papers(tmp_path)
    hosts = parse_hosts("127.0.0.1,localhost,good")
    with ExitStack() as stack:
        ports = [stack.enter_context(serving(lambda connection: connection.sendall(_WELL)))[0] for _ in range(6)]
        fronts = [stack.enter_context(closing(TlsFront(papers, port))) for port in ports]
        of_system = stack.enter_context(closing(ConsumerHttpClient(hosts, BOUNDS)))
        asking = stack.enter_context(closing(ConsumerHttpClient(hosts, BOUNDS, papers.ca)))
        before = _contexts()
        names = ["127.0.0.1", "localhost", "127.0.0.1", "localhost", "127.0.0.1"]
        urls = [f"https://{name}:{front.port}/" for name, front in zip(names, fronts, strict=False)]
        assert [answer.status for answer in asking.ask({url: url for url in urls}).values()] == [200] * 5
        assert _contexts() - before == 1
        stranger = f"https://good:{fronts[5].port}/"
        assert asking.ask({"x": stranger})["x"].status == 0
        assert of_system.ask({"x": urls[0]})["x"].status == 0


def test_a_packed_answer_is_not_unpacked() -> None:
    bomb = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nxxxxx"
    with serving(lambda connection: connection.sendall(bomb)) as (port, _):
        assert _ask(f"http://127.0.0.1:{port}/")


def test_a_redirect_is_not_followed(canary: tuple[int, list[bytes]]) -> None:
    port, heard = canary
    away = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:%d/latest/meta-data\r\nContent-Length: 0\r\n\r\n" % port
    with serving(lambda connection: connection.sendall(away)) as (redirecting, _):
        assert not _ask(f"http://127.0.0.1:{redirecting}/")
        hook = Webhook(f"http://127.0.0.1:{redirecting}/", {}, pause_s=0.0)
        hook.add({"id": "1-1"})
        hook.run_once()
        assert (hook.sent, hook.dropped) == (0, 1)
        hook.on_end()
    assert not heard


#: Of loopback, where somebody listens: the port is put in.
_OF_THE_CANARY = (
    *(
        "127.1",
        "0x7f.0.0.1",
        "0x7f000001",
        "0X7F.1",
        "127.0.0.0x1",
        "2130706433",
        "0177.0.0.1",
        "127.0.0.01",
        "127.0.0.1.",
    ),
    *("\u2460\u2461\u2466.\u24ea.\u24ea.\u2460", "127\u30020\u30020\u30021", "0", "[127.0.0.1]", "[::ffff:127.0.0.1]"),
    *("[64:ff9b::7f00:1]", "[::]", "[fe80::1%25lo]", "[fe80::1]", "::1", "[::1", "good@127.0.0.1", "good:pw@good"),
    *("good\\@127.0.0.1", "good%2f@127.0.0.1", "127.0.0.1%00", "localhost", "evil", "other", "good.evil", "evilgood"),
    *("-good", "good..x", "good\\.evil", "go\tod", "go\u00f6d", "xn--", "good:80"),
)
_CORPUS = (
    *(f"http://{host}:%d/" for host in _OF_THE_CANARY),
    *(
        "http://127.0.0.1:%d#@good/",
        "http://127.0.0.1:%d\\@good/",
        "http://127.0.0.1:%d/ HTTP/1.1\r\nX: y",
        "//127.0.0.1:%d/",
    ),
    *("gopher://127.0.0.1:%d/_FLUSHALL", "ftp://127.0.0.1:%d/", "http:127.0.0.1:%d/", "http:///127.0.0.1:%d/"),
    *("http://127.0.0.1:%d:80/", "http://good:%d/a b", " http://good:%d/", "http://good:%d/\n", "http://good:%d/\0"),
    *(
        "http://good:%d/\r\nX: y",
        "http://good:%d/#x",
        "http://good:%d/" + "a" * 512,
        "http://xn--:%d/\u00e4",
        "good:%d/",
    ),
    *(f"http://{host}/latest/meta-data/" for host in ("169.254.169.254", "192.0.0.192", "100.100.100.200")),
    *(f"http://{host}/" for host in ("[fd00:ec2::254]", "224.0.0.1", "255.255.255.255", "good@169.254.169.254")),
    *(f"http://{host}/" for host in ("169.254.169.254#@good", "[::1]:99999", "127.0.0.1:0", "good:0", "good:65536")),
    *(f"http://good:{port}/" for port in ("-1", "8 0", "", "\u0661")),
    *("file:///etc/passwd", "http:good", "http:///good", "http://", "", "//good/"),
)


@pytest.mark.parametrize("text", _CORPUS)
def test_a_url_of_the_corpus_is_refused_without_repeating_it_and_nothing_is_sent(
    text: str, canary: tuple[int, list[bytes]]
) -> None:
    """By an allow-list that could hardly be wider."""
    port, heard = canary
    hosts = parse_hosts("127.0.0.1,::1,10.0.0.0/8,0.0.0.0/0,::/0,good")
    url = text.replace("%d", str(port))
    with pytest.raises(UnfitUrl) as refused:
        hosts.check(url)
    assert len(url) < 10 or url not in str(refused.value)
    assert not _ask(url, hosts)
    assert not heard


def test_a_name_is_looked_up_once_and_that_address_is_asked(
    canary: tuple[int, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, heard = canary
    looked_up: list[str] = []

    def resolve(name: str, _port: int) -> list[str]:
        looked_up.append(name)
        return ["127.0.0.1"] if len(looked_up) == 1 else ["169.254.169.254"]

    monkeypatch.setattr(asker, "_resolve", resolve)
    assert _ask(f"http://Good:{port}/x")
    assert looked_up == ["good"]
    assert f"\r\nHost: Good:{port}\r\n".encode() in heard[0]
    assert not _ask(f"http://good:{port}/x")
    assert len(heard) == 1


@pytest.mark.parametrize(
    "addresses", [["169.254.169.254"], ["127.0.0.1", "169.254.169.254"], ["::ffff:127.0.0.1"], ["0.0.0.0"], []]
)
def test_a_name_with_an_address_that_is_never_asked_is_not_asked_at_all(
    addresses: list[str], canary: tuple[int, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, heard = canary
    monkeypatch.setattr(asker, "_resolve", lambda _name, _port: addresses)
    assert not _ask(f"http://good:{port}/")
    assert not heard


def test_the_port_of_redis_is_never_asked(canary: tuple[int, list[bytes]]) -> None:
    port, heard = canary
    assert not _ask(f"http://127.0.0.1:{port}/", parse_hosts("127.0.0.1", [port]))
    assert not heard


def _ask_owner(url: str, hosts: HealthHosts, ticket_id: str = "a/b") -> OwnerTold | None:
    question = OwnerQuestion(hosts)
    try:
        return question(url, ticket_id)
    finally:
        question.close()


def test_an_owner_is_asked_beside_its_health_endpoint_at_the_address_that_was_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says = b'{"time_ms": 1, "max_attempts": 5, "entries": []}'
    told = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(says), says)
    monkeypatch.setattr(asker, "_resolve", lambda _name, _port: ["127.0.0.1"])
    with serving(lambda connection: connection.sendall(told)) as (port, heard):
        assert _ask_owner(f"http://good:{port}/x/api/health", parse_hosts("good"), "/" * 256) == OwnerTold((), 5)
    assert heard[0].startswith(b"GET /x/api/tickets/" + b"%2F" * 256 + b" HTTP/1.1\r\n")
    assert f"\r\nHost: good:{port}\r\n".encode() in heard[0]


@pytest.mark.parametrize("ticket_id", [".", "..", "a/..", "../x", "...", "a.b"])
def test_an_owner_is_asked_for_dots_as_they_are(ticket_id: str, canary: tuple[int, list[bytes]]) -> None:
    port, heard = canary
    _ask_owner(f"http://127.0.0.1:{port}/api/health", parse_hosts("127.0.0.1"), ticket_id)
    path = heard[0].split(b" ")[1].decode()
    assert path.startswith("/api/tickets/")
    assert unquote(path.removeprefix("/api/tickets/")) == ticket_id


def test_an_owner_is_not_asked_where_health_urls_may_not_lead(
    canary: tuple[int, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, heard = canary
    monkeypatch.setattr(asker, "_resolve", lambda _name, _port: ["127.0.0.1", "169.254.169.254"])
    for url, hosts in (
        ("http://127.0.0.1", parse_hosts("10.9.9.9")),
        ("http://127.0.0.1", parse_hosts("127.0.0.1", [port])),
        ("http://good", parse_hosts("good")),
    ):
        assert _ask_owner(f"{url}:{port}/api/health", hosts) is None
    assert not heard


def test_an_owner_that_drips_its_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asker, "_LOOK_S", 0.1)
    with serving(_drip_body) as (port, _):
        began_s = time.monotonic()
        assert _ask_owner(f"http://127.0.0.1:{port}/api/health", parse_hosts("127.0.0.1")) is None
        assert time.monotonic() - began_s < 30  # the drip alone would take a minute


@pytest.mark.parametrize(
    ("url", "ports"),
    [
        ("redis://u:pw:77@h:6380/0", [6380]),
        ("redis://h", [6379]),
        ("redis+sentinel://:x@a:26379,b:26380/service/0?sentinel_password=y", [26379, 26380]),
        ("unix:///tmp/a.sock?db=0", [6379]),
    ],
)
def test_the_ports_of_redis_are_those_of_its_url(url: str, ports: list[int]) -> None:
    assert redis_ports(url) == ports
