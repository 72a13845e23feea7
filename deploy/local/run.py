"""``usher run``: one process that handles messages and may lead; and ``running``, the same within a program of yours.

Each such process is a whole Usher: a master, which leads or stands by, and a consumer. They need Redis, and nothing of
each other: no address, no port, no token. A consumer here takes its name, and reports, in its own process where that
leads, else through Redis (``OwnMaster``).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click
import orjson

from usher.common.base.clock import now_s
from usher.common.base.errors import HandlerUnusable, RedisTrouble, SettingsError
from usher.common.base.log import configure, redacted
from usher.common.http.serve import Liveness, WorkerEnds, leave, listen, serve, server_tls, url_of
from usher.common.protocol.keys import Keys
from usher.common.protocol.registration import BESIDE, NAME, RETRYING_HEADER, Registration
from usher.common.redis.client import CommandRefused
from usher.common.redis.embedded import EmbeddedRedis
from usher.common.redis.locate import (
    LocalInstance,
    announce_instance,
    check_at_start,
    find_local_instance,
    resolve_redis_url,
)
from usher.common.runtime.name_lock import NameLock, held_after
from usher.common.runtime.service import Service
from usher.common.runtime.settings import load, options
from usher.consumer.__main__ import check_handler
from usher.consumer.isolation.process import Template
from usher.consumer.lifecycle.master_client import MasterAnswer, MasterClient, MasterUnavailable
from usher.consumer.program import ConsumerProgram, journal_beside, name_what_ran, tell_what_ran
from usher.consumer.settings import WorkSettings
from usher.master.__main__ import log_doctor_findings
from usher.master.assembly.program import MasterProgram
from usher.master.dispatch.events import report_of
from usher.master.leader.limits import TICKET_WINDOW
from usher.master.membership.registry import Membership, NameInUse, RegistrationOver
from usher.master.settings import MasterSettings

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

#: Ports that are tried after the one that is taken.
_PORTS = 64
#: Reports that wait in Redis for the leader, at most; and the least time between two of a process.
_REPORTS, _PACE_S = 100, 0.01
#: Seconds between two looks whether others have died.
_LOOK_S = 0.5


class RunSettings(MasterSettings, WorkSettings):
    """The settings of ``usher run``: those of a master and of a consumer."""


class OwnMaster(MasterClient):
    """The master that a consumer asks here: that of its own process; and Redis for a report, where another leads."""

    longest_s = 5.0

    def __init__(self, master: MasterProgram, slots: int) -> None:
        self._leading, self._keys, self._slots = master.leading, master.place.keys, slots
        self._link = master.place.link("reports")
        self._membership = Membership(self._link, self._keys, master.place.lease_ms)

    def prefer(self, url: str) -> bool:
        return True

    def post(self, path: str, body: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> MasterAnswer:
        answer = partial(MasterAnswer, "this process", sent_s=now_s())
        if path.endswith("/acknowledge"):
            return self._report(answer, body, int(headers.get(RETRYING_HEADER, 0)))
        return self._register(answer, Registration(**orjson.loads(body)))

    def _register(self, answer: Callable[..., MasterAnswer], asked: Registration) -> MasterAnswer:
        try:
            given = self._membership.register(asked)
        except NameInUse:
            return answer(409, {})
        except RegistrationOver:
            return answer(410, {})
        self._leading.roster.wake()
        told: dict[str, Any] = {"generation": given.registration.generation, "ticket_window": TICKET_WINDOW}
        return answer(201, told | {"lease_ms": given.lease_ms, "left_ms": given.left_ms})

    def _report(self, answer: Callable[..., MasterAnswer], body: bytes, retrying: int) -> MasterAnswer:
        dispatcher = self._leading.dispatcher
        if dispatcher.leads:
            report = report_of(body, retrying)
            dispatcher.post(report)
            return answer(204, {}, window=dispatcher.window(report.incarnation))
        try:
            self._link.call("XADD", self._keys.reports, "MAXLEN", "~", _REPORTS, "*", str(retrying), body)
        except (RedisTrouble, CommandRefused) as trouble:
            raise MasterUnavailable(str(trouble)) from trouble
        time.sleep(_PACE_S)
        return answer(204, {}, window=2 * self._slots)  # the least that a leader gives: it is told soon

    def close(self) -> None:
        self._link.close()


class Neighbours(Service):
    """Service that starts the embedded Redis again, should it be killed; and, while this process leads, ends the leases
    of those who were killed with the whole of their program on this machine. A worker that its arbiter starts again
    proves that itself, and knows how the last one ended."""

    name = "neighbours"

    def __init__(self, settings: RunSettings, redis_url: str, master: MasterProgram) -> None:
        super().__init__()
        self._settings, self._redis_url, self._master = settings, redis_url, master
        self._link = master.place.link("neighbours")

    def run_once(self) -> float:
        _revive(self._settings)
        leading = self._master.leading
        for member in list(leading.roster.members.values()) if leading.dispatcher.leads else ():
            if member.alive and NAME.fullmatch(member.registration.name):
                self._look(member.registration)
        return _LOOK_S

    def _look(self, one: Registration) -> None:
        lock = NameLock(self._settings.state_folder, one.name)
        with contextlib.suppress(OSError):  # it is held, or of another machine
            with _life_of(lock).open("rb+") as program:
                fcntl.flock(program, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with held_after(lock.path, one.lock) as is_over:
                if is_over:
                    tell_what_ran(self._settings, self._redis_url, journal_beside(lock), False, False)
                    self._link.call("PEXPIRE", self._master.place.keys.lease(one.incarnation), 1)  # whoever leads
                    self._master.leading.roster.wake()


def _life_of(lock: NameLock) -> Path:
    return lock.path.with_suffix(".program")


@contextlib.contextmanager
def _shown_alive(settings: RunSettings) -> Iterator[None]:
    """Hold a lock that is free when the arbiter and all its workers, which inherit it, are gone."""
    path = _life_of(NameLock(settings.state_folder, settings.consumer_name))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("ab") as file:
        for _ in range(20):  # a neighbour may look; a child that the last one left behind may stay
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_LOOK_S / 10)
        yield


class RunProgram:
    """A master and a consumer as usher.common.http.serve runs them: one web application, one start, one stop."""

    def __init__(self, settings: RunSettings, redis_url: str, ends: WorkerEnds, template: Template) -> None:
        _revive(settings)  # our last worker may have ended because it was gone
        leases_s = {"USHER_LEASE_SECONDS": settings.lease_seconds}
        check_at_start(redis_url, leases_s | {"USHER_LEADER_LEASE_SECONDS": settings.leader_lease_seconds})
        self._settings, self._redis_url = settings, redis_url
        of_process = leave, partial(leave, for_good=True), ends, template
        self.master = MasterProgram(settings, redis_url, lambda: self.consumer.health())
        own = OwnMaster(self.master, settings.concurrency)
        self.consumer = ConsumerProgram(settings, redis_url, *of_process, own)
        self._neighbours = Neighbours(settings, redis_url, self.master)
        self._at = BESIDE + settings.consumer_name

    def app(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path: str = environ["PATH_INFO"]
        if not path.startswith(f"{self._at}/"):
            return self.master.app(environ, start_response)
        environ |= {"SCRIPT_NAME": environ.get("SCRIPT_NAME", "") + self._at, "PATH_INFO": path.removeprefix(self._at)}
        return self.consumer.app(environ, start_response)

    def start(self, port: int, host: str) -> None:
        self.master.start(port, host)
        self.consumer.start(port, host, self._at)
        self._neighbours.start()
        if not port:
            return
        page = self._settings.advertise_url or url_of(host, port, self._settings.tls_cert is not None)
        rows = {"handler": self._settings.handler, "Redis": redacted(self._redis_url), "page": f"{page}/"}
        click.echo("\n".join(["Usher runs.", *(f"  {name:<10} {text}" for name, text in rows.items())]))

    def liveness(self) -> Liveness:
        both = (self.master.liveness(), self.consumer.liveness())
        return Liveness(min(one.silence_s for one in both), "; ".join(filter(None, (one.stalled for one in both))))

    def stop(self) -> None:
        """Give up the lead at once, then drain."""
        self._neighbours.stop()
        self.master.resign()
        self.consumer.stop()
        self.master.stop()


@click.command()
@click.argument("spec", metavar="[HANDLER]", required=False)
@options(RunSettings)
def run(flags: dict[str, Any], spec: str | None) -> None:
    """Run a handler, here and now: this process handles messages, and leads if no other does. Start as many as you
    like, on any machine with the same Redis; kill any. Without --redis-url they share an embedded one on this machine.
    HANDLER: module:function, or a module with a function `handle`. Ctrl-C drains."""
    if spec and flags["handler"]:
        raise click.UsageError("HANDLER and --handler say the same: give one of them")
    named = {"handler": spec if ":" in spec else f"{spec}:handle"} if spec else {}
    settings = load(RunSettings, os.environ, flags | named)
    listener, tls = listen(settings.bind, "USHER_BIND", _PORTS), server_tls(settings.tls_cert, settings.tls_key)
    settings = _named(settings, listener.getsockname()[1])
    configure(settings.consumer_name, settings.log_level, settings.log_format, settings.secrets)
    check_handler(settings.handler)
    with _shown_alive(settings), redis_of(settings) as redis_url:
        log_doctor_findings(redis_url, Keys(settings.work_stream, settings.group))
        template = Template()
        ends = WorkerEnds(partial(name_what_ran, settings), template.begin)
        program, most_s = partial(RunProgram, settings, redis_url, ends, template), settings.drain_seconds + 5
        serve(program, settings.bind, settings.consumer_name, most_s, tls=tls, ends=ends, listener=listener)


@contextlib.asynccontextmanager
async def running(handle: Callable[..., Any], **settings: str) -> AsyncIterator[None]:
    """Handle messages in this very process, as `usher run` does in one of its own, until the block ends. ``settings``:
    those of `usher run` (``redis_url``, ``concurrency``, ...), else of the environment. For development: what ends a
    process of `usher run`, a lost lease or a handler's deadline, ends yours, and nobody starts it again."""
    handler = f"{handle.__module__}:{handle.__qualname__}"
    if handle.__module__ == "__main__":
        raise HandlerUnusable(f"{handler}: put the handler into a module: other processes import it, too")
    if unknown := settings.keys() - RunSettings.model_fields.keys():
        raise SettingsError([f"usher.running has no setting {name}" for name in sorted(unknown)])
    with contextlib.ExitStack() as stack:
        here = {"advertise_url": f"http://{socket.gethostname()}/process-{os.getpid()}"}  # where nobody listens
        given = _named(load(RunSettings, os.environ, here | settings | {"handler": handler}), os.getpid())
        stack.enter_context(_shown_alive(given))
        redis_url = await asyncio.to_thread(stack.enter_context, redis_of(given))
        stack.callback((template := Template()).end)
        program = await asyncio.to_thread(RunProgram, given, redis_url, WorkerEnds(), template)
        try:
            program.start(0, "127.0.0.1")
            yield
        finally:
            await asyncio.to_thread(program.stop)


