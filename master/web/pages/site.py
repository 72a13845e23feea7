"""Put the page together: templates, files, headers, errors for people, and the values that every page has."""

from __future__ import annotations

import hashlib
import shlex
from importlib import resources
from typing import Any

from flask import Blueprint, Flask, Response, g, make_response, redirect, render_template, request
from werkzeug.local import LocalProxy
from werkzeug.wrappers import Response as AnyResponse

from usher.common.base.clock import wall_ms
from usher.common.http.app import Problem
from usher.common.http.auth import CSRF_FIELD, Doorman, csrf_token, doorman, local_path, needs
from usher.common.http.credentials import Role
from usher.master.insight.formatting import FILTERS, TICKET_COLUMNS, message_url, number, spark, ticket_url, tried
from usher.master.insight.status import ORDERS
from usher.master.policy.explain.stuck import OK
from usher.master.policy.states import BY_NAME, LISTED
from usher.master.web.pages.actions import action_routes
from usher.master.web.pages.views import FlashMessages, group_url, view_routes
from usher.master.web.parts import Parts

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'self'; frame-ancestors 'none'"
)
_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
_FILES = ("usher.css", "usher.js", "icon.svg")
_NAV = {
    "Now": (("overview", "/", "Overview"), ("charts", "/charts", "Charts")),
    "Work": (
        ("tickets", "/tickets", "Tickets"),
        ("finished", "/finished", "Finished"),
        ("dead-letters", "/dead-letters", "Dead letters"),
        ("delayed", "/delayed", "Delayed"),
    ),
    "Fleet": (("consumers", "/consumers", "Consumers"), ("streams", "/streams", "Streams")),
    "Control": (("rules", "/rules", "Rules"), ("actions", "/actions", "Actions")),
    "Trust": (("audit", "/audit", "Audit"), ("doctor", "/doctor", "Doctor")),
}
_LOGIN = "/login"


def add_pages(app: Flask, parts: Parts) -> None:
    folder = resources.files("usher.master.web.pages") / "static"
    read = {name: (folder / name).read_bytes() for name in _FILES}
    files = {name: (data, hashlib.sha256(data).hexdigest()[:12]) for name, data in read.items()}
    notes = FlashMessages()
    site = Blueprint("pages", __name__, template_folder="templates")
    _add_files(site, files)
    _add_login(site)
    site.register_blueprint(view_routes(parts))
    site.register_blueprint(action_routes(parts, notes))
    app.register_blueprint(site)
    guard: Doorman = app.extensions["usher_doorman"]
    guard.login_path = _LOGIN
    app.jinja_env.filters.update(FILTERS)
    known: dict[str, Any] = {"csrf_token": csrf_token, "csrf_name": CSRF_FIELD, "quoted": shlex.quote, "orders": ORDERS}
    known |= {"ticket_url": ticket_url, "message_url": message_url, "group_url": group_url, "spark_points": spark}
    known |= {"tried": tried, "ticket_columns": TICKET_COLUMNS, "states": BY_NAME, "listed_states": LISTED}
    app.jinja_env.globals.update(known)
    app.jinja_env.globals["root"] = LocalProxy(lambda: request.script_root)
    app.jinja_env.globals["asset"] = lambda name: f"/static/{name}?v={files[name][1]}"
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    app.context_processor(lambda: _common(parts, notes))

    @app.after_request
    def for_people(response: Response) -> Response:
        is_page = not request.path.startswith(("/api/", "/metrics", "/static/"))
        is_page = is_page and "text/html" in request.headers.get("Accept", "")
        if response.mimetype == "application/problem+json" and is_page:
            response = _problem_page(response)
        if response.mimetype in ("text/html", "image/svg+xml"):
            response.headers["Content-Security-Policy"] = _POLICY
            # Not no-referrer: with that, browsers put null into Origin, by which we recognize our own forms
            # (usher.common.http.auth).
            response.headers["Referrer-Policy"] = "same-origin"
            response.headers["X-Frame-Options"] = "DENY"
            response.headers["Cross-Origin-Opener-Policy"] = "same-origin"
        return response


