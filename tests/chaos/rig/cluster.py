"""A whole system on this machine: Redis, masters, consumers, proxies between them, producer, sink, and the history."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.checker.history import History
from tests.chaos.injectors.proxy import Proxies
from tests.chaos.rig.clock import SteppedClock
from tests.chaos.rig.facts import GROUP, State, count_logs
from tests.chaos.rig.handler import HISTORY_VARIABLE, NAME_VARIABLE, SINK_VARIABLE
from tests.chaos.rig.processes import LogPipe, Program, Restarter, held_by
from tests.chaos.rig.producer import STREAM, Load, Producer, Tail
from tests.chaos.rig.records import HistoryWriter, now_ns
from tests.chaos.rig.redis_server import RedisServer
from tests.chaos.rig.sink import Sink
from tests.chaos.rig.talk import LIMIT, Talk
from tests.chaos.rig.wire import Refused, Unknown
from tests.hands import free_port
from tests.tuned import TUNED, tuned

ROOT = Path(__file__).resolve().parents[3]
HANDLER = "tests.chaos.rig.handler:handle"
_READY_S = 30.0
_QUICK: dict[str, Any] = {"SWEEP_S": 0.4, "RECONCILE_S": 0.5, "HEALTH_S": 0.5, "RETRY_CAP_S": 0.3}
_S = 1_000_000_000


@dataclass(frozen=True)
class Shape:
    """What is started. ``proxied``: the kinds of links with a proxy in between: redis, http, ping."""

    consumers: int = 3
    masters: int = 2
    fsync: str = "everysec"
    lease_s: float = 1.0
    leader_lease_s: float = 1.0
    slots: int = 8
    max_attempts: int = 5
    drain_s: float = 5.0
    proxied: frozenset[str] = frozenset()
    shared_state: bool = (
        True  # consumers prove by their lock file that a predecessor is dead; else each start has a folder of its own
    )
    environ: Mapping[str, str] = field(default_factory=dict)
    tuned: Mapping[str, Any] = field(default_factory=dict)  # constants of the product, as tests/tuned.py sets them
    handlers: tuple[str, ...] = ()  # of the first, second ... consumer, from the first one again; else all have one
    log_pipes: bool = False  # the log goes through pipes, which somebody may cease to read
    is_shipped: bool = False  # Redis is the server that people get with Usher, not the oldest
    has_clock: bool = False  # the clock of Redis can be set


class Cluster:
    """``with Cluster(folder, seed, shape, load) as cluster: cluster.begin(); ...; history = cluster.finish(...)``."""

    def __init__(self, folder: Path, seed: int, shape: Shape, load: Load) -> None:
        self.folder = folder
        self.shape = shape
        self.rng = random.Random(seed)
        self.history_path = folder / "history.jsonl"
        self.counts: Counter[str] = Counter()
        self.consumer_names = [f"c{number}" for number in range(1, shape.consumers + 1)]
        self.master_names = [f"m{number}" for number in range(1, shape.masters + 1)]
        self.http_ports = {name: free_port() for name in (*self.master_names, *self.consumer_names)}
        self._stack = contextlib.ExitStack()
        self._seed = seed
        self._load = load
        self._held_before: dict[int, tuple[int, int]] = {}
        self.history = HistoryWriter(self.history_path)

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ---- start ---------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        stack = self._stack
        stack.callback(self.history.close)
        clock = SteppedClock(self.folder) if self.shape.has_clock else None
        self.redis = stack.enter_context(RedisServer(self.folder, self.shape.fsync, clock, self.shape.is_shipped))
        self.sink = stack.enter_context(Sink(self.folder))
        self.proxies = stack.enter_context(Proxies(random.Random(self._seed + 1)))
        self.producer = Producer(self.redis.port, self.history, self._load, self._seed)
        stack.callback(self.producer.stop)
        urls = [f"http://127.0.0.1:{self.http_ports[name]}" for name in self.master_names]
        self.talk = Talk(self.redis.port, GROUP, self.producer, self.counts, urls) if self._load.talks else None
        self.tail = Tail(self.redis.port, self.history, self._load)
        stack.callback(self.tail.finish)
        self.state = State(self.redis.port, self._load.sources and self._load.streams)
        stack.callback(self.state.close)
        self.restarter = Restarter(ROOT, self.history)
        self.sink.on_hello = self.restarter.watch
        stack.callback(self._kill_programs)
        for name in self.master_names:
            self.restarter.add(self._master(name))
        for name in self.consumer_names:
            self.restarter.add(self._consumer(name))
        self.restarter.start()
        self.tail.start()
        self.wait_until_ready()

    def wait_until_ready(self, within_s: float = _READY_S) -> None:
        """Until somebody leads and all consumers live."""
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            with contextlib.suppress(Exception):
                living = {name.rpartition(":")[0] for name in self.state.living()}
                if self.state.leader_url() and living >= set(self.consumer_names) and self.state.pending() >= 0:
                    return
            fallen = next((program for program in self.restarter.programs.values() if program.starts > 3), None)
            if fallen is not None:
                raise RuntimeError(
                    f"{fallen.name} falls at its start: {fallen.log.read_text('utf-8', 'replace')[-2000:]}"
                )
            time.sleep(0.02)
        raise RuntimeError(f"the system did not start within {within_s:.0f} s; its logs are in {self.folder}")

    def _handler_environ(self, name: str) -> dict[str, str]:
        """What the handler in a program needs, whatever system it runs in."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            HISTORY_VARIABLE: str(self.history_path),
            SINK_VARIABLE: self.sink.address,
            NAME_VARIABLE: name,
        }

    def _redis_url(self, name: str) -> str:
        return f"redis://127.0.0.1:{self._near(name, 'redis', self.redis.port)}/0"

    def _environ(self, name: str) -> dict[str, str]:
        shape = self.shape
        return self._handler_environ(name) | {
            "USHER_REDIS_URL": self._redis_url(name),
            "USHER_STATE_DIR": str(self.folder / ("state" if shape.shared_state else f"state-{name}")),
            "USHER_TICKET_STREAM": f"{STREAM}:*" if self._load.sources else STREAM,
            "USHER_GROUP": GROUP,
            "USHER_LEASE_SECONDS": str(shape.lease_s),
            "USHER_LOG_FORMAT": "json",
            **tuned(**_QUICK | dict(shape.tuned)),
            **shape.environ,
        }

    def _near(self, name: str, kind: str, port: int, other: str = "") -> int:
        """The port by which ``name`` reaches ``port``: a proxy's, if links of that kind have one."""
        if kind not in self.shape.proxied:
            return port
        return self.proxies.add(f"{name}-{kind}{other}", port).port

    def _master(self, name: str) -> Program:
        bind = f"127.0.0.1:{self.http_ports[name]}"
        environ = {"USHER_BIND": bind, "USHER_LEADER_LEASE_SECONDS": str(self.shape.leader_lease_s)}
        return self._program(name, "master", environ | self._environ(name))

    def _consumer(self, name: str) -> Program:
        port = self.http_ports[name]
        urls = [
            f"http://127.0.0.1:{self._near(name, 'http', self.http_ports[master], f'-{master}')}"
            for master in self.master_names
        ]
        environ = {
            "USHER_CONSUMER_NAME": name,
            "USHER_HANDLER": HANDLER,
            "USHER_MASTER_URLS": ",".join(urls),
            "USHER_BIND": f"127.0.0.1:{port}",
            "USHER_ADVERTISE_URL": f"http://127.0.0.1:{self._near(name, 'ping', port)}",
            "USHER_CONCURRENCY": str(self.shape.slots),
            "USHER_MAX_ATTEMPTS": str(self.shape.max_attempts),
            "USHER_RETRY_SECONDS": "0.05",
            "USHER_DRAIN_SECONDS": str(self.shape.drain_s),
        }
        if handlers := self.shape.handlers:
            own = {"USHER_HANDLER": handlers[self.consumer_names.index(name) % len(handlers)]}
        else:
            own = {}
        return self._program(name, "consumer", environ | self._environ(name) | own)

    def _program(self, name: str, kind: str, environ: Mapping[str, str]) -> Program:
        log = self.folder / f"{name}.log"
        return Program(name, [*TUNED, kind], environ, log, pipe=LogPipe(log) if self.shape.log_pipes else None)

    # ---- a run ---------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Let the messages come."""
        self._held_before = {program.worker: held_by(program.worker) for program in self.restarter.programs.values()}
        self.producer.start()
        if self.talk:
            self.talk.start()

    def program(self, name: str) -> Program:
        return self.restarter.programs[name]

    def set_handler(self, name: str, handler: str) -> None:
        """From its next start on the program has another handler."""
        program = self.program(name)
        program.environ = {**program.environ, "USHER_HANDLER": handler}

    def leader(self) -> str:
        """The name of the master that leads; "" if none does."""
        url = self.state.leader_url()
        return next((name for name in self.master_names if url.endswith(f":{self.http_ports[name]}")), "")

    def fault(
        self, kind: str, t0: int, t1: int, who: str = "", recover: str = "", since: int = 0, bound_s: float = 0.0
    ) -> None:
        """Note a fault that was injected."""
        self.counts[kind] += 1
        self.history.write(
            "fault", kind=kind, t0=t0, t1=t1, who=who, recover=recover, since=since or t0, bound_ns=int(bound_s * _S)
        )

    def finish(self, terms: Mapping[str, Any], drain_s: float, gently: bool = False) -> History:
        """End of the faults: wait until all is done, look at what is left, end everything (``gently``: by SIGTERM), and
        read the history."""
        began = now_ns()
        self.proxies.heal()
        if self.talk:
            self.talk.stop()
        self.producer.stop()
        self._wait_quiet(drain_s)
        quiet_ns = now_ns() - began
        left = self._leftovers()
        held = [
            (program.who, *self._held_before[program.worker], *held_by(program.worker)) for program in self._survivors()
        ]
        self.tail.finish()
        self._note_dead_letters()
        if self.talk:
            self.talk.note(self.state.prefix)
        clean = self.restarter.stop(self.consumer_names, self.shape.drain_s + 6 if gently else 0.0)
        for commit in self.sink.commits():
            self.history.write("commit", **commit)
        self.history.write("final", **left, held=held, accounts=self.sink.accounts(), quiet_ns=quiet_ns)
        self.counts.update(count_logs(self.logs()))
        self.counts.update({name: count for name, count in self.proxies.counts.items() if not name.startswith("mode_")})
        self.counts["redis_starts"], self.counts["restarts"] = self.redis.starts, self.restarter.restarts
        self.counts["ended_by_themselves"] = int(clean)
        self.history.write("counters", **self.counts)
        if self.talk:
            self.history.write("terms", talks=True, limit=LIMIT, redriven=self.counts["letters_resumed"] > 0)
        self.history.write("terms", max_attempts=self.shape.max_attempts, drain_ns=int(drain_s * _S), **terms)
        return History.read(self.history_path.read_text("utf-8", "surrogateescape"))

    def logs(self) -> Iterable[Path]:
        return sorted(self.folder.glob("[cm]*.log"))

    def _survivors(self) -> list[Program]:
        """Programs whose worker is the one that they began with."""
        return [program for program in self.restarter.programs.values() if program.worker in self._held_before]

    def _wait_quiet(self, within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        while not self.state.is_quiet() and time.monotonic() < deadline_s:
            time.sleep(0.02)

    def _leftovers(self) -> dict[str, Any]:
        """What is left, when the janitor has had the time to reap."""
        deadline_s = time.monotonic() + 4 * self.shape.lease_s + 3
        while True:
            left: dict[str, Any] = {"pel": -1, "lag": -1}
            with contextlib.suppress(Exception):
                left = self.state.leftovers()
                if not (
                    left["tickets"]
                    or left["attempts"]
                    or left["keys"]
                    or set(left["members"]) - {"master", "halted", *left["live"]}
                ):
                    return left
            if time.monotonic() > deadline_s:
                return left
            time.sleep(0.1)

    def _note_dead_letters(self) -> None:
        """A letter whose body was gone does not tell its uid; producer and tail know it."""
        known = self.tail.uids | self.producer.mids
        with contextlib.suppress(Refused, Unknown):
            for letter in self.state.dead_letters():
                uid = letter["uid"] or known.get(letter["mid"], letter["mid"])
                self.history.write("dlq", **(letter | {"uid": uid}))

    def _kill_programs(self) -> None:
        """At an end that was not planned; after ``finish`` there is nothing left."""
        self.restarter.stop(self.consumer_names, 0.0)
