"""Several real redis-servers that belong together: a master with a replica under Sentinel, and a cluster of three.

All listen on loopback ports that were free a moment ago, keep nothing but what they need in a folder of the test, and
are ended by their process ids when the ``with`` block ends, however it ends.
"""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from redis.crc import key_slot

from usher.common.base.errors import RedisTrouble
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.embedded import find_redis_server

log = logging.getLogger(__name__)

PASSWORD = "s3cret"
SENTINEL_PASSWORD = "wachtwoord"
SERVICE = "usher"
_SLOTS = 16384
_PATIENCE_S = 20.0
#: Ports of servers; a cluster node also takes the port 10,000 above. All of it lies below the ports that Linux gives to
#: connections.
_LOWEST_PORT, _HIGHEST_PORT, _BUS = 12_000, 22_000, 10_000


def until(condition: Callable[[], Any], what: str, within_s: float = _PATIENCE_S) -> Any:
    """The first true value of ``condition``; trouble with Redis counts as not yet. Fails after ``within_s``."""
    deadline_s = time.monotonic() + within_s
    trouble: object = None
    while time.monotonic() < deadline_s:
        try:
            value = condition()
        except RedisTrouble as not_yet:
            value, trouble = None, not_yet
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {within_s} s: {what} ({trouble})")


def figures(**measured: float) -> None:
    """What a test has measured, for ``pytest -o log_cli=true -o log_cli_level=INFO``."""
    log.info(
        "%s",
        " ".join(
            f"{name}={value:.2f}" if isinstance(value, float) else f"{name}={value}" for name, value in measured.items()
        ),
    )


def _free_port() -> int:
    """A port that is free, and whose cluster bus is too."""
    rng = random.Random()
    while True:
        port = rng.randrange(_LOWEST_PORT, _HIGHEST_PORT)
        with socket.socket() as plain, socket.socket() as bus:
            try:
                plain.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + _BUS))
            except OSError:
                continue
        return port


class Server:
    """One redis-server process (or a sentinel) with a configuration of its own."""

    def __init__(
        self, folder: Path, name: str, *settings: str, sentinel: bool = False, binary: Path | None = None
    ) -> None:
        self.port = _free_port()
        self._binary = binary or find_redis_server()
        self._folder = folder / name
        self._folder.mkdir()
        self._sentinel = sentinel
        self._password = SENTINEL_PASSWORD if sentinel else PASSWORD
        kept = () if sentinel else ('save ""', "appendonly no", f"masterauth {PASSWORD}", "repl-diskless-sync-delay 0")
        lines = [
            "bind 127.0.0.1",
            f"port {self.port}",
            f"dir {self._folder}",
            'logfile "log"',
            f"requirepass {self._password}",
            *kept,
            *settings,
        ]
        (self._folder / "conf").write_text("\n".join(lines) + "\n")
        self.process: subprocess.Popen[bytes] | None = None
        self.link = Link(self.url, f"test:{name}", timeout_s=5.0)

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@{self.address}/0"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [str(self._binary), str(self._folder / "conf"), *(["--sentinel"] if self._sentinel else [])]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        process = self.process

        def answers() -> bool:
            assert process.poll() is None, (self._folder / "log").read_text(errors="replace")[-2000:]
            return bool(self.link.call("PING") == b"PONG")

        until(answers, f"{self._folder.name} answers")

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(_PATIENCE_S)
            self.process = None

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.link.close()
        self.kill()

    def ask(self, *command: Any) -> Any:
        """The reply to a command that may be repeated: a change of its role ends the server's connections."""
        return keep_trying(self.link, *command)

    def role(self) -> str:
        return bytes(self.ask("ROLE")[0]).decode()

    def info(self, section: str) -> dict[str, str]:
        return dict(line.split(":", 1) for line in self.ask("INFO", section).decode().splitlines() if ":" in line)


