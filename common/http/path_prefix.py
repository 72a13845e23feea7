"""Serve an application at a path prefix, behind a proxy that shares one host among several programs.

The application knows its own paths only, with or without a prefix. Here the prefix is taken off what is asked, if the
proxy has left it on, and put before what is answered: ``Location``, cookies, the links of pages, and the OpenAPI
document's server. So it is all the same whether the proxy strips the prefix or keeps it, and programs that ask this
service directly need no prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from usher.common.base.errors import SettingsError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment
    from flask import Flask

_FORM = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*")
_LONGEST = 200


def check_path_prefix(value: str) -> str:
    """Return a prefix as it is, or "" for none. Raises ValueError.

    >>> check_path_prefix("/ops/usher"), check_path_prefix("")
    ('/ops/usher', '')
    """
    if not _FORM.fullmatch(value) or len(value) > _LONGEST:
        raise ValueError(
            f"must be a path like /ops/usher, without / at its end, of at most {_LONGEST} of A-Z a-z 0-9 . _ ~ - /"
        )
    return value


def add_path_prefix(app: Flask, prefix: str) -> None:
    """Serve ``app``, which has all its routes, at ``prefix`` too. Raises SettingsError for a prefix that begins like
    one of the routes: whether the proxy has left it on could not be seen then."""
    first = prefix.split("/")[1]
    if first in {rule.rule.split("/")[1] for rule in app.url_map.iter_rules()}:
        raise SettingsError([f"USHER_PATH_PREFIX: /{first} is a path of Usher's own; let it begin in another way"])
    app.wsgi_app = _taken_off(prefix, app.wsgi_app)  # type: ignore[assignment, method-assign]


def _taken_off(prefix: str, app: WSGIApplication) -> WSGIApplication:
    def at_prefix(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[Any]:
        path: str = environ["PATH_INFO"]
        if path == prefix or path.startswith(f"{prefix}/"):
            environ["PATH_INFO"] = path[len(prefix) :] or "/"
        return app(environ, start_response)

    return at_prefix
