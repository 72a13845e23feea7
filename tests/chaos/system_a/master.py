"""``python -m tests.chaos.system_a.master``: reads, chooses, claims, writes the maps; pings; claims what is idle."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import threading
import time
import urllib.request
from typing import Any

import redis

_MIN_IDLE_MS = 2000
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class MasterA:
    """One master; its state is in Redis, so that a restart goes on where the last session stopped. The lock is this
    process' own."""

    def __init__(self, url: str, stream: str, group: str) -> None:
        self._redis = redis.Redis.from_url(url)  # with its default retries, as a user would
        self._stream, self._group = stream, group
        self._lock = threading.RLock()
        self._tickets_key, self._consumers_key = f"{stream}:tickets", f"{stream}:consumers"
        self.tickets: dict[str, dict[str, Any]] = {}
        self.consumers: dict[str, dict[str, Any]] = {}

    def load(self) -> None:
        """Reload the last session."""
        with contextlib.suppress(redis.ResponseError):
            self._redis.xgroup_create(self._stream, self._group, "0", mkstream=True)
        self.tickets = json.loads(self._redis.get(self._tickets_key) or b"{}")
        self.consumers = json.loads(self._redis.get(self._consumers_key) or b"{}")

    def _save(self) -> None:
        self._redis.set(self._tickets_key, json.dumps(self.tickets))
        self._redis.set(self._consumers_key, json.dumps(self.consumers))

    # ---- HTTP ----------------------------------------------------------------------------------------------------------------

    def register(self, name: str, health_url: str) -> None:
        with self._lock:
            self.consumers.setdefault(name, {"tickets": []})["healthURL"] = health_url
            self._save()

    def acknowledge(self, name: str, ticket: str, mid: str) -> None:
        with self._lock:
            known = self.tickets.get(ticket)
            if known and mid in known["messages"]:
                known["messages"].remove(mid)
                if not known["messages"]:
                    del self.tickets[ticket]
                self._save()

    # ---- delegation ----------------------------------------------------------------------------------------------------------

    def _choose(self) -> str:
        names = list(self.consumers)
        loads = {name: sum(t["consumer"] == name for t in self.tickets.values()) for name in names}
        return min(names, key=lambda name: loads[name])

    def _give(self, ticket: str, mids: list[str], name: str) -> None:
        known = self.tickets.setdefault(ticket, {"consumer": name, "messages": []})
        known["consumer"] = name
        known["messages"] += [mid for mid in mids if mid not in known["messages"]]

    def delegate(self) -> None:
        """New entries to consumers: the ticket's if it is in processing, else the one with the fewest."""
        if not self.consumers:
            time.sleep(0.05)
            return
        found = self._redis.xreadgroup(self._group, "master", {self._stream: ">"}, count=50, block=100)
        with self._lock:
            for mid, fields in found[0][1] if found else ():
                ticket = fields[b"ticket_id"].decode()
                name = self.tickets[ticket]["consumer"] if ticket in self.tickets else self._choose()
                self._redis.xclaim(self._stream, self._group, name, 0, [mid], justid=True)
                self._give(ticket, [mid.decode()], name)
            if found:
                self._save()

    # ---- recovery ------------------------------------------------------------------------------------------------------------

    def ping_all(self) -> None:
        """Who does not answer is offline: its tickets go to others, with all their messages."""
        for name, consumer in list(self.consumers.items()):
            try:
                _NO_PROXY.open(consumer["healthURL"], timeout=0.5).close()
            except OSError:
                with self._lock:
                    self.consumers.pop(name, None)
                    if self.consumers:
                        for ticket, known in list(self.tickets.items()):
                            if known["consumer"] == name:
                                heir = self._choose()
                                self._redis.xclaim(self._stream, self._group, heir, 0, known["messages"], justid=True)
                                self._give(ticket, [], heir)
                    self._save()

    def claim_idle(self) -> None:
        """Entries that are idle for long and not in the map."""
        if not self.consumers:
            return
        mapped = {mid for known in self.tickets.values() for mid in known["messages"]}
        for mid, fields in self._redis.xautoclaim(self._stream, self._group, "master", _MIN_IDLE_MS, "0-0", count=100)[
            1
        ]:
            with self._lock:
                ticket = fields[b"ticket_id"].decode()
                name = self.tickets[ticket]["consumer"] if ticket in self.tickets else self._choose()
                self._redis.xclaim(self._stream, self._group, name, 0, [mid], justid=True)
                if mid.decode() not in mapped:
                    self._give(ticket, [mid.decode()], name)
                    self._save()


def _answering(master: MasterA) -> type[http.server.BaseHTTPRequestHandler]:
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.endswith("register"):
                master.register(asked["name"], asked["healthURL"])
            else:
                master.acknowledge(asked["name"], asked["ticket_id"], asked["message_id"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    return Answers


def _forever(work: Any, pause_s: float) -> None:
    while True:
        with contextlib.suppress(redis.RedisError, OSError, KeyError, ValueError):
            work()
        time.sleep(pause_s)


def main() -> None:
    environ = os.environ
    master = MasterA(environ["SYSTEM_A_REDIS"], environ["SYSTEM_A_STREAM"], environ["SYSTEM_A_GROUP"])
    while True:
        with contextlib.suppress(redis.RedisError):
            master.load()
            break
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(environ["SYSTEM_A_PORT"])), _answering(master))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Thread(target=_forever, args=(master.ping_all, 0.5), daemon=True).start()
    threading.Thread(target=_forever, args=(master.claim_idle, 1.0), daemon=True).start()
    _forever(master.delegate, 0.0)


if __name__ == "__main__":
    main()
