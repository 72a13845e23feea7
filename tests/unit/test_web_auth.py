"""Who may do what: tokens, sessions of browsers, and pages of other sites."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from flask import Flask, Response, g, request
from werkzeug.test import Client, TestResponse

from tests.doors import consumer_program
from usher.common.http.answers import answer
from usher.common.http.app import add_health, create_app
from usher.common.http.auth import (
    CSRF_FIELD,
    CSRF_HEADER,
    Doorman,
    Guesses,
    csrf_token,
    doorman,
    local_path,
    must_be_for,
    needs,
)
from usher.common.http.credentials import Credentials, Identity, Role
from usher.common.http.serve import warn_of_plain_http
from usher.common.runtime.service import Health
from usher.consumer.web import create_app as consumer_app

_TOKENS = {
    "t-all": Identity(Role.ALL, "api-token"),
    "t-view": Identity(Role.VIEWER, "ann"),
    "t-act": Identity(Role.OPERATOR, "ben"),
    "t-c1": Identity(Role.CONSUMER, "c1"),
    "t-shop": Identity(Role.CONSUMER, "shop-*"),
}


def _app(tokens: dict[str, Identity] = _TOKENS, *, secure: bool = False, login_path: str | None = None) -> Flask:
    guard = Doorman(Credentials("t-all" if tokens else "", others=tokens), secure=secure)
    guard.login_path = login_path
    app = create_app(__name__, guard, 100)

    def tell() -> Response:
        return answer({"who": g.who, "role": g.role, "csrf": csrf_token()})

    for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        app.add_url_rule("/api/thing", f"thing_{method}", tell, methods=[method])
    app.add_url_rule("/page", "page", tell)
    app.add_url_rule("/api/open", "open", needs(Role.ANYBODY)(lambda: tell()), methods=["GET", "POST"])

    @app.post("/api/mine/<name>")
    @needs(Role.CONSUMER)
    def mine(name: str) -> Response:
        must_be_for(name)
        return tell()

    @app.post("/login")
    @needs(Role.ANYBODY)
    def log_in() -> Any:
        return "in" if doorman().sign_in(request.form["token"]) else ("no", 401)

    @app.post("/logout")
    @needs(Role.ANYBODY)
    def log_out() -> str:
        doorman().sign_out()
        return "out"

    return app


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _signed_in(token: str, app: Flask | None = None) -> Client:
    client = (app or _app()).test_client()
    assert client.post("/login", data={"token": token}).status_code == 200
    return client


def _title(answered: TestResponse, status: int) -> str:
    assert answered.status_code == status, answered.text
    assert answered.mimetype == "application/problem+json"
    title = answered.get_json()["title"]
    assert isinstance(title, str)
    return title


@pytest.mark.parametrize(
    ("token", "name", "role"),
    [("t-all", "api-token", "all"), ("t-view", "ann", "viewer"), ("t-act", "ben", "operator")],
)
def test_a_token_tells_who_it_is(token: str, name: str, role: str) -> None:
    told = _app().test_client().get("/api/thing", headers=_bearer(token)).get_json()
    assert told == {"who": name, "role": role, "csrf": ""}


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_a_viewer_changes_nothing(method: str) -> None:
    client = _app().test_client()
    assert _title(client.open("/api/thing", method=method, headers=_bearer("t-view")), 403) == "role_missing"
    for token in ("t-act", "t-all"):
        assert client.open("/api/thing", method=method, headers=_bearer(token)).status_code == 200


def test_a_consumer_may_do_its_own_work_under_its_own_name_only() -> None:
    client = _app().test_client()
    assert client.post("/api/mine/c1", headers=_bearer("t-c1")).status_code == 200
    assert client.post("/api/mine/shop-7", headers=_bearer("t-shop")).status_code == 200
    assert client.post("/api/mine/anything", headers=_bearer("t-all")).status_code == 200
    for token, name in (("t-c1", "c2"), ("t-c1", "c11"), ("t-shop", "c1")):
        assert _title(client.post(f"/api/mine/{name}", headers=_bearer(token)), 403) == "not_your_name"
    for token in ("t-act", "t-view"):
        assert _title(client.post("/api/mine/c1", headers=_bearer(token)), 403) == "role_missing"
    for method in ("GET", "POST"):
        assert _title(client.open("/api/thing", method=method, headers=_bearer("t-c1")), 403) == "role_missing"


def test_unknown_paths_and_wrong_methods_are_told_only_to_whom_may_come_in() -> None:
    client = _app().test_client()
    assert client.get("/nowhere").status_code == 401
    assert client.get("/nowhere", headers=_bearer("t-view")).status_code == 404
    assert client.delete("/page").status_code == 401
    assert client.delete("/page", headers=_bearer("t-act")).status_code == 405


def test_what_is_for_everybody_needs_no_token_and_is_not_harmed_by_a_wrong_one() -> None:
    client = _app().test_client()
    for headers in ({}, _bearer("wrong")):
        assert client.post("/api/open", headers=headers).get_json() == {"who": "anybody", "role": "anybody", "csrf": ""}


def test_where_no_token_is_set_everybody_may_everything() -> None:
    assert _app({}).test_client().delete("/api/thing").get_json() == {"who": "anybody", "role": "all", "csrf": ""}


# -- sessions


def test_a_session_is_a_cookie_that_scripts_and_other_sites_do_not_get() -> None:
    response = _app().test_client().post("/login", data={"token": "t-act"})
    cookie = response.headers["Set-Cookie"]
    assert cookie.startswith("usher=")
    assert all(part in cookie for part in ("HttpOnly", "SameSite=Strict", "Path=/", "Expires="))
    assert "t-act" not in cookie
    secure = _app(secure=True).test_client().post("/login", data={"token": "t-act"}).headers["Set-Cookie"]
    assert secure.startswith("__Host-usher=")
    assert "Secure" in secure


@pytest.mark.parametrize("token", ["", "wrong", "t-c1"])
def test_strangers_and_consumers_get_no_session(token: str) -> None:
    response = _app().test_client().post("/login", data={"token": token})
    assert response.status_code == 401
    assert "Set-Cookie" not in response.headers


def test_a_session_may_what_its_token_may() -> None:
    client = _signed_in("t-view")
    told = client.get("/api/thing").get_json()
    assert (told["who"], told["role"], len(told["csrf"])) == ("ann", "viewer", 64)
    assert _title(client.post("/api/thing", headers={CSRF_HEADER: told["csrf"]}), 403) == "role_missing"
    client.post("/logout", data={CSRF_FIELD: told["csrf"]})
    assert client.get("/api/thing").status_code == 401


def test_a_session_ends_with_its_token_and_with_its_time() -> None:
    cookie = _signed_in("t-view").get_cookie("usher")
    assert cookie is not None
    kept, gone = _app(), _app({"t-view2" if token == "t-view" else token: who for token, who in _TOKENS.items()})
    for app, status in ((kept, 200), (gone, 401)):
        client = app.test_client()
        client.set_cookie("usher", cookie.value)
        assert client.get("/api/thing").status_code == status
    kept.permanent_session_lifetime = timedelta(seconds=-1)
    client = kept.test_client()
    client.set_cookie("usher", cookie.value)
    assert client.get("/api/thing").status_code == 401


@pytest.mark.parametrize(
    "change", [lambda text: text[:-1], lambda text: "x" + text, lambda text: text.replace(".", ""), lambda _: "a.b.c"]
)
def test_a_cookie_that_we_did_not_make_is_none(change: Any) -> None:
    client = _signed_in("t-act")
    cookie = client.get_cookie("usher")
    assert cookie is not None
    client.set_cookie("usher", change(cookie.value))
    assert client.get("/api/thing").status_code == 401


def test_a_wrong_token_is_not_made_good_by_a_cookie() -> None:
    assert _signed_in("t-act").get("/api/thing", headers=_bearer("wrong")).status_code == 401


def test_what_a_session_changes_needs_its_csrf_token() -> None:
    client, other = _signed_in("t-act"), _signed_in("t-all")
    mine, others = (one.get("/api/thing").get_json()["csrf"] for one in (client, other))
    for headers, data in (
        ({}, {}),
        ({CSRF_HEADER: "x"}, {}),
        ({CSRF_HEADER: others}, {}),
        ({}, {CSRF_FIELD: others}),
        ({CSRF_HEADER: "\xff"}, {}),
    ):
        assert _title(client.post("/api/thing", headers=headers, data=data), 403) == "csrf_token_missing"
    assert client.post("/api/thing", headers={CSRF_HEADER: mine}).status_code == 200
    assert client.post("/api/thing", data={CSRF_FIELD: mine}).status_code == 200


_FOREIGN = [
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Origin": "http://evil"},
    {"Origin": "http://localhost:1"},
    {"Origin": "null"},
    {"Origin": "http://localhost", "Sec-Fetch-Site": "cross-site"},
]


@pytest.mark.parametrize("headers", _FOREIGN)
def test_a_page_of_another_site_changes_nothing(headers: dict[str, str]) -> None:
    client = _signed_in("t-act")
    csrf = client.get("/api/thing").get_json()["csrf"]
    assert _title(client.post("/api/thing", headers={CSRF_HEADER: csrf, **headers}), 403) == "cross_site"
    assert _title(_app({}).test_client().post("/api/thing", headers=headers), 403) == "cross_site"
    assert client.get("/api/thing", headers=headers).status_code == 200
    assert client.post("/api/thing", headers=_bearer("t-act") | headers).status_code == 200


@pytest.mark.parametrize("credentials", ["Basic dXNlcjpwYXNz", "Digest username=x", "Negotiate YII="])
def test_what_a_browser_sends_by_itself_to_a_proxy_makes_a_page_of_another_site_no_better(credentials: str) -> None:
    headers = {"Authorization": credentials, "Sec-Fetch-Site": "cross-site", "Origin": "http://evil"}
    client = _app({}).test_client()
    assert _title(client.post("/api/thing", headers=headers), 403) == "cross_site"
    assert client.post("/api/thing", headers=headers | {"Sec-Fetch-Site": "same-origin"}).status_code == 200
    assert _title(_app().test_client().post("/login", data={"token": "t-act"}, headers=headers), 403) == "cross_site"


@pytest.mark.parametrize(
    "headers", [{}, {"Origin": "http://localhost"}, {"Origin": "null", "Sec-Fetch-Site": "same-origin"}]
)
def test_our_own_page_does(headers: dict[str, str]) -> None:
    client = _signed_in("t-act")
    csrf = client.get("/api/thing").get_json()["csrf"]
    assert client.post("/api/thing", headers={CSRF_HEADER: csrf, **headers}).status_code == 200


def test_a_browser_without_a_session_is_shown_the_way_in_and_nobody_else() -> None:
    client = _app(login_path="/login").test_client()
    html = {"Accept": "text/html,application/xhtml+xml"}
    shown = client.get("/page?a=1&b=//x", headers=html)
    assert (shown.status_code, shown.headers["Location"]) == (303, "/login?next=%2Fpage%3Fa%3D1%26b%3D%2F%2Fx")
    assert client.get("/page").status_code == 401
    assert client.post("/page", headers=html).status_code == 401
    assert client.get("/api/thing", headers=html).status_code == 401


@pytest.mark.parametrize(
    "wanted", ["", "//evil", "/\\evil", "https://evil/", "javascript:1", "/a\r\nX: 1", "/\t/evil", "\\/evil"]
)
def test_the_way_after_the_log_in_leads_nowhere_else(wanted: str) -> None:
    assert local_path(wanted) == "/"


def test_wrong_tokens_are_counted_wherever_they_are_sent() -> None:
    app = _app()
    client = app.test_client()
    assert client.get("/api/thing", headers=_bearer("guess")).status_code == 401
    assert client.post("/login", data={"token": "guess"}).status_code == 401
    assert client.get("/api/thing", headers=_bearer("t-view")).status_code == 200
    assert client.get("/api/thing").status_code == 401, "none was sent"
    assert app.extensions["usher_doorman"].guesses.refused == 2


def test_a_wrong_log_in_is_logged_with_its_address_and_without_the_token(caplog: pytest.LogCaptureFixture) -> None:
    client = _app().test_client()
    for token in ("my-guess", *["another"] * 50):
        assert client.post("/login", data={"token": token}).status_code == 401
    logged = [record.facts for record in caplog.records if record.getMessage() == "token_refused"]  # type: ignore[attr-defined]
    assert logged == [{"address": "127.0.0.1", "sent_in": "log-in"}] * Guesses.LINES


def test_strangers_hear_that_something_is_wrong_and_not_where(caplog: pytest.LogCaptureFixture) -> None:
    app = _app()
    add_health(app, lambda: Health(("intake: NotNow: Redis at redis://db.internal:6379 cannot be reached",)), dict)
    told = [app.test_client().get("/api/health", headers=headers).text for headers in ({}, _bearer("t-view"))]
    assert ["db.internal" in text for text in told] == [False, True]
    assert "intake: NotNow; the log says more" in told[0]
    warn_of_plain_http("10.0.0.1:8700", None)
    warn_of_plain_http("127.0.0.1:8700", None)
    assert [record.getMessage() for record in caplog.records] == ["plain_http"], "tokens can be read on their way"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]", "10.9.8.7", "localhost", "shop-1", "scraped.example", "evil.example"]
)
def test_a_name_that_leads_to_a_consumer_and_is_none_of_its_own_is_refused(host: str) -> None:
    """A page of somewhere else may have its own name lead here (DNS rebinding)."""
    app = consumer_app(consumer_program(lambda: Health(())))  # type: ignore[arg-type]
    for path in ("/api/health", "/api/tickets/T"):
        answered = app.test_client().get(path, headers={"Host": f"{host}:8721"})
        assert answered.status_code == (421 if host == "evil.example" else 200)


def test_where_browsers_come_by_https_they_are_told_to_come_by_nothing_else() -> None:
    header = "Strict-Transport-Security"
    assert header in _app(secure=True).test_client().get("/api/open").headers
    assert header not in _app().test_client().get("/api/open").headers
