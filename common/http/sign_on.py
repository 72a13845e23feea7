"""Let people in whom a proxy in front has signed on: it names them in a header, and is trusted by its address.

What comes from an address that is not named is answered as if the header were not there. The name must be one that no
way through proxies and servers can have made of something else: a header that came twice is joined with a comma, so a
name has none. (A header with underscores is the same to WSGI; ``usher.common.http.server.server`` drops it.)

A browser sends what the proxy recognises it by with every request, so these people need the token of
``usher.common.http.auth`` for changes as those with a session do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from usher.common.base.errors import UsherError
from usher.common.http.credentials import Identity, Role
from usher.common.http.proxies import Network, is_within

#: Everybody whom the proxy names, in a list of names.
ANY_NAME = "*"
#: Before the name in logs: a proxy's name is never that of a token, which has no colon.
MARK = "sign-on:"
_HEADER = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,63}")
#: Visible ASCII but the comma.
_NAME = re.compile(r"[!-+\--~]{1,128}")


class UnfitName(UsherError):
    """A trusted proxy has sent the header, and it does not hold one usable name."""


@dataclass(frozen=True)
class SignOn:
    """Proxies that are trusted to name people in ``header``, and the rights of these. Others have none."""

    header: str
    proxies: tuple[Network, ...]
    operators: frozenset[str]
    viewers: frozenset[str]

    def named(self, environ: Mapping[str, Any]) -> str | None:
        """Return the name of the person who asks; None if nobody who is trusted says so. Raises UnfitName."""
        found: str | None = environ.get("HTTP_" + self.header.upper().replace("-", "_"))
        if found is None or not is_within(environ.get("REMOTE_ADDR", ""), self.proxies):
            return None
        if not _NAME.fullmatch(found):
            raise UnfitName("the header holds no name")
        return found

    def __str__(self) -> str:
        """Tell who is trusted, and for what."""
        people = [
            f"{'all' if ANY_NAME in names else len(names)} as {role.value}s"
            for role, names in ((Role.OPERATOR, self.operators), (Role.VIEWER, self.viewers))
            if names
        ]
        proxies = ", ".join(str(one) for one in self.proxies)
        return f"{proxies} may say in {self.header} who asks; of these names it admits {' and '.join(people)}"

    def identity(self, name: str) -> Identity:
        """Return what the person may do: ``Role.ANYBODY`` for those in neither list."""
        for role, names in ((Role.OPERATOR, self.operators), (Role.VIEWER, self.viewers)):
            if name in names or ANY_NAME in names:
                return Identity(role, MARK + name)
        return Identity(Role.ANYBODY, MARK + name)


def parse_names(value: str) -> frozenset[str]:
    """Return names of people, comma separated, or ``*``. Raises ValueError for a name that no proxy could send."""
    found = frozenset(one.strip() for one in value.split(",") if one.strip())
    if (value and not found) or not all(_NAME.fullmatch(one) for one in found):
        raise ValueError("must be names of 1 to 128 visible ASCII characters, comma separated, or *")
    return found


def check_header(value: str) -> str:
    """Return the name of a header as it is. Raises ValueError."""
    if not _HEADER.fullmatch(value):
        raise ValueError("must be the name of a header: A-Z a-z 0-9 - (no underscore: servers drop such headers)")
    return value
