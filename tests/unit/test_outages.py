"""What fails alike on different tickets waits, uncharged; a message that is wrong, and one ticket alone, is charged."""

from __future__ import annotations

from email.message import Message as Head
from types import SimpleNamespace
from urllib.error import HTTPError

import pytest

from usher.common.protocol.last_error import LastError
from usher.consumer.execution.outages import CONNECTION, DECLARED, OTHER, Outages, Wait, tells_of_connection
from usher.consumer.handlers.message import Message, OwnLease

SIGN = ("ConnectionError", "pay.py:12")
LEASE = OwnLease(10.0, 0.0)


Numbered = type("Numbered", (Exception,), {"code": 503, "status": 429})
OfBoto = type("OfBoto", (Exception,), {"response": {"ResponseMetadata": {"HTTPStatusCode": 503}}})
NoGateway = type("NoGateway", (Exception,), {"response": SimpleNamespace(status_code=502)})
Unlookable = type("Unlookable", (Exception,), {"response": property(lambda self: 1 / 0)})


def message(ticket: str, attempt: int = 1) -> Message:
    made = Message(ticket.encode(), b"1-0", 7, [b"tenant", ticket[:1].encode()], LEASE)
    made.attempt, made.start_us = attempt, (attempt - 1) * 9_000_000
    return made


def failing(outages: Outages, tickets: str, how: str, now_s: float) -> list[bool]:
    """Let each of the tickets fail once; say which of them wait uncharged."""
    waits = []
    for ticket in tickets.split():
        outages.ended(ticket.encode())
        waits.append(outages.failed(message(ticket), SIGN, how, now_s) is not None)
    return waits


@pytest.mark.parametrize(
    ("how", "held"), [(DECLARED, [True, True, True]), (CONNECTION, [False, False, True]), (OTHER, [False] * 3)]
)
def test_as_many_tickets_as_the_error_asks_for_are_an_outage(how: str, held: list[bool]) -> None:
    assert failing(Outages(), "a1 a2 a3", how, 10.0) == held


def test_one_ticket_is_charged_while_others_are_done_and_not_while_nothing_is() -> None:
    outages = Outages()
    for number in range(20):
        assert failing(outages, "a1", CONNECTION, 10.0 + number) == [False]
        outages.done(message("b1"), 10.5 + number)
    assert not any(failing(Outages(), "a1 a1", OTHER, now_s) == [True] for now_s in (10.0, 12.0))
    assert failing(outages, "a1 a1", CONNECTION, 40.0) == [False, False]
    assert failing(outages, "a1", CONNECTION, 41.0) == [True]  # a consumer may have no third ticket
    assert outages.hold(message("a1"), 42.0) is None
    assert failing(outages, "a1", CONNECTION, 43.0) == [True]
    outages.done(message("b1"), 44.0)
    assert failing(outages, "a1", CONNECTION, 45.0) == [False]
    assert failing(outages, "a1", CONNECTION, 46.0) == [True]
    assert failing(outages, "a1", CONNECTION, 46.0 + 3600) == [False]  # for ever is too long for one


def test_as_many_tickets_of_other_consumers_are_one_too() -> None:
    outages, alike = Outages(), LastError("ConnectionError: away", *SIGN)
    assert not outages.wonders(10.0)
    for number in range(3):
        assert failing(outages, "a1", CONNECTION, 10.0 + number) == [False]
        outages.done(message("b1"), 10.1 + number)
        assert [outages.wonders(10.2 + number), outages.wonders(10.3 + number)] == [True, False]
        outages.hear([alike] * (number + 1) + [LastError("KeyError: 1")] * 5, 10.4 + number)
    outages.done(message("b1"), 12.9)
    assert failing(outages, "a1", CONNECTION, 13.0) == [True]
    assert outages.done(message("b1"), 13.1) == [] and outages.wonders(20.0), "they may have been done there"
    [over] = outages.done(message("a1", 2), 13.2)
    assert over.lasted_s is not None and outages.known == {}


def test_other_errors_are_an_outage_while_nothing_of_their_kind_is_done_for_a_second() -> None:
    outages = Outages()
    outages.kinds_of = lambda message: [message.flat[1]]
    assert failing(outages, "a1 a2 a3", OTHER, 10.0) == [False] * 3
    assert failing(outages, "a1", OTHER, 11.0) == [True]
    assert outages.done(message("b1"), 11.1) == []  # another kind is done: that of these is away all the same
    assert failing(outages, "a4", OTHER, 11.2) == [True]
    [over] = outages.done(message("a9"), 11.3)  # and so is one of their kind: their messages are wrong
    assert over.alike == {b"a1", b"a2", b"a3", b"a4"}
    assert failing(outages, "a1 a2 a3", OTHER, 11.4) == [False] * 3


