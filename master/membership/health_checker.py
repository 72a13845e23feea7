"""Health checker: asks every consumer's health URL.

Those of `usher run` are not asked: their leases say it. A consumer lives while its lease is renewed, which it is only
while its services go on. So silence over HTTP alone, which any stranger or firewall can bring about, ends nothing: it
is told, and the consumer gets no new tickets while there are others. The lease is revoked of one that says itself that
it is not well, or that is silent and does not renew: then it cannot go on later where it stopped.

Revoking is not killing: the lease can no longer be renewed and ends by itself. Recovery begins when it has ended, as
after any death, so that a consumer that still works in the meantime is never overlapped. And when the master's own
network is the trouble, every consumer looks dead. So nothing is done about most at once.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping

from usher.common.base.clock import now_s
from usher.common.base.errors import NotNow
from usher.common.base.log import WARNING, event
from usher.common.protocol.keys import Keys
from usher.common.protocol.registration import BESIDE
from usher.common.redis.client import Link
from usher.master.leader.elector import Lead
from usher.master.leader.leader_scripts import LeaderScripts, LeaderService
from usher.master.membership.consumer_http import ConsumerAnswer, ConsumerHttpClient, RequestBounds
from usher.master.membership.registry import SILENT, RegisteredConsumer, read_left_ms

#: Consumers asked in one turn, and in a second: a thousand are not all asked at once, nor all within
#: the time of a round.
_SLICE, _PER_SECOND = 40, 100
#: Least time between two log lines that most consumers are silent.
_TELL_AGAIN_S = 300.0
#: A lease is renewed at each third of its life: less than this part of it is left where two of these did not come.
_RENEWED = 1 / 3
#: How the reason begins of a consumer that answers, and says that it is not well; and most bytes of its answer in it.
_UNWELL, _LONGEST = "it says so itself", 300
#: Bounds of a health request.
BOUNDS = RequestBounds(connect_s=1.0, read_s=2.0, whole_s=3.0, most_bytes=1024)


def judge(failures: Mapping[str, int], limit: int) -> tuple[tuple[str, ...], bool]:
    """Decide from the number of health answers in a row that each living incarnation failed to give. Return those that
    something is to be done about now, and whether the silence of most was put down to our own network.

    ==============================  =======================================
    silent (failures >= limit)      verdict
    ==============================  =======================================
    none                            nothing
    at most half of all             these
    the only consumer there is      it (nothing to compare with)
    more than half                  nothing; our own network is the suspect
    ==============================  =======================================

    >>> judge({"a:1": 5, "b:1": 0}, 5)
    (('a:1',), False)
    """
    silent = tuple(sorted(name for name, count in failures.items() if count >= limit))
    if len(silent) > max(1, len(failures) // 2):
        return (), True
    return silent, False


class HealthChecker(LeaderService):
    """Service that asks all living consumers in rounds while this master leads, many side by side."""

    name = "health"

    def __init__(
        self,
        link: Link,
        keys: Keys,
        lead: Lead,
        every_s: float,
        limit: int,
        asker: ConsumerHttpClient,
        roster: Callable[[], Mapping[str, RegisteredConsumer]],
        lease_ms: int,
        close: Callable[[frozenset[str]], object],
    ) -> None:
        """Make a health checker. ``roster``: all registered consumers, as the roster reader last saw them.
        ``close``: told whenever others than before are to get no new tickets while there are others."""
        super().__init__(link, keys, lead)
        self._every_s, self._limit = every_s, limit
        self._asker = asker  # ours to close
        self._roster = roster
        self._lease_ms = lease_ms
        self._close = close
        self._closed: frozenset[str] = frozenset()
        self._noted: bytes | None = None  # who is silent, as Redis has it from us for pages and commands
        self._silences: dict[str, int] = {}
        self._whys: dict[str, str] = {}  # why the last answer was none, or no good one
        #: The code that each living consumer says it runs.
        self.codes: dict[str, str] = {}
        self._unasked: dict[str, RegisteredConsumer] = {}  # not asked yet in this round
        self._began_s = 0.0
        # since when most are silent, and when that was last logged; 0: they are not
        self._silent_since_s = self._told_s = 0.0
        self.stalls_after_s = max(10.0, 4 * every_s + 60)
        self.revoked = 0
        #: Number of silent consumers that keep their leases.
        self.silent = 0

    def stand_by(self) -> float:
        self._silences.clear()
        self._unasked.clear()
        self.silent = 0
        self._silent_since_s, self._noted = 0.0, None
        self._close_to(frozenset())
        return self._every_s

    def work(self, steps: LeaderScripts) -> float:
        if not self._unasked:
            alive = ((name, member) for name, member in self._roster().items() if member.state == "live")
            self._unasked = {name: member for name, member in alive if BESIDE not in member.registration.health_url}
            self._silences = {name: self._silences.get(name, 0) for name in self._unasked}
            self._whys = {name: self._whys.get(name, "") for name in self._unasked}
            self.codes = {name: self.codes.get(name, "") for name in self._unasked}
            self._began_s = now_s()
        asked = {name: self._unasked.pop(name) for name in list(self._unasked)[:_SLICE]}
        for name, why in self._ask_all(asked).items():
            self._silences[name], self._whys[name] = self._silences[name] + 1 if why else 0, why
        if self._unasked:
            return len(asked) / _PER_SECOND
        self._judge(steps)
        return max(self._every_s - (now_s() - self._began_s), len(asked) / _PER_SECOND)

    def _judge(self, steps: LeaderScripts) -> None:
        silent, own_network = judge(self._silences, self._limit)
        left_ms = read_left_ms(self._link, self._keys, silent)
        to_revoke = [
            one for one in silent if self._whys[one].startswith(_UNWELL) or left_ms[one] < self._lease_ms * _RENEWED
        ]
        self._close_to(frozenset(silent).difference(to_revoke))
        self.silent = sum(count >= self._limit for count in self._silences.values()) - len(to_revoke)
        self._tell(own_network)
        for one in to_revoke:
            if steps.revoke(one):
                self.revoked += 1
                count, why = self._silences[one], self._whys[one]
                event("lease_revoked", level=WARNING, consumer=one, failures=count, why=why)
        unheard = sorted(name.encode() for name, count in self._silences.items() if count >= self._limit)
        if (noted := b" ".join(unheard)) != self._noted:
            with contextlib.suppress(NotNow):  # full memory: it is noted in the next round
                self._link.call("HSET", self._keys.counters, SILENT, noted)
                self._noted = noted

    def _close_to(self, silent: frozenset[str]) -> None:
        """Tell of consumers that are silent and renew their leases, and have them get nothing new."""
        members = self._roster()
        for one in silent - self._closed:
            url = members[one].registration.health_url if one in members else ""
            event("consumer_silent", level=WARNING, consumer=one, url=url, why=self._whys[one])
        for one in self._closed - silent:
            if self._silences.get(one) == 0:
                event("consumer_heard_again", consumer=one)
        if silent != self._closed:
            self._closed = silent
            self._close(silent)

    def _tell(self, most: bool) -> None:
        now = now_s()
        if most and (not self._silent_since_s or now - self._told_s >= _TELL_AGAIN_S):
            self._silent_since_s, self._told_s = self._silent_since_s or now, now
            of, for_s = len(self._silences), round(now - self._silent_since_s)
            event("health_checks_failing", level=WARNING, silent=self.silent, of=of, for_s=for_s)
        elif not most and self._silent_since_s:
            event("health_checks_recovered", of=len(self._silences), after_s=round(now - self._silent_since_s))
            self._silent_since_s = 0.0

    def _ask_all(self, members: Mapping[str, RegisteredConsumer]) -> dict[str, str]:
        answers = self._asker.ask(
            {incarnation: member.registration.health_url for incarnation, member in members.items()}
        )
        for incarnation, answer in answers.items():
            if answer.unfit:
                event("health_url_invalid", level=WARNING, consumer=incarnation, why=answer.unfit)
            if code := re.search(rb'"code":"([0-9a-f]{1,40})"', answer.body):
                self.codes[incarnation] = code[1].decode()
        return {incarnation: _why_not(answer) for incarnation, answer in answers.items()}

    def on_end(self) -> None:
        self._asker.close()
        self._link.close()


def _why_not(answer: ConsumerAnswer) -> str:
    if answer.status == 200:
        return ""
    if answer.status == 503 and b'"status":"failing"' in answer.body:  # not that of a proxy in between
        return f"{_UNWELL}: {answer.body[:_LONGEST].decode(errors='replace')}"
    return f"HTTP status {answer.status}" if answer.status else answer.unfit or answer.failed
