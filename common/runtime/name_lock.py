"""Proof that a process of this machine is dead: one lock file per consumer name.

Without it, a consumer that starts again under its name would have to wait until the lease of its predecessor ends. The
kernel frees a ``flock`` when the last process that has the open file is gone, however it ended. So the *holder* of a
name's lock knows that the former holder, and every child forked while it held the lock, no longer runs. A distant
master still needs proof that both spoke of the same lock, and which of them held it later: the request of a dead
process may reach a master that was suspended after the request of its successor. The registration carries the evidence
``boot-id:device:inode:moment``; the moment is read, while the lock is held, from a clock that only grows in one boot.
An immediate takeover needs the same lock at a later moment.

Limit: virtual machines cloned while they run agree in boot id, device and inode. With one consumer name and one lock
folder, two living clones would each prove the other dead: give them different names, or reboot them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from usher.common.base.clock import moment_ns
from usher.common.base.errors import StartRefused
from usher.common.protocol.registration import NO_LOCK, held_later

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str | None:
    """Return the id of this boot of the kernel; None on systems without one (only Linux has it)."""
    try:
        return _BOOT_ID.read_text("ascii").strip() or None
    except OSError:
        return None


class NameLock:
    """The lock file ``<state_folder>/locks/<name>.lock``.

    * Take it *after* the last fork of a server (in the gunicorn worker): a lock taken before would be shared with the
      arbiter and outlive the worker, which is the process that has to be proved dead.
    * It is close-on-exec: a program that a handler starts does not keep the name. A child *forked* by a handler does,
      because it may still be doing that handler's work.
    * An open inode keeps its number, so also if the folder is cleaned up equal numbers mean the same lock; unequal ones
      only mean that the successor has to wait for the lease. So it must while children of a dead holder have the lock.
    """

    def __init__(self, state_folder: Path, name: str) -> None:
        self.path = state_folder / "locks" / f"{name}.lock"
        self._descriptor: int | None = None
        self._taken_by = 0

    def acquire(self) -> str | None:
        """Take the lock for the life of this process.

        Returns the evidence ``boot-id:device:inode:moment``, or ``NO_LOCK`` where the system has none; None when
        another living process has the lock, or children of a dead one. Taking it again is fine, and gives a later
        moment. Raises StartRefused when the file cannot be created.
        """
        if self._descriptor is not None and self._taken_by == os.getpid():
            return self._evidence(self._descriptor)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as problem:
            raise StartRefused(f"USHER_STATE_DIR: the lock file {self.path} cannot be created: {problem}") from problem
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:  # a file system without it (some network and FUSE mounts)
            os.close(descriptor)
            return NO_LOCK
        self._descriptor, self._taken_by = descriptor, os.getpid()
        return self._evidence(descriptor)

    @staticmethod
    def _evidence(descriptor: int) -> str:
        boot = boot_id()
        if boot is None:
            return NO_LOCK
        file = os.fstat(descriptor)
        return f"{boot}:{file.st_dev}:{file.st_ino}:{moment_ns()}"


@contextlib.contextmanager
def held_after(path: Path, lock: str) -> Iterator[bool]:
    """Hold a name lock for a moment, if it is free. Yields whether that proves dead who gave ``lock`` as its evidence:
    who comes to take the name meanwhile is told that it is held."""
    with contextlib.ExitStack() as stack:
        is_over = False
        with contextlib.suppress(OSError):  # it is held, or of another machine
            file = stack.enter_context(path.open("rb+"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_over = held_later(NameLock._evidence(file.fileno()), lock)
        yield is_over
