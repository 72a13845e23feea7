"""Run everything on this machine, for `usher up` and `usher demo`: plan what to run, check it, and wait until all is
well."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from pydantic import Field

from usher.common.base.clock import wall_ms
from usher.common.base.errors import SettingsError, StartRefused
from usher.common.base.text import pluralize
from usher.common.cli.masters import is_well, living_consumers, somebody_leads
from usher.common.http.serve import check_address
from usher.common.redis.client import check_reachable
from usher.common.redis.embedded import free_port, prepare
from usher.common.redis.locate import LocalInstance, announce_instance, find_local_instance
from usher.common.runtime.settings import CommonSettings, load, name_of
from usher.common.runtime.settings import environment as changed_settings
from usher.deploy.local.supervision import Supervision, SupervisionHangs, SupervisionLost, environment, master_urls

#: Seconds that programs need around the drain, in addition to it; more than ``usher.common.http.serve`` takes (8 s).
AROUND_DRAIN_S = 12
EXAMPLE_HANDLER = "usher.deploy.demo.handlers:show"
#: Characters with a meaning in a command line or a value of supervisord, wherever they come from.
_NOT_IN_A_FOLDER = frozenset('%"\\\n')
#: A socket's path has 108 bytes on Linux and 104 elsewhere; supervisord binds a temporary name with ".<pid>" after it.
_LONGEST_FOLDER = 80
_POLL_S = 0.1
#: Stand-ins for settings that are only known at each program's start, or checked below.
_ANY = {"handler": "any:handler"}


class LocalSettings(CommonSettings):
    """The settings of `usher up`; every other setting of the programs is taken from the environment."""

    consumers: int = Field(2, ge=1, le=64, description="Number of consumers.")
    masters: int = Field(2, ge=1, le=8, description="Number of masters: one leads, the others stand by.")
    port: int = Field(
        8700, ge=1, le=65_527, description="Port of the first master; the others take the ports after it."
    )
    redis_port: int = Field(
        0,
        ge=0,
        le=65_535,
        description="Port of the embedded Redis. 0: a free one, the same as last time if it is still free.",
    )
    handler: str = Field(EXAMPLE_HANDLER, description="The function that handles messages, as module:function.")
    drain_seconds: float = Field(20.0, ge=0, le=3600, description="At a stop: time for running handlers to finish.")

    @property
    def stop_seconds(self) -> int:
        return int(self.drain_seconds) + AROUND_DRAIN_S

    @property
    def urls(self) -> list[str]:
        return master_urls(self.port, self.masters).split(",")


@dataclass(frozen=True)
class Plan:
    """A checked plan: nothing in it can be wrong any more, unless another program takes a port meanwhile."""

    settings: LocalSettings
    state_folder: Path
    redis_url: str
    redis_port: int | None  # None: not ours
    environ: dict[str, str]


@contextlib.contextmanager
def claimed(state_folder: Path) -> Iterator[int]:
    """Hold the folder; yield the descriptor of its lock, which supervisord is to hold too: its programs drain after
    `usher up` was killed."""
    try:
        state_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(state_folder / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        raise StartRefused(f"USHER_STATE_DIR: {state_folder} cannot be used: {problem}") from problem
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        other = find_local_instance(state_folder)
        running = f"`usher up` already runs with {state_folder}" + (
            f" (process {other.pid}, masters {other.master_urls}); stop it" if other else "; wait"
        )
        drains = f"{state_folder}: the run before was killed, and its programs still drain; wait"
        told = running if other or not (state_folder / "up.json").exists() else drains
        raise StartRefused(f"USHER_STATE_DIR: {told}, or set another folder and --port") from None
    try:
        yield descriptor
    finally:
        (state_folder / "up.json").unlink(missing_ok=True)
        os.close(descriptor)


def local_settings(environ: Mapping[str, str], flags: Mapping[str, Any]) -> LocalSettings:
    """Return the settings of ``usher up``. Raises SettingsError naming what is wrong with them and with those of its
    programs, in one message.

    When its own settings are right, those of the programs are checked by ``plan``.
    """
    try:
        return load(LocalSettings, environ, flags)
    except SettingsError as wrong:
        raise SettingsError([*dict.fromkeys((*wrong.problems, *problems_of_programs(_of_programs(environ))))]) from None


def _of_programs(environ: Mapping[str, str]) -> dict[str, str]:
    own = {name_of(field) for field in LocalSettings.model_fields} | {"USHER_BIND"}
    return {name: value for name, value in environ.items() if name not in own}


def plan(settings: LocalSettings, environ: Mapping[str, str], check: Callable[[], None] = lambda: None) -> Plan:
    """Check everything that can be wrong. Raises StartRefused or SettingsError naming the setting; nothing runs yet.

    ``check`` is called while it takes long, and may raise.
    """
    folder = settings.state_folder.absolute()
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        raise StartRefused(
            f"USHER_STATE_DIR: {folder} is too long for the sockets in it; set one of at most {_LONGEST_FOLDER} bytes"
        )
    if odd := sorted(_NOT_IN_A_FOLDER & set(str(folder))):
        raise StartRefused(
            f"USHER_STATE_DIR: supervisord cannot use a folder with {' '.join(odd)} in its name ({folder}); set"
            " another one"
        )
    for index in range(settings.masters):
        check_address(f"127.0.0.1:{settings.port + index}", "USHER_PORT")
    if settings.redis_url:
        check_reachable(settings.redis_url)
        redis_url, redis_port = settings.redis_url, None
    else:
        redis_port = _redis_port(settings, folder)
        prepared = prepare(folder, redis_port, server=settings.redis_server)
        os.close(prepared.lock_fd)  # only a check: the server takes the lock itself
        redis_url = prepared.url
    base = _of_programs(environ) | changed_settings(settings)
    base["USHER_HANDLER"] = settings.handler
    whole = environment(
        base,
        folder,
        consumers=settings.consumers,
        masters=settings.masters,
        port=settings.port,
        redis_port=redis_port,
        stop_seconds=settings.stop_seconds,
    )
    check_programs(whole, check)
    return Plan(settings, folder, redis_url, redis_port, whole)


def start(made: Plan, running: Supervision, check: Callable[[], None], told: Callable[[str], None]) -> None:
    """Start Redis, masters, consumers and, for an outbox, the streamer, each when the one before is well; return when
    all are.

    ``check`` is called all the time and may raise; ``told`` gets a text on what is being waited for. Raises
    StartRefused when a program cannot start.
    """
    settings = made.settings
    names = [f"consumer-{index + 1}" for index in range(settings.consumers)]
    up = LocalInstance(made.redis_url, ",".join(settings.urls), os.getpid(), ",".join(names), wall_ms())
    announce_instance(made.state_folder, up)
    groups: list[tuple[str, str, Callable[[], str]]] = [
        ("master", pluralize(settings.masters, "master"), lambda: _first_trouble(settings.urls, settings.api_token)),
        ("consumer", pluralize(settings.consumers, "consumer"), lambda: _missing(set(names), settings)),
    ]
    if made.redis_port is not None:
        groups.insert(0, ("redis", "Redis", lambda: _unreachable(made.redis_url)))
    if made.environ.get("USHER_OUTBOX_URL"):
        groups.append(("streamer", "the streamer", lambda: _not_running(running, "streamer")))
    for group, words, trouble in groups:
        told(f"starting {words}")
        running.start_group(group)
        _wait(running, group, check, trouble, 60.0 + settings.lease_seconds)
    announce_instance(made.state_folder, replace(up, starting_since_ms=0))


def can_prove() -> bool:
    return all(find_spec(name) for name in ("pyarrow", "duckdb"))


def watch(running: Supervision, redis_is_ours: bool) -> None:
    try:
        states = running.states()
    except SupervisionHangs:
        return  # supervisord is not needed at this moment
    if redis_is_ours and any(state.group == "redis" and state.state == "FATAL" for state in states):
        raise SupervisionLost(f"Redis does not start any more; its last words:\n{running.last_words('redis')}")


def _redis_port(settings: LocalSettings, folder: Path) -> int:
    """Return the port that was asked for, else the one of the last time if it is free, else a free one (and remember
    it)."""
    masters = range(settings.port, settings.port + settings.masters)
    if settings.redis_port in masters:
        raise StartRefused(
            f"USHER_REDIS_PORT: {settings.redis_port} is a port of the masters too (USHER_PORT and those after it);"
            " choose another"
        )
    if settings.redis_port:
        check_address(f"127.0.0.1:{settings.redis_port}", "USHER_REDIS_PORT")
        return settings.redis_port
    memory = folder / "redis.port"
    with contextlib.suppress(OSError, ValueError, StartRefused):
        port = int(memory.read_text("ascii"))
        check_address(f"127.0.0.1:{port}", "USHER_REDIS_PORT")
        if port not in masters:
            return port
    port = next(port for port in iter(free_port, 0) if port not in masters)
    memory.write_text(f"{port}\n", "ascii")
    return port


def _unreachable(url: str) -> str:
    try:
        check_reachable(url)
    except StartRefused as trouble:
        return str(trouble)
    return ""


def _first_trouble(urls: list[str], token: str) -> str:
    for url in urls:
        well, reason = is_well(url, token)
        if not well:
            return f"{url}: {reason}"
    return "" if somebody_leads(urls, token) else "no master leads"


def _not_running(running: Supervision, group: str) -> str:
    states = [state.state for state in running.states() if state.group == group]
    return "" if all(state == "RUNNING" for state in states) else f"{group}: {', '.join(states)}"


def _missing(names: set[str], settings: LocalSettings) -> str:
    missing = sorted(names - living_consumers(settings.urls, settings.api_token))
    return f"not registered: {', '.join(missing)}" if missing else ""


def _wait(
    running: Supervision, group: str, check: Callable[[], None], trouble: Callable[[], str], within_s: float
) -> None:
    """Wait until ``trouble`` is empty. Raises StartRefused when a program of the group ended at once (all was checked
    before, so trying again would only hide why), or when time is over."""
    deadline_s = time.monotonic() + within_s
    while problem := trouble():
        check()
        states = [state for state in running.states() if state.group == group]
        stuck = [state for state in states if state.state in ("BACKOFF", "FATAL")]  # it may be tried again
        if stuck or time.monotonic() > deadline_s:
            names = [state.name for state in stuck or states if state.state != "RUNNING"] or [group]
            told = f"{names[0]} did not start" if stuck else f"{group} is not well after {within_s:.0f} s ({problem})"
            raise StartRefused(f"{told}; the last lines of its log ({running.logs}):\n{running.last_words(names[0])}")
        time.sleep(_POLL_S)


def problems_of_programs(environ: Mapping[str, str]) -> list[str]:
    from usher.consumer.settings import ConsumerSettings
    from usher.master.settings import MasterSettings, StreamerSettings

    problems: list[str] = []
    for cls in (MasterSettings, StreamerSettings, ConsumerSettings):
        try:
            load(cls, environ, _ANY if "consumer_name" in cls.model_fields else None)
        except SettingsError as wrong:
            problems += wrong.problems
    return [*dict.fromkeys(problems)]


def check_programs(environ: Mapping[str, str], check: Callable[[], None] = lambda: None) -> None:
    """Raise SettingsError or HandlerUnusable unless master, consumer and handler can be used with these settings.
    ``check`` is called all the time and may raise, which ends the check."""
    from usher.consumer.__main__ import check_handler

    if problems := problems_of_programs(environ):
        raise SettingsError(problems)
    if handler := environ.get("USHER_HANDLER", ""):
        check_handler(handler, check, environ)


@click.command()
def preflight() -> None:
    check_programs(os.environ)
