"""What proxies in front say, and of whom it is believed: address, host, path prefix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from flask import Flask, g, redirect, request
from werkzeug.test import TestResponse
from werkzeug.wrappers import Response as AnyResponse

from usher.common.http.answers import answer
from usher.common.http.app import create_app
from usher.common.http.auth import Doorman, Guesses, doorman, is_within, needs
from usher.common.http.credentials import Credentials, Identity, Role, parse_networks

_PAGES = Path(__file__).resolve().parents[2] / "master/web/pages"
_PROXY, _OTHER = "10.0.0.5", "10.0.0.6"
_BEARER = {"Authorization": "Bearer t"}


def _app(*, secure: bool = False) -> Flask:
    credentials = Credentials(others={"t": Identity(Role.VIEWER, "ann")})
    guard = Doorman(credentials, secure=secure, proxies=parse_networks(_PROXY))
    guard.login_path = "/login"
    app = create_app(__name__, guard, 100, hosts=("localhost", "usher.example"))
    app.add_url_rule("/tickets", "tickets", lambda: answer({"path": request.full_path, "address": g.address}))

    @app.post("/login")
    @needs(Role.ANYBODY)
    def log_in() -> AnyResponse:
        doorman().sign_in("t")
        return redirect("/tickets", 303)

    return app


def _ask(app: Flask, path: str, peer: str = _PROXY, method: str = "GET", **headers: str) -> TestResponse:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return app.test_client().open(path, method=method, headers=named, environ_base={"REMOTE_ADDR": peer})


@pytest.mark.parametrize("peer", [_PROXY, f"::ffff:{_PROXY}"])
def test_a_named_proxy_is_believed(peer: str) -> None:
    told = _ask(
        _app(),
        "/tickets?x=1",
        peer,
        X_Forwarded_For="9.9.9.9, 1.1.1.1",
        X_Forwarded_Host="usher.example",
        Host="inner",
        **_BEARER,
    )
    assert told.get_json() == {"path": "/tickets?x=1", "address": "1.1.1.1"}


def test_nobody_else_is(caplog: pytest.LogCaptureFixture) -> None:
    said = {"X_Forwarded_For": "1.1.1.1", "X_Forwarded_Host": "usher.example", "X_Forwarded_Prefix": "/ops"}
    assert _ask(_app(), "/tickets", _OTHER, **said, **_BEARER).get_json()["address"] == _OTHER
    assert _ask(_app(), "/tickets", _OTHER, **said, Host="inner", **_BEARER).status_code == 421
    assert _ask(_app(), "/ops/tickets", _OTHER, **said, **_BEARER).status_code == 404
    turned_away = _ask(_app(), "/tickets", _OTHER, **said, Accept="text/html")
    assert turned_away.headers["Location"].startswith("/login")


def test_the_prefix_may_be_there_or_not_and_is_taken_off_once_and_whole() -> None:
    app, said = _app(), {"X_Forwarded_Prefix": "/ops/usher", **_BEARER}
    for path in ("/tickets?x=1", "/ops/usher/tickets?x=1"):
        assert _ask(app, path, **said).get_json()["path"] == "/tickets?x=1"
    for path in ("/ops/usher", "/ops/usher/", "/ops/ushers/tickets", "/ops/tickets", "/ops/usher/ops/usher/tickets"):
        assert _ask(app, path, **said).status_code == 404
    assert _ask(app, "/tickets", **_BEARER).status_code == 200, "who asks directly has none"


@pytest.mark.parametrize(
    "prefix", ["ops", "//evil", "/ops//usher", "/ops?x", "https://evil/", "/ops/../x", '/"><b>', ""]
)
def test_a_prefix_that_is_no_plain_path_is_none(prefix: str) -> None:
    turned_away = _ask(_app(), "/tickets", X_Forwarded_Prefix=prefix, Accept="text/html")
    assert turned_away.headers["Location"] == "/login?next=%2Ftickets"


@pytest.mark.parametrize(
    ("prefix", "secure", "cookie", "path"),
    [
        ("", False, "usher", "/"),
        ("", True, "__Host-usher", "/"),
        ("/ops/usher", False, "usher", "/ops/usher"),
        ("/ops/usher/", True, "__Secure-usher", "/ops/usher"),
    ],
)
def test_other_programs_behind_the_proxy_do_not_get_the_session(
    prefix: str, secure: bool, cookie: str, path: str
) -> None:
    signed_in = _ask(_app(secure=secure), "/login", method="POST", X_Forwarded_Prefix=prefix)
    name, *parts = signed_in.headers["Set-Cookie"].replace("=", "; ", 1).split("; ")
    assert name == cookie
    assert f"Path={path}" in parts
    assert ("Secure" in parts) is secure
    assert (signed_in.headers["Location"], signed_in.text) == (f"{path.rstrip('/')}/tickets", "")


@pytest.mark.parametrize("file", sorted(_PAGES.glob("templates/**/*.html")), ids=lambda file: file.name)
def test_every_link_of_a_template_begins_with_the_prefix(file: Path) -> None:
    links = re.findall(r'\b(?:href|src|action|formaction|data-live)="([/{].*?)"', file.read_text())
    found = [link for link in links if not link.startswith(("{{ root }}", "{% ", "{{ elsewhere }}"))]
    assert not found, f"{file.name}: begin these with {{{{ root }}}}"


def test_scripts_and_styles_know_no_path_of_their_own() -> None:
    script = (_PAGES / "static/usher.js").read_text()
    assert not re.findall(r"[\"'`]/[a-z]\w*|path=/", script)
    assert "url(" not in (_PAGES / "static/usher.css").read_text()


@pytest.mark.parametrize("value", ["0.0.0.0/0", "::/0", "proxy", ",", "10.0.0.1/8"])
def test_networks_that_are_none_or_all_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="must"):
        parse_networks(value)
    assert not is_within("unknown", parse_networks(_PROXY))


# -- guesses, which are counted by address


def test_after_many_wrong_tokens_no_other_one_of_that_address_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [60.0 * 7 + 50]
    monkeypatch.setattr("usher.common.http.auth.now_s", lambda: now[0])
    app = _app()

    def guess(token: str, address: str = "1.1.1.1", path: str = "/tickets") -> TestResponse:
        return _ask(app, path, X_Forwarded_For=address, Authorization=f"Bearer {token}")

    assert {guess("of last year").status_code for _ in range(2 * Guesses.MOST)} == {401}, "the same one counts once"
    assert guess("t", "2.2.2.2").status_code == 200
    for address in ("1.1.1.1", "2.2.2.2"):
        assert {guess(f"guess{number}", address).status_code for number in range(Guesses.MOST + 9)} == {401, 429}
    unheard = guess("t")
    assert (unheard.status_code, unheard.get_json()["title"]) == (429, "too_many_wrong_tokens")
    assert unheard.headers["Retry-After"] == "10"
    assert guess("of last year").status_code == 401, "an old program is told the same"
    assert guess("t", "2.2.2.2").status_code == 200, "who was let in before goes on"
    assert guess("t", "3.3.3.3").status_code == 200
    now[0] += 10
    assert guess("t").status_code == 200
