"""A path prefix: which ones are taken, and what they change of answers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from flask import Flask, redirect, request
from werkzeug.wrappers import Response as AnyResponse

from usher.common.base.errors import SettingsError
from usher.common.http.app import create_app
from usher.common.http.auth import Doorman, doorman, needs
from usher.common.http.credentials import Credentials, Identity, Role
from usher.common.http.path_prefix import add_path_prefix
from usher.common.runtime.settings import load
from usher.master.settings import MasterSettings

_PAGES = Path(__file__).resolve().parents[2] / "master/web/pages"
_HTML = {"Accept": "text/html"}


def _app(prefix: str, *, secure: bool = False) -> Flask:
    guard = Doorman(Credentials({"t": Identity(Role.VIEWER, "ann")}), secure=secure, prefix=prefix)
    guard.login_path = "/login"
    app = create_app(__name__, guard, 100)
    app.add_url_rule("/tickets", "tickets", lambda: request.full_path)

    @app.post("/login")
    @needs(Role.ANYBODY)
    def log_in() -> AnyResponse:
        response: AnyResponse = redirect("/tickets", 303)
        doorman().sign_in("t", response)
        return response

    if prefix:
        add_path_prefix(app, prefix)
    return app


@pytest.mark.parametrize(
    "value",
    [
        *("ops", "/", "/ops/", "//ops", "/ops//usher", "/ops?x", "/ops#x", "/ops usher", "/ops/../x", "/.", "/ö"),
        *("https://host/ops", "//host/ops", "/ops\n", "/ops;x", "/ops%2Fx", '/"><b>', "/" + "x" * 200),
    ],
)
def test_a_prefix_that_is_no_plain_path_is_refused(value: str) -> None:
    with pytest.raises(SettingsError, match="USHER_PATH_PREFIX: must be a path like /ops/usher"):
        load(MasterSettings, {"USHER_PATH_PREFIX": value})
    assert load(MasterSettings, {"USHER_PATH_PREFIX": "/ops/us-her_1.0~"}).path_prefix == "/ops/us-her_1.0~"


def test_a_prefix_that_begins_like_a_path_of_ours_is_refused() -> None:
    with pytest.raises(SettingsError, match="/tickets is a path of Usher's own"):
        _app("/tickets/usher")
    assert _app("/ticket").test_client().post("/ticket/login").status_code == 303


def test_the_prefix_may_be_there_or_not_and_is_taken_off_once_and_whole() -> None:
    client = _app("/ops/usher").test_client()
    named = {"Authorization": "Bearer t"}
    for path in ("/tickets?x=1", "/ops/usher/tickets?x=1"):
        assert client.get(path, headers=named).text == "/tickets?x=1"
    for path in ("/ops/usher", "/ops/usher/", "/ops/ushers/tickets", "/ops/tickets", "/ops/usher/ops/usher/tickets"):
        assert client.get(path, headers=named).status_code == 404


def test_what_leads_on_leads_below_the_prefix() -> None:
    for prefix in ("", "/ops/usher"):
        client = _app(prefix).test_client()
        turned_away = client.get(f"{prefix}/tickets?x=1", headers=_HTML)
        assert turned_away.headers["Location"] == f"{prefix}/login?next=%2Ftickets%3Fx%3D1"
        signed_in = client.post(f"{prefix}/login")
        assert (signed_in.headers["Location"], signed_in.text) == (f"{prefix}/tickets", "")


@pytest.mark.parametrize(
    ("prefix", "secure", "cookie", "path"),
    [
        ("", False, "usher", "/"),
        ("", True, "__Host-usher", "/"),
        ("/ops/usher", False, "usher", "/ops/usher"),
        ("/ops/usher", True, "__Secure-usher", "/ops/usher"),
    ],
)
def test_other_programs_behind_the_proxy_do_not_get_the_session(
    prefix: str, secure: bool, cookie: str, path: str
) -> None:
    set_cookie = _app(prefix, secure=secure).test_client().post(f"{prefix}/login").headers["Set-Cookie"]
    name, *parts = set_cookie.replace("=", "; ", 1).split("; ")
    assert name == cookie
    assert f"Path={path}" in parts
    assert ("Secure" in parts) is secure


@pytest.mark.parametrize("file", sorted(_PAGES.glob("templates/**/*.html")), ids=lambda file: file.name)
def test_every_link_of_a_template_begins_with_the_prefix(file: Path) -> None:
    links = re.findall(r'\b(?:href|src|action|formaction|data-live)="([/{].*?)"', file.read_text())
    found = [link for link in links if not link.startswith("{{ root }}") and not link.startswith("{% ")]
    assert not found, f"{file.name}: begin these with {{{{ root }}}}"


def test_scripts_and_styles_know_no_path_of_their_own() -> None:
    script = (_PAGES / "static/usher.js").read_text()
    assert re.findall(r"[\"'`]/[a-z]\w*|path=/", script) == ['"/events'], "a path is known by this ending"
    assert "url(" not in (_PAGES / "static/usher.css").read_text()
