"""Authenticate and authorise requests: tokens in headers for programs, signed cookies for browsers (``flask.session``),
and people whom a proxy has signed on. The first of these that a request has decides, in this order: ``Authorization``,
the proxy's header, the cookie; what is wrong with it is not made up for by the next. docs/security.md says what guards
against foreign pages.

Every route requires a role: the one that ``needs`` sets at its view, else viewer for GET and operator for everything
else. ``flask.g.who`` (a name for the action log) and ``flask.g.role`` are set in every view; in public views ``role``
may be ``Role.ANYBODY``.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

from flask import Flask, Request, current_app, g, redirect, request, session
from flask.sessions import SecureCookieSessionInterface
from werkzeug.middleware.proxy_fix import ProxyFix
from werkzeug.wrappers import Response as AnyResponse

from usher.common.base.clock import now_s, wall_ms
from usher.common.base.errors import RedisTrouble
from usher.common.base.log import WARNING, event
from usher.common.http.answers import Problem
from usher.common.http.credentials import NOBODY_ASKED, PERSON, STRANGER, Credentials, Identity, Network, Role
from usher.common.protocol.keys import Keys
from usher.common.redis.client import CommandRefused, Link

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

CSRF_FIELD, CSRF_HEADER = "csrf_token", "X-CSRF-Token"
SESSION_S = 12 * 3600
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_CHALLENGE = {"WWW-Authenticate": "Bearer"}
_FORM = "application/x-www-form-urlencoded"
#: In the environ of a request that came through a named proxy; and what may be its prefix.
_FROM_PROXY, _PREFIX = "usher.from_proxy", re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")
_UNFIT = "the proxy's header holds no name of 1 to 128 visible ASCII characters without a comma, or came twice"
_UNHEARD = "from this address came too many wrong tokens; this one was not looked at, right or wrong"
_NOT_ADMITTED = "the proxy has signed you on, but USHER_TOKENS_FILE has no `sign-on` line with the name it gives"

View = TypeVar("View", bound=Callable[..., Any])


def needs(role: Role) -> Callable[[View], View]:
    def mark(view: View) -> View:
        view.usher_needs = role  # type: ignore[attr-defined]
        return view

    return mark


def needed_role(app: Flask, endpoint: str | None, method: str) -> Role:
    """Return the role that a route requires. An unknown path requires the usual role, so that strangers do not learn
    which paths exist."""
    usual = Role.VIEWER if method in _SAFE else Role.OPERATOR
    needed: Role = getattr(app.view_functions.get(endpoint or ""), "usher_needs", usual)
    return needed


def doorman() -> Doorman:
    found: Doorman = current_app.extensions["usher_doorman"]
    return found


def csrf_token() -> str:
    return doorman().csrf_token()


def caller() -> str:
    """Return the name of the token of the current request; "" where none is asked for."""
    return str(g.who) if doorman().asks else ""


def must_be_for(consumer: str) -> None:
    if not g.identity.is_for(consumer):
        raise Problem(403, "not_your_name", "this token is for another consumer")


class Guesses:
    """Bounds guessed tokens: from an address that has sent 60 different wrong ones in a minute none is looked up until
    the next, right or wrong, but for those that were before. So an old token, sent again and again, locks nobody out,
    and who shares an address with others can go on guessing what these use: only their length protects them."""

    MOST, LINES = 60, 10

    def __init__(self) -> None:
        self.refused = 0
        self._lock = threading.Lock()
        self._right: set[tuple[str, str]] = set()
        self._minute, self._wrong, self._lines = 0.0, dict[str, set[str]](), Counter[str]()

    def wait_s(self, address: str, seal: str) -> float:
        with self._lock:
            if (minute := now_s() // 60) != self._minute or len(self._wrong) > 10_000:
                self._minute, self._wrong, self._lines = minute, {}, Counter()
            wrong = self._wrong.get(address, ())
            heard = len(wrong) < self.MOST or seal in wrong or (address, seal) in self._right
            self.refused += not heard
            return 0.0 if heard else 60.0 - now_s() % 60

    def let_in(self, address: str, seal: str) -> None:
        with self._lock:
            if len(self._right) > 10_000:
                self._right.clear()
            self._right.add((address, seal))

    def count(self, address: str, seal: str = "") -> bool:
        """Count a refused token. Return True if the log is to tell of it: of few of an address, and of all."""
        with self._lock:
            self.refused += 1
            if seal:
                self._wrong.setdefault(address, set()).add(seal)
            self._lines[address] += 1
            return self._lines[address] <= self.LINES and self._lines.total() <= 6 * self.LINES


class _Sessions(SecureCookieSessionInterface):
    """With these prefixes browsers accept the cookie over https only. __Host- is for this host, and for the path /
    only, at which the other programs behind a proxy would get it too."""

    digest_method = staticmethod(hashlib.sha256)

    def get_cookie_name(self, app: Flask) -> str:
        secure = app.config["SESSION_COOKIE_SECURE"]
        return "usher" if not secure else "__Secure-usher" if request.script_root else "__Host-usher"

    def get_cookie_path(self, _app: Flask) -> str:
        return request.script_root or "/"


class Doorman:
    """A guard that checks every request before its view, and makes sessions.

    ``secure``: browsers reach this service by https only, so cookies say so. ``proxies``: those that are believed, and
    may name people in ``sign_on_header``. ``login_path``: the page, if there is one, to which a browser without a
    session is sent.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        secure: bool = False,
        proxies: Sequence[Network] = (),
        sign_on_header: str = "X-Forwarded-User",
    ) -> None:
        self.login_path: str | None = None
        self.secure = secure
        #: Where it is noted which sessions have ended, so that no master takes a copy of such a cookie.
        self.noted_in: tuple[Link, Keys] | None = None
        self.guesses = Guesses()
        self._credentials = credentials
        self._proxies = proxies
        self._header = "HTTP_" + sign_on_header.upper().replace("-", "_")

    @property
    def asks(self) -> bool:
        return self._credentials.asked

    def attach(self, app: Flask) -> None:
        app.extensions["usher_doorman"] = self
        app.secret_key = self._credentials.key
        app.session_interface = _Sessions()
        app.permanent_session_lifetime = timedelta(seconds=SESSION_S)
        app.config.update(SESSION_COOKIE_SECURE=self.secure, SESSION_COOKIE_SAMESITE="Strict")
        app.config["SESSION_REFRESH_EACH_REQUEST"] = False
        if self._proxies:
            app.wsgi_app = behind_proxies(app.wsgi_app, self._proxies)  # type: ignore[assignment, method-assign]

    def admit(self, asked: Request, needed: Role) -> AnyResponse | None:
        """Set ``g.identity``, ``g.who``, ``g.role``, ``g.address``, and ``g.signed_on`` of somebody whom a proxy names
        (else ""). Raise Problem 401 or 403 unless the caller may enter. Returns None, or a redirect to the log-in."""
        g.signed_on, g.refusal, g.address = "", None, neighbours(asked.remote_addr or "")
        g.identity, by_browser = self.recognise(asked)
        g.who, g.role = g.identity.name, g.identity.role
        if g.role is Role.ANYBODY and needed is not Role.ANYBODY:
            return self._turn_away(asked)
        # Other credentials (Basic, Digest, Negotiate) are sent by browsers by themselves, once a proxy asked for them.
        is_bearer = asked.environ.get("HTTP_AUTHORIZATION", "").partition(" ")[0].lower() == "bearer"
        if asked.method not in _SAFE and not is_bearer:
            if _from_elsewhere(asked):
                origin, host = (asked.headers.get(name, "")[:100] for name in ("Origin", "Host"))
                told = f"this request comes from a page of another site: {origin!a}, and was sent to {host!a}"
                way_out = "a proxy in front must pass Host on, or be in USHER_PROXIES and send X-Forwarded-Host"
                raise Problem(403, "cross_site", f"{told}; {way_out}")
            if by_browser and not self._has_csrf_token(asked):
                raise Problem(
                    403, "csrf_token_missing", "reload the page: its token is missing or from an older session"
                )
        if not g.role.may(needed):
            raise Problem(403, "role_missing", f"this needs the role {needed.value}")
        return None

    def sign_in(self, token: str) -> bool:
        """Begin a session of the owner of ``token``; False if nobody who may see pages has it. Raises Problem 429."""
        if self._find(token, "log-in", Role.VIEWER) is None:
            return False
        session.clear()
        session.permanent = True
        session.update(seal=self._credentials.seal_token(token), id=secrets.token_urlsafe(12))
        return True

    def sign_out(self) -> None:
        """End the session of the browser that asks. Raises RedisTrouble: it may go on."""
        if "id" in session and self.noted_in is not None:
            link, keys = self.noted_in
            link.call("SET", keys.signed_out(session["id"]), "1", "PX", SESSION_S * 1000)
        session.clear()

    def csrf_token(self, ago: int = 0) -> str:
        """Return the token that must accompany every change by this browser; empty without a session or sign-on. Of
        somebody whom a proxy names: that of ``ago`` times 12 hours before."""
        if name := g.get("signed_on"):
            return self._credentials.seal(f"sign-on csrf {wall_ms() // (SESSION_S * 1000) - ago} {name}")
        return self._credentials.seal(f"csrf {session['id']}") if "id" in session else ""

    def recognise(self, asked: Request) -> tuple[Identity, bool]:
        if not self._credentials.asked:
            return NOBODY_ASKED, False
        if (header := asked.environ.get("HTTP_AUTHORIZATION")) is not None:
            return self._of_header(header) or STRANGER, False
        found = self._of_proxy(asked) or self._of_session()
        return found or STRANGER, found is not None

    def _of_header(self, header: str) -> Identity | None:
        scheme, _, token = header.partition(" ")
        if scheme.lower() != "bearer":
            self._note_wrong("header")
            return None
        try:  # WSGI decodes all headers as latin-1; tokens are UTF-8
            return self._find(token.strip().encode("latin-1", "replace").decode("utf-8", "surrogateescape"), "header")
        except Problem as unheard:
            g.refusal = unheard
            return None

    def _of_proxy(self, asked: Request) -> Identity | None:
        name: str | None = asked.environ.get(self._header)
        if name is None or _FROM_PROXY not in asked.environ or not self._credentials.people:
            return None
        if not PERSON.fullmatch(name):
            self._note_wrong("sign-on header")
            g.refusal = Problem(401, "unfit_sign_on", _UNFIT, headers=_CHALLENGE)
            return STRANGER
        g.signed_on, person = name, self._credentials.person(name)
        if person.role is Role.ANYBODY:
            g.refusal = Problem(403, "not_admitted", _NOT_ADMITTED)
        return person

    def _find(self, token: str, place: str, least: Role = Role.ANYBODY) -> Identity | None:
        """Return the identity of a token that was sent; None if it is wrong, or may not ``least``. Raises Problem 429
        when it was not looked up: its address has sent too many wrong ones."""
        seal = self._credentials.seal_token(token)
        if wait_s := self.guesses.wait_s(g.address, seal):
            raise Problem(429, "too_many_wrong_tokens", _UNHEARD, headers={"Retry-After": str(math.ceil(wait_s))})
        if (found := self._credentials.known.get().get(seal)) is None or not found.role.may(least):
            self._note_wrong(place, seal)
            return None
        self.guesses.let_in(g.address, seal)
        return found

    def _note_wrong(self, place: str, seal: str = "") -> None:
        if self.guesses.count(g.address, seal):
            event("token_refused", level=WARNING, address=g.address, sent_in=place)

    def _of_session(self) -> Identity | None:
        found = self._credentials.known.get().get(session["seal"]) if "id" in session else None
        if found is None or self.noted_in is None:
            return found
        link, keys = self.noted_in
        try:
            return None if link.call("EXISTS", keys.signed_out(session["id"])) else found
        except (RedisTrouble, CommandRefused):  # the page tells of it; without Redis little is seen
            return found

    def _turn_away(self, asked: Request) -> AnyResponse:
        """Redirect a browser that wants a page to the log-in; answer everything else with 401, and those whom a proxy
        names in vain with the reason: they get no further with a token either."""
        if g.refusal is not None:
            raise g.refusal
        is_page = asked.method in ("GET", "HEAD") and not asked.path.startswith("/api/")
        if self.login_path is not None and is_page and "text/html" in asked.headers.get("Accept", ""):
            return redirect(f"{self.login_path}?next={quote(asked.full_path.rstrip('?'), safe='')}", 303)
        raise Problem(401, detail="send a valid bearer token", headers=_CHALLENGE)

    def _has_csrf_token(self, asked: Request) -> bool:
        given = asked.headers.get(CSRF_HEADER) or (asked.form.get(CSRF_FIELD, "") if asked.mimetype == _FORM else "")
        return any(
            hmac.compare_digest(given.encode("utf-8", "replace"), self.csrf_token(ago).encode()) for ago in (0, 1)
        )


