"""The name and the lease of a consumer: the registrar takes the name at a master, over HTTP, and ends; the heartbeat
renews the lease every third of its life, as long as the program makes progress.

A lease that was lost or revoked is never taken up again: the process leaves, and its successor is a new incarnation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from usher.common.base.clock import now_s
from usher.common.base.errors import RedisTrouble
from usher.common.base.log import ERROR, WARNING, event
from usher.common.protocol.registration import NO_LOCK, Registration
from usher.common.runtime.service import Service, ServiceEnded
from usher.consumer.handlers.message import OwnLease
from usher.consumer.lifecycle.master_client import MasterAnswer, MasterClient, MasterUnavailable, refusal
from usher.consumer.lifecycle.owner_scripts import OwnerScripts

_WHEN_HELD_S = 0.5
_WAY_OUT = (
    "this consumer asks again until the other one, or its lease, has ended; to run both at the same time, give each its"
    " own USHER_CONSUMER_NAME"
)


@dataclass(frozen=True)
class Taken:
    """A successful registration: the name is ours. The lease is counted from ``sent_s``: the time at which the request
    left, or earlier by the age that the lease had already. ``ticket_window``: most messages of one ticket that masters
    hand over at a time."""

    registration: Registration
    lease_s: float
    sent_s: float
    ticket_window: int


class Registrar(Service):
    """The service that registers once, trying every master in turn until one accepts."""

    name = "register"
    stalls_after_s = 60.0

    def __init__(
        self,
        ask: Callable[[], Registration],
        masters: MasterClient,
        on_taken: Callable[[Taken], None],
        before: Callable[[], None] = lambda: None,
        give_up: Callable[[str], None] = lambda why: None,
    ) -> None:
        """Make the service. ``ask`` makes a registration with a new uuid and the evidence of this moment. ``before``
        must have succeeded before one is sent. ``give_up`` is told why a registration can never succeed."""
        super().__init__()
        self._ask = ask
        self._asked = ask()
        self._masters = masters
        self._on_taken = on_taken
        self._before = before
        self._give_up = give_up
        self._was_held = False  # the last answer was 409, and nothing was asked since

    def run_once(self) -> float:
        if self._was_held and self._asked.lock == NO_LOCK:
            # The holder of the name may have ended since, and the name lock may be ours now: then there is no need to
            # wait for the end of its lease.
            anew = self._ask()
            self._asked = anew if anew.lock != NO_LOCK else self._asked
        self._before()
        # The next request may be heard and its answer be lost: then this very uuid has the name.
        self._was_held = False
        asked = self._asked
        body: dict[str, str | int] = {"name": asked.name, "uuid": asked.uuid, "health_url": asked.health_url}
        body |= {"slots": asked.slots, "capacity": asked.capacity, "lock": asked.lock}
        answer = self._masters.post("/api/consumers/register", orjson.dumps(body))
        self._was_held = answer.status == 409
        if answer.status in (200, 201):
            if self._accepted(answer.document, answer.sent_s):
                raise ServiceEnded
            # The master stood still. It has counted the lease from later on, and says so when it is asked again.
            event("registration_expired", level=WARNING, consumer=asked.name, master=answer.url)
            return 0.0
        if answer.status == 409:
            event("name_in_use", level=WARNING, consumer=asked.name, master=answer.url, way_out=_WAY_OUT)
            return _WHEN_HELD_S
        if answer.status == 410:
            # An earlier request was heard, its answer was lost, and the lease ended before this request. Nothing was
            # started under that uuid.
            event("registration_expired", level=WARNING, consumer=asked.name, master=answer.url)
            self._asked = self._ask()
            return _WHEN_HELD_S
        raise self._refused(answer)

    def _refused(self, answer: MasterAnswer) -> MasterUnavailable:
        why = refusal(answer.document) or str(answer.status)
        if 400 <= answer.status < 500 and answer.status != 429:
            event("registration_refused", level=ERROR, master=answer.url, status=answer.status, why=why)
        if answer.status == 422:
            self._give_up(f"{answer.url} refuses this registration: {why}")
        return MasterUnavailable(f"{answer.url} answered {answer.status} {why}")

    def _accepted(self, answer: Mapping[str, Any], sent_s: float) -> bool:
        registration = replace(self._asked, generation=int(answer["generation"]))
        lease_s, left_s = int(answer["lease_ms"]) / 1000, int(answer["left_ms"]) / 1000
        window = int(answer["ticket_window"])
        taken = Taken(registration, lease_s, sent_s - (lease_s - left_s), window)
        if sent_s + left_s <= now_s():
            return False
        # Only now: an answer that cannot be read leaves everything as it was, and the masters are asked again.
        event("consumer_registered", consumer=registration.incarnation, lease_ms=answer["lease_ms"])
        if (leader_url := answer.get("leader_url")) is not None:
            self._masters.prefer(leader_url)
        self._on_taken(taken)
        return True


#: A renewal that failed is tried again after this part of the lease.
_RETRY_PART = 0.1
#: So often one of the renewals, which are every third of the lease, also touches what is pending.
_TOUCHES = 3


class Heartbeat(Service):
    """The service that keeps the lease. It calls ``on_lost`` once, when the lease cannot be kept."""

    name = "beat"

    def __init__(
        self,
        steps: OwnerScripts,
        lease: OwnLease,
        works: Callable[[], bool],
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._steps, self._link = steps, steps.link
        self._lease = lease
        self._works = works
        self._on_lost = on_lost
        self._renewals = 0
        self.stalls_after_s = max(10.0, lease.lease_s)

    def run_once(self) -> float:
        if not self._works():
            event("lease_not_renewed", level=WARNING, why="the program makes no progress")
            return self._retry_s()
        start = b"-"
        while start:  # each call extends the lease, and touches some of the pending entries
            sent_s = now_s()
            lease_ms, left_ms = int(1000 * self._lease.lease_s), int(1000 * (self._lease.ends_s - sent_s))
            try:
                if self._renewals % _TOUCHES:
                    state, start = self._steps.extend(lease_ms, left_ms), b""
                else:
                    state, _, start = self._steps.renew(lease_ms, start, left_ms)
            except RedisTrouble as trouble:
                event("lease_not_renewed", level=WARNING, why=str(trouble))
                return self._retry_s()
            if state in ("", "revoked"):
                self._lease.end()
                self._on_lost(f"the lease is lost: {'it was revoked' if state else 'it had ended'}")
                return self._lease.lease_s
            self._lease.renewed(sent_s)
            self.made_progress()
        self._renewals += 1
        return self._lease.lease_s / 3

    def _retry_s(self) -> float:
        return self._lease.lease_s * _RETRY_PART  # the lease guard decides when it is too late


#: Time between looks, as a part of the lease; it also looks when the lease ends. The clock of our waits stands still
#: while the machine sleeps, the lease's clock does not.
_LOOK_PART = 0.1


class LeaseGuard(Service):
    """The service that watches the end of the lease. The heartbeat may hang in a call to Redis for longer than the
    lease; handlers must not run on beside a new owner."""

    name = "guard"

    def __init__(self, lease: OwnLease, on_lost: Callable[[str], None]) -> None:
        super().__init__()
        self._lease = lease
        self._on_lost = on_lost

    def run_once(self) -> float:
        look_s, left_s = self._lease.lease_s * _LOOK_PART, self._lease.ends_s - now_s()
        if left_s > 0:
            return min(look_s, left_s)
        self._lease.end()
        self._on_lost("the lease could not be renewed in time")
        return look_s