def test_one_at_a_time_is_tried_and_all_go_on_when_one_of_them_is_done() -> None:
    outages = Outages()
    failing(outages, "a1 a2 a3 a4", CONNECTION, 10.0)
    assert outages.done(message("b1"), 10.0) == []
    assert outages.hold(message("b2"), 10.0) is None  # it has not failed: nothing says that it needs the same
    assert outages.hold(message("a1"), 10.5) is None
    assert outages.hold(message("a2"), 11.5) is not None  # while that one runs
    assert failing(outages, "a1", CONNECTION, 11.6) == [True]
    assert outages.hold(message("a2"), 11.7) is None
    assert outages.hold(message("a3"), 11.8) is not None
    [over] = outages.done(message("a2", 2), 11.9)
    assert (over.alike, over.lasted_s, over.probes) == ({b"a1", b"a3", b"a4"}, pytest.approx(1.9), 2)
    assert outages.hold(message("a3"), 11.9) is None and outages.known == {}


def test_very_many_wait_in_redis_and_go_on_a_few_at_a_time() -> None:
    outages, names = Outages(), [f"a{number}" for number in range(1000)]
    outages.slots = 16
    waits = [outages.failed(message(name), SIGN, DECLARED, 10.0) for name in names]
    here = [wait for wait in waits if wait is not None and wait.is_here]
    assert outages.known[SIGN].waiting == {}  # none has left yet
    for name, wait in zip(names, waits, strict=True):
        assert wait is not None and outages.waits(message(name), wait)
    assert [wait.due_s for wait in here] == [10.0 + number for number in range(1, 11)]
    assert all(40.0 <= wait.due_s <= 70.0 for wait in waits if wait is not None and not wait.is_here)
    [over] = outages.done(message("a0", 2), 20.0)
    going, gone = [*over.first], {*over.first}
    assert len(going) == 16 and outages.overdue(20.9) == []
    [late] = outages.overdue(21.0)  # other consumers have done those: nobody here tells
    going, gone = [*late.first, *going], {*late.first, *going}
    for ticket, _ in going:  # as they are done, others follow: never more at a time
        for more in outages.done(message(ticket.decode(), 2), 21.0):
            assert len(more.first) <= 8
            gone |= {*more.first}
            going += more.first
    assert gone == {(name.encode(), 7) for name in names[10:]}
    assert outages.known == {}


def test_what_goes_on_keeps_few_slots_until_all_of_it_is_done_and_rests_where_others_work() -> None:
    outages, names = Outages(), [f"a{number}" for number in range(100)]
    outages.slots = 8
    for name in names:
        wait = outages.failed(message(name), SIGN, DECLARED, 10.0)
        assert wait is not None and outages.waits(message(name), wait)
    outages.done(message("b1"), 10.5)
    [over] = outages.done(message("a9", 2), 10.6)
    assert over.first == [(b"a0", 0), (b"a1", 0)]  # first those that wait here
    for at_s in (10.61, 10.62, 10.63):
        assert outages.done(message("a0", 2), at_s, False) == outages.done(message("a1", 2), at_s, False) == []
    assert outages.done(message("a0", 2), 10.64) == outages.done(message("b1"), 10.645) == []  # as long as it worked
    [more] = outages.done(message("b1"), 10.651)
    assert more.first == [(b"a2", 0)]
    assert outages.done(message("a1", 2), 11.6)[0].first == [(b"a3", 0)]
    [more] = outages.done(message("a0", 2), 11.7)  # nothing of others was done for a second: it had waited, too
    assert len(more.first) == 6 and outages.done(message("a3", 2), 11.71) == []


def test_where_all_of_a_tenant_fail_few_others_of_it_are_tried() -> None:
    outages = Outages()
    outages.kinds_of = lambda message: [message.flat[1]]
    failing(outages, "a1 a2 a3", CONNECTION, 10.0)
    outages.done(message("b1"), 10.1)
    assert outages.hold(message("a4"), 10.9) is None  # it may be a moment only
    held = [outages.hold(message(f"a{number}"), 11.0 + number / 1000) is not None for number in range(5, 105)]
    assert held.count(False) == 3  # the probe, and one each 50 ms
    assert outages.hold(message("b2"), 11.1) is None
    tried = [outages.hold(message(f"a{number}"), number / 10) is None for number in range(120, 220)]
    assert tried.count(True) == outages.go_on // 2 - 2  # they hang: others need the slots
    outages.ended(b"a5")
    assert outages.hold(message("a220"), 22.0) is None
    outages.done(message("a5"), 22.1)  # not all of them
    assert [outages.hold(message(name), 22.1) for name in ("a300", "a301")] == [None, None]
    [over] = outages.done(message("a1", 2), 22.2)
    assert len(over.alike) == 194 and outages.known == {}


def test_who_went_on_by_itself_takes_no_place_of_those_that_still_wait() -> None:
    outages = Outages()
    failing(outages, " ".join(f"a{number}" for number in range(100)), CONNECTION, 10.0)
    outages.known[SIGN].waiting.update(
        (b"a%d" % number, (7, 120.0 if number == 99 else 60.0)) for number in range(9, 100)
    )
    [over] = outages.done(message("a0", 2), 91.0)
    assert over.first == [(b"a99", 7)]


