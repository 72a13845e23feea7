"""A log whose reader is slow, stands still, or is gone; and processes that are forked while threads log."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.process.machine import until
from usher.common.base import log_writer
from usher.common.base.log_writer import LineWriter


class Log:
    """A writer, and what it told of lines that were dropped."""

    def __init__(self, descriptor: int | None) -> None:
        self.lock = threading.RLock()
        self.told: list[int] = []
        self.writer = LineWriter(descriptor, self.lock, self.told.append)

    def write(self, line: bytes) -> None:
        with self.lock:
            self.writer.write(line)


@pytest.fixture(params=["pipe", "socket", "pipe without RWF_NOWAIT"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """The end to read from, and that to write to."""
    made = [end.detach() for end in socket.socketpair()] if request.param == "socket" else os.pipe()
    if "without" in request.param:
        monkeypatch.delattr(os, "RWF_NOWAIT")
    yield made[0], made[1]
    for end in made:
        os.close(end)


def test_a_line_is_there_at_once(ends: tuple[int, int]) -> None:
    log = Log(ends[1])
    log.write(b"one\n")
    log.write(b"two\n")
    assert os.read(ends[0], 100) == b"one\ntwo\n"


def test_lines_wait_for_a_reader_that_stands_still_and_those_beyond_the_bound_are_counted(
    ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "_MOST_BYTES", 200_000)
    log = Log(ends[1])
    lines = [b"%06d %s\n" % (number, b"x" * 992) for number in range(600)]
    for line in lines:
        log.write(line)
    dropped = log.writer.dropped
    assert 100 < dropped < 400, "200 KB wait, and what the pipe holds"
    assert log.writer.is_blocked
    read = b""
    while len(read) < 1000 * (600 - dropped):
        read += os.read(ends[0], 65_536)
    assert read == b"".join(lines[: 600 - dropped])
    until(lambda: log.told == [dropped], 10, "what is missing is told")
    assert not log.writer.is_blocked
    log.write(b"more\n")
    assert os.read(ends[0], 100) == b"more\n"


def test_a_reader_that_is_slow_loses_no_line_of_a_burst(ends: tuple[int, int]) -> None:
    log = Log(ends[1])
    read: list[bytes] = []

    def slowly() -> None:
        while not read or b"end\n" not in read[-1]:
            read.append(os.read(ends[0], 4096))

    reading = threading.Thread(target=slowly)
    reading.start()
    for _ in range(3000):
        log.write(b"x" * 999 + b"\n")
    log.write(b"end\n")
    reading.join(30)
    assert log.writer.dropped == 0
    assert b"".join(read).count(b"x\n") == 3000


def test_a_line_that_is_longer_than_a_pipe_arrives_whole(ends: tuple[int, int]) -> None:
    log = Log(ends[1])
    log.write(b"x" * 3_000_000 + b"\n")
    log.write(b"end\n")
    read = b""
    while not read.endswith(b"end\n"):
        read += os.read(ends[0], 65_536)
    assert len(read) == 3_000_005


def test_what_waits_is_flushed_as_far_as_somebody_reads(ends: tuple[int, int]) -> None:
    log = Log(ends[1])
    while not log.writer.is_blocked:
        log.write(b"x" * 999 + b"\n")
    with log.lock:
        log.writer.flush(0.01)
    assert log.writer.is_blocked
    reading = threading.Thread(target=lambda: [os.read(ends[0], 65_536) for _ in range(3)])
    reading.start()
    with log.lock:
        log.writer.flush(20.0)
    assert not log.writer.is_blocked
    os.write(ends[1], b"x\n" * 50_000)
    reading.join(10)


def test_a_reader_that_is_gone_costs_lines_and_nothing_else() -> None:
    reader, writer = os.pipe()
    log = Log(writer)
    os.close(reader)
    log.write(b"one\n")
    log.write(b"two\n")
    assert log.writer.dropped == 2
    os.close(writer)


def test_without_stderr_lines_are_dropped_and_counted() -> None:
    log = Log(None)
    log.write(b"one\n")
    assert log.writer.dropped == 1


def test_what_closes_all_descriptors_gets_no_line_into_its_own_files() -> None:
    reader, writer = os.pipe()
    log = Log(writer)
    number = log.writer._descriptor
    os.close(number)
    other, mine = os.pipe()
    os.dup2(mine, number)
    log.write(b"one\n")
    assert log.writer.dropped == 1
    os.close(mine)
    os.close(number)
    assert os.read(other, 100) == b""
    for end in (reader, writer, other):
        os.close(end)


_FORKS = """
import logging, os, sys, threading, time
from usher.common.base.log import configure, event

configure("c1", "info", "human")
log = logging.getLogger("test")

def on_and_on():
    while True:
        event(log, "said", text="x" * 1000)

for _ in range(4):
    threading.Thread(target=on_and_on, daemon=True).start()
for number in range(300):
    if (pid := os.fork()) == 0:
        event(log, "child_says", number=number)
        os._exit(0)
    until_s = time.monotonic() + 10
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > until_s:
            os.kill(pid, 9)
            os._exit(1)
        time.sleep(0.001)
os._exit(0)
"""


def test_children_that_are_forked_while_threads_log_can_log() -> None:
    ended = subprocess.run([sys.executable, "-c", _FORKS], stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert ended.returncode == 0, "a child hangs"
    assert ended.stderr.count("child_says") == 300
