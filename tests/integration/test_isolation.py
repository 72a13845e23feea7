"""The child process of suspects, as its consumer sees it: an answer is never passed over, and no handler runs on when
the lease is over."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from usher.common.base.clock import now_s
from usher.consumer.isolation.process import HandlerProcess
from usher.consumer.isolation.values import DIED, DONE, HUNG, LEASE, Piece, ProcessSpec

_HANDLERS = """
import time
from pathlib import Path
from usher import handler

@handler(deadline_s=1)
def soon(message):
    time.sleep(0.3)

def long(message):
    time.sleep(4.5)

@handler(deadline_s=30)
def writes(message):
    for number in range(40):
        time.sleep(0.05)
        Path("effect").write_text(str(number))
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
    with HandlerProcess(ProcessSpec("kept:soon", "s", False), os.environ, still) as process:
        process.begin()
        still.is_sent = True
        assert process.run(piece()).how == DONE


def test_the_time_in_which_all_stood_still_is_given_back_and_a_hang_is_seen_all_the_same() -> None:
    still = Still(4.0)
    with HandlerProcess(ProcessSpec("kept:long", "s", False, handler_s=3), os.environ, still) as process:
        process.begin()
        still.is_sent = True
        assert process.run(piece()).how == DONE, "4.5 s of work, of which 4 s passed while nobody looked"
    with HandlerProcess(ProcessSpec("kept:long", "s", False, handler_s=1), os.environ, lambda: None) as process:
        process.begin()
        began_s = time.monotonic()
        assert process.run(piece()).how == HUNG
        assert time.monotonic() - began_s < 3


def test_it_ends_by_itself_when_the_lease_ends_and_whoever_renews_it_stands_still(folder: Path) -> None:
    spec = ProcessSpec("kept:writes", "s", False, is_rehearsal=False, has_lease=True)
    with HandlerProcess(spec, os.environ, lambda: None) as process:
        process.begin()
        process.tell({LEASE: now_s() + 0.5})
        result = process.run(piece())
    assert (result.how, result.error) == (DIED, "by SIGKILL")
    assert int((folder / "effect").read_text()) < 25, "no effect long after the lease"


def test_it_runs_on_for_as_long_as_it_is_told_of_renewals(folder: Path) -> None:
    spec = ProcessSpec("kept:writes", "s", False, is_rehearsal=False, has_lease=True)
    process = HandlerProcess(spec, os.environ, lambda: process.tell({LEASE: now_s() + 0.5}) and None)
    with process:
        process.begin()
        assert process.run(piece()).how == DONE
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
    with HandlerProcess(ProcessSpec("kept:soon", "s", False), os.environ, lambda: None) as process:
        assert process.run(piece()).how == DONE
