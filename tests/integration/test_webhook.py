"""The bell's webhook against a real HTTP server: in batches, not too often, never in the way, and it says nothing that
is secret."""

from __future__ import annotations

import base64
import hmac
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.abuse import check_contract
from tests.integration.routers import until
from tests.tls_front import Papers, TlsFront
from usher.common.observability.metrics import _TRIES, MOST_AT_ONCE, MOST_WAITING, DeadLetterNotifier, Metrics, Webhook
from usher.common.protocol.keys import Keys
from usher.common.readers.loop import LoopOptions, MessageReadingLoop, StreamMessage
from usher.common.redis.client import Link
from usher.common.runtime.settings import CommonSettings

_WITHIN_S = 20.0


class Server(ThreadingHTTPServer):
    """Notes what is POSTed; ``answer`` says with which status, after which wait."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.answer: Callable[[int], int] = lambda number: 204
        self.location = ""
        self.release = threading.Event()
        self.holds = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook?key=secret"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.paths.append(self.path)
        self.server.headers.append(dict(self.headers))
        self.server.bodies.append(body)
        self.server.got.append(json.loads(body))
        if self.server.holds:
            self.server.release.wait(_WITHIN_S)
        self.send_response(self.server.answer(len(self.server.got)))
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield made
    made.release.set()
    made.shutdown()
    made.server_close()
    thread.join(_WITHIN_S)


@pytest.fixture
def start() -> Iterator[Callable[..., Webhook]]:
    made: list[Webhook] = []

    def begin(url: str, pause_s: float = 0.05) -> Webhook:
        hook = Webhook(url, {"program": "c1", "stream": "s", "group": "g"}, pause_s)
        made.append(hook)
        hook.start()
        return hook

    yield begin
    for hook in made:
        hook.stop()
        assert hook.join(_WITHIN_S)


def test_a_reading_loop_rings_for_its_letters_and_is_in_the_metrics_of_its_program(
    server: Server, redis_url: str
) -> None:
    def handle(message: StreamMessage) -> None:
        if message.fields["text"] == "bad":
            raise ValueError("of no use")

    def shown(name: str) -> float:
        return REGISTRY.get_sample_value(f"usher_loop_{name}_total", {"stream": "payments", "group": "billing"}) or 0

    done, letters = shown("done"), shown("dead_letters")
    options = LoopOptions(threads=1, max_attempts=2, retry_s=0.01, webhook=server.url, webhook_secret="secret")
    link = Link(redis_url, "test")
    _, bad = link.all_of([("XADD", "payments", "*", "text", text) for text in ("good", "bad")])
    with MessageReadingLoop(redis_url, "payments", "billing", handle, options) as loop:
        until(lambda: server.got)
        assert loop.health().ok
        until(lambda: (shown("done"), shown("dead_letters")) == (done + 1, letters + 1))
    [letter] = server.got[0]["dead_letters"]
    assert (server.got[0]["stream"], server.got[0]["group"]) == ("payments", "billing")
    told = [letter[name] for name in ("message_id", "reason", "error_type", "attempts")]
    assert told == [bad.decode(), "attempts_exhausted", "ValueError", 2]
    assert "webhook-signature" in server.headers[0]
    assert REGISTRY.get_sample_value("usher_dead_letters_total", {"reason": "attempts_exhausted"})
    link.close()


def test_dead_letters_are_told_in_batches(server: Server, start: Callable[..., Webhook]) -> None:
    server.holds = True  # the first one is on its way until all others are there
    hook = start(server.url)
    for number in range(250):
        hook.add({"message_id": f"{number}-0"})
    server.release.set()
    until(lambda: hook.sent == 250)
    assert [letter["message_id"] for document in server.got for letter in document["dead_letters"]] == [
        f"{number}-0" for number in range(250)
    ]
    assert all(len(document["dead_letters"]) <= MOST_AT_ONCE for document in server.got)
    assert len(server.got) <= 4, "the first at once, the others a pause apart"
    assert server.got[0].keys() == {"program", "stream", "group", "dead_letters", "left_out"}


def test_who_does_not_answer_holds_up_nobody_and_too_many_are_only_counted(
    server: Server, start: Callable[..., Webhook]
) -> None:
    server.holds = True
    hook = start(server.url)
    hook.add({"message_id": "first"})
    until(lambda: server.got)
    for number in range(3 * MOST_WAITING):  # while it hangs: this returns at once, and memory has its bound
        hook.add({"message_id": f"{number}-0"})
    server.holds = False
    server.release.set()
    until(lambda: hook.sent + hook.dropped == MOST_WAITING + 1)
    assert sum(document["left_out"] for document in server.got[-(MOST_WAITING // MOST_AT_ONCE) :]) == 2 * MOST_WAITING


def test_what_is_refused_comes_again_and_is_left_in_the_end(
    server: Server, start: Callable[..., Webhook], caplog: pytest.LogCaptureFixture
) -> None:
    server.answer = lambda number: 500 if number <= _TRIES + 1 else 200
    hook = start(server.url)
    hook.add({"message_id": "1-0"})
    until(lambda: hook.dropped == 1)
    assert len(server.got) == _TRIES
    hook.add({"message_id": "2-0"})
    until(lambda: hook.sent == 1)
    assert [document["dead_letters"][0]["message_id"] for document in server.got] == ["1-0"] * _TRIES + ["2-0"] * 2
    [told] = [record.facts for record in caplog.records if record.getMessage() == "webhook_failed"]  # type: ignore[attr-defined]
    assert told == {"url": f"http://127.0.0.1:{server.server_port}/...", "letters": 1, "why": "it answered 500"}


def test_no_redirect_is_followed(server: Server, start: Callable[..., Webhook]) -> None:
    server.answer, server.location = (lambda number: 307), f"http://127.0.0.1:{server.server_port}/elsewhere"
    hook = start(server.url)
    hook.add({"message_id": "1-0"})
    until(lambda: hook.dropped == 1)
    assert set(server.paths) == {"/hook?key=secret"}


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/secret", "http://[::1", "http://nowhere.invalid/secret"])
def test_nobody_there_is_no_trouble(start: Callable[..., Webhook], url: str, caplog: pytest.LogCaptureFixture) -> None:
    hook = start(url)
    hook.add({"message_id": "1-0"})
    until(lambda: hook.dropped == 1)
    assert hook.trouble is None
    assert "secret" not in str([getattr(record, "facts", {}) for record in caplog.records])


def test_it_survives_the_abuse_of_its_contract(server: Server) -> None:
    def make() -> Webhook:
        hook = Webhook(server.url, {}, 0.0)
        hook.add({"message_id": "1-0"})
        return hook

    check_contract(make)


def test_the_bell_counts_without_a_webhook_too() -> None:
    metrics = Metrics()
    bell = DeadLetterNotifier(metrics, CommonSettings(), "c1", Keys("s", "g"))
    bell.ring(b"T", b"1-0", "gave_up", error_type="ValueError", attempts=3, policy="halt")
    bell.ring(b"\xff", b"2-0", "too_large")
    page = metrics.page()[0].decode()
    assert 'usher_dead_letters_total{reason="gave_up"} 1.0' in page
    assert 'usher_dead_letters_total{reason="too_large"} 1.0' in page
    assert bell.services == ()


def test_a_receiver_with_a_certificate_of_our_own_ca_is_believed_with_that_ca_alone(
    server: Server, tmp_path: Path
) -> None:
    papers = Papers(tmp_path)
    with closing(TlsFront(papers, server.server_port)) as front:
        for ca, got in ((None, 0), (papers.ca, 1)):
            hook = Webhook(f"https://127.0.0.1:{front.port}/hook", {}, 0.0, ca=ca)
            hook.add({"message_id": "1-1"})
            while hook.sent + hook.dropped == 0:
                hook.run_once()
            hook.on_end()
            assert (hook.sent, len(server.got)) == (got, got)


def test_with_a_secret_each_try_of_a_post_is_signed_under_one_id(server: Server) -> None:
    server.answer = lambda number: 500 if number == 1 else 204
    hook = Webhook(server.url, {}, 0.0, secret="whsec_c2VjcmV0IG9mIG91cnM=")
    hook.add({"message_id": "1-1"})
    try:
        while hook.sent == 0:
            hook.run_once()
    finally:
        hook.on_end()
    first, second = server.headers
    assert first["webhook-id"] == second["webhook-id"]
    for headers, body in zip(server.headers, server.bodies, strict=True):
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        expected = base64.b64encode(hmac.digest(b"secret of ours", signed, "sha256")).decode()
        assert headers["webhook-signature"] == f"v1,{expected}"
