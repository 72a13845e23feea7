"""Elector: holds the leader lease, so that one master acts at a time. What it holds is an epoch that Redis checks, not
a belief.

Renewal and work share their fate: when the dispatcher makes no progress, the lease is not extended and a standby takes
over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import re
import threading
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from usher.common.base.clock import now_s
from usher.common.base.log import WARNING, event
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.redis.client import Link
from usher.common.runtime.name_lock import boot_id
from usher.common.runtime.service import Service, ServiceEnded
from usher.master.settings import LONGEST_LEASE_S

#: A standby looks again when the lease that it saw would end, or after so many seconds: a leader that resigns, and one
#: that is elected, tells those who read the stream of changes. Others, and who tries to be elected, look more often.
_LOOK_S, _AGAIN_S = 5.0, 0.5
#: The first doubt is settled at once. An election sooner than this after the last one delays the next: when doubts
#: follow each other, something lasting is wrong.
_CALM_S, _PAUSE_S = 5.0, 0.4


class _Known(NamedTuple):
    epoch: int | None = None
    is_doubted: bool = False
    until_s: float = 0.0
    leader_url: str | None = None


class Lead:
    """This process's knowledge of the leadership, which threads share; guarded by its lock where it changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known = _Known()
        self.on_change: Callable[[], None] = lambda: None  # called when this knowledge has changed
        self.on_doubt: Callable[[], None] = lambda: None  # called when an election is due

    @property
    def epoch(self) -> int | None:
        """Return our epoch, or None when we do not lead or doubt what we know."""
        known = self._known
        return None if known.is_doubted else known.epoch

    @property
    def is_ours(self) -> bool:
        return self._known.epoch is not None

    @property
    def holds(self) -> bool:
        """Return whether we hold the lead and its lease still runs, by our clock and counted from the moment we asked
        for it. If not, another master may lead that we have not heard of."""
        known = self._known
        return known.epoch is not None and now_s() < known.until_s

    @property
    def leader_url(self) -> str | None:
        return self._known.leader_url

    def doubt(self, epoch: int) -> None:
        """Doubt ``epoch``: the outcome of a command under it is unknown, so a new epoch is needed before anything else
        happens."""
        self._end(epoch, epoch, is_doubted=True)

    def lost(self, epoch: int) -> None:
        """Give up the lead: Redis answered FENCED to ``epoch``."""
        self._end(epoch, None, is_doubted=False)

    def _end(self, epoch: int, left: int | None, *, is_doubted: bool) -> None:
        with self._lock:
            if self._known.epoch == epoch:
                self._known = self._known._replace(epoch=left, is_doubted=is_doubted)
        self.on_doubt()
        self.on_change()

    def _extended(self, until_s: float) -> None:
        with self._lock:
            self._known = self._known._replace(until_s=until_s)

    def _set(self, epoch: int | None, leader_url: str | None) -> None:
        with self._lock:
            before = self._known
            self._known = _Known(epoch, False, before.until_s, leader_url)
        if self._known != before:
            self.on_change()


class LeaderRecord(NamedTuple):
    """Content of the leader key; both fields are None when nobody leads."""

    epoch: int | None
    url: str | None


def parse_held(stored: bytes | None) -> LeaderRecord:
    epoch, _, holder = (stored or b"").decode(errors="replace").partition(" ")
    return LeaderRecord(int(epoch) if epoch.isdecimal() else None, holder.partition(" ")[2] or None)


#: The files of leaders in this process, to whom their locks say nothing.
_OURS = set[Path]()


class DeathWatch(Service):
    """Service that waits for the end of a leader on this machine: for the record lock that it has on a file of its own.
    The kernel takes such locks from a process that ends, however it does, and children inherit none."""

    name = "leader-ends"

    def __init__(self, path: Path, tell: Callable[[], None]) -> None:
        super().__init__()
        self._path, self._tell = path, tell

    def run_once(self) -> float:
        try:
            with self._path.open("rb+") as file:
                fcntl.lockf(file, fcntl.LOCK_EX)
                self._path.unlink(missing_ok=True)
                self._tell()
        except OSError as refused:
            if refused.errno == errno.EDEADLK:  # it waits for the end of one of us, who led before
                return _AGAIN_S
        raise ServiceEnded  # also without the file: it left, or is on another machine


