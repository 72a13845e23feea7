"""The table of HTTP answers, row by row: sent over raw sockets to real masters (a leader and a standby) on a real
Redis.

Where a row of the design promises something else than we do, ``instead_of`` has its answer and the row says why. What
is looked at more closely elsewhere is in `tests/integration/test_master_api*.py` and `test_serving*.py`; these rows say
that a whole master does it too.

What gunicorn's parser refuses it answers itself: `_BY_GUNICORN`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gunicorn
import pytest

from tests.hands import EmbeddedRedis, Role, ask, line_of
from tests.process.crew import KEYS, Crew
from tests.process.machine import until
from usher import Link

pytestmark = pytest.mark.process

_REGISTER, _ACKNOWLEDGE = "/api/consumers/register", "/api/messages/acknowledge"
_TOKENS = {"a": Role.CONSUMER, "b": Role.CONSUMER, "new": Role.CONSUMER, "ann": Role.VIEWER, "olga": Role.OPERATOR}
#: Slow clients, each of which has a thread for as long as it sends something now and then.
_SLOW = 36


@dataclass
class System:
    """A leader and a standby; a is registered in its second generation, its ticket T is acknowledged, its ticket U is
    not; b has nothing."""

    leader: int
    standby: int
    link: Link
    crew: Crew
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """``ask``: what is sent. ``also``: headers that the answer has, with their values (None: any)."""

    case: str
    ask: Callable[[System], bytes]
    status: int
    title: str | None = None
    also: dict[str, str | None] = field(default_factory=dict)
    body: Callable[[System, Any], bool] = lambda _system, _document: True
    to_standby: bool = False
    instead_of: tuple[Any, str] | None = None


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


def _send(port: int, sent: bytes, within_s: float = 30, address: str = "127.0.0.1") -> Answer:
    with socket.create_connection(("127.0.0.1", port), timeout=within_s, source_address=(address, 0)) as connection:
        connection.sendall(sent)
        return _answer(connection)


def _answer(connection: socket.socket) -> Answer:
    with contextlib.closing(http.client.HTTPResponse(connection)) as response:
        response.begin()
        return Answer(response.status, response.headers, response.read())


# ---- requests ----


def _request(
    method: str,
    path: str,
    body: object = None,
    *,
    token: str = "a",
    of: str | None = "application/json",
    host: str = "127.0.0.1",
    **headers: str,
) -> bytes:
    """A whole request; ``body``: bytes as they are, anything else as JSON."""
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"Host": host, **({"Authorization": f"Bearer {token}"} if token else {})}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        lines |= {"Content-Type": of} if of else {}
        if "Transfer-Encoding" not in lines:
            lines.setdefault("Content-Length", str(len(content)))
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content


def _get(path: str = "/api/consumers", **more: Any) -> Callable[[System], bytes]:
    return lambda _system: _request("GET", path, **({"token": "ann"} | more))


def _post(body: object, path: str = _REGISTER, **more: Any) -> Callable[[System], bytes]:
    return lambda _system: _request("POST", path, body, **more)


def _registration(system: System, **changes: Any) -> dict[str, Any]:
    return {"name": "a", "uuid": "a-1", "health_url": f"http://127.0.0.1:{system.leader}/api/health/live", **changes}


def _register(token: str = "a", **changes: Any) -> Callable[[System], bytes]:
    return lambda system: _request("POST", _REGISTER, _registration(system, **changes), token=token)


def _report(ticket: str, *message_ids: str, of: str = "incarnation", token: str = "a") -> Callable[[System], bytes]:
    """Acknowledge; the ids are names of facts, or ids."""

    def ask(system: System) -> bytes:
        ids = [system.facts.get(name, name) for name in message_ids]
        item = {"ticket_id": ticket, "fence": 1, "message_ids": ids}
        return _request("POST", _ACKNOWLEDGE, {"incarnation": system.facts.get(of, of), "tickets": [item]}, token=token)

    return ask


def _raw(head: bytes, body: bytes = b"{}") -> Callable[[System], bytes]:
    """A registration with these header lines, as they are."""
    start = f"POST {_REGISTER} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer a\r\nContent-Type: application/json\r\n".encode()
    return lambda _system: start + head + b"\r\n" + body


def _results(*answers: str) -> Callable[[System, Any], bool]:
    return lambda _system, document: bool(document == {"results": [list(answers)]})


_CLOSE: dict[str, str | None] = {"Connection": "close"}
_LATER: dict[str, str | None] = {"Retry-After": None}
_STRANGER = {"type": "about:blank", "title": "unauthorized", "status": 401, "detail": "send a valid bearer token"}
_ASKS_FOR_A_TOKEN: dict[str, str | None] = {"WWW-Authenticate": "Bearer"}


def _is_stranger(_system: System, document: Any) -> bool:
    """The same body, whatever was wrong."""
    return {name: value for name, value in document.items() if name != "request_id"} == _STRANGER


# ---- the table ----

#: The same status, and no request that is processed; but no problem document.
_BY_GUNICORN = (
    "a problem document",
    "gunicorn's parser refuses it, and answers in its own HTML: no public hook of gunicorn has a say in that",
)
#: What gunicorn's parser reads in its versions before 27, whose refusals are 400 also for a long URI.
_IS_OLD = gunicorn.version_info < (27,)
_SINCE_27 = ("lines that end in LF", "LF in a chunk extension")
_LONG_REPORT = (413, "64 KiB do not hold 500 messages of 500 tickets with ids of 256 bytes: a report may have 512 KiB")

ROWS = [
    # Who asks
    Row("no token", _get(token=""), 401, "unauthorized", _ASKS_FOR_A_TOKEN, _is_stranger),
    Row("invalid token", _get(token="nobody"), 401, "unauthorized", _ASKS_FOR_A_TOKEN, _is_stranger),
    Row("half a token", _get(token="an"), 401, "unauthorized", _ASKS_FOR_A_TOKEN, _is_stranger),
    Row("no token, unknown path", _get("/api/nowhere", token=""), 401, "unauthorized", _ASKS_FOR_A_TOKEN, _is_stranger),
    Row("A registers B", _register(name="b"), 403, "not_your_name"),
    Row("A reports for B", _report("T", "1-0", of="b:1"), 403, "not_your_name"),
    Row("a viewer acts", _post({"reason": ""}, "/api/consumers/a/drain", token="ann"), 403, "role_missing"),
    Row("a consumer acts as operator", _post({"reason": ""}, "/api/consumers/a/drain"), 403, "role_missing"),
    # Registering and reporting
    Row(
        "register new",
        _register("new", name="new"),
        201,
        None,
        {},
        lambda _, got: got["generation"] > 0 and got["lease_ms"] == 60_000,
    ),
    Row(
        "the same start again",
        _register(),
        200,
        None,
        {},
        lambda system, got: bool(got["generation"] == system.facts["generation"]),
    ),
    Row("a name that is held", _register(uuid="a-2"), 409, "name_in_use", _LATER),
    Row("report: ok", _report("T", "done"), 200, None, {}, _results("ok")),
    Row("report: the same again", _report("T", "done"), 200, None, {}, _results("gone")),
    Row("report: another's ticket", _report("U", "others", of="b", token="b"), 200, None, {}, _results("stale")),
    Row("report of an old generation", _report("T", "done", of="ended"), 409, "fenced"),
    Row(
        "report of an unknown consumer",
        _report("T", "done", of="a:1"),
        409,
        "fenced",
        instead_of=(
            404,
            (
                "a leader knows who lives, not who ever lived: unknown and ended look alike, and both have to register"
                " again"
            ),
        ),
    ),
    Row(
        "deregister an unknown consumer",
        _post({"incarnation": "a:1"}, "/api/consumers/deregister"),
        404,
        "unknown_incarnation",
    ),
    Row(
        "a report to a standby",
        _report("T", "done"),
        503,
        "not_leader",
        _LATER,
        lambda system, got: bool(got["leader_url"]),
        to_standby=True,
    ),
    # Malformed: 400
    Row("malformed JSON", _post(b'{"name":'), 400, "malformed_json"),
    Row("bad UTF-8", _post(b'{"name": "\xff"}'), 400, "malformed_json"),
    Row("a lone surrogate", _post(rb'{"name": "\ud800"}'), 400, "malformed_json"),
    Row("NaN", _post(b'{"slots": NaN}'), 422, "invalid_fields"),
    # Well-formed, wrong type or range: 422
    Row("true for a number", _register(slots=True), 422, "invalid_fields"),
    Row("2^64", _register(slots=2**64), 422, "invalid_fields"),
    Row("a name that does not fit", _register(name="-a"), 422, "invalid_fields"),
    Row("a name with a line break", _register(name="a\n"), 422, "invalid_fields"),
    Row("a message id that does not fit", _report("T", "1-0-0"), 422, "invalid_fields"),
    Row("a message id in other digits", _report("T", "\u0661-0"), 422, "invalid_fields"),
    Row("a ticket id of 257 bytes", _report("t" * 257, "1-0"), 422, "invalid_fields"),
    # HTTP
    Row("wrong media type", _post(b"a=b", of="application/x-www-form-urlencoded"), 415, "unsupported_media_type"),
    Row("no media type", _post(b"{}", of=None), 415, "unsupported_media_type"),
    Row("an answer that cannot be", _get(Accept="text/html"), 406, "not_acceptable"),
    Row("unknown path", _get("/api/nowhere"), 404, "not_found"),
    Row("wrong method", _get(_REGISTER), 405, "method_not_allowed", {"Allow": None}),
    Row("a registration of 4,097 bytes", _post(b" " * 4097), 413, "content_too_large", _CLOSE),
    Row(
        "a length beyond the limit, before any of it was sent",
        _raw(b"Content-Length: 4097\r\n", b""),
        413,
        "content_too_large",
        _CLOSE,
    ),
    Row(
        "a report of 64 KiB + 1",
        _post(b" " * (64 * 1024 + 1), _ACKNOWLEDGE),
        400,
        "malformed_json",
        instead_of=_LONG_REPORT,
    ),
    Row("a report of 512 KiB + 1", _post(b" " * (512 * 1024 + 1), _ACKNOWLEDGE), 413, "content_too_large", _CLOSE),
    Row("no length", _raw(b"", b""), 411, "length_required", _CLOSE),
    Row(
        "a length and chunks",
        _raw(b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n"),
        400,
        also=_CLOSE,
        instead_of=_BY_GUNICORN,
    ),
    Row("two lengths", _raw(b"Content-Length: 2\r\nContent-Length: 2\r\n"), 400, also=_CLOSE, instead_of=_BY_GUNICORN),
    Row(
        "a coding that is not exactly chunked",
        _raw(b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n"),
        400,
        None,
        _CLOSE,
    ),
    Row(
        "lines that end in LF",
        lambda _: b"GET /api/consumers HTTP/1.1\nHost: 127.0.0.1\n\n",
        400,
        also=_CLOSE,
        instead_of=_BY_GUNICORN,
    ),
    Row(
        "LF in a chunk extension",
        _raw(b"Transfer-Encoding: chunked\r\n", b"2;a\nb\r\n{}\r\n0\r\n\r\n"),
        400,
        None,
        _CLOSE,
    ),
    Row("a space before the colon", _raw(b"Content-Length : 2\r\n"), 400, also=_CLOSE, instead_of=_BY_GUNICORN),
    Row("a URI of more than 2 KiB", _get("/" + "a" * 2048), 414, "uri_too_long", _CLOSE),
    Row(
        "headers of more than 8 KiB",
        _get(**{f"X-{index}": "a" * 950 for index in range(9)}),
        431,
        "request_header_fields_too_large",
        _CLOSE,
    ),
    Row(
        "headers of more than 8 KiB, with a body",
        _post(b"{}", **{f"X-{index}": "a" * 950 for index in range(9)}),
        431,
        "request_header_fields_too_large",
        _CLOSE,
    ),
    Row("65 headers", _get(**{f"X-{n}": "a" for n in range(64)}), 431, also=_CLOSE, instead_of=_BY_GUNICORN),
    Row(
        "Expect, with a length beyond the limit",
        _raw(b"Content-Length: 4097\r\nExpect: 100-continue\r\n", b""),
        413,
        None,
        _CLOSE,
    ),
    Row("a Host that is not ours", _get(host="rebound.example"), 421, "misdirected_request"),
    Row("a Host with more than a name", _get(host="rebound.example@localhost"), 421, "misdirected_request"),
]


# ---- the system ----


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, short_tmp: Path) -> Iterator[System]:
    folder = short_tmp / "answers"
    folder.mkdir()
    tokens = folder / "tokens"
    tokens.write_text("".join(f"{line_of(role, name, name)}\n" for name, role in _TOKENS.items()))
    tokens.chmod(0o600)
    environ = {"USHER_TOKENS_FILE": str(tokens), "USHER_HOSTS": "127.0.0.1", "USHER_LEASE_SECONDS": "60"}
    with EmbeddedRedis(folder / "redis", port=None, durable=False) as server, contextlib.ExitStack() as stack:
        link = stack.enter_context(Link(server.url, "test"))
        crew = stack.enter_context(Crew(folder, server.url, **environ))
        for _ in range(2):
            crew.start_master()
        yield _prepared(crew, link)


def _prepared(crew: Crew, link: Link) -> System:
    crew.until(lambda: sorted(_leads(url) for url in crew.masters) == [False, True], 30, "one master leads")
    leader, standby = sorted(
        (int(url.rpartition(":")[2]) for url in crew.masters), key=lambda port: not _leads(f"http://127.0.0.1:{port}")
    )
    system = System(leader, standby, link, crew)
    ended = _send(leader, _register(uuid="a-0")(system)).document["incarnation"]
    crew.until(lambda: ended in _told(crew, "consumer_joined"), 30, "it is known")
    link.call("DEL", KEYS.lease(ended))
    crew.until(lambda: ended in _told(crew, "consumer_lost"), 30, "it is lost")
    registered = _send(leader, _register()(system)).document
    link.call("DEL", KEYS.unproven(registered["incarnation"]))  # as its first renewal does
    done, others = (link.call("XADD", KEYS.stream, "*", "ticket_id", ticket).decode() for ticket in "TU")
    crew.until(lambda: len(_pending(link, registered["incarnation"])) == 2, 30, "both are handed over")
    link.call("XACK", KEYS.stream, KEYS.group, done)
    other = _send(leader, _register("b", name="b")(system)).document["incarnation"]
    system.facts = {
        "incarnation": registered["incarnation"],
        "generation": registered["generation"],
        "ended": ended,
        "b": other,
    }
    system.facts |= {"done": done, "others": others}
    return system


def _leads(url: str) -> bool:
    document = ask(f"{url}/api/health").document
    return isinstance(document, dict) and document.get("leader") is True


def _told(crew: Crew, action: str) -> set[str]:
    return {found["consumer"] for found in crew.events(action)}


def _pending(link: Link, incarnation: str) -> list[str]:
    return [row[0].decode() for row in link.call("XPENDING", KEYS.stream, KEYS.group, "-", "+", 10, incarnation)]


@pytest.mark.parametrize(
    "row", [row for row in ROWS if not (_IS_OLD and row.case in _SINCE_27)], ids=lambda row: row.case.replace(" ", "-")
)
def test_the_answer_is_the_promised_one(system: System, row: Row) -> None:
    answered = _send(system.standby if row.to_standby else system.leader, row.ask(system))
    assert row.instead_of is None or row.instead_of[0] != row.status, "this is no exception any more"
    if row.instead_of is _BY_GUNICORN:
        _check_by_gunicorn(answered, row.status)
    else:
        _check(answered, row.status, row.title)
        assert row.body(system, answered.document), answered.document
    for name, value in row.also.items():
        assert name in answered.headers
        assert value is None or answered.headers[name] == value


def _check_by_gunicorn(answered: Answer, status: int) -> None:
    assert answered.status == status, answered.body
    assert answered.headers["Content-Type"] == "text/html", "it is no exception any more"
    assert answered.body.startswith(b"<html>")
    assert b"Traceback" not in answered.body


def _check(answered: Answer, status: int, title: str | None) -> None:
    """Every problem is a problem document without a stack and without anything that was sent."""
    assert answered.status == status, answered.body
    assert (answered.headers["Cache-Control"], answered.headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
    if status < 400:
        assert answered.headers["Content-Type"] == "application/json"
        return
    assert answered.headers["Content-Type"] == "application/problem+json"
    document = answered.document
    assert (document["type"], document["status"], len(document["request_id"])) == ("about:blank", status, 16)
    assert title is None or document["title"] == title
    assert b"Traceback" not in answered.body


def test_who_falls_silent_is_408_or_closed_and_its_thread_is_free(system: System) -> None:
    """A body that does not go on within 10 s; of a head that does not (6.1: 5 s) gunicorn says nothing."""
    with contextlib.ExitStack() as stack:
        slow, headless = (
            stack.enter_context(socket.create_connection(("127.0.0.1", system.leader), timeout=60)) for _ in range(2)
        )
        slow.sendall(_request("POST", _ACKNOWLEDGE, b"5\r\n{}", Transfer_Encoding="chunked"))
        headless.sendall(_get()(system)[:-10])
        answer = _answer(slow)
        _check(answer, 408, "request_timeout")
        assert answer.headers["Connection"] == "close"
        assert headless.recv(1) == b""


_LOG_IN = (
    b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length:"
    b" 10\r\n\r\n"
)


@pytest.mark.parametrize(
    "half",
    [
        pytest.param(b"GET /api/health/live HT", id="half a head"),
        pytest.param(
            b"GET /api/health/live HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n", id="a body that nobody asked for"
        ),
        pytest.param(_LOG_IN, id="half a log-in"),
    ],
)
def test_strangers_that_take_their_time_hold_up_nobody(system: System, half: bytes) -> None:
    """More of them than threads do: then others wait. A reverse proxy is the answer to that
    (`tests/integration/test_reverse_proxy.py`)."""
    with contextlib.ExitStack() as stack:
        for _ in range(_SLOW):
            stack.enter_context(socket.create_connection(("127.0.0.1", system.leader), timeout=60)).sendall(half)
        until(lambda: _refused(system.leader) is None, 2, "it answers")


@pytest.mark.parametrize(
    "half",
    [
        pytest.param(_LOG_IN, id="a length"),
        pytest.param(_LOG_IN.replace(b"Content-Length: 10", b"Content-Length: 4096"), id="the greatest length"),
        pytest.param(_LOG_IN.replace(b"Content-Length: 10", b"Transfer-Encoding: chunked"), id="chunks"),
        pytest.param(
            _LOG_IN.replace(b"Content-Length: 10", b"Content-Length: 10\r\nExpect: 100-continue"),
            id="when told to go on",
        ),
    ],
)
def test_log_ins_that_trickle_in_keep_nobody_from_logging_in(system: System, half: bytes) -> None:
    """As long as they are fewer than threads."""
    with contextlib.ExitStack() as stack:
        for _ in range(_SLOW):
            stack.enter_context(socket.create_connection(("127.0.0.1", system.leader), timeout=60)).sendall(half)
        time.sleep(0.3)
        began = time.monotonic()
        assert _send(system.leader, _LOG_IN + b"token=view", address="127.0.0.2").status == 403, (
            "nobody has that token, and it was looked at"
        )
        assert time.monotonic() - began < 2


def _refused(port: int) -> Answer | None:
    answered = _send(port, _request("GET", "/api/health/live"))
    return answered if answered.status != 200 else None


# ---- Redis is away ----


@pytest.fixture(scope="module")
def away(short_tmp: Path) -> Iterator[int]:
    """The port of a master whose Redis has gone."""
    folder = short_tmp / "away"
    folder.mkdir()
    with EmbeddedRedis(folder / "redis", port=None, durable=False) as server, Crew(folder, server.url) as crew:
        crew.start_master()
        crew.until(lambda: _leads(crew.masters[0]), 30, "it leads")
        server.stop()
        port = int(crew.masters[0].rpartition(":")[2])
        crew.until(lambda: _send(port, _request("GET", "/api/health/ready")).status == 503, 30, "it notices")
        crew.until(lambda: not _leads(crew.masters[0]), 30, "its lead has ended; until then it answers what it knows")
        yield port


@pytest.mark.parametrize(
    ("sent", "titles"),
    [
        (_request("POST", _REGISTER, {"name": "a", "health_url": "http://127.0.0.1:1/"}), ("redis_unavailable",)),
        (_request("POST", "/api/consumers/deregister", {"incarnation": "a:1"}), ("redis_unavailable", "not_leader")),
        (
            _request(
                "POST",
                _ACKNOWLEDGE,
                {"incarnation": "a:1", "tickets": [{"ticket_id": "T", "fence": 1, "message_ids": ["1-0"]}]},
            ),
            ("redis_unavailable", "not_leader"),
        ),
        *(
            (_request("GET", path), ("redis_unavailable",))
            for path in ("/api/consumers", "/api/tickets", "/api/dead-letters")
        ),
        *(
            (_request("GET", path), ("redis_unavailable",))
            for path in ("/api/rules", "/api/actions", "/api/explain?id=T", "/api/lag")
        ),
        (_request("POST", "/api/rules", {"target": "everything", "action": "pause"}), ("redis_unavailable",)),
    ],
    ids=lambda value: value.split(b" HTTP", 1)[0].decode().replace(" ", "-") if isinstance(value, bytes) else "",
)
def test_while_redis_is_away_it_is_503_and_never_500(away: int, sent: bytes, titles: tuple[str, ...]) -> None:
    answered = _send(away, sent)
    _check(answered, 503, None)
    assert answered.document["title"] in titles
    assert answered.headers["Retry-After"]


def test_while_redis_is_away_the_master_is_alive_and_not_ready(away: int) -> None:
    """Alive: a restart would mend nothing."""
    assert _send(away, _request("GET", "/api/health/live")).status == 200
    ready = _send(away, _request("GET", "/api/health/ready"))
    assert (ready.status, ready.document["status"]) == (503, "failing")
    assert ready.document["reasons"]
