"""The HTTP rules that both programs share: reading of JSON, problem documents, the token, health.

Requests that gunicorn's parser refuses (framing, sizes of headers, time) never come here; see
``usher.common.http.serve``.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NotRequired, TypeVar
from urllib.parse import urlsplit

from flask import Flask, Request, Response, current_app, g, request
from pydantic import BaseModel, TypeAdapter, ValidationError
from typing_extensions import TypedDict
from werkzeug.exceptions import HTTPException
from werkzeug.routing import BaseConverter
from werkzeug.routing import ValidationError as NoSuchPath
from werkzeug.wrappers import Response as AnyResponse

from usher.common.base.clock import now_s
from usher.common.base.errors import NotNow, RedisTrouble
from usher.common.base.log import ERROR, event, log_state
from usher.common.http.answers import Problem, answer, answer_problem
from usher.common.http.auth import Doorman, needed_role
from usher.common.http.credentials import Role
from usher.common.http.openapi import tells
from usher.common.observability.metrics import Metrics, counter
from usher.common.protocol.stream_id import is_id
from usher.common.runtime.service import Health

#: Most bytes of method, path and query, and of all header lines of a request.
_REQUEST_LINE, _HEADERS = 2048, 8 * 1024
#: A read that failed within so many seconds is tried again: behind a Redis that hangs, people would wait twice.
_QUICKLY_S = 1.0
#: Most wrong fields that an answer names.
_MOST_NAMED = 20
#: In place of a host's name: any address.
ANY_ADDRESS = "<address>"
_JSON = ("application/json", "application/problem+json")
_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
#: The ending of paths that also offer an event stream, and its content type.
_EVENTS, _EVENT_STREAM = "/events", "text/event-stream"

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


def create_app(name: str, doorman: Doorman, max_body: int, hosts: Collection[str] = ()) -> Flask:
    """Create a Flask application that keeps the rules. ``max_body``: most bytes of a request's body, unless a view says
    otherwise. ``hosts``: names and addresses that requests may be addressed to (421 otherwise), maybe ``ANY_ADDRESS``;
    empty: any."""
    app = Flask(name, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = max_body
    app.url_map.merge_slashes = False  # "a//b" is a possible ticket id
    app.url_map.converters |= {"rest": _Rest, "stream_id": _StreamId}
    allowed = frozenset(host.lower() for host in hosts)
    doorman.attach(app)

    @app.before_request
    def keep_rules() -> AnyResponse | None:
        g.began_s = now_s()
        _check_size(request.environ)
        _check_form(request)
        _check_host(request, allowed)
        turned_away = doorman.admit(request, needed_role(app, request.endpoint, request.method))
        _check_request(request)
        return turned_away

    @app.after_request
    def harden(response: Response) -> Response:
        if "X-Content-Type-Options" in response.headers:
            return response  # of a read that was tried again
        response.headers.setdefault("Cache-Control", "no-store")
        response.headers["X-Content-Type-Options"] = "nosniff"
        if doorman.secure:
            response.headers["Strict-Transport-Security"] = "max-age=31536000"  # a year
        if (location := response.headers.get("Location", "")).startswith("/"):
            response.headers["Location"] = request.script_root + location
            response.set_data(b"")  # a page with that link, for browsers of long ago
        return response

    app.register_error_handler(Problem, answer_problem)
    app.register_error_handler(HTTPException, _answer_http)
    app.register_error_handler(RedisTrouble, _answer_redis)
    app.register_error_handler(Exception, _answer_bug)
    return app


def own_hosts(bind: str, advertise_url: str = "", more: str = "") -> list[str]:
    """Return the hosts that requests may name where no token is asked for: a page of somewhere else can make a name of
    its own lead here (DNS rebinding), but no address. ``more``: comma separated."""
    own = (bind.rpartition(":")[0], urlsplit(advertise_url).hostname or "", "localhost", *more.split(","))
    return [ANY_ADDRESS, *filter(None, (host.strip().strip("[]") for host in own))]


class _State(TypedDict):
    """An answer about health, with further facts. ``reasons`` of what fails; ``warnings`` want a look."""

    status: Literal["ok", "failing", "draining", "alive"]
    reasons: NotRequired[list[str]]
    warnings: NotRequired[list[str]]


#: Kinds of refusal of a Redis that is up but takes no writes, in our own words: Redis' words may reveal too much.
_REFUSED = {
    "OOM": "its memory is full (OOM)",
    "MISCONF": "it cannot write to its disk (MISCONF)",
    "NOREPLICAS": "too few replicas are connected (NOREPLICAS)",
}


def add_health(
    app: Flask,
    health: Callable[[], Health],
    facts: Callable[[], Mapping[str, Any]],
    draining: Callable[[], bool] = lambda: False,
    stalled: Callable[[], str] = lambda: "",
) -> None:
    """Add ``/api/health`` and ``/ready`` (200, or 503 with the reasons; both with ``facts``) and ``/live`` (200, or 503
    when ``stalled`` names services that stand still: the arbiter ends the process then too, serve.py).

    ``/ready`` is 503 too from the moment a stop was requested, so that a load balancer sends nothing more while answers
    still come. ``/live`` asks for nothing outside: a restart would not mend the absence of Redis.
    """

    @app.get("/api/health", endpoint="health")
    @tells("Tell if the program makes progress, and if not, why.", {200: _State, 503: _State}, role=Role.ANYBODY)
    def tell() -> Response:
        found = health()
        reasons = [in_brief(reason) if g.role is Role.ANYBODY else reason for reason in found.reasons]
        status: dict[str, Any] = {"status": "ok"} if found.ok else {"status": "failing", "reasons": reasons}
        dropped, is_blocked = log_state()
        lost = [f"{'nobody reads the log' if is_blocked else 'the log lacks lines'}: {dropped} dropped"]
        if warnings := [*found.warnings, *lost * (is_blocked or dropped > 0)]:
            status["warnings"] = warnings
        return answer({**status, **facts()}, 200 if found.ok else 503)

    @app.get("/api/health/ready")
    @tells("Tell if work may be sent here, and if not, why.", {200: _State, 503: _State}, role=Role.ANYBODY)
    def ready() -> Response:
        return answer({"status": "draining", **facts()}, 503) if draining() else tell()

    @app.get("/api/health/live")
    @tells("Tell if the program is alive, and which services hang.", {200: _State, 503: _State}, role=Role.ANYBODY)
    def live() -> Response:
        why = stalled()
        if why and not draining():
            return answer({"status": "failing", "reasons": [why]}, 503)
        return answer({"status": "alive"})


def in_brief(reason: str) -> str:
    """Return a reason as strangers get it: the text of an error may name hosts, users and databases.

    >>> in_brief("intake: NotNow: Redis at redis://db:6379 cannot be reached"), in_brief("beat is not running")
    ('intake: NotNow; the log says more', 'beat is not running')
    """
    name, *error = reason.split(": ", 2)
    return f"{name}: {error[0]}; the log says more" if len(error) == 2 else reason


def add_metrics(app: Flask, metrics: Metrics) -> None:
    """Add ``/metrics`` for Prometheus, and to these the wrong tokens that the application's doorman was sent."""

    @app.get("/metrics", endpoint="metrics")
    @tells("Metrics, for Prometheus.", {200: "text/plain"})
    def show_metrics() -> Response:
        text, content_type = metrics.page(request.headers.get("Accept", ""))
        return Response(text, content_type=content_type)

    guard: Doorman = app.extensions["usher_doorman"]
    text = (
        "Requests and log-ins with a token that is not known, or not looked up after many of these; the log names their"
        " addresses."
    )
    metrics.add(lambda: [counter("refused_tokens", text, guard.guesses.refused)])


