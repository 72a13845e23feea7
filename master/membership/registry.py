"""Registry of consumers. A consumer's process takes its name at any master: the register script compares and sets, so
no epoch is needed. And who is registered, and lives: the lease in Redis is the only authority.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from usher.common.base.errors import RedisTrouble, UsherError
from usher.common.base.log import ERROR, WARNING, event
from usher.common.protocol.keys import Keys
from usher.common.protocol.registration import Registration, held_later, parse
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import leases_command, pairs, parse_leases
from usher.common.runtime.service import Service
from usher.master.leader.elector import Lead
from usher.master.policy.rules import Rulebook

#: Field of the counters with the living incarnations that do not answer the leader over HTTP.
SILENT = "silent"
#: Seconds between two looks at the roster of which nobody says that it has changed.
_EVERY_S, _LEAST_S = 10.0, 0.05
#: States that ``state_of`` returns.
STATES = ("live", "starting", "paused", "draining", "revoked", "lost")


@dataclass(frozen=True)
class RegisteredConsumer:
    """A registered incarnation. ``state``: live, starting (it has not renewed its lease yet, and gets nothing),
    draining, revoked, or "" when its lease has ended."""

    registration: Registration
    state: str

    @property
    def alive(self) -> bool:
        return self.state != ""

    @property
    def accepts(self) -> bool:
        return self.state == "live"


def read_registry(link: Link, keys: Keys) -> dict[str, RegisteredConsumer]:
    return members_of(link, keys, link.call("HGETALL", keys.consumers))


def members_of(link: Link, keys: Keys, registered: Any) -> dict[str, RegisteredConsumer]:
    registrations = []
    for name, stored in pairs(registered).items():
        try:
            registrations.append(parse(name, stored))
        except ValueError:
            event("registration_unreadable", level=ERROR, consumer=name)
    if not registrations:
        return {}
    names = [registration.incarnation for registration in registrations]
    states = parse_leases(link.call(*leases_command(keys, names)))
    return {
        name: RegisteredConsumer(registration, state)
        for name, registration, state in zip(names, registrations, states, strict=True)
    }


def read_left_ms(link: Link, keys: Keys, incarnations: Iterable[str]) -> dict[str, int]:
    names = list(incarnations)
    left = link.all_of([("PTTL", keys.lease(name)) for name in names])  # raises: a refusal is no end of a lease
    return {name: max(0, ms) for name, ms in zip(names, left, strict=True)}


def state_of(member: RegisteredConsumer, rules: Rulebook) -> str:
    """Return the state as people see it: live, starting, paused (drained by an operator, and alive), draining, revoked
    or lost."""
    if member.accepts and rules.of_consumers.get(member.registration.name) is not None:
        return "paused"
    return member.state or "lost"


def strangers(pending: Mapping[str, int], members: Container[str]) -> dict[str, int]:
    """Return the names in the group that hold entries and are not on the roster, with the number of entries.
    ``pending``: all names in the group."""
    return {name: count for name, count in pending.items() if count and name not in members and ":" in name}


class ConsumerRegistry(Service):
    """Service that reads the roster while this master leads, and posts it: when somebody says that it has changed
    (``wake``: a registration, a first renewal, a drain, a revocation, a departure, a new lead), when the first lease
    could end, and from time to time, should nobody have heard of a change."""

    name = "roster"
    stalls_after_s = 4 * _EVERY_S

    def __init__(
        self, link: Link, keys: Keys, lead: Lead, tell: Callable[[dict[str, RegisteredConsumer]], object], lease_ms: int
    ) -> None:
        super().__init__()
        self._link = link
        self._keys = keys
        self._lead = lead
        self._tell = tell
        self._lease_ms = lease_ms
        self.members: Mapping[str, RegisteredConsumer] = {}
        self._is_told = True
        self._registered: Any = None

    def wake(self) -> None:
        self._is_told = True
        super().wake()

    def run_once(self) -> float:
        if not self._lead.is_ours:  # a standby reads it when it takes over
            self.members = {}
            return _EVERY_S  # an election wakes us
        # Who registers, tells (register.lua); all else is seen by the leases.
        if self._is_told or not all(member.alive for member in self.members.values()):
            self._is_told, self._registered = False, None
        self._registered = self._registered or self._link.call("HGETALL", self._keys.consumers)
        self.members = members = members_of(self._link, self._keys, self._registered)
        left_ms = read_left_ms(self._link, self._keys, [name for name, member in members.items() if member.alive])
        self._tell(members)
        if any(ms > self._lease_ms for ms in left_ms.values()):
            self._shorten(left_ms)
        return max(_LEAST_S, min([_EVERY_S, *((ms + 1) / 1000 for ms in left_ms.values())]))

    def _shorten(self, left_ms: Mapping[str, int]) -> None:
        """Shorten those of these leases that last longer than any that was given: the clock of Redis was set back
        since.

        A living consumer renews its lease soon, so this is for one that died just before: its tickets, and its name,
        would wait for as long as the clock was set back. Shortening is right whoever does it and whatever happens
        meanwhile: nobody trusts the lease for longer than it was given for, and from now on that time runs. So it needs
        no script and no epoch.
        """
        # The longest lease was noted before these were registered, and only grows.
        longest_ms = max(int(self._link.call("HGET", self._keys.counters, "lease") or 0), self._lease_ms)
        for name, left in left_ms.items():
            if left > longest_ms:
                event("lease_too_long", level=WARNING, consumer=name, left_ms=left, longest_ms=longest_ms)
                try:
                    self._link.call("PEXPIRE", self._keys.lease(name), longest_ms)
                except CommandRefused:  # this user lacks the right
                    return


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
        generation = int(self._link.run("next_generation", (self._keys.counters,), ()))
        new = replace(asked, generation=generation)
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
        leases = (keys.lease(before), keys.lease(new.incarnation))
        own = (keys.inbox(before), keys.unproven(new.incarnation), keys.unproven(before))
        script_keys = (keys.consumers, *leases, keys.changed, keys.counters, *own)
        args = (new.name, stored, new.dump(), lease_ms, "1" if proven_dead else "0")
        reply: Sequence[Any] = self._link.run("register", script_keys, args)
        return reply

    def close(self) -> None:
        self._link.close()
