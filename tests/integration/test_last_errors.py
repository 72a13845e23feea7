"""The last error of a message: kept beside its attempts, shown wherever somebody looks, and gone with them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import pytest

from tests.integration.actors import ConsumerActor, MasterActor, Run, Stage, Trouble
from usher.common.base.clock import wall_ms
from usher.common.base.errors import ReplyUnknown, RetryLater
from usher.common.protocol.attempts import Attempts
from usher.common.protocol.last_error import TRACEBACK, LastError, decode
from usher.common.redis.replies import pairs
from usher.common.runtime.settings import CommonSettings
from usher.master.insight.live import StuckTickets
from usher.master.insight.status import StatusReader
from usher.master.operations.shelves import DeadLetters
from usher.master.policy.letters import LetterFilter
from usher.master.policy.rules import Rulebook
from usher.master.policy.states import TicketFilter
from usher.master.verbs.view import View

T, U, V = b"T", b"U", b"V"


@pytest.fixture
def stage(redis_url: str) -> Iterator[Stage]:
    with Stage(redis_url) as made:
        yield made


@pytest.fixture
def m(stage: Stage) -> MasterActor:
    return stage.leader()


def given(stage: Stage, m: MasterActor, consumer: ConsumerActor, *tickets: bytes) -> list[bytes]:
    sent = [stage.send(ticket)[0] for ticket in tickets]
    m.settle()
    consumer.read()
    return sent


def begin(consumer: ConsumerActor) -> Run:
    consumer.lanes.wake_due(1e12)
    run = next(filter(None, (consumer.start() for _ in range(10))))
    assert run is not None
    return run


def fail(run: Run, says: str = "pen") -> None:
    try:
        raise KeyError(says)
    except KeyError as problem:
        run.fail(problem)


def noted(stage: Stage) -> dict[bytes, LastError | None]:
    found = pairs(stage.link.call("HGETALL", stage.keys.errors))
    return {name: decode(value) for name, value in found.items() if not name.startswith(TRACEBACK)}


def rows(stage: Stage, wanted: TicketFilter | None = None) -> dict[str, dict[str, object]]:
    reader = StatusReader(stage.link, stage.keys)
    return {row["ticket_id"]: row for row in reader.find(wanted or TicketFilter(), "age", 100)["rows"]}


def test_a_failure_leaves_its_error_with_the_call_that_notes_its_attempts(stage: Stage, m: MasterActor) -> None:
    a = stage.consumer()
    [first] = given(stage, m, a, T)
    fail(begin(a))
    a.link.calls.clear()
    a.acker.run_once()
    assert set(a.link.calls) == {"charge"}, "no round trip of its own"
    error = noted(stage)[first]
    assert error is not None
    assert error[:2] == ("KeyError: 'pen'", "KeyError")
    assert (error.starts, error.charged, error.most) == (1, 1, 3)
    assert error.at.rpartition(":")[0].endswith("test_last_errors.py")
    trace = stage.link.call("HGET", stage.keys.errors, TRACEBACK + first).decode()
    assert "raise KeyError(says)" in trace
    row = rows(stage)["T"]
    assert (row["state"], row["attempts"], row["charged"]) == ("retrying", 1, 1)
    document = View(CommonSettings(), stage.link, stage.keys).explain("T")
    assert document["last_error"]["error"] == "KeyError: 'pen'"
    assert document["traceback"] == trace
    assert f"last error: {error.told}, " in "\n".join(document["sentences"])
    assert "pen" not in "\n".join(document["sentences"]), "who may not see what messages say reads them too"

    begin(a).succeed()
    a.flush()
    assert stage.link.call("EXISTS", stage.keys.attempts, stage.keys.errors) == 0


def test_failures_whose_note_was_answered_by_nobody_are_counted_once(stage: Stage, m: MasterActor) -> None:
    a = stage.consumer("a")
    first, _ = given(stage, m, a, T, U)
    fail(begin(a))
    a.link.troubles["charge"] = Trouble.REPLY_LOST
    with pytest.raises(ReplyUnknown):
        a.flush()
    fail(begin(a))
    a.flush()
    assert stage.link.call("HGETALL", stage.keys.failures) == [b"failed", b"2"]
    assert len(stage.link.call("HGET", stage.keys.errors, b"h" + first).split(b"\n")) == 1


def test_who_only_asks_to_be_called_later_has_no_error_unless_there_was_one(stage: Stage, m: MasterActor) -> None:
    a = stage.consumer()
    first, second = given(stage, m, a, T, U)
    for run in (begin(a), begin(a)):
        if run.message.stream_id == first:
            run.fail(RetryLater(0))
            continue
        try:
            try:
                raise ConnectionError("away")
            except ConnectionError as cause:
                raise RetryLater(0, "the bank is away") from cause
        except RetryLater as later:
            run.fail(later)
    a.flush()
    error = noted(stage)[second]
    assert error is not None
    assert (error.error_type, error.charged) == ("RetryLater", 0)
    assert first not in noted(stage)


def test_a_halted_ticket_keeps_its_error_until_it_goes_on(stage: Stage, m: MasterActor) -> None:
    a = stage.consumer(max_attempts=1, policy="halt")
    given(stage, m, a, T, U, T)
    for _ in range(2):
        fail(begin(a))
    a.flush()
    assert stage.link.call("HLEN", stage.keys.errors) == 2, "the letters have the tracebacks"
    row = rows(stage, TicketFilter(frozenset({"halted"}), error="KeyError"))["T"]
    assert (row["attempts"], row["charged"], row["max_attempts"]) == (1, 1, 1)
    letters = DeadLetters(stage.link, stage.keys)
    [kept] = [one for one in letters.page(LetterFilter(), None, 9).letters if one.ticket == T]
    assert row["last_error"]["told"] == f"KeyError in {kept.at}"  # type: ignore[index]
    whole = letters.get(kept.id)
    assert whole is not None
    assert "raise KeyError(says)" in whole[0].traceback
    assert [one.word for one in letters.redrive([kept.id])] == ["resumed"]
    assert len(noted(stage)) == 1, "it starts anew"


def test_a_message_that_is_given_up_before_it_starts_has_the_traceback_of_its_last_start(
    stage: Stage, m: MasterActor
) -> None:
    a = stage.consumer()
    [first] = given(stage, m, a, T)
    fail(begin(a))
    a.flush()
    stage.link.call("HSET", stage.keys.attempts, first, "3 3 1 0")
    stage.end_lease(a)
    b = stage.consumer("b")
    m.settle()
    b.read()
    assert b.start() is None
    b.flush()
    [letter] = stage.world.dead()
    assert b"raise KeyError(says)" in letter[b"usher-traceback"]
    assert stage.link.call("EXISTS", stage.keys.errors) == 0


def test_the_first_and_the_last_failure_are_logged_with_a_traceback(
    stage: Stage, m: MasterActor, caplog: pytest.LogCaptureFixture
) -> None:
    a = stage.consumer()
    given(stage, m, a, T)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            fail(begin(a))
            a.flush()
        [_] = given(stage, m, a, U)
        begin(a).fail(RetryLater(0))
    told = [(one.message.partition("\n")[0], one.levelname, "raise KeyError" in one.message) for one in caplog.records]
    assert [line for line in told if line[0].startswith(("handler_", "message_"))] == [
        ("handler_failed", "WARNING", True),
        ("handler_failed", "WARNING", False),
        ("message_given_up", "ERROR", True),
        ("handler_asked_later", "INFO", False),
    ]


def test_what_fails_alike_is_one_group_and_a_consumer_of_a_former_version_leaves_no_error(
    stage: Stage, m: MasterActor
) -> None:
    a = stage.consumer()
    ids = given(stage, m, a, T, U, V)
    for _ in range(2):
        fail(begin(a))
    a.flush()
    stage.link.call("HSET", stage.keys.attempts, ids[2], "1 1 0 0")
    stuck = StuckTickets(stage.link, stage.keys, "ticket_id")
    states, now_ms = {a.incarnation: "live"}, wall_ms()
    groups = stuck.look(math.inf, 3, states, Rulebook(), now_ms)
    assert [(one["state"], one["tickets"], one["messages_are_all"]) for one in groups] == [
        ("retrying", 2, True),
        ("retrying", 1, True),
    ]
    assert groups[0]["text"].startswith("KeyError in ")
    assert groups[1]["text"] == ""
    assert [one["tickets_are_all"] for one in groups] == [True, True]
    assert len(stuck.look(0, 3, states, Rulebook(), now_ms)) == 2, "of the last scan"
    stuck.forget()
    assert not stuck.look(0, 3, states, Rulebook(), now_ms), "nobody has looked, and it may be otherwise now"
    assert rows(stage)["V"]["last_error"] is None
    assert Attempts(1, 1) == Attempts(*(rows(stage)["V"][name] for name in ("attempts", "charged")))  # type: ignore[arg-type]