def read_body(asked: Request, limit: int) -> bytes:
    """Read the body of a request that says it is JSON. Raises Problem: 411 no length, 413 too long, 415 not JSON, 408
    too slow, 400 cut short."""
    length = asked.content_length
    if length is None and "HTTP_TRANSFER_ENCODING" not in asked.environ:
        raise Problem(411, detail="send a Content-Length", close=True)
    too_large = Problem(413, "content_too_large", f"at most {limit} bytes", close=True)
    if (length or 0) > limit:
        raise too_large
    charset = asked.mimetype_params.get("charset", "utf-8").lower()
    if asked.mimetype != "application/json" or charset != "utf-8" or "HTTP_CONTENT_ENCODING" in asked.environ:
        raise Problem(415, detail="send application/json in UTF-8, not compressed", close=True)
    try:
        body: bytes = asked.environ["wsgi.input"].read(limit + 1)
    except (TimeoutError, BlockingIOError):
        raise Problem(408, detail="the body did not arrive in time", close=True) from None
    except Exception:  # also the server's own, of chunks that are none
        raise Problem(400, detail="the body could not be read", close=True) from None
    if len(body) < (length or 0):
        raise Problem(400, detail="the body is shorter than its Content-Length", close=True)
    if len(body) > limit:
        raise too_large
    return body


