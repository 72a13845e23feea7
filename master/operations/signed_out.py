"""Sessions of the page that ended because their users signed out: noted in Redis, so that no master takes a copy of
such a cookie any more."""

from __future__ import annotations

import threading

from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link


class SignedOut:
    """The ended sessions, see ``usher.common.http.auth.EndedSessions``. May be used by many threads, one at a time."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link  # guarded by self._lock
        self._keys = keys
        self._lock = threading.Lock()

    def end(self, session: str, for_s: int) -> None:
        with self._lock:
            self._link.call("SET", self._keys.signed_out(session), "1", "PX", for_s * 1000)

    def has(self, session: str) -> bool:
        with self._lock:
            return bool(self._link.call("EXISTS", self._keys.signed_out(session)))

    def close(self) -> None:
        self._link.close()
