"""Membership: a consumer's process takes its name. Any master may do this; the register script compares and sets, so no epoch is needed."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from common.errors import RedisTrouble, UsherError
from common.keys import Keys
from common.redis_client import Link
from common.registration import NO_LOCK, Registration, parse
from common.scripts import ScriptRunner

#: Times that another registration of the same name may come in between before we give up for now.
_TRIES = 5


class NameInUse(UsherError):
    """A living process elsewhere has this consumer name."""

    def __init__(self, retry_after_ms: int) -> None:
        self.retry_after_ms = retry_after_ms
        super().__init__()


@dataclass(frozen=True)
class Registered:
    """``created`` is False when the same process registered before: nothing changed."""

    registration: Registration
    created: bool


class Membership:
    """Registers and looks up consumers. Used by the HTTP threads, one at a time."""

    def __init__(self, link: Link, keys: Keys, lease_ms: int) -> None:
        self._link = link  # guarded by self._lock
        self._scripts = ScriptRunner(link)
        self._keys = keys
        self._lease_ms = lease_ms
        self._lock = threading.Lock()

    def register(self, asked: Registration) -> Registered:
        """Give ``asked`` a generation and a lease. Raises NameInUse while a living incarnation has the name.

        A predecessor whose name lock the new process holds (same boot, same file) is proven dead: nobody waits for its lease.
        """
        with self._lock:
            for _ in range(_TRIES):
                stored: bytes = self._link.call("HGET", self._keys.consumers, asked.name) or b""
                former = self._former(asked.name, stored)
                if former is not None and former.uuid == asked.uuid and self._extended(former):
                    return Registered(former, created=False)
                registered = self._try(asked, former, stored)
                if registered is not None:
                    return registered
        raise RedisTrouble(f"the name {asked.name} is being registered again and again")

    def _extended(self, mine: Registration) -> bool:
        """The same process asks again: its lease begins anew, because it will count it from this request. False if it has none any more."""
        keys = (self._keys.lease(mine.incarnation), self._keys.stream)
        state, _ = self._scripts.run("renew", keys, (self._keys.group, mine.incarnation, self._lease_ms))
        return bool(state not in (b"LOST", b"revoked"))

    def _former(self, name: str, stored: bytes) -> Registration | None:
        try:
            return parse(name.encode(), stored) if stored else None
        except ValueError:
            return None  # unreadable: replaced whole

    def _try(self, asked: Registration, former: Registration | None, stored: bytes) -> Registered | None:
        """One attempt; None when somebody else's registration came in between."""
        keys = self._keys
        generation = int(self._scripts.run("next_generation", (keys.counters,), ()))
        new = asked.with_generation(generation)
        proven_dead = former is not None and former.lock != NO_LOCK and former.lock == asked.lock
        former_lease = keys.lease(former.incarnation if former is not None else new.incarnation)
        reply = self._scripts.run(
            "register",
            (keys.consumers, former_lease, keys.lease(new.incarnation)),
            (asked.name, stored, new.dump(), self._lease_ms, "1" if proven_dead else "0"),
        )
        if reply[0] == b"HELD":
            raise NameInUse(reply[1])
        return Registered(new, created=True) if reply[0] == b"REGISTERED" else None

    def close(self) -> None:
        self._link.close()
