"""Find the Redis to use: the one that is set, or that of the running ``usher up`` of this machine."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from usher.common.base.errors import StartRefused
from usher.common.base.private_file import write_private
from usher.common.redis.endpoints import CLUSTER, mode, near
from usher.common.runtime.settings import CommonSettings


@dataclass(frozen=True)
class LocalInstance:
    """A running ``usher up``, as it announces itself to the other programs of this machine in ``<state>/up.json``."""

    redis_url: str
    master_urls: str
    pid: int
    consumers: str = ""  # names, comma separated
    starting_since_ms: int = 0  # wall clock; 0: all of its programs have started


def announce_instance(state_folder: Path, up: LocalInstance) -> None:
    """Write ``up.json``, readable by its owner only: the URL holds the password."""
    state_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(state_folder / "up.json", json.dumps(asdict(up)) + "\n")


def find_local_instance(state_folder: Path) -> LocalInstance | None:
    """Return the ``usher up`` that runs with this state folder; None when there is none, or its process is gone."""
    try:
        told = json.loads((state_folder / "up.json").read_bytes())
        up = LocalInstance(
            str(told["redis_url"]),
            str(told["master_urls"]),
            int(told["pid"]),
            str(told.get("consumers", "")),
            int(told.get("starting_since_ms", 0)),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return up if up.pid > 0 and _alive(up.pid) else None


def resolve_redis_url(settings: CommonSettings) -> str:
    """Return the URL of the Redis to use: the one that is set, else that of the ``usher up`` of this machine. Raises
    StartRefused when there is neither."""
    if settings.redis_url:
        return _near(settings.redis_url, settings)
    up = find_local_instance(settings.state_folder)
    if up is None:
        raise StartRefused(
            f"USHER_REDIS_URL is empty and no `usher up` is running (looked in {settings.state_folder / 'up.json'})"
        )
    return _near(up.redis_url, settings)


def _near(url: str, settings: CommonSettings) -> str:
    """Call ``near`` for the stream of these settings. Raises StartRefused when the streams cannot lie in one slot of a
    cluster."""
    sources = settings.sources
    if sources is not None and mode(url) == CLUSTER and sources.tag is None:
        raise StartRefused(
            "USHER_TICKET_STREAM: in a cluster all streams that are taken in must share one hash tag, as in"
            f" orders{{t}},billing{{t}} or tickets{{t}}:* (it is {settings.ticket_stream!r})"
        )
    return near(url, settings.work_stream)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