def test_where_others_are_done_a_ticket_is_charged_after_an_hour() -> None:
    outages = Outages()
    failing(outages, "a1 a2 a3", CONNECTION, 10.0)
    assert failing(outages, "a1", CONNECTION, 7200.0) == [True]  # nothing at all is done
    outages.done(message("b1"), 7200.0)
    assert failing(outages, "a1", CONNECTION, 7201.0) == [False]
    outages.leave(b"a1")  # its message is a dead letter: the next one has an hour of its own
    assert failing(outages, "a1", CONNECTION, 7202.0) == [True]


def test_all_wait_for_as_long_as_it_takes_though_one_more_was_done_as_it_began() -> None:
    outages = Outages()
    failing(outages, "a1 a2 a3", CONNECTION, 10.0)
    outages.done(message("b1"), 10.1)
    assert failing(outages, "a1 a2 a3", CONNECTION, 7200.0) == [True] * 3
    assert outages.waiting == 3
    outages.done(message("b1"), 7400.0)  # theirs are done elsewhere: none failed here for long
    assert (outages.waiting, outages.known) == (0, {})


def test_who_is_asked_for_is_tried_at_once_and_any_end_of_a_try_lets_others_try() -> None:
    outages = Outages()
    failing(outages, "a1 a2 a3", CONNECTION, 10.0)
    assert outages.hold(message("a1"), 10.5) is None
    assert outages.hold(message("a2"), 11.6) is not None
    outages.ask(b"a2")
    assert outages.hold(message("a2"), 11.6) is None
    outages.ended(b"a1")  # by whatever else
    assert outages.hold(message("a3"), 11.7) is None
    outages.ended(b"a3")
    assert outages.hold(message("a1"), 11.8) is not None
    outages.leave(b"a2")  # it waits for a reason of its own
    assert outages.hold(message("a1"), 11.8) is not None
    outages.leave(b"a3")  # it asked to be called later, which tells nothing
    assert outages.hold(message("a1"), 11.8) is None


def test_who_leaves_for_redis_as_it_ends_need_not_wait_and_who_waits_for_another_reason_does() -> None:
    outages = Outages()
    failing(outages, "a1 a2 a3", CONNECTION, 10.0)
    outages.leave(b"a3")
    [over] = outages.done(message("a1", 2), 11.0)
    assert over.alike == {b"a2"}
    assert not any(outages.waits(message("a2"), Wait(60.0, is_here, 10.0, 3)) for is_here in (False, True))
    outages.ask(b"a2")  # nobody holds it: nothing is to be remembered
    assert outages._asked == set()


def test_more_tickets_than_are_remembered_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("usher.consumer.execution.outages._MOST", 3)
    outages = Outages()
    failing(outages, "a1 a2 a3", CONNECTION, 10.0)
    outages.done(message("b1"), 10.1)
    assert failing(outages, "a4 a5", CONNECTION, 10.2) == [True] * 2


@pytest.mark.parametrize(
    ("raised", "is_one"),
    [
        *((one, True) for one in (TimeoutError(), OSError(113, "no route"), OSError(28, "no space"))),
        *((one, True) for one in (NoGateway(), OfBoto(), HTTPError("", 503, "Service Unavailable", Head(), None))),
        *((one, False) for one in (KeyError("x"), FileNotFoundError(), Unlookable("at"), Numbered())),
    ],
)
def test_the_type_of_an_error_its_cause_or_its_part_tells_of_a_connection(raised: Exception, is_one: bool) -> None:
    assert tells_of_connection(raised) is is_one
    wrapped = RuntimeError("cannot pay")
    wrapped.__cause__ = raised
    assert tells_of_connection(wrapped) is is_one
    assert tells_of_connection(ExceptionGroup("of a task group", [ValueError(), raised])) is is_one


def test_while_few_fail_the_others_are_not_asked_about_one_by_one_and_after_a_failure_they_are() -> None:
    outages = Outages()
    failing(outages, "a1", OTHER, 10.0)
    assert not outages.is_quiet(b"b1"), "its success ends the silence of its kind"
    outages.done(message("b1"), 10.1)
    assert (outages.is_quiet(b"b2"), outages.is_quiet(b"a1")) == (True, False)
    failing(outages, "a2", OTHER, 10.2)
    assert not outages.is_quiet(b"b2")
    outages.done(message("b2"), 10.3)
    outages.overdue(11.0)
    assert not outages.is_quiet(b"b3"), "once a second it is noted that others are done"
    assert failing(outages, "a1 a2 a3", DECLARED, 11.1) == [True] * 3
    outages.done(message("b3"), 11.2)
    assert not outages.is_quiet(b"b4")


def test_a_ticket_that_has_failed_in_two_ways_is_asked_about_after_one_of_them_is_over() -> None:
    outages, other = Outages(), ("KeyError", "pay.py:13")
    failing(outages, "a1", OTHER, 10.0)
    outages.ended(b"a1")
    for ticket in ("a1", "a2"):
        outages.failed(message(ticket), other, OTHER, 10.1)
    assert outages.failed(message("a3"), other, DECLARED, 10.2) is not None
    outages.done(message("a3"), 10.5)  # it is over, and the first one still has the ticket
    assert list(outages.known) == [SIGN]
    assert (outages.is_quiet(b"a1"), outages.is_quiet(b"b1")) == (False, True)
