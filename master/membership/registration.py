"""Registration: a consumer's process takes its name. Any master may do this; the register script compares and sets, so
no epoch is needed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from usher.common.base.errors import RedisTrouble, UsherError
from usher.common.protocol.keys import Keys
from usher.common.protocol.registration import Registration, held_later, parse
from usher.common.redis.client import Link
from usher.common.redis.scripts import ScriptRunner

#: Times that another registration of the same name may come in between before we give up for now.
_TRIES = 5


class NameInUse(UsherError):
    """A living process elsewhere has this consumer name. ``retry_after_ms``: what is left of its lease."""

    def __init__(self, retry_after_ms: int) -> None:
        self.retry_after_ms = retry_after_ms
        super().__init__()


class RegistrationOver(UsherError):
    """The registration under this uuid has ended, or its process is dead, as its successor's lock shows. A process that
    lives asks again under a new uuid."""


@dataclass(frozen=True)
class RegistrationResult:
    """Outcome of a registration. ``created`` is False when the same process registered before: only its health URL may
    have changed.
    ``left_ms`` is what is left of its lease of ``lease_ms``."""

    registration: Registration
    created: bool
    lease_ms: int
    left_ms: int


class Membership:
    """Registration of consumers. Used by the HTTP threads, one at a time."""

    def __init__(self, link: Link, keys: Keys, lease_ms: int) -> None:
        self._link = link  # guarded by self._lock
        self._scripts = ScriptRunner(link)
        self._keys = keys
        self.lease_ms = lease_ms
        self._lock = threading.Lock()

    def register(self, asked: Registration) -> RegistrationResult:
        """Give ``asked`` a generation and a lease. Raises NameInUse while a living incarnation has the name, and
        RegistrationOver.

        A predecessor whose name lock the new process held later (same boot, same file) is proven dead: nobody waits for
        its lease. It also works the other way: requests may lie in a master that was stopped, and the process that sent
        this one may be long dead.
        """
        with self._lock:
            for _ in range(_TRIES):
                stored: bytes = self._link.call("HGET", self._keys.consumers, asked.name) or b""
                former = self._former(asked.name, stored)
                if former is not None and former.uuid == asked.uuid:
                    result, mine = self._again(former), replace(former, health_url=asked.health_url)
                    if mine == former or self._write(mine, stored, former, 0, False)[0] == b"REGISTERED":
                        return replace(result, registration=mine)
                    continue
                if former is not None and held_later(former.lock, asked.lock):
                    raise RegistrationOver
                registered = self._try(asked, former, stored)
                if registered is not None:
                    return registered
        raise RedisTrouble(f"the name {asked.name} is being registered again and again")

    def _again(self, mine: Registration) -> RegistrationResult:
        """Answer a process that asks again, or whose request arrives a second time when it is already dead: so its
        lease is not made longer, and one that has ended never begins again. Another master, with other settings, may
        have given the lease: the process is told no more than the longest that is noted. Nor is it told that more is
        left: after the clock of Redis was set back, PTTL is too high by that step."""
        lease = self._keys.lease(mine.incarnation)
        state, left_ms, longest = self._link.all_of(
            [("GET", lease), ("PTTL", lease), ("HGET", self._keys.counters, "lease")]
        )
        if state is None or left_ms <= 0:
            raise RegistrationOver
        if state != b"live":
            raise NameInUse(left_ms)
        lease_ms = min(self.lease_ms, int(longest or self.lease_ms))
        return RegistrationResult(mine, created=False, lease_ms=lease_ms, left_ms=min(left_ms, lease_ms))

    def _former(self, name: str, stored: bytes) -> Registration | None:
        try:
            return parse(name.encode(), stored) if stored else None
        except ValueError:
            return None  # unreadable: it is replaced as a whole

    def _try(self, asked: Registration, former: Registration | None, stored: bytes) -> RegistrationResult | None:
        generation = int(self._scripts.run("next_generation", (self._keys.counters,), ()))
        new = asked.with_generation(generation)
        proven_dead = former is not None and held_later(asked.lock, former.lock)
        reply = self._write(new, stored, former, self.lease_ms, proven_dead)
        if reply[0] == b"HELD":
            raise NameInUse(reply[1])
        return (
            RegistrationResult(new, created=True, lease_ms=self.lease_ms, left_ms=self.lease_ms)
            if reply[0] == b"REGISTERED"
            else None
        )

    def _write(
        self, new: Registration, stored: bytes, former: Registration | None, lease_ms: int, proven_dead: bool
    ) -> Sequence[Any]:
        keys, before = self._keys, (former or new).incarnation
        reply: Sequence[Any] = self._scripts.run(
            "register",
            (
                keys.consumers,
                keys.lease(before),
                keys.lease(new.incarnation),
                keys.changed,
                keys.counters,
                keys.inbox(before),
                keys.unproven(new.incarnation),
                keys.unproven(before),
            ),
            (new.name, stored, new.dump(), lease_ms, "1" if proven_dead else "0"),
        )
        return reply

    def close(self) -> None:
        self._link.close()