class _Together:
    """Servers that are ended together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: list[Server] = []

    def add(self, name: str, *settings: str, sentinel: bool = False) -> Server:
        server = Server(self.folder, name, *settings, sentinel=sentinel)
        self.servers.append(server)
        server.start()
        return server

    def build(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        try:
            self.build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for server in self.servers:
            server.close()


class UnderSentinel(_Together):
    """A master, its replica, and three sentinels that watch them; two of them must agree that the master is down."""

    down_after_ms = 1000

    def build(self) -> None:
        self.first = self.add("first")
        self.second = self.add("second", f"replicaof 127.0.0.1 {self.first.port}")
        until(lambda: self.second.info("replication").get("master_link_status") == "up", "the replica follows")
        self.sentinels = [self.add(f"sentinel-{n}", *self._watch(self.first.port), sentinel=True) for n in range(3)]
        until(
            lambda: all(self._knows_the_others(sentinel) for sentinel in self.sentinels),
            "the sentinels know each other and the replica",
        )

    def _watch(self, port: int) -> list[str]:
        return [
            f"sentinel monitor {SERVICE} 127.0.0.1 {port} 2",
            f"sentinel auth-pass {SERVICE} {PASSWORD}",
            f"sentinel down-after-milliseconds {SERVICE} {self.down_after_ms}",
            f"sentinel failover-timeout {SERVICE} 5000",
            f"sentinel sentinel-pass {SENTINEL_PASSWORD}",
        ]

    @staticmethod
    def _knows_the_others(sentinel: Server) -> bool:
        flat = sentinel.link.call("SENTINEL", "MASTER", SERVICE)
        facts = dict(zip(flat[::2], flat[1::2], strict=True))
        return (facts[b"num-other-sentinels"], facts[b"num-slaves"], facts[b"flags"]) == (b"2", b"1", b"master")

    @property
    def url(self) -> str:
        hosts = ",".join(sentinel.address for sentinel in self.sentinels)
        return f"redis+sentinel://:{PASSWORD}@{hosts}/{SERVICE}?sentinel_password={SENTINEL_PASSWORD}"

    def named(self) -> list[int]:
        """The port that each sentinel names as the master's."""
        return [
            int(sentinel.link.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1]) for sentinel in self.sentinels
        ]

    def fail_over(self) -> None:
        """Ask for a failover while the master lives, and wait until all sentinels name the other server."""
        self.sentinels[0].link.call("SENTINEL", "FAILOVER", SERVICE)
        until(lambda: self.named() == [self.second.port] * 3, "all sentinels name the other server")

    def swap_by_hand(self) -> None:
        """An operator swaps master and replica, and tells the sentinels afterwards. Connections to the former master
        stay open."""
        for sentinel in self.sentinels:
            sentinel.link.call("SENTINEL", "REMOVE", SERVICE)
        self.second.link.call("REPLICAOF", "NO", "ONE")
        self.first.link.call("REPLICAOF", "127.0.0.1", self.second.port)
        for sentinel in self.sentinels:
            sentinel.link.call("SENTINEL", "MONITOR", SERVICE, "127.0.0.1", self.second.port, 2)
            sentinel.link.call("SENTINEL", "SET", SERVICE, "auth-pass", PASSWORD)
        until(lambda: self.named() == [self.second.port] * 3, "all sentinels name the other server")


