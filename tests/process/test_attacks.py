"""Attacks and mistakes, a row of one table each: what they did before step 13, and what comes of them now."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from flask import Flask, request

from tests.process.crew import KEYS
from tests.process.test_acl import _BY_KEY, Guarded, _client, _refusal, guarded_redis
from usher.common.base.errors import SettingsError
from usher.common.base.text import json_line
from usher.common.http.app import add_health, create_app
from usher.common.http.auth import CSRF_HEADER, Doorman, SignedOut, csrf_token, doorman, needs
from usher.common.http.credentials import Credentials, Identity, Role
from usher.common.http.serve import warn_of_plain_http
from usher.common.observability.webhook import signature
from usher.common.protocol.last_error import LastError
from usher.common.redis.client import Link
from usher.common.runtime.service import Health
from usher.common.runtime.settings import load
from usher.consumer.settings import ConsumerSettings
from usher.consumer.web import create_app as consumer_app
from usher.consumer.web import hosts_of
from usher.deploy.local.init_deploy import Host, plan
from usher.master.web.seen import without_texts

pytestmark = pytest.mark.process

_REFUSED = "NOPERM"


class Attack(NamedTuple):
    """``before``: what came of it on 11b4ba8; ``after``: what ``attempt`` finds now."""

    what: str
    before: str
    after: str
    attempt: Callable[[Guarded], str]


def _by(user: str, *command: str) -> Callable[[Guarded], str]:
    def send(server: Guarded) -> str:
        client = _client(server, user)
        refusal = _refusal(client, *command)
        client.close()
        return refusal or _REFUSED

    return send


def _signed_out_cookie(server: Guarded) -> str:
    """Two masters with the same tokens; the cookie is copied before its user signs out at one of them."""
    apps = [_site(SignedOut(Link(server.url("master"), "test"), KEYS)) for _ in range(2)]
    client = apps[0].test_client()
    client.post("/login", data={"token": "t" * 20})
    cookie = client.get_cookie("usher")
    assert cookie is not None
    seen = []
    for app in apps:
        other = app.test_client()
        other.set_cookie("usher", cookie.value)
        seen.append(other.get("/api/thing").status_code)
    client.post("/logout", headers={CSRF_HEADER: client.get("/api/csrf").text})
    for app in apps:
        other = app.test_client()
        other.set_cookie("usher", cookie.value)
        seen.append(other.get("/api/thing").status_code)
    return f"{seen[:2]} before, {seen[2:]} after"


def _site(ended: SignedOut) -> Flask:
    guard = Doorman(Credentials("all", others={"t" * 20: Identity(Role.VIEWER, "ann")}))
    guard.ended = ended
    app = create_app(__name__, guard, 100)
    app.add_url_rule("/api/thing", "thing", lambda: "seen")
    app.add_url_rule("/api/csrf", "csrf", csrf_token)

    @app.post("/login")
    @needs(Role.ANYBODY)
    def log_in() -> str:
        doorman().sign_in(request.form["token"])
        return "in"

    @app.post("/logout")
    @needs(Role.ANYBODY)
    def log_out() -> str:
        doorman().sign_out()
        return "out"

    return app


def _health_of_strangers(_server: Guarded) -> str:
    guard = Doorman(Credentials("t" * 20))
    app = create_app(__name__, guard, 0)
    add_health(app, lambda: Health(("intake: NotNow: Redis at redis://db.internal:6379 cannot be reached",)), dict)
    told = [
        app.test_client().get("/api/health", headers=headers).get_json()["reasons"][0]
        for headers in ({}, {"Authorization": f"Bearer {'t' * 20}"})
    ]
    assert "db.internal" in told[1], "who has the token is told all"
    return str(told[0])


def _rebound_name(_server: Guarded) -> str:
    app = consumer_app(
        Doorman(Credentials("t" * 20)),
        lambda: Health(()),
        dict,
        ticket=lambda _ticket: {},
        hosts=hosts_of("0.0.0.0:8721", "http://shop-1:8721/api/health", "scraped.example"),
    )
    ours = ("127.0.0.1:8721", "[::1]:8721", "10.9.8.7:8721", "localhost:8721", "shop-1:8721", "scraped.example")
    told = [app.test_client().get("/api/health", headers={"Host": host}).status_code for host in ours]
    assert told == [200] * len(ours)
    return str(app.test_client().get("/api/tickets/T", headers={"Host": "evil.example:8721"}).status_code)


def _host(**environ: str) -> Host:
    host = environ.pop("host", "127.0.0.1")
    return plan(Path("/srv/usher"), ("all",), host, 1, "usher.deploy.demo.handlers:show", environ)


def _handlers_secrets(_server: Guarded) -> str:
    host = _host()
    files = host.files()
    secrets = {value for name, value in host.settings.items() if name.startswith(("REDIS_URL_", "TOKEN_OPERATOR"))}
    secrets |= {host.settings[name] for name in ("USHER_REDIS_URL", "USHER_API_TOKEN")}
    seen = [secret for secret in secrets - {host.settings["REDIS_URL_CONSUMER"]} if secret in files["consumer.env"]]
    supervisord = re.findall(r"EnvironmentFile|usher\.env", files["usher.service"] + files["start"])
    return f"{len(seen) + len(supervisord)} of others"


def _exposure(_server: Guarded) -> str:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed here (Debian: apt-get install systemd)")
    with tempfile.TemporaryDirectory(prefix="usher-t-") as folder:
        unit = Path(folder) / "usher.service"
        unit.write_text(_host().files()["usher.service"])
        words = [analyze, "security", "--offline=true", "--no-pager", str(unit)]
        told = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60).stdout
    found = re.search(r"exposure level for usher.service: ([0-9.]+)", told)
    if found is None:
        pytest.skip("this systemd-analyze does not rate files")
    return "at most 3 of 10" if float(found[1]) <= 3 else found[1]


def _plain_redis(_server: Guarded) -> str:
    host = _host(host="10.0.0.1", USHER_TLS_CERT="/etc/cert.pem")
    return ", ".join({url.partition("://")[0] for name, url in host.settings.items() if "REDIS_URL" in name})


def _logged(name: str, attempt: Callable[[], object]) -> str:
    """The events that a logger gets."""
    handler, seen = logging.Handler(), []
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        attempt()
    finally:
        logging.getLogger(name).removeHandler(handler)
    return ", ".join(seen) or "no line"


def _guesses(_server: Guarded) -> str:
    client = _site(SignedOut(Link(_server.url("master"), "test"), KEYS)).test_client()
    return _logged("usher.common.http.auth", lambda: [client.post("/login", data={"token": guess}) for guess in "ab"])


def _repeated_guess(_server: Guarded) -> str:
    client = _site(SignedOut(Link(_server.url("master"), "test"), KEYS)).test_client()
    told = _logged("usher.common.http.auth", lambda: [client.post("/login", data={"token": "a"}) for _ in range(500)])
    return f"{told.count('token_refused')} lines"


def _viewer(_server: Guarded) -> str:
    error = LastError("KeyError: 'bob'", "KeyError", "shop/orders.py:41")._asdict()
    seen = without_texts({"last_error": error, "error_type": "KeyError", "traceback": "bob = 1"})
    return f"{seen['last_error']['error']} in {seen['last_error']['at']}{' and bob' * ('bob' in json.dumps(seen))}"


def _no_https(_server: Guarded) -> str:
    app = create_app(
        __name__, Doorman(Credentials("all", others={"t" * 20: Identity(Role.VIEWER, "ann")}), secure=True), 100
    )
    return app.test_client().get("/").headers.get("Strict-Transport-Security", "no header").partition("=")[0]


def _forged_webhook(_server: Guarded) -> str:
    signed = {secret: signature(secret, "msg_1", 1, b"{}") for secret in ("whsec_b3Vycw==", "whsec_dGhlaXJz")}
    return "told apart" if len(set(signed.values())) == 2 else "alike"


def _plain_http(_server: Guarded) -> str:
    return _logged("usher.common.http.serve", lambda: warn_of_plain_http("10.0.0.1:8700", None))


def _short_token(_server: Guarded) -> str:
    try:
        load(ConsumerSettings, {"USHER_HANDLER": "a:b", "USHER_BIND": "10.0.0.1:8721", "USHER_API_TOKEN": "secret"})
    except SettingsError as refused:
        return "refused" if "can be guessed" in str(refused) else str(refused)
    return "taken"


_ATTACKS = [
    Attack(
        "a sender's script never ends (EVAL)",
        "the server hangs for a minute",
        _REFUSED,
        _by("sender", "EVAL", "1", "0"),
    ),
    Attack("a sender loads a script", "loaded", _REFUSED, _by("sender", "SCRIPT", "LOAD", "return 1")),
    Attack("a sender sets the stream's key", "the stream is gone", _REFUSED, _by("sender", "SET", KEYS.stream, "x")),
    Attack("a handler's script never ends (EVAL)", "the same", _REFUSED, _by("consumer", "EVAL", "1", "0")),
    Attack(
        "a handler cuts the stream",
        "unread messages are gone",
        _REFUSED,
        _by("consumer", "XTRIM", KEYS.stream, "MAXLEN", "0"),
    ),
    Attack("a handler deletes the index", "it is gone", _REFUSED, _by("consumer", "DEL", KEYS.tickets)),
    Attack("a handler changes rules", "NOPERM", _REFUSED, _by("consumer", "HSET", KEYS.rules, "a", "b")),
    Attack("an auditor takes the lead", "taken", _REFUSED, _by("auditor", "SET", KEYS.leader, "x")),
    Attack(
        "a handler looks for secrets in its environment and its file",
        "all tokens but one in supervisord's and its own, all in usher.env",
        "0 of others",
        _handlers_secrets,
    ),
    Attack("a handler uses what its unit leaves open", "9.1 of 10 (UNSAFE)", "at most 3 of 10", _exposure),
    Attack(
        "the cookie of a user who has signed out is used at two masters",
        "[200, 200] before, [200, 200] after",
        "[200, 200] before, [401, 401] after",
        _signed_out_cookie,
    ),
    Attack(
        "a stranger asks for health while Redis is away",
        "intake: NotNow: Redis at redis://db.internal:6379 cannot be reached",
        "intake: NotNow; the log says more",
        _health_of_strangers,
    ),
    Attack("a page's own name leads to a consumer (DNS rebinding)", "200", "421", _rebound_name),
    Attack("a network is read beside HTTPS", "redis", "rediss", _plain_redis),
    Attack("tokens are guessed at the log-in", "no line", "token_refused, token_refused", _guesses),
    Attack("one wrong token is sent 500 times", "no line (then 500 lines)", "10 lines", _repeated_guess),
    Attack(
        "a viewer reads what an error says",
        "KeyError: 'bob', and the traceback",
        "KeyError in shop/orders.py:41",
        _viewer,
    ),
    Attack("a browser comes back by plain HTTP", "no header", "max-age", _no_https),
    Attack("somebody forges a webhook", "nothing is signed", "told apart", _forged_webhook),
    Attack("a token is read on its way", "no line", "plain_http", _plain_http),
    Attack("a token of six characters is guessed from elsewhere", "taken", "refused", _short_token),
    Attack(
        "a ticket id moves the cursor of a terminal, or turns text around, in --json",
        '["\x9b2J\u202e"]',
        '["\\u009b2J\\u202e"]',
        lambda _server: json_line(["\x9b2J\u202e"]),
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Guarded]:
    with tempfile.TemporaryDirectory(prefix="usher-t-", dir="/tmp") as name, guarded_redis(Path(name)) as made:
        made.admin.call("XADD", KEYS.stream, "*", "ticket_id", "T")
        yield made


@pytest.mark.parametrize("attack", _ATTACKS, ids=lambda attack: attack.what)
def test_what_comes_of_an_attack(server: Guarded, attack: Attack) -> None:
    if attack.after == _REFUSED and not _BY_KEY:
        pytest.skip("Redis 6.2 knows no rights by key")
    assert attack.attempt(server) == attack.after