def _named(settings: RunSettings, number: int) -> RunSettings:
    """Number the consumer's name by the port, which nobody else on this machine has: who starts there again gets the
    tickets of one that was killed, at once."""
    named = {"consumer_name": f"{settings.consumer_name[:58]}-{number}"}
    return settings.model_copy(update=named | {"bind": f"{settings.bind.rpartition(':')[0]}:{number}"})


@contextlib.contextmanager
def redis_of(settings: RunSettings) -> Iterator[str]:
    """Yield the URL of the Redis to use: the one that is set, that of a running `usher up`, or an embedded one: the
    first such process of this machine starts it, the last one ends it; it lives on when they are killed."""
    folder = settings.state_folder
    if settings.redis_url:
        yield resolve_redis_url(settings)
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (paths := (folder / "run.users", folder / "run.lock")):
        path.touch(0o600)
    with paths[0].open("a") as users, paths[1].open("a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(users, fcntl.LOCK_SH)
        if find_local_instance(folder) is None:
            _start_redis(settings)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            yield resolve_redis_url(settings)
        finally:
            fcntl.flock(turn, fcntl.LOCK_EX)
            fcntl.flock(users, fcntl.LOCK_UN)
            with contextlib.suppress(OSError, ValueError):  # others use it; it has gone; it is that of `usher up`
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock, up = folder / "redis" / "lock", find_local_instance(folder)
                if up is not None and int(lock.read_text("ascii")) == up.pid:
                    os.kill(up.pid, signal.SIGTERM)
                    with lock.open("a") as free:  # its own until it has ended
                        fcntl.flock(free, fcntl.LOCK_EX)
                    (folder / "up.json").unlink(missing_ok=True)


def _start_redis(settings: RunSettings) -> None:
    server = EmbeddedRedis(settings.state_folder, None, server=settings.redis_server)
    server.start()
    announce_instance(settings.state_folder, LocalInstance(server.url, f"http://{settings.bind}", server.pid))


def _revive(settings: RunSettings) -> None:
    """Start the embedded Redis of `usher run` again if it has ended, and nobody is about to start or to end one. That
    of `usher up` is not ours. Raises StartRefused."""
    folder = settings.state_folder
    if settings.redis_url or ((up := find_local_instance(folder)) and not up.redis_url.startswith("unix:")):
        return
    with contextlib.suppress(OSError), (folder / "run.lock").open("a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with (folder / "redis" / "lock").open("rb+") as lives:
            fcntl.flock(lives, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _start_redis(settings)
