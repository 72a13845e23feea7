from __future__ import annotations

import os
import signal
import threading

import pytest

from usher.common.runtime.signals import UntilSignal


def test_the_first_signal_is_a_flag_and_the_second_one_what_it_was_before() -> None:
    with UntilSignal() as until:
        assert not until.came
        signal.raise_signal(signal.SIGINT)
        assert until.came
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_a_program_has_taken_or_ignores_is_its_own() -> None:
    seen: list[int] = []
    before = (
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number)),
        signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        with UntilSignal() as until:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            assert (until.came, seen) == (False, [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


def test_a_handler_that_is_set_inside_stays() -> None:
    with UntilSignal():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) is signal.SIG_IGN


def test_on_another_thread_it_takes_nothing() -> None:
    found: list[bool] = []

    def run() -> None:
        with UntilSignal() as until:
            found.append(until.came or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False]


def test_a_child_that_was_forked_inside_ends_as_any_other() -> None:
    with UntilSignal():
        if (pid := os.fork()) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(3)  # it went on
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def test_one_within_another_ends_both_and_the_next_signal_is_what_it_was() -> None:
    """Such as `run` of a reading loop, in a program whose own loop looks at signals: it would not have ended, nor the
    program."""
    with UntilSignal() as outer, UntilSignal() as inner:
        signal.raise_signal(signal.SIGINT)
        assert (outer.came, inner.came) == (True, True)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_was_within_leaves_the_signals_to_the_one_around_it() -> None:
    with UntilSignal() as outer:
        with UntilSignal() as inner:
            pass
        signal.raise_signal(signal.SIGTERM)
        assert (outer.came, inner.came) == (True, False)


def test_a_forked_child_that_looks_at_signals_itself_gets_them() -> None:
    """Such as a worker process that runs a reading loop: it was ended at once, with what it had."""
    pipe = os.pipe()
    with UntilSignal():
        if (pid := os.fork()) == 0:
            with UntilSignal() as own:
                signal.raise_signal(signal.SIGTERM)
                os.write(pipe[1], b"came" if own.came else b"")
                signal.raise_signal(signal.SIGTERM)
            os._exit(3)  # it went on
        os.close(pipe[1])
        with os.fdopen(pipe[0], "rb") as told:
            assert told.read() == b"came"
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