def read_json(kind: type[T], limit: int) -> T:
    """Read the JSON document of this request. Raises Problem: those of ``read_body`` and of ``parse_json``."""
    return parse_json(kind, read_body(request, limit))


def parse_json(kind: type[T], body: bytes) -> T:
    """Raises Problem: 400 for what is no JSON in UTF-8, 422 for what is no document of this kind."""
    try:
        found: T = _adapter(kind).validate_json(body)
        return found
    except ValidationError as wrong:
        if wrong.errors(include_url=False, include_input=False)[0]["type"] == "json_invalid":
            raise Problem(400, "malformed_json", "the body is not JSON in UTF-8") from None
        raise _refusal(wrong, kind) from None


def read_query(kind: type[M]) -> M:
    """Read the query of this request, in which each name stands once: of two values nobody knows which is meant. Raises
    Problem 422."""
    if twice := [name for name in kind.model_fields if len(request.args.getlist(name)) > 1]:
        raise unprocessable([{"field": name, "problem": "is given more than once"} for name in twice])
    return read_model(kind, request.args.to_dict())


def read_model(kind: type[T], document: object, strict: bool | None = None) -> T:
    """Validate ``document``; ``strict`` False: numbers may be texts. Raises Problem 422, which names the wrong fields
    and never repeats a value."""
    try:
        found: T = _adapter(kind).validate_python(document, strict=strict)
        return found
    except ValidationError as wrong:
        raise _refusal(wrong, kind) from None


_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def _refusal(wrong: ValidationError, kind: type[Any]) -> Problem:
    return unprocessable([_wrong_field(error, kind) for error in wrong.errors(include_url=False)[:_MOST_NAMED]])


def unprocessable(errors: list[dict[str, str]]) -> Problem:
    """Return a Problem 422. ``errors``: ``{"field": path, "problem": sentence}`` each."""
    return Problem(422, "invalid_fields", "some fields cannot be used", errors=errors)


def _wrong_field(error: Any, kind: type[Any]) -> dict[str, str]:
    if error["type"] == "extra_forbidden":  # its name is input
        known = ", ".join(getattr(kind, "model_fields", None) or kind.__annotations__)
        return {"field": "(unknown)", "problem": f"there is an unknown field; known are {known}"}
    return {
        "field": ".".join(str(part) for part in error["loc"]),
        "problem": error["msg"].removeprefix("Value error, "),
    }


class _Rest(BaseConverter):
    """The rest of a path, of any form: it may begin with a slash, have two in a row, or a line break."""

    regex = r"[\s\S]+"
    part_isolating = False