class Elector(Service):
    """Service that takes, extends and gives up the leader lease."""

    name = "elect"

    def __init__(
        self,
        link: Link,
        keys: Keys | LogKeys,
        lead: Lead,
        url: str,
        lease_ms: int,
        works: Callable[[], bool],
        for_others: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._link = link
        self._keys = keys
        self._lead = lead
        # The word between epoch and URL tells apart two masters that were given the same URL, and our own lost reply
        # from theirs.
        self._holder = f"{uuid.uuid4().hex[:12]} {url}"
        self._url = url
        self._lease_ms = lease_ms
        changed = (keys.changed,) if isinstance(keys, Keys) else ()
        self._of_lead = (keys.leader, keys.counters, *changed)
        self._hears = bool(changed)
        self._works = works
        self._for_others = for_others  # steps that are loaded for users that may not send scripts
        self._not_loaded = ""  # why they could not be, as it was logged
        self._elected_s, self._not_before_s = -math.inf, 0.0
        self._not_extended: int | None = None  # the epoch for which that is logged
        self._told_of = ""  # the leader for which our standing by is logged
        self.elections = 0
        self.folder: Path | None = None  # for the locks by which leaders of this machine show that they live
        self._life: IO[bytes] | None = None
        self._dead: str | None = None  # the holder that does not
        self._is_told = True  # somebody says that who leads has changed

    def wake(self) -> None:
        self._is_told = True
        super().wake()

    def run_once(self) -> float:
        self._load_for_others()
        wait_s = self._lead_or_stand_by()
        self._load_for_others()  # what Redis turned out not to know just now
        return wait_s

    def _load_for_others(self) -> None:
        loads = self._for_others if self._lead.is_ours else ()
        refused = self._link.load_for_others(loads) if loads else []
        why = refused[0] if refused else ""
        if why and why != self._not_loaded:
            event("scripts_not_loaded", level=WARNING, refused=len(refused), why=why)
        self._not_loaded = why

    def _lead_or_stand_by(self) -> float:
        epoch, doubted, _, _ = self._lead._known
        if epoch is None or doubted:
            # Who hears of each new leader asks no more than when the lease of the known one ends.
            is_known = self._hears and self._told_of and not (self._is_told or doubted)
            if is_known and 0 < (left_ms := self._link.call("PTTL", self._keys.leader)) <= 1000 * LONGEST_LEASE_S:
                return min(_LOOK_S, (left_ms + 1) / 1000)
            if (early_s := self._not_before_s - now_s()) > 0:
                return early_s
            self._is_told = False
            return self._elect(succeed=str(epoch) if doubted else "")
        if self._works():
            until_s = now_s() + self._lease_ms / 1000
            # As long as our lease runs by our clock, the key is ours. When it is over, another may have it, and what
            # he holds is not for us to extend.
            held = self._link.call("GETEX", self._keys.leader, "PX", self._lease_ms) if self._lead.holds else None
            if parse_held(held).epoch != epoch:
                event("leadership_lost", epoch=epoch)
                self._lead.lost(epoch)
                return 0.0
            self._lead._extended(until_s)
        else:
            if self._not_extended != epoch:
                why = "the work that it is held for makes no progress"
                event("leadership_not_renewed", level=WARNING, epoch=epoch, why=why)
            self._not_extended = epoch
        # A lease may be longer than the health check waits for a turn.
        return min(self._lease_ms, 1000 * self.stalls_after_s) / 3000

    def _stand_by(self, holder: str) -> None:
        """Note that another master leads. Log it once per leader, so that an operator who starts a master by hand
        beside others learns what it does."""
        url = holder.partition(" ")[2]
        self._lead._set(None, url)
        if self._told_of != holder:
            self._told_of = holder
            event("standby", leader=url, stream=self._keys.stream)
            if self.folder is not None and (path := self._lock_of(holder)) not in _OURS:
                DeathWatch(path, partial(self._died, holder)).start()

    def _lock_of(self, holder: str) -> Path:
        # Of this kernel: a folder that machines share may have locks that they do not.
        name = f"leader-{boot_id() or ''}-{re.sub('[^0-9a-f]', '', holder.partition(' ')[0])}"
        return (self.folder or Path()) / name

    def _died(self, holder: str) -> None:
        """Note that the process of this leader has ended: its lease is not waited for, its epoch is succeeded."""
        self._dead = holder
        self.wake()

    def _live(self) -> None:
        """Take the lock that shows, for as long as this process lives, that a leader of this machine does."""
        if self.folder is not None and self._life is None:
            with contextlib.suppress(OSError):  # without it others wait for our lease
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _OURS.add(path := self._lock_of(self._holder))
                path.touch(0o600)
                self._life = path.open("wb")
                fcntl.lockf(self._life, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _elect(self, succeed: str) -> float:
        """Succeed an epoch, or ("") nobody; stand by while another master leads. Return for how many seconds there is
        nothing to do."""
        self._live()
        until_s = now_s() + self._lease_ms / 1000
        reply = self._link.run("elect", self._of_lead, (self._holder, self._lease_ms, succeed))
        if reply[0] == b"HELD":
            held, _, holder = reply[1].decode(errors="replace").partition(" ")
            # Longer than any lease: the clock of Redis was set back since it was taken, and its holder may be dead. If
            # not, it extends it soon, and finds that it was succeeded.
            is_too_long = reply[2] > 1000 * LONGEST_LEASE_S
            if not is_too_long and holder not in (self._holder, self._dead):
                self._stand_by(holder)
                return min(
                    _LOOK_S if self._hears else _AGAIN_S, _AGAIN_S if reply[2] == -1 else (reply[2] + 1) / 1000
                )  # -1: it has no end
            if is_too_long:
                why = "it lasts too long: the clock of Redis was set back"
                event("leadership_lease_too_long", level=WARNING, epoch=held, why=why)
            # Or it is our own: the reply to an earlier call was lost, or our epoch was dropped, and a late command is
            # to be refused.
            reply = self._link.run("elect", self._of_lead, (self._holder, self._lease_ms, held))
            if reply[0] == b"HELD":
                return _AGAIN_S
        self.elections += 1
        former_s, self._elected_s = self._elected_s, now_s()
        self._not_before_s = self._elected_s + _PAUSE_S * (self._elected_s - former_s < _CALM_S)
        epoch = int(reply[1])
        self._told_of = ""
        event("leader_elected", epoch=epoch, stream=self._keys.stream)
        self._lead._extended(until_s)
        self._lead._set(epoch, self._url)
        return min(_AGAIN_S, self._lease_ms / 3000)

    def on_end(self) -> None:
        epoch = self._lead._known.epoch
        try:
            if epoch is not None:
                self._link.run("elect", self._of_lead, (self._holder, 0, str(epoch)))
                event("leadership_resigned", epoch=epoch)
        except Exception as problem:  # the lease ends by itself
            event("leadership_resign_failed", level=WARNING, problem=str(problem))
        finally:
            self._link.close()
            if self._life is not None:
                self._lock_of(self._holder).unlink(missing_ok=True)
                self._life.close()
