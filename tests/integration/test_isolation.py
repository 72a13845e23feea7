"""The child process of suspects, as its consumer sees it: an answer is never passed over, and no handler runs on when
the lease is over."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from tests.process.machine import until
from usher.common.base.clock import now_s
from usher.common.runtime import fork_guard
from usher.consumer.isolation.process import HandlerProcess, How, Piece, ProcessSpec, Template

_HANDLERS = """
import gc
import os
from multiprocessing.connection import Connection
import signal
import time
from pathlib import Path
from usher import handler

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # for a sigwait() of its own

def leaves(message):
    os._exit(5)

class Forged:
    def __reduce__(self):
        return os.mkdir, ("forged",)

def forges(message):
    [asker] = [one for one in gc.get_objects() if isinstance(one, Connection)]
    asker.send(Forged())

def execs(message):
    os.execvp("sleep", ["sleep", "20"])

@handler(deadline_s=1)
def soon(message):
    time.sleep(0.3)

def long(message):
    time.sleep(4.5)

@handler(deadline_s=0.5)
def hangs(message):
    time.sleep(30)

@handler(deadline_s=30)
def writes(message):
    for number in range(40):
        time.sleep(0.05)
        Path("next").write_text(str(number))
        Path("next").rename("effect")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "kept.py").write_text(_HANDLERS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def piece() -> Piece:
    return Piece(b"T", b"5-0", 7, (0, 0, 0, 0), (b"body", b"x"))


class Still:
    """Its consumer stands still once, after the message was sent: another handler keeps the interpreter."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_sent = False

    def __call__(self) -> None:
        if self.is_sent:
            self.is_sent = False
            time.sleep(self.seconds)


def test_a_handler_that_returned_while_its_consumer_stood_still_has_not_hung() -> None:
    still = Still(2.5)
    with HandlerProcess(ProcessSpec("kept:soon", "s", False), still) as process:
        process.begin()
        still.is_sent = True
        assert process.run(piece()).how == How.DONE


def test_the_time_in_which_all_stood_still_is_given_back_and_a_hang_is_seen_all_the_same() -> None:
    still = Still(4.0)
    with HandlerProcess(ProcessSpec("kept:long", "s", False, handler_s=3), still) as process:
        process.begin()
        still.is_sent = True
        assert process.run(piece()).how == How.DONE, "4.5 s of work, of which 4 s passed while nobody looked"
    with HandlerProcess(ProcessSpec("kept:long", "s", False, handler_s=1), lambda: None) as process:
        process.begin()
        began_s = time.monotonic()
        assert process.run(piece()).how == How.HUNG
        assert time.monotonic() - began_s < 3


def test_it_ends_by_itself_when_the_lease_ends_and_whoever_renews_it_stands_still(folder: Path) -> None:
    spec = ProcessSpec("kept:writes", "s", False, is_rehearsal=False)
    with HandlerProcess(spec, lambda: None) as process:
        process.begin()
        process.tell(now_s() + 0.5)
        result = process.run(piece())
    assert (result.how, result.error) == (How.DIED, "by SIGKILL")
    assert int((folder / "effect").read_text()) < 25, "no effect long after the lease"


def test_it_runs_on_for_as_long_as_it_is_told_of_renewals(folder: Path) -> None:
    spec = ProcessSpec("kept:writes", "s", False, is_rehearsal=False)
    process = HandlerProcess(spec, lambda: process.tell(now_s() + 0.5) and None)
    with process:
        process.begin()
        assert process.run(piece()).how == How.DONE
    assert (folder / "effect").read_text() == "39"


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < 1030:
        taken.append(os.dup(taken[0]))
    yield
    for one in taken:
        os.close(one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_consumer_with_more_than_a_thousand_open_files_has_one_too() -> None:
    with HandlerProcess(ProcessSpec("kept:soon", "s", False), lambda: None) as process:
        assert process.run(piece()).how == How.DONE


def test_a_message_that_its_process_did_not_take_has_not_run() -> None:
    """The process ends, by no doing of the message, when it has begun and before it reads."""
    ends: list[int] = []
    with HandlerProcess(ProcessSpec("kept:soon", "s", False), lambda: _kill(ends)) as process:
        for _ in range(2):
            child = process.begin()
            os.kill(child.pid, signal.SIGSTOP)
            ends.append(child.pid)  # once it was sent: the next look ends it
            result = process.run(piece())
            assert (result.how, "before it took the message" in result.error) == (How.NOT_RUN, True)
        assert process.run(piece()).how == How.DONE, "the next one has a process again"


def _kill(ends: list[int]) -> None:
    while ends:
        os.kill(ends.pop(), signal.SIGKILL)


@pytest.mark.parametrize(("kills", "is_in_doubt"), [(7, False), (8, True)])
def test_who_is_killed_while_the_kernel_ends_processes_for_want_of_memory_need_not_be_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kills: int, is_in_doubt: bool
) -> None:
    """The kernel takes the child first, whoever needs the memory."""
    counts = folder / "vmstat"
    counts.write_text("nr_free_pages 12\noom_kill 7\n")
    monkeypatch.setattr(fork_guard, "_COUNTS", counts)

    def end() -> None:
        if (folder / "effect").exists():
            counts.write_text(f"nr_free_pages 12\noom_kill {kills}\n")
            os.kill(child.pid, signal.SIGKILL)

    with HandlerProcess(ProcessSpec("kept:writes", "s", False), end) as process:
        child = process.begin()
        result = process.run(piece())
    assert (result.how, result.error[:10], result.is_in_doubt) == (How.DIED, "by SIGKILL", is_in_doubt)


def test_one_that_we_may_not_end_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler has changed the user."""

    def refuse(*_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    with HandlerProcess(ProcessSpec("kept:hangs", "s", False), lambda: None) as process, monkeypatch.context() as patch:
        child = process.begin()
        patch.setattr(os, "killpg", refuse)
        patch.setattr(os, "kill", refuse)
        assert process.run(piece()).how == How.HUNG
    assert child.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("handler", "told"),
    [
        ("leaves", "with exit code 5"),
        ("execs", "by closing what connects us with it"),
        ("forges", "by closing what connects us with it"),
    ],
)
def test_an_end_is_seen_at_once_whatever_the_handler_did_to_signals_and_descriptors(handler: str, told: str) -> None:
    with HandlerProcess(ProcessSpec(f"kept:{handler}", "s", False), lambda: None) as process:
        process.begin()
        began_s = time.monotonic()
        result = process.run(piece())
        assert (result.how, result.error) == (How.DIED, told)
        assert not Path("forged").exists()
        assert time.monotonic() - began_s < 5


def test_the_template_may_go_at_any_moment() -> None:
    template, spec = Template(), ProcessSpec("kept:soon", "s", False)
    with HandlerProcess(spec, lambda: template._process.kill(), template=template) as process:
        for _ in range(2):
            assert process.run(piece()).how == How.DONE, "what it has forked goes on"
            process._kill()
    template.end()


_ASKER = """
import os, sys, threading, time
from usher.consumer.isolation.process import HandlerProcess, Piece, ProcessSpec, Template

def pool():
    "Of another handler: it lives on, with copies of all that is open here."
    if not os.fork():
        time.sleep(30)

def end():
    if os.path.exists("effect"):
        pool()
        os._exit(9)

threading.Timer(0.1, pool).start()  # while the template starts
process = HandlerProcess(ProcessSpec("kept:writes", "s", False), end)
print(process.begin().pid, flush=True)
process.run(Piece(b"T", b"5-0", 7, (0, 0, 0, 0), ()))
"""


def test_it_ends_at_once_with_who_asked_whatever_that_has_left_behind(folder: Path) -> None:
    asker = subprocess.Popen([sys.executable, "-c", _ASKER], stdout=subprocess.PIPE, start_new_session=True)
    assert asker.stdout is not None
    try:
        pid = int(asker.stdout.readline())
        assert asker.wait(20) == 9
        until(lambda: not psutil.pid_exists(pid), 1, "the handler has ended")
    finally:
        os.killpg(asker.pid, signal.SIGKILL)
        asker.stdout.close()


def test_whose_asker_is_killed_ends_without_a_traceback(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    template = Template()
    ours, theirs = socket.socketpair()
    with theirs, (tmp_path / "where").open("wb") as where:
        forked = template.fork(theirs.fileno(), where.fileno())
        theirs.close()
        with Connection(ours.detach()) as pipe:
            pipe.send(ProcessSpec("usher.deploy.bench.handlers:noop", "s", False))
            assert pipe.poll(20)
    forked.wait(20)
    template.end()
    assert "Traceback" not in capfd.readouterr().err