def local_path(wanted: str) -> str:
    """Return a path of this service to go to after the log-in; ``/`` for what could lead elsewhere.

    >>> local_path("/tickets/42?x=1"), local_path("//evil/"), local_path("/\\\\evil"), local_path("https://evil/")
    ('/tickets/42?x=1', '/', '/', '/')
    """
    fits = wanted.startswith("/") and not wanted.startswith("//") and "\\" not in wanted and wanted.isprintable()
    return wanted if fits else "/"


def _from_elsewhere(asked: Request) -> bool:
    """Return True if a browser says that a page of another site sends this request. Programs send no such header."""
    site = asked.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = asked.headers.get("Origin")
    return origin is not None and urlsplit(origin).netloc.lower() != asked.headers.get("Host", "").lower()


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an address; one of IPv4 that is written as IPv6 is what it is."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def is_within(text: str, networks: Sequence[Network]) -> bool:
    address = _address(text)
    return address is not None and any(address in network for network in networks)


def neighbours(text: str) -> str:
    """Return what stands for an address where addresses are counted: whoever has one of IPv6 has all of its /64.

    >>> neighbours("2001:db8::1:2:3"), neighbours("::ffff:10.0.0.1"), neighbours("10.0.0.1"), neighbours("")
    ('2001:db8::/64', '10.0.0.1', '10.0.0.1', '')
    """
    if (address := _address(text)) is None or address.version == 4:
        return str(address or text)
    return str(ipaddress.ip_network((address, 64), strict=False))


def behind_proxies(app: WSGIApplication, proxies: Sequence[Network]) -> WSGIApplication:
    """Trust these proxies by their addresses: what they say of a request's address, host, scheme and path is taken for
    the request's own, and what anybody else says of these is left alone. A prefix (``X-Forwarded-Prefix: /ops/usher``)
    is taken off what is asked, if the proxy has left it on, and stands before every link, redirect and cookie path."""
    fixed = ProxyFix(app, x_for=1, x_proto=1, x_host=1, x_prefix=1)

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[Any]:
        if not is_within(environ.get("REMOTE_ADDR", ""), proxies):
            return app(environ, start_response)
        environ[_FROM_PROXY] = True
        prefix, path = environ.pop("HTTP_X_FORWARDED_PREFIX", "").rstrip("/"), environ["PATH_INFO"]
        if _PREFIX.fullmatch(prefix):
            environ["HTTP_X_FORWARDED_PREFIX"] = prefix
            if path == prefix or path.startswith(f"{prefix}/"):
                environ["PATH_INFO"] = path[len(prefix) :] or "/"
        return fixed(environ, start_response)

    return application
