"""Sessions of the page that ended because their users signed out: noted in Redis, so that no master takes a copy of
such a cookie any more."""

from __future__ import annotations

from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link


class SignedOut:
    """The ended sessions, see ``usher.common.http.auth.EndedSessions``."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    def end(self, session: str, for_s: int) -> None:
        self._link.call("SET", self._keys.signed_out(session), "1", "PX", for_s * 1000)

    def has(self, session: str) -> bool:
        return bool(self._link.call("EXISTS", self._keys.signed_out(session)))
