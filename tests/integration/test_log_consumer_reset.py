"""A log consumer that is reset: where it goes on, what is noted for those who trim meanwhile, and who else notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from tests.outboxes import STREAM, Outbox, add, noted_id, read_all, send
from usher import Link, LogConsumer


@pytest.mark.parametrize("wait_s", [0.0, 0.05])
def test_an_idle_one_notices_a_reset_that_another_process_made(
    outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link, wait_s: float
) -> None:
    ids = send(link, *"abc")
    idle = consumers(outbox)
    read_all(idle)
    assert consumers(outbox).reset(ids[0], {"uids": ["a"], "count": 1}) == ids[0]
    assert idle.step(add, wait_s) == 0, "it looks"
    assert idle.step(add, wait_s) == 2
    assert idle.state()[1] == {"uids": list("abc"), "count": 3}


class Ended(BaseException):
    """The process dies here."""


def test_an_idle_one_notices_a_reset_whose_process_died_before_it_could_tell(
    outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = send(link, *"abc")
    idle, resetting = consumers(outbox), consumers(outbox)
    read_all(idle)

    def die(*_: object, **__: object) -> None:
        raise Ended

    monkeypatch.setattr(resetting, "_note", die)
    with pytest.raises(Ended):
        resetting.reset(ids[0], {"uids": ["a"], "count": 1})
    assert noted_id(link) == ids[0], "nobody trims what it needs now"
    assert idle.step(add) == 0, "it looks"
    assert idle.step(add) == 2
    assert idle.state() == (ids[2], {"uids": list("abc"), "count": 3})
    assert noted_id(link) == ids[2]


def test_what_a_reset_noted_that_was_never_committed_is_put_right(
    outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = send(link, *"abc")
    idle, resetting = consumers(outbox), consumers(outbox)
    read_all(idle)
    note = resetting._log.note

    def note_and_die(*given: Any, **named: Any) -> None:
        note(*given, **named)
        raise Ended

    monkeypatch.setattr(resetting._log, "note", note_and_die)
    with pytest.raises(Ended):
        resetting.reset(ids[0], {})
    assert noted_id(link) == ids[0]
    for _ in range(2):
        assert idle.step(add) == 0
    assert noted_id(link) == ids[2]
    assert idle.state()[1]["uids"] == list("abc")


def test_a_reset_goes_on_behind_an_entry_that_is_there_and_is_noted_at_once(
    sqlite_outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    ids = send(link, *"abcde")
    consumer = consumers(sqlite_outbox)
    read_all(consumer)
    link.call("XDEL", STREAM, ids[2])
    assert consumer.reset(ids[2], {"count": 2, "uids": ["a", "b"]}) == ids[1]
    assert noted_id(link) == ids[1]
    read_all(consumer)
    assert consumer.state()[1] == {"count": 4, "uids": ["a", "b", "d", "e"]}
    assert noted_id(link) == ids[-1]


def test_a_copy_behind_a_reset_of_a_record_before_it_is_left_out(
    outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    """The state that was given has its effect already."""
    ids = send(link, *"abcbad")
    consumer = consumers(outbox)
    read_all(consumer)
    consumer.reset(ids[1], {"count": 2, "uids": ["a", "b"]})
    read_all(consumer)
    assert consumer.state()[1]["uids"] == list("abcd")


def test_a_reset_forward_that_is_not_committed_leaves_no_note_ahead_of_sql(
    outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    """Else all between would be trimmed, and SQL still needs it."""
    ids = send(link, *"abcde")
    consumer = consumers(outbox, batch=1)
    consumer.step(add)

    def lost(_: sa.Connection) -> None:
        raise RuntimeError("the commit did not arrive")

    sa.event.listen(outbox.engine, "commit", lost)
    try:
        with pytest.raises(RuntimeError):
            consumer.reset(ids[4], {"count": 5})
    finally:
        sa.event.remove(outbox.engine, "commit", lost)
    assert consumer.state()[0] == ids[0]
    assert noted_id(link) == ids[0]
    read_all(consumer)
    assert consumer.state()[1]["uids"] == list("abcde")
    assert consumer.reset(ids[4], {"count": 5}) == ids[4] == noted_id(link)


def test_no_reset_comes_between_what_a_start_reads_and_what_it_notes(
    outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its note replaces whatever is there, so it must be true until it is made."""
    send(link, "a")
    read_all(consumers(outbox))
    starting = consumers(outbox)
    note, tried = starting._log.note, []

    def while_it_notes(*what: Any, **how: Any) -> bool:
        if how.get("replace"):
            with pytest.raises(sa.exc.OperationalError), outbox.engine.begin() as other:
                is_sqlite = other.dialect.name == "sqlite"
                other.execute(sa.text("PRAGMA busy_timeout = 0" if is_sqlite else "SET LOCAL lock_timeout = '100ms'"))
                other.execute(sa.text("UPDATE checkpoints SET version = version + 1"))
            tried.append(what)
        return note(*what, **how)

    monkeypatch.setattr(starting._log, "note", while_it_notes)
    starting.step(add)
    assert tried
