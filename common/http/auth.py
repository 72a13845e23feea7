"""Authenticate and authorise requests: tokens in headers for programs, signed cookies for browsers, and people whom a
proxy has signed on (``usher.common.http.sign_on``). Roles and tokens are in ``usher.common.http.credentials``. The
first of these that a request has decides, in this order: ``Authorization``, the proxy's header, the cookie; what is
wrong with it is not made up for by the next.

Every route requires a role: the one that ``needs`` sets at its view, else viewer for GET and operator for everything
else. ``flask.g.who`` (a name for the action log) and ``flask.g.role`` are set in every view; in public views ``role``
may be ``Role.ANYBODY``.

A browser has a session: a signed cookie that names a token by a keyed hash, made by ``Doorman.sign_in`` for a user who
knew that token. It ends after 12 hours, when its user signs out (``EndedSessions``: a copy of the cookie is worth
nothing then), or when the token is taken out of the configuration. Its role is the present role of the token.
Protection against foreign pages:

* The cookie is HttpOnly, SameSite=Strict, and Secure where TLS is used.
* A request that changes something and comes with the cookie, or is of somebody whom a proxy has signed on, must have
  ``csrf_token()`` in the form field ``CSRF_FIELD`` or the header ``CSRF_HEADER``. A bearer token needs none of this:
  browsers send other credentials by themselves, but never a bearer token.
* A request that changes something is refused when the browser says that it comes from another site
  (``Sec-Fetch-Site``, ``Origin``), even if no token is required. Pages must be sent with
  ``Referrer-Policy: same-origin``: with ``no-referrer``, browsers put ``null`` into Origin.

Wrong tokens are counted and, few of many, logged with the address that sent them (``usher.common.http.proxies``), and
an address that sends many is slowed (``usher.common.http.rate_limits.GuessLimit``): 429 in place of 401, and of 403 at
the log-in. What needs no token is answered nevertheless.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urlsplit

from flask import Flask, Request, current_app, g, redirect, request
from itsdangerous import BadData, URLSafeTimedSerializer
from werkzeug.wrappers import Response as AnyResponse

from usher.common.base.clock import wall_ms
from usher.common.base.errors import RedisTrouble
from usher.common.base.log import event
from usher.common.http.credentials import NOBODY_ASKED, STRANGER, Credentials, Identity, Role, digest_of, fixed_tokens
from usher.common.http.problem import Problem
from usher.common.http.proxies import Network, address_of
from usher.common.http.rate_limits import GuessLimit, Refusals
from usher.common.http.sign_on import SignOn, UnfitName
from usher.common.redis.client import CommandRefused

log = logging.getLogger(__name__)

CSRF_FIELD, CSRF_HEADER = "csrf_token", "X-CSRF-Token"
SESSION_S = 12 * 3600
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_CHALLENGE = {"WWW-Authenticate": "Bearer"}
_FORM = "application/x-www-form-urlencoded"
_UNFIT = "the proxy's header holds no name of 1 to 128 visible ASCII characters without a comma, or came twice"
_UNHEARD = "from this address came too many wrong tokens; this one was not looked at, right or wrong"
_NOT_ADMITTED = (
    "the proxy has signed you on, but USHER_SIGN_ON_OPERATORS and USHER_SIGN_ON_VIEWERS do not have the name it gives"
)

View = TypeVar("View", bound=Callable[..., Any])


def needs(role: Role) -> Callable[[View], View]:
    """Decorate a view with the role that it requires."""

    def mark(view: View) -> View:
        view.usher_needs = role  # type: ignore[attr-defined]
        return view

    return mark


def needed_role(app: Flask, endpoint: str | None, method: str) -> Role:
    """Return the role that a route requires. An unknown path requires the usual role, so that strangers do not learn
    which paths exist."""
    view = app.view_functions.get(endpoint) if endpoint is not None else None
    needed: Role | None = getattr(view, "usher_needs", None)
    if needed is not None:
        return needed
    return Role.VIEWER if method in _SAFE else Role.OPERATOR


def looked_at(api_token: str, viewer_token: str) -> Doorman:
    """Return the doorman of a read-only service: health is public, the rest requires a token."""
    viewer, own = Identity(Role.VIEWER, "viewer-token"), Identity(Role.ALL, "api-token")
    return Doorman(
        Credentials(fixed_tokens({"USHER_API_TOKEN": (api_token, own), "USHER_VIEWER_TOKEN": (viewer_token, viewer)}))
    )


def doorman() -> Doorman:
    """Return the doorman of the application that handles the current request."""
    found: Doorman = current_app.extensions["usher_doorman"]
    return found


def csrf_token() -> str:
    """Return the token that forms and scripts of a page send back (see above); empty without a session cookie."""
    return doorman().csrf_token(request)


def caller() -> str:
    """Return the name of the token of the current request; "" where none is asked for."""
    return str(g.who) if doorman().asks else ""


def must_be_for(consumer: str) -> None:
    """Raise Problem 403 unless the caller may speak for the consumer of that name."""
    if not g.identity.is_for(consumer):
        raise Problem(403, "not_your_name", "this token is for another consumer")


class EndedSessions(Protocol):
    """The sessions whose users have signed out, at any of the programs that take the same cookies."""

    def end(self, session: str, for_s: int) -> None:
        """Note the session for so many seconds. Raises RedisTrouble."""

    def has(self, session: str) -> bool:
        """Return True if the session was noted. Raises RedisTrouble."""


class Doorman:
    """A guard that checks every request before its view, and makes sessions.

    ``secure``: browsers reach this service by https only, so cookies say so. ``prefix``: the path at which they reach
    it, see ``usher.common.http.path_prefix``. ``sign_on``: the proxies that may name people; it needs credentials that
    ask for tokens. ``proxies``: those that are believed for whom they ask (``X-Forwarded-For``). ``login_path``: the
    page, if there is one, to which a browser without a session is sent.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        secure: bool = False,
        prefix: str = "",
        sign_on: SignOn | None = None,
        proxies: Sequence[Network] = (),
    ) -> None:
        self.login_path: str | None = None
        self._credentials = credentials
        self._sign_on = sign_on
        self._proxies = proxies
        self._guesses = GuessLimit()
        self._signer = URLSafeTimedSerializer(
            credentials.key, salt="session", signer_kwargs={"digest_method": hashlib.sha256}
        )
        self.secure = secure
        self.prefix = prefix
        self.ended: EndedSessions | None = None
        self._refusals = Refusals()
        #: With these prefixes, browsers accept the cookie over https only. __Host- is for this host, and for the path /
        #: only, at which the other programs behind a proxy would get it too.
        self.cookie = "usher" if not secure else "__Secure-usher" if prefix else "__Host-usher"

    @property
    def asks(self) -> bool:
        """True if this service requires tokens."""
        return self._credentials.asked

    @property
    def refused_tokens(self) -> int:
        """Number of wrong tokens since the start, in headers and at the log-in, with those that were not looked up."""
        return self._refusals.number

    def attach(self, app: Flask) -> None:
        """Become the doorman of ``app``."""
        app.extensions["usher_doorman"] = self

    def greet(self, asked: Request) -> None:
        """Identify the caller: set ``g.identity``, ``g.who``, ``g.role``, ``g.by_browser`` (their browser tells who
        they are by itself), ``g.address``, of somebody whom a proxy names ``g.signed_on`` (else "") and ``g.refusal``,
        which those have too whose token was not looked up."""
        g.signed_on, g.refusal, g.address = "", None, address_of(asked.environ, self._proxies)
        g.identity, g.by_browser = self._recognise(asked)
        g.who, g.role = g.identity.name, g.identity.role

    def check(self, asked: Request, needed: Role) -> AnyResponse | None:
        """Raise Problem 401 or 403 unless the greeted caller may enter. Returns None, or a redirect to the log-in."""
        if g.role is Role.ANYBODY and needed is not Role.ANYBODY:
            return self._turn_away(asked)
        if asked.method not in _SAFE and not _has_bearer_token(asked):
            if _from_elsewhere(asked):
                raise Problem(403, "cross_site", "this request comes from a page of another site")
            if g.by_browser and not self._has_csrf_token(asked):
                raise Problem(
                    403, "csrf_token_missing", "reload the page: its token is missing or from an older session"
                )
        if not g.role.may(needed):
            raise Problem(403, "role_missing", f"this needs the role {needed.value}")
        return None

    def sign_in(self, token: str, response: AnyResponse) -> Identity | None:
        """Put a session into ``response`` for the owner of ``token`` (viewers and operators); None if no identity that
        may see pages has this token. Raises Problem 429."""
        identity = self._find(token, "log-in")
        if identity is None:
            return None
        if not identity.role.may(Role.VIEWER):
            self._note_wrong("log-in")
            return None
        value = str(self._signer.dumps(f"{self._credentials.seal(digest_of(token))}.{secrets.token_urlsafe(12)}"))
        self._set_cookie(response, value, SESSION_S)
        return identity

    def sign_out(self, asked: Request, response: AnyResponse) -> None:
        """End the session of the browser that asked and gets ``response``. Raises RedisTrouble: it may go on."""
        _, session = self._session(asked.cookies.get(self.cookie))
        if session and self.ended is not None:
            self.ended.end(session, SESSION_S)
        self._set_cookie(response, "", 0)

    def csrf_token(self, asked: Request) -> str:
        """Return the token that must accompany every change by this browser; empty without a session or sign-on."""
        return self._csrf_token(asked, 0)

    def _csrf_token(self, asked: Request, ago: int) -> str:
        """Return the token of now, or, of somebody whom a proxy names, that of ``ago`` times 12 hours before."""
        if name := g.get("signed_on"):  # what is sealed begins unlike that of any cookie
            return self._credentials.seal(f"sign-on csrf {wall_ms() // (SESSION_S * 1000) - ago} {name}")
        cookie = asked.cookies.get(self.cookie)
        return self._credentials.seal("csrf " + cookie) if cookie else ""

    def _recognise(self, asked: Request) -> tuple[Identity, bool]:
        """Return the caller's identity, and True if a browser tells it by itself."""
        if not self._credentials.asked:
            return NOBODY_ASKED, False
        header: str | None = asked.environ.get("HTTP_AUTHORIZATION")
        if header is not None:
            scheme, _, token = header.partition(" ")
            # WSGI decodes all headers as latin-1; tokens are UTF-8.
            text = token.strip().encode("latin-1", "replace").decode("utf-8", "surrogateescape")
            found = None
            if scheme.lower() != "bearer":
                self._note_wrong("header")
                return STRANGER, False
            try:
                found = self._find(text, "header")
            except Problem as unheard:
                g.refusal = unheard
            return found or STRANGER, False
        if (named := self._of_proxy(asked)) is not None:
            return named, True
        found = self._of_cookie(asked.cookies.get(self.cookie))
        return found or STRANGER, found is not None

    def _of_proxy(self, asked: Request) -> Identity | None:
        """Return the identity of the person whom a trusted proxy names; None if none does."""
        if self._sign_on is None:
            return None
        try:
            name = self._sign_on.named(asked.environ)
        except UnfitName:
            self._note_wrong("sign-on header")
            g.refusal = Problem(401, "unfit_sign_on", _UNFIT, headers=_CHALLENGE)
            return STRANGER
        if name is None:
            return None
        g.signed_on, person = name, self._sign_on.identity(name)
        if person.role is Role.ANYBODY:
            g.refusal = Problem(403, "not_admitted", _NOT_ADMITTED)
        return person

    def _find(self, token: str, place: str) -> Identity | None:
        """Return the identity of a token that was sent; None if it is wrong. Raises Problem 429 when it was not looked
        up: its address has sent too many wrong ones."""
        seal = self._credentials.seal(digest_of(token))
        wait_s = self._guesses.ask(g.address, seal)
        if wait_s:
            self._refusals.count()
            raise Problem(429, "too_many_wrong_tokens", _UNHEARD, headers={"Retry-After": str(math.ceil(wait_s))})
        found = self._credentials.find_sealed(seal)
        left = self._guesses.note(g.address, seal, is_right=found is not None, was_free=wait_s is None)
        if found is None:
            self._note_wrong(place, left=left)
        return found

    def _note_wrong(self, place: str, **more: Any) -> None:
        """Count a wrong token; log it, if not too many are."""
        left_out = self._refusals.tell(g.address)
        if left_out:
            more |= {"left_out": left_out}
        if left_out is not None:
            event(log, "token_refused", level=logging.WARNING, address=g.address, sent_in=place, **more)

    def _of_cookie(self, cookie: str | None) -> Identity | None:
        seal, session = self._session(cookie)
        found = self._credentials.find_sealed(seal) if session else None
        if found is None or self.ended is None:
            return found
        try:
            return None if self.ended.has(session) else found
        except (
            RedisTrouble,
            CommandRefused,
        ):  # the page tells of it; without Redis little is seen
            return found

    def _session(self, cookie: str | None) -> tuple[str, str]:
        """Return the seal of the token and the id of the session in a cookie of ours; else two empty texts."""
        try:
            seal, _, session = self._signer.loads(cookie or "", max_age=SESSION_S).partition(".")
            return seal, session
        except BadData:
            return "", ""

    def _turn_away(self, asked: Request) -> AnyResponse:
        """Redirect a browser that wants a page to the log-in; answer everything else with 401, and those whom a proxy
        names in vain with the reason: they get no further with a token either."""
        if g.refusal is not None:
            raise g.refusal
        sees_pages = (
            asked.method in ("GET", "HEAD")
            and not asked.path.startswith("/api/")
            and "text/html" in asked.headers.get("Accept", "")
        )
        if self.login_path is not None and sees_pages:
            return redirect(f"{self.login_path}?next={quote(asked.full_path.rstrip('?'), safe='')}", 303)
        raise Problem(401, detail="send a valid bearer token", headers=_CHALLENGE)

    def _has_csrf_token(self, asked: Request) -> bool:
        given = asked.headers.get(CSRF_HEADER) or (asked.form.get(CSRF_FIELD, "") if asked.mimetype == _FORM else "")
        return any(
            hmac.compare_digest(given.encode("utf-8", "replace"), self._csrf_token(asked, ago).encode())
            for ago in (0, 1)
        )

    def _set_cookie(self, response: AnyResponse, value: str, max_age_s: int) -> None:
        response.set_cookie(
            self.cookie,
            value,
            max_age=max_age_s,
            path=self.prefix or "/",
            secure=self.secure,
            httponly=True,
            samesite="Strict",
        )


def local_path(wanted: str) -> str:
    """Return the path to go to after the log-in: a path of this service, or ``/`` for anything that could lead
    elsewhere.

    >>> local_path("/tickets/42?x=1"), local_path("//evil/"), local_path("/\\\\evil"), local_path("https://evil/")
    ('/tickets/42?x=1', '/', '/', '/')
    """
    fits = wanted.startswith("/") and not wanted.startswith("//") and "\\" not in wanted and wanted.isprintable()
    return wanted if fits else "/"


def _has_bearer_token(asked: Request) -> bool:
    """Return True if the request has a bearer token. Other credentials (Basic, Digest, Negotiate) are sent by browsers
    by themselves, once a proxy in front of us has asked for them."""
    header: str = asked.environ.get("HTTP_AUTHORIZATION", "")
    return header.partition(" ")[0].lower() == "bearer"


def _from_elsewhere(asked: Request) -> bool:
    """Return True if a browser says that a page of another site sends this request. Programs send no such header."""
    site = asked.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = asked.headers.get("Origin")
    return origin is not None and urlsplit(origin).netloc.lower() != asked.headers.get("Host", "").lower()