class _StreamId(BaseConverter):
    """A stream id like 1526919030474-55; any other text belongs to another route, or is 404."""

    regex = r"[0-9]{1,20}-[0-9]{1,20}"

    def to_python(self, value: str) -> str:
        if not is_id(value):
            raise NoSuchPath
        return value


def _check_size(environ: Mapping[str, Any]) -> None:
    """gunicorn bounds each header line, and their number. It has dropped those whose name has an underscore."""
    if len(environ["REQUEST_METHOD"]) + len(environ.get("RAW_URI", "")) + len("  HTTP/1.1") > _REQUEST_LINE:
        raise Problem(414, "uri_too_long", close=True)
    headers = ((name.removeprefix("HTTP_"), value) for name, value in environ.items() if name.startswith("HTTP_"))
    if sum(len(name) + len(": \r\n") + len(value) for name, value in headers) > _HEADERS:
        raise Problem(431, "request_header_fields_too_large", close=True)


def _check_form(asked: Request) -> None:
    """Half a form may say something else: werkzeug notices one, where the server does not say that it does. Nor is
    one waited for that strangers send in chunks, which would hold a thread."""
    if "CONTENT_LENGTH" in asked.environ:
        asked.environ.pop("wsgi.input_terminated", None)
    elif asked.mimetype in _FORMS and "HTTP_TRANSFER_ENCODING" in asked.environ:
        raise Problem(411, detail="send the form with a Content-Length", close=True)


def _check_host(asked: Request, hosts: frozenset[str]) -> None:
    with contextlib.suppress(ValueError):  # it is no host, or no address
        named = asked.environ.get("HTTP_HOST", "")
        host = (hosts and not set("@/\\?#") & set(named) and urlsplit(f"//{named}").hostname) or ""
        if not hosts or host in hosts or (ANY_ADDRESS in hosts and ipaddress.ip_address(host)):
            return
    raise Problem(421, detail="this service does not answer to that host name; USHER_HOSTS names those it does")


def _check_request(asked: Request) -> None:
    environ = asked.environ
    coding = environ.get("HTTP_TRANSFER_ENCODING")
    if coding is not None and coding.strip().lower() != "chunked":
        raise Problem(400, detail="the only transfer coding here is chunked", close=True)
    accepted = environ.get("HTTP_ACCEPT", "*/*")
    offered = (*_JSON, _EVENT_STREAM) if asked.path.endswith(_EVENTS) else _JSON
    if (
        accepted not in ("*/*", "application/json")
        and asked.path.startswith("/api/")
        and not asked.accept_mimetypes.best_match(offered)
    ):
        raise Problem(406, detail="the answers here are application/json")


def _answer_http(error: HTTPException) -> Response | HTTPException:
    """Answer werkzeug's own errors: 404, 405 and the like. Their texts are left out, since some repeat the input."""
    if error.code is None or error.code < 400:
        return error
    kept = {name: value for name, value in error.get_headers() if name in ("Allow", "Retry-After", "WWW-Authenticate")}
    return answer_problem(Problem(error.code, headers=kept))


def _answer_redis(trouble: RedisTrouble) -> AnyResponse:
    if request.method in ("GET", "HEAD") and "is_again" not in g and now_s() - g.began_s < _QUICKLY_S:
        g.is_again = True  # reading twice is harmless, and only use shows that Redis has ended an idle connection
        return current_app.full_dispatch_request()
    why = _REFUSED.get(trouble.kind, "") if isinstance(trouble, NotNow) else ""
    detail = f"Redis refuses writes: {why}" if why else "Redis does not answer as it should; try again"
    return answer_problem(Problem(503, "redis_unavailable", detail, headers={"Retry-After": "1"}))


def _answer_bug(_bug: Exception) -> Response:
    problem = Problem(500)
    asked: dict[str, Any] = {"method": request.method, "endpoint": request.endpoint}
    event("request_failed", level=ERROR, exc_info=True, request_id=problem.request_id, **asked)
    return answer_problem(problem)
