"""The master's HTTP interface: the real application under the real server, asked over real HTTP and raw sockets.

Only the master behind it is a stand-in (``Desk``), which answers by the names it is asked with; the real one has tests
of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.doors import doorman
from tests.served import Running
from usher.common.base.errors import NotNow, ReplyUnknown
from usher.common.base.log import configure, event
from usher.common.http import serve as serving
from usher.common.http.serve import Liveness
from usher.common.protocol.registration import Registration
from usher.common.runtime.service import Health
from usher.master.assembly.facing import create_app
from usher.master.dispatch.events import Report
from usher.master.membership.consumer_http import parse_hosts
from usher.master.membership.registry import NameInUse, RegistrationOver, RegistrationResult
from usher.master.web.api import IncarnationFenced

CHILD = "from tests.integration.test_master_api import child; child()"
_TOKEN = "a token - ä"
_LEADER = "http://127.0.0.1:8701"


class Desk:
    """A master whose answers the tests choose by name."""

    leader_url, look_now = _LEADER, staticmethod(lambda: None)

    def __init__(self, how: dict[str, Any]) -> None:
        self._how = how
        self.status = self.membership = self.dispatcher = self.lead = self

    def _trouble(self, name: str) -> None:
        if name.startswith("redis-away"):
            raise NotNow("LOADING", "Redis: LOADING secret")
        if name.startswith("redis-unsure"):
            raise ReplyUnknown
        if name.startswith("bug"):
            raise KeyError("secret")

    def register(self, asked: Registration) -> RegistrationResult:
        event("asked", asked={name: value for name, value in asdict(asked).items() if name != "generation"})
        self._trouble(asked.name)
        if asked.name == "held":
            raise NameInUse(2_300)
        if asked.name == "over":
            raise RegistrationOver
        return RegistrationResult(replace(asked, generation=7), asked.uuid != "again", 10_000, 9_000)

    def deregister(self, incarnation: str) -> bool:
        self._trouble(incarnation)
        return incarnation != "unknown:1"

    def window(self, incarnation: str) -> int | None:
        return 80 if incarnation == "c1:7" else None

    def acknowledge(self, report: Report) -> list[list[str]]:
        self._trouble(report.incarnation)
        if report.incarnation == "fenced:1":
            raise IncarnationFenced
        wants, retrying = report.wants_answers, report.retrying
        event("reported", incarnation=report.incarnation, wants_answers=wants, retrying=retrying)
        return [["ok" if message_id != b"9-9" else "gone" for message_id in ids] for _, ids in report.items]

    def consumers(self) -> list[dict[str, Any]]:
        return [{"name": "c1"}]

    def tickets(self, cursor: str, limit: int) -> dict[str, Any]:
        return {"tickets": [], "cursor": None, "asked": [cursor, limit]}

    def ticket(self, ticket_id: str) -> dict[str, Any] | None:
        return None if ticket_id == "unknown" else {"ticket_id": ticket_id}

    def proofs(self) -> dict[str, Any]:
        return {"audit": self._how.get("audit")}

    def health(self) -> Health:
        return Health(tuple(self._how.get("reasons", ())))

    def leading(self) -> dict[str, Any]:
        return {"role": "standby", "leader": False, "leader_url": _LEADER, "epoch": None}


class Program:
    def __init__(self, how: dict[str, Any]) -> None:
        hosts = how.get("hosts", ())
        self.app = create_app(
            Desk(how),
            doorman=doorman(how.get("token", "")),
            health_hosts=parse_hosts("127.0.0.1,::1,good"),
            hosts=hosts,
        )

    def start(self, port: int, host: str) -> None:
        pass

    def liveness(self) -> Liveness:
        return Liveness(60.0)

    def stop(self) -> None:
        pass


def child() -> None:
    how = json.loads(sys.argv[1])
    configure("master", "info", "json")
    serving.serve(lambda: Program(how), "127.0.0.1:0", "master")


def _running(folder: Path, **how: Any) -> Iterator[Running]:
    running = Running(folder, how, CHILD)
    try:
        yield running.wait_until_up()
    finally:
        running.kill()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from _running(tmp_path_factory.mktemp("master"))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from _running(tmp_path_factory.mktemp("guarded"), token=_TOKEN, reasons=["intake is not running"])


def ask(running: Running, method: str, path: str, **more: Any) -> requests.Response:
    answered = requests.request(
        method, f"http://127.0.0.1:{running.port}{path}", timeout=20, allow_redirects=False, **more
    )
    assert answered.headers["Cache-Control"] == "no-store"
    assert answered.headers["X-Content-Type-Options"] == "nosniff"
    if answered.status_code >= 400 and method != "HEAD" and "reasons" not in answered.json():
        check_problem(answered.headers["Content-Type"], answered.json(), answered.status_code)
        assert "secret" not in answered.text
    return answered


def check_problem(content_type: str, document: dict[str, Any], status: int) -> None:
    assert content_type == "application/problem+json"
    assert document["status"] == status
    assert document["type"] == "about:blank"
    assert document["title"]
    assert len(document["request_id"]) == 16


def registration(**changes: Any) -> dict[str, Any]:
    return {"name": "c1", "health_url": "http://127.0.0.1:1/api/health", **changes}


def report(incarnation: str = "c1:7", *message_ids: str) -> dict[str, Any]:
    return {
        "incarnation": incarnation,
        "tickets": [{"ticket_id": "T", "fence": 5, "message_ids": list(message_ids or ["1-0"])}],
    }


REGISTER, DEREGISTER, ACKNOWLEDGE = "/api/consumers/register", "/api/consumers/deregister", "/api/messages/acknowledge"


# -- what works


def test_a_new_registration_is_201(master: Running) -> None:
    answered = ask(master, "POST", REGISTER, json=registration())
    assert answered.status_code == 201
    given = {
        "incarnation": "c1:7",
        "generation": 7,
        "lease_ms": 10_000,
        "left_ms": 9_000,
        "ticket_window": 1024,
        "leader_url": _LEADER,
    }
    assert answered.json() == given
    assert answered.headers["Content-Type"] == "application/json"


def test_what_is_left_out_of_a_registration_has_its_default(master: Running) -> None:
    ask(master, "POST", REGISTER, json={"consumer_name": "bare", "healthURL": "http://good/x"})
    asked = next(record["asked"] for record in master.records("asked") if record["asked"]["name"] == "bare")
    assert len(asked.pop("uuid")) == 32
    assert asked == {"name": "bare", "health_url": "http://good/x", "slots": 1, "capacity": 1000, "lock": "-"}


def test_what_is_in_a_registration_is_taken(master: Running) -> None:
    given = registration(name="full", uuid="u-1", slots=8, capacity=2000, lock="ab-12:2049:77:123456789")
    ask(master, "POST", REGISTER, json=given)
    assert given in [record["asked"] for record in master.records("asked")]


def test_a_start_that_is_over_is_410(master: Running) -> None:
    answered = ask(master, "POST", REGISTER, json=registration(name="over"))
    assert (answered.status_code, answered.json()["title"]) == (410, "registration_over")


def test_deregister(master: Running) -> None:
    assert ask(master, "POST", DEREGISTER, json={"incarnation": "c1:7"}).status_code == 200
    answered = ask(master, "POST", DEREGISTER, json={"incarnation": "unknown:1"})
    assert (answered.status_code, answered.json()["title"]) == (404, "unknown_incarnation")


def test_a_report_gets_one_word_per_message(master: Running) -> None:
    answered = ask(master, "POST", ACKNOWLEDGE, json=report("c1:7", "1-0", "9-9", "2-0"))
    assert (answered.status_code, answered.json()) == (200, {"results": [["ok", "gone", "ok"]]})


@pytest.mark.parametrize(
    "prefer", ["return=minimal", "respond-async, Return=Minimal; why=speed", "return=minimal,wait=1"]
)
def test_whoever_prefers_it_gets_no_words(master: Running, prefer: str) -> None:
    answered = ask(master, "POST", ACKNOWLEDGE, json=report("c1:7", "1-0"), headers={"Prefer": prefer})
    assert (answered.status_code, answered.content, answered.headers["Preference-Applied"]) == (
        204,
        b"",
        "return=minimal",
    )
    assert "Content-Type" not in answered.headers
    assert answered.headers["Usher-Window"] == "80", "so many messages it is given at a time"


def test_a_report_tells_how_many_tickets_wait_for_a_retry(master: Running) -> None:
    for text in ("17", "many", "-1", "9999999", ""):
        headers = {"Prefer": "return=minimal", "Usher-Retrying": text}
        told = {"incarnation": "retrying:1", "tickets": []}
        assert ask(master, "POST", ACKNOWLEDGE, json=told, headers=headers).status_code == 204
    retrying = [told["retrying"] for told in master.records("reported") if told["incarnation"] == "retrying:1"]
    assert retrying == [17, 0, 0, 0, 0]


def test_the_program_hears_whether_words_are_wanted(master: Running) -> None:
    for headers in ({}, {"Prefer": "return=minimal"}):
        ask(master, "POST", ACKNOWLEDGE, json=report("wanted:1"), headers=headers)
    assert [told["wants_answers"] for told in master.records("reported") if told["incarnation"] == "wanted:1"] == [
        True,
        False,
    ]


def test_a_report_of_500_tickets_with_the_longest_ids_is_taken(master: Running) -> None:
    tickets = [
        {"ticket_id": f"{index:0256}", "fence": 2**53, "message_ids": [f"1795215518421-{index}"]}
        for index in range(500)
    ]
    answered = ask(master, "POST", ACKNOWLEDGE, json={"incarnation": "c1:7", "tickets": tickets})
    assert answered.json() == {"results": [["ok"]] * 500}


@pytest.mark.parametrize("name", ["redis-away", "redis-unsure"])
@pytest.mark.parametrize("path", [REGISTER, DEREGISTER, ACKNOWLEDGE])
def test_trouble_with_redis_is_503_and_never_500(master: Running, name: str, path: str) -> None:
    body = {
        REGISTER: registration(name=name),
        DEREGISTER: {"incarnation": f"{name}:1"},
        ACKNOWLEDGE: report(f"{name}:1"),
    }[path]
    answered = ask(master, "POST", path, json=body)
    assert (answered.status_code, answered.headers["Retry-After"]) == (503, "1")


def test_a_bug_is_500_without_its_words_and_is_found_in_the_log_by_its_id(master: Running) -> None:
    answered = ask(master, "POST", ACKNOWLEDGE, json=report("bug:1"))
    assert answered.status_code == 500
    logged = [
        record for record in master.records("request_failed") if record["request_id"] == answered.json()["request_id"]
    ]
    assert len(logged) == 1
    assert "KeyError" in logged[0]["traceback"]


def test_reads(master: Running) -> None:
    assert ask(master, "GET", "/api/consumers").json() == {"consumers": [{"name": "c1"}]}
    assert ask(master, "HEAD", "/api/consumers").status_code == 200
    assert ask(master, "GET", "/api/audit").json() == {"audit": None}
    assert ask(master, "GET", "/api/tickets").json()["asked"] == ["0", 100]
    assert ask(master, "GET", "/api/tickets?cursor=17&limit=5").json()["asked"] == ["17", 5]
    assert ask(master, "GET", "/api/tickets?state=halted").status_code == 422, "else all are told as halted"
    assert ask(master, "GET", "/api/tickets?limit=999999999").json()["asked"] == ["0", 200]


@pytest.mark.parametrize(
    "query",
    [
        *("limit=0", "limit=-1", "limit=x", "limit=%D9%A1", "limit=1e2", "limit=9999999999"),
        *("cursor=a", "cursor=%00", "cursor=18446744073709551616"),
        "id=a&id=b",
    ],
)
def test_a_page_that_cannot_be_is_422(master: Running, query: str) -> None:
    assert ask(master, "GET", f"/api/tickets?{query}").status_code == 422


@pytest.mark.parametrize(("path", "status"), [("unknown", 404), ("%FF", 404), ("t" * 257, 422), ("%C3%A4" * 129, 422)])
def test_a_ticket_that_is_not_there_or_cannot_be(master: Running, path: str, status: int) -> None:
    assert ask(master, "GET", f"/api/tickets/{path}").status_code == status


def test_health_of_a_master_that_is_well(master: Running) -> None:
    for path in ("/api/health", "/api/health/ready"):
        answered = ask(master, "GET", path)
        assert (answered.status_code, answered.json()["status"], answered.json()["role"]) == (200, "ok", "standby")
        assert answered.json()["leader_url"] == _LEADER
    assert ask(master, "GET", "/api/health/live").status_code == 200


def test_health_of_a_master_that_is_not_well_says_why_and_needs_no_token(guarded: Running) -> None:
    for path in ("/api/health", "/api/health/ready"):
        answered = ask(guarded, "GET", path)
        assert (answered.status_code, answered.json()["reasons"]) == (503, ["intake is not running"])
    assert ask(guarded, "GET", "/api/health/live").status_code == 200


# -- the token


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_with_the_token_it_works(guarded: Running, scheme: str) -> None:
    headers = {"Authorization": f"{scheme} {_TOKEN}".encode()}
    assert ask(guarded, "POST", ACKNOWLEDGE, headers=headers, json=report()).status_code == 200


# -- what is refused


@pytest.mark.parametrize(
    ("accept", "status"),
    [
        ("*/*", 200),
        ("application/*", 200),
        ("text/html,*/*;q=0.8", 200),
        ("text/html", 406),
        ("application/json;q=0", 406),
        ("image/*", 406),
    ],
)
def test_an_answer_that_the_client_cannot_take(master: Running, accept: str, status: int) -> None:
    assert ask(master, "GET", "/api/consumers", headers={"Accept": accept}).status_code == status


@pytest.mark.parametrize("path", [REGISTER, DEREGISTER, ACKNOWLEDGE])
@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Type": "text/plain"}, b"{}", 415),
        ({"Content-Type": "application/json; charset=latin-1"}, b"{}", 415),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, b"{}", 415),
        ({"Content-Type": "application/json"}, b"", 400),
        ({"Content-Type": "application/json"}, b"[]", 422),
        ({"Content-Type": "application/json"}, b'"secret"', 422),
        ({"Content-Type": "application/json"}, b"null", 422),
        ({"Content-Type": "Application/JSON; charset=UTF-8"}, b'{"secret": 1}', 422),
    ],
)
def test_a_body_that_cannot_be_read(
    master: Running, path: str, headers: dict[str, str], body: bytes, status: int
) -> None:
    assert ask(master, "POST", path, headers=headers, data=body).status_code == status


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *(
            ({"name": wrong}, "name")
            for wrong in (None, 5, "", "-a", ".a", "a b", "a/b", "a\n", "ä", "a:1", "a" * 65, ["a"])
        ),
        *(({"slots": wrong}, "slots") for wrong in (None, True, "1", 1.0, 0, 1025, 2**64)),
        *(({"capacity": wrong}, "capacity") for wrong in (True, 0, 100_001, 2**64)),
        *(({"uuid": wrong}, "uuid") for wrong in (5, "", "a b", "u" * 65, "-u")),
        *(({"lock": wrong}, "lock") for wrong in (None, 5, "", "a b", "l" * 201)),
        *(
            ({"health_url": wrong}, "health_url")
            for wrong in (None, 5, "", "http://evil/", "http://127.1/", "http://good@127.0.0.1/", "file:///etc/passwd")
        ),
        *(
            ({"health_url": wrong}, "health_url")
            for wrong in ("http://169.254.169.254/", "http://[::1]:99999/", "http://127.0.0.1:0/", "http://good/ x")
        ),
        ({"secret": 1}, "(unknown)"),
        ({"consumer_name": "c1"}, "(unknown)"),
    ],
)
def test_a_registration_with_a_wrong_field_is_422_and_names_it(
    master: Running, changes: dict[str, Any], field: str
) -> None:
    answered = ask(master, "POST", REGISTER, json=registration(**changes))
    assert answered.status_code == 422
    assert [error["field"] for error in answered.json()["errors"]] == [field]
