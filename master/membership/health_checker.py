"""Health checker: asks every consumer's health URL, and revokes the lease of one that stays silent.

Revoking is not killing: the lease can no longer be renewed and ends by itself. Recovery begins when it has ended, as
after any death, so that a consumer that still works in the meantime is never overlapped.

The lease in Redis is the authority on life; the health check finds processes that live but do not work or cannot be
reached. It can be wrong in one big way: when the master's own network is the trouble, every consumer looks dead. So
most are never revoked at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from usher.common.base.clock import now_s
from usher.common.base.errors import Fenced
from usher.common.base.log import event
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.common.redis.scripts import ScriptRunner
from usher.common.runtime.service import Service
from usher.master.leader.elector import Lead
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.membership.consumer_http import ConsumerHttpClient, RequestBounds
from usher.master.membership.registry import RegisteredConsumer

log = logging.getLogger(__name__)

#: Consumers asked in one turn, and in a second: a thousand are not all asked at once, nor all within
#: the time of a round.
_SLICE, _PER_SECOND = 40, 100
#: Least time between two log lines that most consumers are silent.
_TELL_AGAIN_S = 300.0
#: Bounds of a health request.
BOUNDS = RequestBounds(connect_s=1.0, read_s=2.0, whole_s=3.0, most_bytes=1024)


def judge(failures: Mapping[str, int], limit: int) -> tuple[tuple[str, ...], bool]:
    """Decide from the number of health answers in a row that each living incarnation failed to give. Return those whose
    lease is to be revoked now, and whether the silence of most was put down to our own network.

    ==============================  =======================================
    silent (failures >= limit)      verdict
    ==============================  =======================================
    none                            nothing
    at most half of all             revoke them
    the only consumer there is      revoke it (nothing to compare with)
    more than half                  nothing; our own network is the suspect
    ==============================  =======================================

    >>> judge({"a:1": 5, "b:1": 0}, 5)
    (('a:1',), False)
    """
    silent = tuple(sorted(name for name, count in failures.items() if count >= limit))
    if len(silent) > max(1, len(failures) // 2):
        return (), True
    return silent, False


class HealthChecker(Service):
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
    ) -> None:
        """Make a health checker. ``roster``: all registered consumers, as the roster reader last saw them."""
        super().__init__()
        self._link = link
        self._scripts = ScriptRunner(link)
        self._keys = keys
        self._lead = lead
        self._every_s = every_s
        self._limit = limit
        self._asker = asker  # ours to close
        self._roster = roster
        self._silences: dict[str, int] = {}
        self._unasked: dict[str, RegisteredConsumer] = {}  # not asked yet in this round
        self._began_s = 0.0
        # since when most are silent, and when that was last logged; 0: they are not
        self._silent_since_s = self._told_s = 0.0
        self.stalls_after_s = max(10.0, 4 * every_s + 60)
        self.revoked = 0
        #: Number of silent consumers that keep their leases because most are silent.
        self.silent = 0

    def run_once(self) -> float:
        epoch = self._lead.epoch
        if epoch is None:
            self._silences.clear()
            self._unasked.clear()
            self.silent = 0
            self._silent_since_s = 0.0
            return self._every_s
        if not self._unasked:
            self._unasked = {name: member for name, member in self._roster().items() if member.state == "live"}
            self._silences = {name: self._silences.get(name, 0) for name in self._unasked}
            self._began_s = now_s()
        asked = {name: self._unasked.pop(name) for name in list(self._unasked)[:_SLICE]}
        for name, well in self._ask_all(asked).items():
            self._silences[name] = 0 if well else self._silences[name] + 1
        if self._unasked:
            return len(asked) / _PER_SECOND
        self._judge(epoch)
        return max(self._every_s - (now_s() - self._began_s), len(asked) / _PER_SECOND)

    def _judge(self, epoch: int) -> None:
        """Decide at the end of a round, when every consumer was asked."""
        to_revoke, own_network = judge(self._silences, self._limit)
        self.silent = sum(count >= self._limit for count in self._silences.values()) if own_network else 0
        self._tell()
        steps = LeaderScripts(self._scripts, self._keys, epoch, "")
        try:
            for incarnation in to_revoke:
                if steps.revoke(incarnation):
                    self.revoked += 1
                    event(
                        log,
                        "lease_revoked",
                        level=logging.WARNING,
                        consumer=incarnation,
                        failures=self._silences[incarnation],
                    )
        except Fenced:
            self._lead.lost(epoch)

    def _tell(self) -> None:
        """Log that most are silent: when it begins, now and then while it lasts, and when it is over."""
        now = now_s()
        if self.silent and (not self._silent_since_s or now - self._told_s >= _TELL_AGAIN_S):
            self._silent_since_s, self._told_s = self._silent_since_s or now, now
            lasts_s = round(now - self._silent_since_s)
            event(
                log,
                "health_checks_failing",
                level=logging.WARNING,
                silent=self.silent,
                of=len(self._silences),
                for_s=lasts_s,
            )
        elif not self.silent and self._silent_since_s:
            event(log, "health_checks_recovered", of=len(self._silences), after_s=round(now - self._silent_since_s))
            self._silent_since_s = 0.0

    def _ask_all(self, members: Mapping[str, RegisteredConsumer]) -> dict[str, bool]:
        """Ask these consumers and return, for each, whether it says that it is well."""
        answers = self._asker.ask(
            {incarnation: member.registration.health_url for incarnation, member in members.items()}
        )
        for incarnation, answer in answers.items():
            if answer.unfit:
                event(log, "health_url_invalid", level=logging.WARNING, consumer=incarnation, why=answer.unfit)
        return {incarnation: answer.status == 200 for incarnation, answer in answers.items()}

    def on_end(self) -> None:
        self._asker.close()
        self._link.close()