def _add_files(site: Blueprint, files: dict[str, tuple[bytes, str]]) -> None:
    @site.get("/static/<name>")
    @needs(Role.ANYBODY)
    def file(name: str) -> Response:
        if name not in files:
            raise Problem(404)
        data, version = files[name]
        response = Response(data, content_type=_TYPES[name.rpartition(".")[2]])
        if request.args.get("v") == version:
            response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


def _add_login(site: Blueprint) -> None:
    @site.get(_LOGIN)
    @needs(Role.ANYBODY)
    def show_login() -> AnyResponse:
        wanted = local_path(request.args.get("next", "/"))
        if not doorman().asks:
            return redirect(wanted, 303)
        return make_response(render_template("layout/login.html", page="login", next=wanted))

    @site.post(_LOGIN)
    @needs(Role.ANYBODY)
    def login() -> AnyResponse:
        if request.content_length is None or "Expect" in request.headers:
            # Anyone may send one. A body of this length (MAX_CONTENT_LENGTH) has arrived by now, and holds no thread;
            # chunks would be waited for.
            raise Problem(411, detail="send the form with a Content-Length", close=True)
        form = request.form
        wanted = local_path(form.get("next", "/"))
        if doorman().sign_in(form.get("token", "")) is None:
            return make_response(render_template("layout/login.html", page="login", next=wanted, wrong=True), 403)
        return redirect(wanted, 303)

    @site.post("/logout")
    @needs(Role.VIEWER)
    def logout() -> AnyResponse:
        doorman().sign_out()
        return redirect(_LOGIN, 303)


def _common(parts: Parts, notes: FlashMessages) -> dict[str, Any]:
    role: Role = getattr(g, "role", Role.ANYBODY)
    may_look = role.may(Role.VIEWER)
    # Every page takes a snapshot, so that the counts beside the names of pages are up to date on all of them.
    seen = parts.overview.snapshot() if may_look else {}
    found = [alarm for alarm in seen.get("alarms", ()) if alarm["level"] != OK]
    number_of = len(found) + len(seen.get("groups", ()))
    counts = _counts(seen, number_of)
    theme = request.cookies.get("usher_theme")
    return {
        "role": role.value,
        "who": getattr(g, "who", ""),
        "may_look": may_look,
        "may_act": role.may(Role.OPERATOR),
        "shown_names": parts.fields.names if role.may(Role.OPERATOR) else (),
        "signed_in": may_look and bool(csrf_token()) and doorman().asks,
        "signed_on": g.get("signed_on", ""),
        "nav": [(group, [(*page, counts.get(page[0], "")) for page in pages]) for group, pages in _NAV.items()],
        "troubles": number_of,
        "theme": theme if theme in ("light", "dark") else "",
        "pulse": seen,
        "now_ms": wall_ms(),
        "said": notes.get(request.args.get("said", "")),
    }


def _counts(seen: dict[str, Any], number_of: int) -> dict[str, str]:
    names = {"dead-letters": "dead_letters", "rules": "rules", "tickets": "tickets", "delayed": "delayed"}
    told = {name: seen.get(key) for name, key in {**names, "consumers": "living"}.items()} | {"overview": number_of}
    return {name: number(count) for name, count in told.items() if count}


def _problem_page(response: Response) -> Response:
    problem = response.get_json()
    title = str(problem.get("title", "problem")).replace("_", " ").capitalize()
    text = render_template("layout/problem.html", page="problem", problem=problem, title=title)
    page = make_response(text, response.status_code)
    for name in ("Retry-After", "Allow", "Connection", "WWW-Authenticate"):
        if name in response.headers:
            page.headers[name] = response.headers[name]
    return page
