"""Run audits again and again, each in a process of its own, so that no Java holds memory between two of them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from usher.common.base.errors import RedisTrouble, StartRefused
from usher.common.protocol.keys import Keys
from usher.common.protocol.stream_id import ZERO, rank
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.endpoints import near
from usher.common.redis.locate import resolve_redis_url
from usher.common.redis.replies import pairs
from usher.common.runtime.own_command import usher_command
from usher.master.audit.settings import AuditChoices
from usher.master.audit.streams import expand, is_pattern

#: So much of a run log may be new before it is proven, whatever the time: the rest is for the run itself.
_FULL = 1 / 3
#: So many looks at the run logs between two runs.
_LOOKS = 20


def run_every(every_s: float, is_early: Callable[[], bool] | None = None) -> None:
    """Run this process' command every ``every_s``, and sooner when ``is_early`` says so; with it the first time after
    ``every_s``, else at once. Ends with a signal."""
    words = [word for word in sys.argv[1:] if not word.startswith("--every=")]
    if "--every" in words:
        at = words.index("--every")
        del words[at : at + 2]
    if words[:1] != ["audit"]:
        words = ["audit", *words]
    if is_early is not None:
        _wait(time.monotonic() + every_s, every_s / _LOOKS, is_early)
    while True:
        began_s = time.monotonic()
        code = subprocess.run(usher_command(*words), check=False).returncode
        click.echo(f"usher: audit ended with exit code {code}; the next one in {every_s / 60:g} minutes", err=True)
        _wait(max(began_s + every_s, time.monotonic() + 1.0), every_s / _LOOKS, is_early)


def _wait(until_s: float, look_s: float, is_early: Callable[[], bool] | None) -> None:
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(left_s if is_early is None else min(left_s, look_s))
        if is_early is not None and is_early():
            return


def is_filling(settings: AuditChoices) -> bool:
    """Return True when a run log has so much new that it may be cut before it is archived. False while Redis is
    away."""
    try:
        url, streams = resolve_redis_url(settings), settings.streams
        if any(map(is_pattern, streams)):
            streams = expand(url, streams, settings.group)
        return any(
            _filled(near(url, one), Keys(one, settings.group), settings.run_log_length) >= _FULL for one in streams
        )
    except (RedisTrouble, CommandRefused, StartRefused):
        return False


def _filled(url: str, keys: Keys, cap: int) -> float:
    link = Link(url, "usher:audit", timeout_s=30.0)
    try:
        archived, log = link.pipeline([("HGET", keys.archived, "runs"), ("XINFO", "STREAM", keys.runs)])
        return 0.0 if isinstance(log, Exception) else filled(archived or ZERO, pairs(log), cap)
    finally:
        link.close()


def filled(archived: bytes, log: Mapping[bytes, Any], cap: int) -> float:
    """Return which part of a run log that holds up to ``cap`` records is new, by their times.

    >>> filled(b"70-0", {b"first-entry": [b"10-0"], b"last-generated-id": b"110-0", b"length": 50}, 100)
    0.2
    """
    if not log[b"first-entry"] or not cap:
        return 0.0
    new, held = (rank(log[b"last-generated-id"]) - rank(since) for since in (archived, log[b"first-entry"][0]))
    share = min(1.0, max(0, new) / held) if held else float(new > 0)
    return share * min(1.0, log[b"length"] / cap)
