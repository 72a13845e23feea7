"""Health checker: asks every consumer's health URL, and revokes the lease of one that stays silent.

Revoking is not killing: the lease cannot be renewed any more and ends by itself; recovery begins when it has ended, as after any
death, so that a consumer that still works in the meantime is never overlapped.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import requests

from common.errors import Fenced
from common.keys import Keys
from common.log import event
from common.redis_client import Link
from common.scripts import ScriptRunner
from common.service import Service
from master.elector import Lead
from master.leader_steps import LeaderSteps
from master.policy.liveness import judge
from master.roster import Member, read_roster

log = logging.getLogger(__name__)

_CONNECT_S, _READ_S = 1.0, 2.0
#: Bytes of an answer that are looked at; the rest of an endless body is never read.
_MOST_BYTES = 1024
_AT_ONCE = 16


class HealthChecker(Service):
    """Pings all living consumers side by side while this master leads."""

    name = "health"

    def __init__(self, link: Link, keys: Keys, lead: Lead, every_s: float, limit: int) -> None:
        super().__init__()
        self._link = link
        self._scripts = ScriptRunner(link)
        self._keys = keys
        self._lead = lead
        self._every_s = every_s
        self._limit = limit
        self._silences: dict[str, int] = {}
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ping")
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy of the environment: the address that was registered is the one that is asked
        self._session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=_AT_ONCE, pool_connections=64, max_retries=0))
        self.stalls_after_s = max(10.0, 4 * every_s + 60)
        self.revoked = 0

    def run_once(self) -> float:
        epoch = self._lead.epoch
        if epoch is None:
            self._silences.clear()
            return self._every_s
        members = {name: member for name, member in read_roster(self._link, self._keys).items() if member.state == "live"}
        answers = dict(zip(members, self._pool.map(self._answers, members.values()), strict=True))
        self._silences = {name: 0 if well else self._silences.get(name, 0) + 1 for name, well in answers.items()}
        verdict = judge(self._silences, self._limit)
        if verdict.own_network:
            event(log, "most_are_silent", level=logging.WARNING, silent=sum(n >= self._limit for n in self._silences.values()), of=len(members))
        steps = LeaderSteps(self._scripts, self._keys, epoch, "")
        try:
            for incarnation in verdict.revoke:
                if steps.revoke(incarnation):
                    self.revoked += 1
                    event(log, "lease_revoked", level=logging.WARNING, consumer=incarnation, failures=self._silences[incarnation])
        except Fenced:
            self._lead.lost(epoch)
        return self._every_s

    def _answers(self, member: Member) -> bool:
        try:
            with self._session.get(
                member.registration.health_url, timeout=(_CONNECT_S, _READ_S), allow_redirects=False, stream=True
            ) as response:
                next(response.iter_content(_MOST_BYTES), b"")
                return response.status_code == 200
        except (requests.RequestException, OSError):
            return False

    def on_end(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._session.close()
        self._link.close()
