"""consumer/lifecycle/lease.py: what a consumer makes of the answers of masters. They come from a real HTTP server
that says what the test wants."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from usher.common.base.clock import now_s
from usher.common.base.errors import RedisTrouble
from usher.common.protocol.registration import Registration
from usher.common.runtime.service import ServiceEnded
from usher.consumer.lifecycle.lease import Registrar, Taken
from usher.consumer.lifecycle.master_client import MasterClient, MasterUnavailable


class Master:
    """Answers requests in turn with ``answers`` (status, document; 0: it breaks off), and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self.asked: list[dict[str, Any]] = []
        master = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                master.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                status, document = master.answers.pop(0)
                if not status:
                    return  # heard, and not answered
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def master() -> Iterator[Master]:
    made = Master()
    yield made
    made.close()


def test_why_no_master_could_is_told_as_the_master_told_it(master: Master) -> None:
    refused = {"title": "redis_unavailable", "detail": "Redis refuses writes: its memory is full (OOM)"}
    master.answers += [(503, refused), (503, {"title": "not_leader", "leader_url": None, "ticket_window": 128})]
    with pytest.raises(
        MasterUnavailable,
        match=r"redis_unavailable: Redis refuses writes: its memory is full \(OOM\); http.*not_leader$",
    ):
        MasterClient([master.url], "").post("/", b"{}")


def _ask() -> Registration:
    return Registration("c1", uuid.uuid4().hex, "http://127.0.0.1:1/api/health", 4, 100)


def _register(master: Master, *answers: tuple[int, dict[str, Any]]) -> Taken:
    """Ask until a name is taken."""
    master.answers += answers
    taken: list[Taken] = []
    registrar = Registrar(_ask, MasterClient([master.url], ""), taken.append)
    try:
        for _ in range(len(answers) - 1):
            registrar.run_once()
        with pytest.raises(ServiceEnded):
            registrar.run_once()
    finally:
        registrar.on_end()
    return taken[0]


def _given(left_ms: int) -> dict[str, Any]:
    return {
        "incarnation": "c1:7",
        "generation": 7,
        "lease_ms": 10_000,
        "left_ms": left_ms,
        "leader_url": None,
        "ticket_window": 128,
    }


def test_it_asks_again_under_the_same_uuid_for_as_long_as_it_is_not_over(master: Master) -> None:
    taken = _register(master, (409, {}), (201, _given(10_000)))
    assert {asked["uuid"] for asked in master.asked} == {taken.registration.uuid}


def test_who_waits_for_a_name_asks_anew_as_soon_as_it_has_evidence_and_only_then(master: Master) -> None:
    """Its predecessor lived when it began, and has ended since."""
    locks = ["-", "-", "boot:1:2:900", "boot:1:2:950"]
    master.answers += [(409, {}), (409, {}), (409, {}), (201, _given(10_000))]
    taken: list[Taken] = []
    registrar = Registrar(lambda: replace(_ask(), lock=locks.pop(0)), MasterClient([master.url], ""), taken.append)
    try:
        for _ in range(3):
            registrar.run_once()
        with pytest.raises(ServiceEnded):
            registrar.run_once()
    finally:
        registrar.on_end()
    assert [asked["lock"] for asked in master.asked] == ["-", "-", "boot:1:2:900", "boot:1:2:900"]
    uuids = [asked["uuid"] for asked in master.asked]
    assert uuids[0] == uuids[1] != uuids[2] == uuids[3] == taken[0].registration.uuid


def test_who_may_have_been_heard_asks_under_the_same_uuid_though_it_has_evidence_now(master: Master) -> None:
    """Else it would have to wait for the lease that it was given."""
    locks = ["-", "-", "boot:1:2:900"]
    master.answers += [(409, {}), (0, {}), (0, {}), (200, _given(9_000))]
    taken: list[Taken] = []
    registrar = Registrar(lambda: replace(_ask(), lock=locks.pop(0)), MasterClient([master.url], ""), taken.append)
    try:
        registrar.run_once()
        with pytest.raises(RedisTrouble):
            registrar.run_once()
        with pytest.raises(ServiceEnded):
            registrar.run_once()
    finally:
        registrar.on_end()
    assert {asked["uuid"] for asked in master.asked} == {taken[0].registration.uuid}


def test_when_its_registration_is_over_it_begins_under_a_new_uuid(master: Master) -> None:
    taken = _register(master, (410, {}), (201, _given(10_000)))
    first, second = (asked["uuid"] for asked in master.asked)
    assert first != second
    assert taken.registration.uuid == second


def test_a_lease_that_is_over_when_its_answer_comes_is_asked_for_again(master: Master) -> None:
    """A leader that stood still for longer made every consumer begin its process anew."""
    taken = _register(master, (201, _given(0)), (200, _given(9_000)))
    assert {asked["uuid"] for asked in master.asked} == {taken.registration.uuid}
    assert taken.sent_s + taken.lease_s > now_s() + 8.0


def test_a_lease_that_was_not_new_any_more_is_counted_by_what_is_left_of_it(master: Master) -> None:
    before_s = now_s()
    taken = _register(master, (200, _given(4_000)))
    assert taken.lease_s == 10.0
    assert before_s + 4.0 <= taken.sent_s + taken.lease_s <= now_s() + 4.0


def test_what_must_happen_before_happens_before_and_as_long_as_it_fails_nobody_is_asked(master: Master) -> None:
    troubles: list[Exception] = [RedisTrouble("not yet"), RedisTrouble("not yet")]

    def before() -> None:
        assert master.asked == []
        if troubles:
            raise troubles.pop()

    registrar = Registrar(_ask, MasterClient([master.url], ""), lambda taken: None, before)
    for _ in range(2):
        with pytest.raises(RedisTrouble):
            registrar.run_once()
    assert master.asked == []
    master.answers.append(
        (201, {"generation": 7, "lease_ms": 1000, "left_ms": 1000, "leader_url": None, "ticket_window": 128})
    )
    with pytest.raises(ServiceEnded):
        registrar.run_once()
    assert len(master.asked) == 1
    registrar.on_end()


def test_a_registration_that_waiting_cannot_mend_ends_the_program_with_the_masters_reason(master: Master) -> None:
    errors = [{"field": "health_url", "problem": "its host is not one of USHER_HEALTH_HOSTS"}]
    master.answers += [(422, {"title": "invalid_fields", "detail": "some fields cannot be used", "errors": errors})]
    ended: list[str] = []
    registrar = Registrar(_ask, MasterClient([master.url], ""), lambda taken: None, give_up=ended.append)
    with pytest.raises(MasterUnavailable, match="health_url: its host is not one of USHER_HEALTH_HOSTS"):
        registrar.run_once()
    registrar.on_end()
    (why,) = ended
    assert "some fields cannot be used: health_url: its host is not one of USHER_HEALTH_HOSTS" in why


def test_a_refusal_that_others_may_mend_is_told_and_asked_again(master: Master) -> None:
    master.answers += [(403, {"title": "not_your_name", "detail": "this token is for another consumer"})]
    ended: list[str] = []
    registrar = Registrar(_ask, MasterClient([master.url], ""), lambda taken: None, give_up=ended.append)
    with pytest.raises(MasterUnavailable, match="this token is for another consumer"):
        registrar.run_once()
    registrar.on_end()
    assert not ended
