"""A log whose reader is slow, stands still, or is gone; logging handlers of others; and processes that are forked while
threads log."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.process.machine import until
from usher.common.base import log as module
from usher.common.base.log import DEBUG, _Stderr


class Log:
    """Writer to a descriptor, as the log has one."""

    def __init__(self, descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lock = threading.RLock()
        with monkeypatch.context() as patch, os.fdopen(descriptor, "w", closefd=False) as stderr:
            patch.setattr(sys, "stderr", stderr)
            self.stderr = _Stderr(self.lock)

    def write(self, line: bytes) -> None:
        with self.lock:
            self.stderr.write(line)


@pytest.fixture(params=["pipe", "socket", "pipe without RWF_NOWAIT"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """The end to read from, and that to write to."""
    made = [end.detach() for end in socket.socketpair()] if request.param == "socket" else os.pipe()
    if "without" in request.param:
        monkeypatch.delattr(os, "RWF_NOWAIT")
    yield made[0], made[1]
    for end in made:
        os.close(end)


@pytest.fixture
def log(ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Log:
    return Log(ends[1], monkeypatch)


def test_a_line_is_there_at_once_and_lines_keep_their_order(ends: tuple[int, int], log: Log) -> None:
    for number in range(100):
        log.write(b"%03d\n" % number)
    assert log.stderr.flush(5)
    assert os.read(ends[0], 4000) == b"".join(b"%03d\n" % number for number in range(100))


def test_lines_wait_for_a_reader_that_stands_still_and_those_beyond_the_bound_are_counted(
    ends: tuple[int, int], log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 200_000)
    lines = [b"%06d %s\n" % (number, b"x" * 992) for number in range(1000)]
    began_s = time.monotonic()
    for line in lines:
        log.write(line)
    assert time.monotonic() - began_s < 1, "nobody waits"
    dropped = log.stderr.dropped
    assert 300 < dropped <= 800, "200 KB wait, and what the pipe or the socket holds"
    assert log.stderr.waits() and not log.stderr.flush(0.01)
    read = b""
    while len(read) < 1000 * (1000 - dropped):
        read += os.read(ends[0], 65_536)
    assert (told := read.splitlines(True)) == sorted({*told} & {*lines}), "whole ones, in their order"
    until(lambda: log.stderr.told == dropped, 10, "what is missing is told")
    log.write(b"more\n")
    assert os.read(ends[0], 100) == b"more\n"


def test_a_line_that_is_longer_than_a_pipe_arrives_whole(ends: tuple[int, int], log: Log) -> None:
    log.write(b"x" * 3_000_000 + b"\n")
    read = b""
    while not read.endswith(b"\n"):
        read += os.read(ends[0], 65_536)
    assert len(read) == 3_000_001


def test_a_reader_that_is_gone_costs_lines_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    log = Log(writer, monkeypatch)
    os.close(reader)
    log.write(b"one\n")
    log.write(b"two\n")
    until(lambda: log.stderr.dropped == 2, 5, "both are counted")
    os.close(writer)


def test_what_closes_all_descriptors_gets_no_line_into_its_own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    log = Log(writer, monkeypatch)
    number = log.stderr._descriptor
    os.close(number)
    other, mine = os.pipe()
    os.dup2(mine, number)
    log.write(b"one\n")
    assert log.stderr.dropped == 1
    os.close(mine)
    os.close(number)
    assert os.read(other, 100) == b""
    for end in (reader, writer, other):
        os.close(end)


class Brought(logging.Handler):
    """A handler of others, which fails now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.got.append(record.getMessage())
        if len(self.got) == 1:
            raise ValueError("no")


def test_handlers_of_others_get_events_and_lines_and_cannot_fail_an_event(capfd: pytest.CaptureFixture[str]) -> None:
    module.configure("c1", "info", "human")
    brought = Brought()
    logging.getLogger().addHandler(brought)
    for _ in range(2):
        module.event("an_event")
    module.event("too_quiet", level=DEBUG)
    logging.getLogger("theirs").warning("a line")
    logging.getLogger("theirs").debug("not logged")
    assert brought.got == ["an_event", "an_event", "a line"]
    told = capfd.readouterr().err
    assert (told.count("an_event"), told.count("a line")) == (2, 1)


_FORKS = """
import os, sys, threading, time
from usher.common.base.log import configure, event

configure("c1", "info", "human")

def on_and_on():
    while True:
        event("said", text="x" * 1000)

for _ in range(4):
    threading.Thread(target=on_and_on, daemon=True).start()
for number in range(100):
    if (pid := os.fork()) == 0:
        event("child_says", number=number)
        os._exit(0)
    until_s = time.monotonic() + 10
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > until_s:
            os.kill(pid, 9)
            os._exit(1)
        time.sleep(0.001)
os._exit(0)
"""


def test_a_descriptor_that_cannot_be_written_costs_the_line_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        log = Log(full, monkeypatch)
        log.write(b"lost\n")
        assert (log.stderr.flush(5), log.stderr.dropped) == (True, 1)
    finally:
        os.close(full)


def test_children_that_are_forked_while_threads_log_can_log() -> None:
    ended = subprocess.run([sys.executable, "-c", _FORKS], stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert ended.returncode == 0, "a child hangs"
    assert ended.stderr.count("child_says") == 100