class Cluster(_Together):
    """Three masters, each with a third of the slots; ``replicas`` of each if asked for."""

    def __init__(self, folder: Path, replicas: int = 0) -> None:
        super().__init__(folder)
        self._replicas = replicas

    def build(self) -> None:
        settings = (
            "cluster-enabled yes",
            "cluster-config-file nodes",
            "cluster-node-timeout 2000",
            "cluster-allow-replica-migration no",
        )
        self.masters = [self.add(f"node-{n}", *settings) for n in range(3)]
        self.replicas = [[self.add(f"replica-{n}-{m}", *settings) for m in range(self._replicas)] for n in range(3)]
        for epoch, server in enumerate(self.servers):
            server.link.call("CLUSTER", "SET-CONFIG-EPOCH", epoch + 1)
        for n, master in enumerate(self.masters):
            first, last = n * _SLOTS // 3, (n + 1) * _SLOTS // 3
            master.link.call("CLUSTER", "ADDSLOTS", *range(first, last))
        for server in self.servers[1:]:
            server.link.call("CLUSTER", "MEET", "127.0.0.1", self.servers[0].port)
        until(lambda: all(self._knows_everybody(server) for server in self.servers), "every node knows every other one")
        for master, replicas in zip(self.masters, self.replicas, strict=True):
            for replica in replicas:
                replica.link.call("CLUSTER", "REPLICATE", self.id_of(master))
        until(self.is_ready, "the cluster is ready")

    def _knows_everybody(self, server: Server) -> bool:
        lines = server.link.call("CLUSTER", "NODES").decode().splitlines()
        return len(lines) == len(self.servers) and not any("handshake" in line or "fail" in line for line in lines)

    def is_ready(self) -> bool:
        return all(self._is_ready(server) for server in self.servers)

    def _is_ready(self, server: Server) -> bool:
        if "cluster_state:ok" not in server.link.call("CLUSTER", "INFO").decode():
            return False
        follows = server in self.masters or server.info("replication").get("master_link_status") == "up"
        owners = {slots[2][1] for slots in server.link.call("CLUSTER", "SLOTS") if len(slots) >= 3 + self._replicas}
        return follows and owners == {master.port for master in self.masters}

    @staticmethod
    def id_of(server: Server) -> str:
        return bytes(server.link.call("CLUSTER", "MYID")).decode()

    @property
    def url(self) -> str:
        return f"redis+cluster://:{PASSWORD}@" + ",".join(server.address for server in self.servers)

    def owner_of(self, key: str) -> Server:
        """The node that has the slot of a key, as the first node that is up says."""
        slot = key_slot(key.encode())
        up = next(server for server in self.servers if server.process is not None)
        port = next(owner[1] for first, last, owner, *_ in up.link.call("CLUSTER", "SLOTS") if first <= slot <= last)
        return next(server for server in self.servers if server.port == port)

    def _agree(self) -> bool:
        """Moves that follow each other faster than the nodes talk can leave them at odds for good: each claims its
        slots with an epoch, and one that takes a slot back without having heard of the epoch it was lost in claims it
        with too low a one."""
        views = set()
        for server in self.servers:
            if server.process is not None:
                nodes = (line.split() for line in server.link.call("CLUSTER", "NODES").decode().splitlines())
                views.add(tuple(sorted((words[0], words[6], *words[8:]) for words in nodes)))
        return len(views) == 1

    def another_than(self, server: Server) -> Server:
        return next(master for master in self.masters if master is not server)

    def move_slot_of(
        self,
        key: str,
        target: Server,
        meanwhile: Callable[[], object] = lambda: None,
        tell: Sequence[Server] | None = None,
    ) -> None:
        """Move the slot of a key with all it holds, as ``redis-cli --cluster reshard`` does.

        ``meanwhile`` is called half-way. ``tell``: the nodes that are told at the end, the new owner first; None: all.
        """
        until(self._agree, "all nodes agree on who has what, and since when")
        slot, source = key_slot(key.encode()), self.owner_of(key)
        target.link.call("CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
        source.link.call("CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(target))
        meanwhile()
        while keys := source.link.call("CLUSTER", "GETKEYSINSLOT", slot, 100):
            with contextlib.suppress(CommandRefused):  # a lease may have ended between the two commands
                source.link.call("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "AUTH", PASSWORD, "KEYS", *keys)
        for server in tell or (target, source, *self.masters):
            server.link.call("CLUSTER", "SETSLOT", slot, "NODE", self.id_of(target))


def keep_trying(link: Link, *command: Any, within_s: float = _PATIENCE_S) -> Any:
    """The reply to a command that may be repeated, tried again while Redis is away or elsewhere."""
    reply: list[Any] = []

    def is_answered() -> bool:
        reply[:] = [link.call(*command)]
        return True

    until(is_answered, f"{command[0]} is answered", within_s)
    return reply[0]
