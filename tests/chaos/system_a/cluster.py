"""System A in the rig: the same Redis, producer, handler, sink, faults and checker; other programs."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

from tests.chaos.rig.cluster import Cluster
from tests.chaos.rig.facts import GROUP
from tests.chaos.rig.processes import Program
from tests.chaos.rig.producer import STREAM


class ClusterA(Cluster):
    """One master and some consumers of system A."""

    def wait_until_ready(self, within_s: float = 20.0) -> None:
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            with contextlib.suppress(Exception):
                if len(json.loads(self.state.call("GET", f"{STREAM}:consumers") or b"{}")) == len(self.consumer_names):
                    return
            time.sleep(0.02)
        raise RuntimeError(f"system A did not start; its logs are in {self.folder}")

    def leader(self) -> str:
        return self.master_names[0]

    def _system_a(self, name: str, module: str) -> Program:
        environ = self._handler_environ(name) | {
            "SYSTEM_A_REDIS": self._redis_url(name),
            "SYSTEM_A_STREAM": STREAM,
            "SYSTEM_A_GROUP": GROUP,
            "SYSTEM_A_PORT": str(self.http_ports[name]),
            "SYSTEM_A_MASTER": f"http://127.0.0.1:{self.http_ports[self.master_names[0]]}",
        }
        command = [sys.executable, "-m", f"tests.chaos.system_a.{module}"]
        return Program(name, command, environ, self.folder / f"{name}.log", has_arbiter=False)

    def _master(self, name: str) -> Program:
        return self._system_a(name, "master")

    def _consumer(self, name: str) -> Program:
        return self._system_a(name, "consumer")

    def _leftovers(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + 3
        while (
            tickets := json.loads(self.state.call("GET", f"{STREAM}:tickets") or b"{}")
        ) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        left = {"pel": self.state.pending(), "lag": self.state.lag(), "tickets": len(tickets)}
        return left | {"attempts": 0, "members": [], "live": [], "keys": []}
