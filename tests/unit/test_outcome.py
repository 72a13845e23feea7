from __future__ import annotations

import contextlib
import math
import random
from datetime import timedelta
from typing import Any

import pytest

from usher.common.base.callables import check_done
from usher.common.base.errors import GiveUp, PartialFailure, RetryLater, readable
from usher.common.protocol.attempts import Attempts
from usher.consumer.handlers.batches import judge
from usher.consumer.handlers.decorators import around
from usher.consumer.handlers.loader import check_ran, handler_of
from usher.consumer.handlers.message import Message, OwnLease
from usher.consumer.policy.outcome import Bury, RetryPolicy, decide, unended

POLICY = RetryPolicy(max_attempts=3, base_s=1.0, cap_s=3.0)


class Lowest(random.Random):
    def random(self) -> float:
        return 0.0


class Unspeakable(Exception):
    """An exception that fails when somebody asks what it says."""

    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("raised", "failures", "decision"),
    [
        (GiveUp("never"), 1, Bury("gave_up", "GiveUp: never")),
        (GiveUp("never"), 99, Bury("gave_up", "GiveUp: never")),
        (RetryLater(7), 1, 7.0),
        (RetryLater(7), 99, 7.0),
        (RetryLater(-1), 1, 0.0),
        (RetryLater(timedelta(minutes=2)), 1, 120.0),
        (ValueError("bad"), 1, 0.5),
        (ValueError("bad"), 2, 1.0),
        (ValueError("bad"), 3, Bury("attempts_exhausted", "ValueError: bad")),
        (ValueError("bad"), 4, Bury("attempts_exhausted", "ValueError: bad")),
        (GiveUp("caf\udce9"), 1, Bury("gave_up", "GiveUp: caf\\udce9")),
        (SystemExit(3), 1, 0.5),
        (SystemExit(3), 3, Bury("attempts_exhausted", "SystemExit: 3")),
        (Unspeakable(), 3, Bury("attempts_exhausted", "Unspeakable: (its text is unavailable: ValueError)")),
        (Unspeakable(), 1, 0.5),
    ],
)
def test_each_row_of_the_table(raised: BaseException, failures: int, decision: float | Bury) -> None:
    assert decide(raised, failures, POLICY, Lowest()) == decision


@pytest.mark.parametrize("wrong", [math.inf, math.nan, 1e9, "1", None, b"1", timedelta.max])
def test_what_is_no_time_is_refused_where_it_is_said(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="RetryLater takes seconds"):
        RetryLater(wrong)


def test_a_group_of_errors_is_what_its_errors_ask_for() -> None:
    later, longer, never, bad = RetryLater(1), RetryLater(9), GiveUp("never"), ValueError("bad")
    for errors, asked in (([later], later), ([later, longer], longer), ([bad, never], never)):
        assert readable(ExceptionGroup("of a TaskGroup", errors)) is asked
        assert readable(ExceptionGroup("outer", [ExceptionGroup("inner", errors)])) is asked
    for others in ([later, bad], [bad], [PartialFailure({})]):  # what else of a group was cancelled is not in it
        assert (group := ExceptionGroup("of a TaskGroup", others)) is readable(group)


@pytest.mark.parametrize("error", [RetryLater(1), GiveUp("never"), ValueError("bad"), SystemExit(1)])
def test_an_error_that_is_returned_is_raised(error: BaseException) -> None:
    def handle(message: Any) -> Any:
        return error

    around(contextlib.nullcontext)(handle)
    for call in (
        lambda: check_ran(error),
        lambda: check_done(error, TypeError, ""),
        lambda: handler_of(handle).call(None),
    ):
        with pytest.raises(type(error)):
            call()
    for kind, raised in ((GiveUp, GiveUp), (RetryLater, TypeError)):  # without its parentheses
        with pytest.raises(raised):
            check_ran(kind)
        for named in (kind, {"1-0": kind}):
            [outcome] = judge([[Message(b"T", b"1-0", 1, [], OwnLease(1.0, 0.0))]], named, None)
            assert type(outcome[1]) is raised
    [outcome] = judge([[Message(b"T", b"1-0", 1, [], OwnLease(1.0, 0.0))]], error, None)
    assert outcome[1] is error


@pytest.mark.parametrize(
    ("crashes", "losses", "why"),
    [(1, 0, "its process ended while its"), (0, 3, "its last start failed"), (0, 0, "its last start failed")],
)
def test_attempts_that_were_used_up_without_an_error_say_what_is_known(crashes: int, losses: int, why: str) -> None:
    """And not more: whoever raised each time, beside others that ended the process, was not ended with it every
    time."""
    buried = unended(Attempts(4, 4, crashes, losses))
    assert buried.reason == "attempts_exhausted"
    assert buried.error.startswith(why)


def test_the_wait_grows_with_the_failures_up_to_the_cap() -> None:
    policy = RetryPolicy(max_attempts=10, base_s=1.0, cap_s=3.0)
    waits = [decide(OSError(), failures, policy, Lowest()) for failures in range(1, 6)]
    assert waits == [0.5, 1.0, 1.5, 1.5, 1.5]


def test_of_a_very_long_error_the_beginning_is_kept() -> None:
    decision = decide(GiveUp("x" * 1_000_000), 1, POLICY, Lowest())
    assert isinstance(decision, Bury)
    assert len(decision.error) == 4000
    assert decision.error.startswith("GiveUp: xxx")
