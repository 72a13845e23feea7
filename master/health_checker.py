"""Health checker: asks every consumer's health URL, and revokes the lease of one that stays silent.

Revoking is not killing: the lease cannot be renewed any more and ends by itself; recovery begins when it has ended, as after any
death, so that a consumer that still works in the meantime is never overlapped.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import requests
import urllib3

from common.clock import now_s
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
from master.web.health_url import HealthHosts, UnfitUrl

log = logging.getLogger(__name__)

_CONNECT_S, _READ_S = 1.0, 2.0
#: Of a whole question, however the answer trickles in; and how often that is looked at.
_WHOLE_S, _LOOK_S = 3.0, 0.5
#: Bytes of an answer that are looked at; the rest of an endless body is never read.
_MOST_BYTES = 1024
_AT_ONCE = 16


class _Asking(requests.adapters.HTTPAdapter):
    """Asks an address, and checks the certificate for the name in the Host header. ``cut_late`` ends what takes too long in all: the limits of
    requests are for each piece of an answer, and a server may send one byte at a time."""

    def __init__(self) -> None:
        self._under_way: dict[int, tuple[Any, float]] = {}  # thread -> its connection, since when
        super().__init__(pool_maxsize=_AT_ONCE, pool_connections=64, max_retries=0)

    def init_poolmanager(self, *args: Any, **more: Any) -> None:
        super().init_poolmanager(*args, **more)
        kinds = {"http": urllib3.HTTPConnectionPool, "https": urllib3.HTTPSConnectionPool}
        self.poolmanager.pool_classes_by_scheme = {scheme: self._noted(kind) for scheme, kind in kinds.items()}

    def _noted(self, pool: Any) -> Any:
        under_way = self._under_way

        def request(connection: Any, *args: Any, **more: Any) -> Any:
            under_way[threading.get_ident()] = (connection, now_s())
            return pool.ConnectionCls.request(connection, *args, **more)

        return type("_Pool", (pool,), {"ConnectionCls": type("_Connection", (pool.ConnectionCls,), {"request": request})})

    def build_connection_pool_key_attributes(self, request: Any, verify: Any, cert: Any = None) -> Any:
        host, pool = super().build_connection_pool_key_attributes(request, verify, cert)
        if host["scheme"] == "https":
            name = re.sub(r":[0-9]+$", "", request.headers["Host"]).strip("[]")
            pool = {**pool, "server_hostname": name, "assert_hostname": name}  # type: ignore[typeddict-unknown-key]
        return host, pool

    def answered(self) -> None:
        """This thread's question is over."""
        self._under_way.pop(threading.get_ident(), None)

    def cut_late(self) -> None:
        """Break the connections of questions that are older than ``_WHOLE_S``; their readers then find them closed."""
        for connection, since_s in list(self._under_way.values()):
            sock = getattr(connection, "sock", None)
            if sock is not None and now_s() - since_s > _WHOLE_S:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it is closed already


def _resolve(name: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]


class HealthChecker(Service):
    """Pings all living consumers side by side while this master leads."""

    name = "health"

    def __init__(self, link: Link, keys: Keys, lead: Lead, every_s: float, limit: int, hosts: HealthHosts, ca: Path | None = None) -> None:
        super().__init__()
        self._link = link
        self._scripts = ScriptRunner(link)
        self._keys = keys
        self._lead = lead
        self._every_s = every_s
        self._limit = limit
        self._hosts = hosts
        self._silences: dict[str, int] = {}
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ping")
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy of the environment: the address that was registered is the one that is asked
        self._session.verify = True if ca is None else str(ca.expanduser())
        self._asking = _Asking()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, self._asking)
        self.stalls_after_s = max(10.0, 4 * every_s + 60)
        self.revoked = 0

    def run_once(self) -> float:
        epoch = self._lead.epoch
        if epoch is None:
            self._silences.clear()
            return self._every_s
        members = {name: member for name, member in read_roster(self._link, self._keys).items() if member.state == "live"}
        answers = self._ask_all(members)
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

    def _ask_all(self, members: Mapping[str, Member]) -> dict[str, bool]:
        asked = {name: self._pool.submit(self._answers, member) for name, member in members.items()}
        while wait(asked.values(), timeout=_LOOK_S).not_done:
            self._asking.cut_late()
        return {name: future.result() for name, future in asked.items()}

    def _answers(self, member: Member) -> bool:
        """Whether it says that it is well. Its URL is looked at once more: it comes from Redis, and its name may lead elsewhere by now."""
        try:
            url, host = self._hosts.pin(member.registration.health_url, _resolve)
            with self._session.get(url, headers={"Host": host}, timeout=(_CONNECT_S, _READ_S), allow_redirects=False, stream=True) as response:
                response.raw.read(_MOST_BYTES)  # as it came: what is packed is not unpacked
                return response.status_code == 200
        except UnfitUrl as unfit:
            event(log, "health_url_unfit", level=logging.WARNING, consumer=member.registration.incarnation, why=str(unfit))
            return False
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError):
            return False
        finally:
            self._asking.answered()

    def on_end(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._session.close()
        self._link.close()
