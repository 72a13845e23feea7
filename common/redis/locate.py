"""Find the Redis to use: the one that is set, or that of the running ``usher up`` of this machine; and check it at the
start of a long-running program. Write files, whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from usher.common.base.clock import now_s
from usher.common.base.errors import NotNow, RedisTrouble, StartRefused
from usher.common.base.log import WARNING, event
from usher.common.redis.client import AUTH, REFUSED, Link, check_reachable
from usher.common.redis.endpoints import CLUSTER, mode, near
from usher.common.runtime.settings import CommonSettings


def write_whole(path: Path, text: str, mode: int = 0o600, give: Callable[[Path], object] = lambda draft: None) -> None:
    """Write a file, whole or not at all. ``give`` may change its owner before it is in its place. Raises StartRefused
    when it cannot be written."""
    draft = path.with_name(path.name + ".new")
    try:
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        give(draft)
        draft.replace(path)
    except OSError as problem:
        raise StartRefused(f"{path} cannot be written: {problem.strerror or problem}") from problem


#: Round trips that a lease must outlast. Its first renewal goes over a new connection (TCP, TLS, password, name, two
#: questions about the server) and sends its script twice.
_ROUND_TRIPS = 12
_PINGS = 5


@dataclass(frozen=True)
class LocalInstance:
    """A running ``usher up``, as it announces itself to the other programs of this machine in ``<state>/up.json``."""

    redis_url: str
    master_urls: str
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    consumers: str = ""  # names, comma separated
    starting_since_ms: int = 0  # wall clock; 0: all of its programs have started


_adapter = functools.cache(lambda: TypeAdapter(LocalInstance))  # not at the import: it takes 10 ms


def announce_instance(state_folder: Path, up: LocalInstance) -> None:
    """Write ``up.json``, readable by its owner only: the URL holds the password."""
    state_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(state_folder / "up.json", _adapter().dump_json(up).decode() + "\n")


def find_local_instance(state_folder: Path) -> LocalInstance | None:
    """Return the ``usher up`` that runs with this state folder; None when there is none, or its process is gone."""
    try:
        up = _adapter().validate_json((state_folder / "up.json").read_bytes())
    except (OSError, ValueError):
        return None
    return up if Path(f"/proc/{up.pid}").exists() else None


def resolve_redis_url(settings: CommonSettings) -> str:
    """Return the URL of the Redis to use: the one that is set, else that of the ``usher up`` of this machine; with the
    stream noted in it where need be (``near``). Raises StartRefused when there is neither, or when the streams cannot
    lie in one slot of a cluster."""
    url, sources = settings.redis_url, settings.sources
    if not url:
        if (up := find_local_instance(settings.state_folder)) is None:
            looked_in = settings.state_folder / "up.json"
            raise StartRefused(
                f"USHER_REDIS_URL is empty, and no `usher run` or `usher up` runs here (looked in {looked_in})"
            )
        url = up.redis_url
    if sources is not None and mode(url) == CLUSTER and sources.tag is None:
        raise StartRefused(
            "USHER_TICKET_STREAM: in a cluster all streams that are taken in must share one hash tag, as in"
            f" orders{{t}},billing{{t}} or tickets{{t}}:* (it is {settings.ticket_stream!r})"
        )
    return near(url, settings.work_stream)


def check_at_start(url: str, leases_s: Mapping[str, float]) -> None:
    """Call ``check_reachable``, but only log a Redis that is away: it may come up later than the program, which until
    then is alive and not ready. ``leases_s``: the leases that the program is to keep there, by setting.

    Raises StartRefused for faults that waiting does not mend: Redis refuses us, is too old, or too far for a lease.
    """
    try:
        check_reachable(url)
    except StartRefused as refused:
        cause = refused.__cause__
        if not isinstance(cause, NotNow) or cause.kind in (AUTH, REFUSED):
            raise
        event("redis_unreachable", level=WARNING, why=str(refused), means="waiting for it")
        return
    with contextlib.suppress(RedisTrouble):
        check_leases(url, leases_s)


def check_leases(url: str, leases_s: Mapping[str, float]) -> None:
    """Raise StartRefused unless Redis is near enough to keep these leases, by setting; RedisTrouble when it is away."""
    took_s = []
    with Link(url, "usher:check") as link:
        link.call("PING")
        for _ in range(_PINGS):
            sent_s = now_s()
            link.call("PING")
            took_s.append(now_s() - sent_s)
    for setting, lease_s in leases_s.items():
        if (shortest_s := _ROUND_TRIPS * min(took_s)) > lease_s:
            raise StartRefused(
                f"{setting}: a lease of {lease_s:g} s would be lost before it is renewed: the way to Redis and back"
                f" takes {1000 * min(took_s):.0f} ms here, and a lease must last {_ROUND_TRIPS} times as long: set"
                f" {max(shortest_s, 0.1):.1f} or more"
            )
