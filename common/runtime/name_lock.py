"""Proof that a process of this machine is dead: one lock file per consumer name.

A consumer that starts again under its name would otherwise have to wait until the lease of its predecessor ends. The
kernel frees a ``flock`` when the last process that has the open file is gone, however it ended, so whoever *holds* the
lock of a name knows that its former holder - and every child forked while it held it - runs no more. What remains to be
shown to the master, far away, is that both spoke of the same lock, and who held it later, because the request of a dead
process may reach a master that was stopped after that of its successor. The evidence ``boot-id:device:inode:moment``
stands in the registration; the moment is read, while the lock is held, from a clock that only grows in one boot. A
take-over at once needs the same lock at a later moment.

Its limit: virtual machines cloned while they run agree in boot id, device and inode. With one consumer name and one
lock folder, two clones would each prove the other dead, which lives: give them different names, or reboot them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from usher.common.base.clock import moment_ns
from usher.common.base.errors import StartRefused
from usher.common.protocol.registration import NO_LOCK

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: flock on a file system that has none (some network and FUSE mounts).
_NO_FLOCK = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


def boot_id() -> str | None:
    """Names this kernel from its boot to its end; None where the system does not tell (it is Linux' own)."""
    try:
        return _BOOT_ID.read_text("ascii").strip() or None
    except OSError:
        return None


class NameLock:
    """The lock file ``<state_folder>/locks/<name>.lock``.

    * Take it *after* the last fork of a server (in the gunicorn worker): a lock taken before would be shared with the arbiter and
      outlive the worker, which is the process that has to be proved dead.
    * It is close-on-exec: a program that a handler starts does not keep the name. A child *forked* by a handler does, because it may
      still be doing that handler's work.
    * The file is unlinked only where children of a dead holder keep its lock, maybe for ever (``begin_anew``). An inode that is open keeps its
      number, so even then, or if somebody tidies the folder, equal numbers mean the same lock; unequal ones only mean
      that the successor has to wait for the lease.
    * A second file, ``<name>.process``, has a record lock, which children do not inherit: it tells the holder from its children. It is taken
      first, and without it nobody takes the other one: else who stands still between the two would be taken for dead.
      Nothing is proved by it; and no descriptor of it is ever closed, because that would free it.
    """

    def __init__(self, state_folder: Path, name: str) -> None:
        self.path = state_folder / "locks" / f"{name}.lock"
        self._process_path = self.path.with_suffix(".process")
        self._descriptor: int | None = None
        self._taken_by = 0
        self._process: int | None = None  # the descriptor of the second file
        #: Whether children of the former holder have its lock still, and what it left is not ours to read.
        self.is_anew = False

    def acquire(self) -> str | None:
        """Take the lock for the life of this process.

        Returns the evidence ``boot-id:device:inode:moment``, or ``NO_LOCK`` where the system cannot give any; None when
        another process that lives holds the lock. Taking it again is fine, and gives a later moment. Raises
        StartRefused when the file cannot be made.
        """
        if self._descriptor is not None and self._taken_by == os.getpid():
            return self._evidence(self._descriptor)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as problem:
            raise StartRefused(f"USHER_STATE_DIR: the lock file {self.path} cannot be made: {problem}") from problem
        try:
            is_the_process = self._is_the_process()
        except OSError as problem:  # without it we would look dead to whoever can open it
            os.close(descriptor)
            raise StartRefused(
                f"USHER_STATE_DIR: the lock file {self._process_path} cannot be made: {problem}"
            ) from problem
        if is_the_process is False:
            os.close(descriptor)
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as problem:
            os.close(descriptor)
            if problem.errno in _NO_FLOCK:
                return NO_LOCK
            raise StartRefused(f"USHER_STATE_DIR: {self.path} cannot be locked: {problem}") from problem
        if not self._is_still_there(descriptor):  # somebody has begun anew between our look and our lock
            os.close(descriptor)
            return self.acquire()
        self._descriptor, self._taken_by = descriptor, os.getpid()
        return self._evidence(descriptor)

    def begin_anew(self) -> str | None:
        """After ``acquire`` has answered None: if the holder itself has ended, and only children of it are left, take a
        new lock that they do not have. It proves nothing about that holder, whose children may be at its work: its
        lease is waited for. But who comes after us need not wait for ours. None: the holder lives."""
        if not self._is_the_process():
            return None
        with contextlib.suppress(OSError):
            self.path.unlink()
        evidence = self.acquire()
        self.is_anew = evidence is not None
        return evidence

    def _is_still_there(self, descriptor: int) -> bool:
        """Whether the path leads to this very file."""
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.stat(follow_symlinks=False))
        except OSError:
            return False

    def _is_the_process(self) -> bool | None:
        """Whether this process has, or gets, the record lock: False when another one has it, None where the file system
        has no such locks. Raises OSError when the file cannot be made."""
        if self._process is None:
            self._process = os.open(self._process_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(self._process, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            return False if problem.errno in (errno.EAGAIN, errno.EACCES) else None
        return True

    @staticmethod
    def _evidence(descriptor: int) -> str:
        boot = boot_id()
        if boot is None:
            return NO_LOCK
        file = os.fstat(descriptor)
        return f"{boot}:{file.st_dev}:{file.st_ino}:{moment_ns()}"
