"""NameLock with real processes: killed ones, forked ones, started ones."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from usher.common.base.errors import StartRefused
from usher.common.protocol.registration import NO_LOCK, held_later
from usher.common.runtime import name_lock as process
from usher.common.runtime.name_lock import NameLock, boot_id

pytestmark = pytest.mark.process

_HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from usher.common.runtime.name_lock import NameLock

lock = NameLock(Path(sys.argv[1]), "c1")
print(lock.acquire(), flush=True)
if sys.argv[2] == "forks":
    pid = os.fork()
    if pid:
        print(pid, flush=True)
elif sys.argv[2] == "starts":
    print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False).pid, flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def _holder(state: Path, and_then: str = "waits") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that holds the lock of c1, and the evidence it got."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(state), and_then], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            yield holder, holder.stdout.readline().strip()
        finally:
            holder.kill()


def _its_child(holder: subprocess.Popen[str]) -> int:
    assert holder.stdout is not None
    return int(holder.stdout.readline())


def test_the_evidence_is_boot_device_inode_and_moment(tmp_path: Path) -> None:
    lock = NameLock(tmp_path, "c1")
    evidence = lock.acquire()
    file = lock.path.stat()
    assert evidence is not None
    assert evidence.rpartition(":")[0] == f"{boot_id()}:{file.st_dev}:{file.st_ino}"
    again = lock.acquire()
    assert again is not None
    assert held_later(again, evidence), "taking it again is fine, and is later"
    assert " " not in evidence, "it is one word of the registration"


def test_a_name_is_held_by_one_process_and_a_killed_holder_frees_it_at_once(tmp_path: Path) -> None:
    with _holder(tmp_path) as (holder, its_evidence):
        assert NameLock(tmp_path, "c1").acquire() is None
        assert NameLock(tmp_path, "c2").acquire() is not None
        holder.kill()
        holder.wait()
        evidence = NameLock(tmp_path, "c1").acquire()
        assert evidence is not None
        assert held_later(evidence, its_evidence), "the same lock, later: the predecessor is proved dead"
        assert not held_later(its_evidence, evidence)


def test_a_stopped_holder_lives(tmp_path: Path) -> None:
    with _holder(tmp_path) as (holder, _):
        holder.send_signal(signal.SIGSTOP)
        assert NameLock(tmp_path, "c1").acquire() is None


def test_a_forked_child_that_outlives_the_holder_still_holds(tmp_path: Path) -> None:
    with _holder(tmp_path, "forks") as (holder, its_evidence):
        child = _its_child(holder)
        try:
            holder.kill()
            holder.wait()
            assert NameLock(tmp_path, "c1").acquire() is None
        finally:
            os.kill(child, signal.SIGKILL)
        deadline = time.monotonic() + 10  # it is not our child: nobody tells us when it is gone
        while (evidence := NameLock(tmp_path, "c1").acquire()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert evidence is not None
        assert held_later(evidence, its_evidence)


def test_a_program_that_the_holder_started_does_not_hold(tmp_path: Path) -> None:
    with _holder(tmp_path, "starts") as (holder, its_evidence):
        child = _its_child(holder)
        try:
            holder.kill()
            holder.wait()
            evidence = NameLock(tmp_path, "c1").acquire()
            assert evidence is not None
            assert held_later(evidence, its_evidence)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_lock_that_was_taken_before_a_fork_is_not_the_childs(tmp_path: Path) -> None:
    lock = NameLock(tmp_path, "c1")
    assert lock.acquire() is not None
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.acquire() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_files_that_somebody_removed_give_other_evidence(tmp_path: Path) -> None:
    with _holder(tmp_path) as (_, its_evidence):
        (tmp_path / "locks" / "c1.lock").unlink()
        evidence = NameLock(tmp_path, "c1").acquire()
        assert evidence is not None
        assert not held_later(evidence, its_evidence), "it proves nothing about a holder that may still live"


def test_without_a_boot_id_the_name_is_still_locked_but_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_BOOT_ID", tmp_path / "none")
    assert boot_id() is None
    with _holder(tmp_path):
        assert NameLock(tmp_path, "c1").acquire() is None
    assert NameLock(tmp_path, "c1").acquire() == NO_LOCK


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("in the way")
    with pytest.raises(StartRefused, match="USHER_STATE_DIR"):
        NameLock(tmp_path, "c1").acquire()


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "c1.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(StartRefused, match="USHER_STATE_DIR: .*c1.lock"):
        NameLock(tmp_path, "c1").acquire()
    assert not (tmp_path / "victim").exists()


def test_who_stands_still_while_it_takes_a_lock_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that are started at once both had a lock then, and one journal."""
    real, others = process.fcntl.flock, []
    with contextlib.ExitStack() as stack:

        def late(*args: int) -> None:
            monkeypatch.setattr(process.fcntl, "flock", real)
            others.append(stack.enter_context(_holder(tmp_path))[1])
            real(*args)

        monkeypatch.setattr(process.fcntl, "flock", late)
        ours = NameLock(tmp_path, "c1").acquire()
        assert [evidence for evidence in (ours, *others) if evidence not in (None, "None")] == [ours or others[0]], (
            "one of them has it"
        )
