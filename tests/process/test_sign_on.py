"""A real master behind a proxy that signs people on, and what others try: raw sockets from an address that is trusted
to name people (127.0.0.2), and from one that is not (127.0.0.1)."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPResponse
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

import pytest

from tests.doors import tokens_file
from tests.hands import CSRF_FIELD, CSRF_HEADER, EmbeddedRedis, Role
from tests.nginx import free_port, needs_nginx, nginx
from tests.process.crew import Crew
from usher.cli import run

pytestmark = pytest.mark.process

_PROXY, _OTHER = "127.0.0.2", "127.0.0.1"
_OPERATOR, _CONSUMER = "token-of-operators", "token-of-consumers"
_NAMED = "X-Forwarded-User"
_RULE = {"target": "ticket", "value": "T", "action": "pause"}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str

    @property
    def title(self) -> str:
        return str(json.loads(self.text)["title"])


class Master:
    """A master that believes 127.0.0.2."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.port = int(crew.masters[0].rpartition(":")[2])

    def ask(
        self,
        *headers: tuple[str, str | bytes],
        path: str = "/api/rules",
        method: str = "GET",
        body: str = "",
        source: str = _PROXY,
    ) -> Answer:
        """Send just these headers, byte by byte, beside Host and Content-Length."""
        lines = [f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nConnection: close\r\n".encode()]
        for name, value in headers:
            lines += [name.encode(), b": ", value if isinstance(value, bytes) else value.encode(), b"\r\n"]
        lines.append(f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
        address = ("127.0.0.1", self.port)
        with socket.create_connection(address, timeout=20, source_address=(source, 0)) as connection:
            connection.sendall(b"".join(lines))
            with closing(HTTPResponse(connection)) as response:
                response.begin()
                return Answer(response.status, dict(response.headers.items()), response.read().decode())

    def post(self, path: str, form: dict[str, str], *headers: tuple[str, str]) -> Answer:
        """As a form of a page does, through the proxy."""
        kind = ("Content-Type", "application/x-www-form-urlencoded")
        return self.ask(kind, *headers, path=path, method="POST", body=urlencode(form))


@pytest.fixture(scope="module")
def master(short_tmp: Path) -> Iterator[Master]:
    folder = short_tmp / "sign-on"
    folder.mkdir()
    signed_on = "operator olga sign-on\noperator otto@example.org sign-on\nviewer vera sign-on\n"
    tokens = (Role.OPERATOR, "operator-token", _OPERATOR), (Role.CONSUMER, "*", _CONSUMER)
    environ = {
        "USHER_TOKENS_FILE": tokens_file(folder, *tokens, signed_on=signed_on),
        "USHER_PROXIES": f"{_PROXY}, fd00::/8",
    }
    with (
        EmbeddedRedis(folder / "redis", port=None, durable=False) as server,
        Crew(folder, server.url, **environ) as crew,
    ):
        crew.start_master()
        made = Master(crew)
        crew.until(lambda: _is_up(made), 60, "it is well")
        yield made


def _is_up(master: Master) -> bool:
    try:
        return master.ask(path="/api/health").status == 200
    except OSError:
        return False


def test_whom_the_proxy_names_may_what_the_lists_say(master: Master) -> None:
    assert master.ask((_NAMED, "vera")).status == 200
    assert master.ask((_NAMED.lower(), "otto@example.org")).status == 200
    page = master.ask((_NAMED, "vera"), ("Accept", "text/html"), path="/")
    assert page.status == 200
    assert "Signed on as <bdi>vera</bdi>" in page.text
    assert "sign out there" in page.text
    assert "/logout" not in page.text
    assert "Only there can you sign out" in master.ask((_NAMED, "vera"), path="/login").text
    for name in ("eve", "OLGA", "olga2", "*", "token-of-operators"):
        refused = master.ask((_NAMED, name))
        assert (refused.status, refused.title) == (403, "not_admitted"), name
        shown = master.ask((_NAMED, name), ("Accept", "text/html"), path="/")
        assert (shown.status, "USHER_TOKENS_FILE" in shown.text) == (403, True), "no way round by the log-in"


def test_an_address_that_is_not_named_names_nobody(master: Master) -> None:
    assert master.ask((_NAMED, "olga"), source=_OTHER).status == 401
    assert master.ask((_NAMED, "olga"), ("X-Forwarded-For", _PROXY), ("X-Real-IP", _PROXY), source=_OTHER).status == 401
    assert master.ask((_NAMED, "olga"), ("Forwarded", f"for={_PROXY}"), source="127.0.0.3").status == 401
    assert master.ask(source=_PROXY).status == 401, "the proxy itself is nobody"


@pytest.mark.parametrize(
    "headers",
    [
        ((_NAMED, "olga"), (_NAMED, "olga")),
        ((_NAMED, "olga"), ("x-forwarded-user", "eve")),
        ((_NAMED, ""),),
        ((_NAMED, "   "),),
        ((_NAMED, "olga"), (_NAMED, "")),
        ((_NAMED, "olga,eve"),),
        ((_NAMED, "ölga"),),
        ((_NAMED, b"olg\xe4"),),
        ((_NAMED, "ol ga"),),
        ((_NAMED, "x" * 129),),
        ((_NAMED, "x" * 4000),),
        ((_NAMED, b"ol\tga"),),
    ],
)
def test_a_header_that_holds_not_one_name_is_refused(
    master: Master, headers: tuple[tuple[str, str | bytes], ...]
) -> None:
    refused = master.ask(*headers)
    assert (refused.status, refused.title) == (401, "unfit_sign_on")
    assert refused.headers["WWW-Authenticate"] == "Bearer"
    assert master.ask(*headers, ("Accept", "text/html"), path="/").status == 401, "and not sent to the log-in"
    assert master.ask(*headers, path="/api/health").status == 200


@pytest.mark.parametrize("name", ["X_Forwarded_User", "X-Forwarded_User", "x_forwarded-user"])
def test_a_header_with_underscores_is_not_the_header(master: Master, name: str) -> None:
    assert master.ask((name, "olga")).status == 401
    both = master.ask((_NAMED, "vera"), (name, "olga"), path="/rules")
    assert "Signed on as <bdi>vera</bdi>" in both.text, "what a proxy does not know to delete changes nothing"


@pytest.mark.parametrize("value", [b"olga\x1b[31m", b"olga\x7f", b"olga\x00", b"ol\rga", b"olga\r\n eve"])
def test_what_could_end_a_header_gets_no_further_than_the_parser(master: Master, value: bytes) -> None:
    assert master.ask((_NAMED, value)).status in (400, 401)


def test_a_token_decides_before_the_header_and_the_header_before_the_session(master: Master) -> None:
    bearer, wrong = ("Authorization", f"Bearer {_OPERATOR}"), ("Authorization", "Bearer wrong")
    json_kind, rule = ("Content-Type", "application/json"), json.dumps(_RULE)
    acted = master.ask(bearer, (_NAMED, "vera"), json_kind, path="/api/rules", method="POST", body=rule)
    assert (acted.status, json.loads(acted.text)["rule"]["who"]) == (201, "operator-token")
    assert master.ask(wrong, (_NAMED, "olga")).status == 401
    assert master.ask(("Authorization", "Basic b2xnYTp4"), (_NAMED, "olga")).status == 401
    consumer = ("Authorization", f"Bearer {_CONSUMER}")
    assert master.ask(consumer, (_NAMED, "olga")).status == 403, "a consumer's token is one behind the proxy too"

    signed_in = master.post("/login", {"token": _OPERATOR})
    cookie = ("Cookie", signed_in.headers["Set-Cookie"].partition(";")[0])
    assert master.ask(cookie).status == 200
    page = master.ask(cookie, (_NAMED, "vera"), path="/rules").text
    assert "Signed on as <bdi>vera</bdi>" in page
    assert "/rules/set" not in page, "the session's rights are not hers"
    assert master.ask(cookie, (_NAMED, "eve")).status == 403
    assert master.ask(cookie, (_NAMED, "")).status == 401


def test_pages_of_other_sites_do_nothing_in_the_name_of_whom_the_proxy_signs_on(master: Master) -> None:
    olga = (_NAMED, "olga")

    def token_of(*headers: tuple[str, str], path: str = "/rules") -> str:
        found = re.search(rf'name="{CSRF_FIELD}" value="([^"]+)"', master.ask(*headers, path=path).text)
        assert found is not None
        return found[1]

    mine = token_of(olga)
    for headers in (
        (("Sec-Fetch-Site", "cross-site"),),
        (("Sec-Fetch-Site", "same-site"),),
        (("Origin", "https://evil.example"),),
        (("Origin", "null"),),
    ):
        refused = master.post("/rules/set", {**_RULE, CSRF_FIELD: mine}, olga, *headers)
        assert (refused.status, refused.title) == (403, "cross_site")
    theirs = token_of((_NAMED, "otto@example.org"))
    session = master.post("/login", {"token": _OPERATOR}).headers["Set-Cookie"].partition(";")[0]
    of_session = token_of(("Cookie", session))
    assert len({mine, theirs, of_session}) == 3
    for token in ("", "x", theirs, of_session):
        refused = master.post("/rules/set", {**_RULE, CSRF_FIELD: token}, olga)
        assert (refused.status, refused.title) == (403, "csrf_token_missing")
        refused = master.post("/rules/set", {**_RULE, CSRF_FIELD: token}, olga, ("Cookie", session))
        assert refused.status == 403, "nor with the cookie that goes with it"
    for method, path in (("POST", "/api/rules"), ("DELETE", "/api/rules/x")):
        refused = master.ask(
            olga, ("Content-Type", "application/json"), path=path, method=method, body=json.dumps(_RULE)
        )
        assert (refused.status, refused.title) == (403, "csrf_token_missing")
    forged = master.ask(("Cookie", f"usher=sign-on csrf 0 olga; usher={mine}"), path="/login").text
    assert mine not in forged
    assert master.post("/rules/set", {**_RULE, CSRF_FIELD: mine, "why": "asked"}, olga).status == 303
    api = ((CSRF_HEADER, mine), ("Content-Type", "application/json"))
    assert master.ask(olga, *api, path="/api/rules", method="POST", body=json.dumps(_RULE)).status == 200
    viewer = master.post("/rules/set", {**_RULE, CSRF_FIELD: token_of(olga)}, (_NAMED, "vera"))
    assert viewer.status == 403
    actions = json.loads(master.ask(olga, path="/api/actions").text)["actions"]
    assert {action["who"] for action in actions[:2]} == {"sign-on:olga"}
    assert "sign-on:olga" in master.ask(olga, path="/actions").text


def test_it_is_never_on_in_silence_and_the_log_repeats_no_name_that_was_refused(master: Master) -> None:
    [told] = master.crew.events("sign_on")
    assert told["level"] == "WARNING"
    assert told["trusted"] == (
        "127.0.0.2, fd00::/8 may say in X-Forwarded-User who asks; of these names it admits 2 as operators and 1 as"
        " viewers (*: all)"
    )
    assert told["trusted"] in master.ask((_NAMED, "vera"), path="/doctor").text
    for name in ("evil eve", "", "x" * 200):
        master.ask((_NAMED, name))
    refused = [one for one in master.crew.events("token_refused") if one["sent_in"] == "sign-on header"]
    assert {one["address"] for one in refused} == {_PROXY}
    assert "evil" not in master.crew.log()


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("USHER_PROXIES", "0.0.0.0/0", "all addresses"),
        ("USHER_PROXIES", "::/0", "all addresses"),
        ("USHER_PROXIES", "proxy", "addresses and"),
        ("USHER_PROXIES", ",", "addresses and"),
        ("USHER_PROXIES", "10.0.0.1/8", "addresses and"),
        ("USHER_SIGN_ON_HEADER", "X_User", "should match pattern"),
    ],
)
def test_settings_that_admit_nobody_or_everybody_are_refused(
    name: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert run(["master"]) == 2
    told = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert name in told and problem in told


@needs_nginx
def test_a_client_of_a_proxy_that_deletes_the_header_names_nobody(master: Master, tmp_path: Path) -> None:
    port = free_port()
    passed = f"proxy_pass http://127.0.0.1:{master.port}; proxy_bind {_PROXY}; proxy_set_header Host $http_host;"
    servers = f"""server {{ listen 127.0.0.1:{port};
        location / {{ {passed} proxy_set_header {_NAMED} vera; }}
        location /api/ {{ {passed} proxy_set_header {_NAMED} ""; }} }}"""
    with nginx(tmp_path, servers, port):
        through = Master(master.crew)
        through.port = port
        for headers in ((), ((_NAMED, "olga"),), (("X_Forwarded_User", "olga"),), ((_NAMED, "olga"), (_NAMED, "olga"))):
            assert through.ask(*headers, source=_OTHER).status == 401, headers
            page = through.ask(*headers, path="/rules", source=_OTHER)
            assert "Signed on as <bdi>vera</bdi>" in page.text, headers
