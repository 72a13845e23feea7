"""The SQL sink on SQLite and PostgreSQL: an effect is stored once, under the highest fence, or not at all."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.sinks import Mark, accounts, add, rows
from usher.common.base.errors import OwnershipLost, RetryLater
from usher.consumer.sinks.outcomes import SinkMisused, SinkNotNow, StaleFence
from usher.consumer.sinks.sql import SqlSink, plain_errors, storable


@pytest.fixture
def handle(sink: SqlSink) -> Callable[[Mark], None]:
    return sink.exactly_once(add)


def test_a_repeat_is_done_already_and_its_function_is_not_called(engine: sa.Engine, sink: SqlSink) -> None:
    calls = []

    @sink.exactly_once
    def handle(mark: Mark, session: Session) -> None:
        calls.append(mark.uid)
        add(mark, session)

    for mark in (
        Mark("T", "a", 1, 10),
        Mark("T", "a", 1, 10),
        Mark("T", "a", 2, 10),
        Mark("T", "b", 2, 100),
        Mark("T", "a", 2, 10),
    ):
        handle(mark)
    assert calls == ["a", "b"]
    assert accounts(engine) == {"T": 110}


def test_in_the_with_form_a_repeat_ends_at_the_first_use_and_goes_on_behind_the_block(
    engine: sa.Engine, sink: SqlSink
) -> None:
    behind = []

    def handle(mark: Mark) -> None:
        with sink.transaction(mark) as session:
            add(mark, session)
            behind.append("inside")
        behind.append("behind")

    handle(Mark("T", "a", 1))
    handle(Mark("T", "a", 1))
    assert behind == ["inside", "behind", "behind"]
    assert accounts(engine) == {"T": 1}


@pytest.mark.parametrize("use", [lambda session: object() in session, list])
def test_every_use_of_the_session_ends_the_block_of_a_repeat(
    sink: SqlSink, handle: Callable[[Mark], None], use: Callable[[Any], Any]
) -> None:
    handle(Mark("T", "a", 1))
    with sink.transaction(Mark("T", "a", 1)) as session:
        use(session)
        pytest.fail("the block went on")
    with sink.transaction(Mark("T", "a", 1)) as session, session:
        pytest.fail("the block went on")


def test_a_lower_fence_stores_nothing(engine: sa.Engine, handle: Callable[[Mark], None]) -> None:
    handle(Mark("T", "a", 7))
    with pytest.raises(StaleFence) as stale:
        handle(Mark("T", "b", 6))
    assert isinstance(stale.value, OwnershipLost)
    with pytest.raises(StaleFence):  # also of a repeat: it is not ours to call done
        handle(Mark("T", "a", 6))
    handle(Mark("other", "b", 6))
    assert accounts(engine) == {"T": 1, "other": 1}
    assert rows(engine, "usher_uids") == 2


def test_the_fence_of_a_repeat_counts(engine: sa.Engine, handle: Callable[[Mark], None]) -> None:
    handle(Mark("T", "a", 1))
    handle(Mark("T", "a", 9))
    with pytest.raises(StaleFence):
        handle(Mark("T", "b", 8))
    assert accounts(engine) == {"T": 1}


def test_what_raises_is_undone_with_its_uid_and_its_fence(engine: sa.Engine, sink: SqlSink) -> None:
    with pytest.raises(ZeroDivisionError), sink.transaction(Mark("T", "a", 5)) as session:
        add(Mark("T", "a", 5), session)
        raise ZeroDivisionError
    assert (accounts(engine), rows(engine, "usher_uids"), rows(engine, "usher_fences")) == ({}, 0, 0)
    with sink.transaction(Mark("T", "a", 4)) as session:
        add(Mark("T", "a", 4), session)
    assert accounts(engine) == {"T": 1}


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_ending_the_transaction_inside_is_refused_and_stores_nothing_twice(
    engine: sa.Engine, sink: SqlSink, end: str
) -> None:
    with (
        pytest.raises(SinkMisused, match="leave commit and rollback to the sink"),
        sink.transaction(Mark("T", "a", 1)) as session,
    ):
        add(Mark("T", "a", 1), session)
        getattr(session.connection(), end)() if end == "commit" else session.rollback()
    with sink.transaction(Mark("T", "a", 1)) as session:
        add(Mark("T", "a", 1), session)
    assert accounts(engine) == {"T": 1}


def test_a_failed_statement_that_the_handler_swallowed_is_no_success(engine: sa.Engine, sink: SqlSink) -> None:
    """PostgreSQL would answer the COMMIT with a rollback, and the message would be acknowledged without its effect."""

    def handle() -> None:
        with sink.transaction(Mark("T", "a", 1)) as session:
            add(Mark("T", "a", 1), session)
            try:
                session.execute(sa.text("SELECT * FROM nowhere"))
            except sa.exc.DBAPIError:
                pass

    if engine.dialect.name == "postgresql":
        with pytest.raises(SinkMisused, match="begin_nested"):
            handle()
        assert (accounts(engine), rows(engine, "usher_uids")) == ({}, 0)
    else:
        handle()
        assert (accounts(engine), rows(engine, "usher_uids")) == ({"T": 1}, 1)


def test_autocommit_is_refused(engine: sa.Engine, sink: SqlSink) -> None:
    careless = SqlSink(sa.create_engine(engine.url, isolation_level="AUTOCOMMIT"))
    with pytest.raises(SinkMisused, match="AUTOCOMMIT"), careless.transaction(Mark("T", "a", 1)):
        pass
    careless.engine.dispose()


def test_missing_tables_are_named_with_the_way_out(engine: sa.Engine) -> None:
    with (
        pytest.raises(SinkMisused, match=r"usher_fences.*create_tables\(\)"),
        SqlSink(engine).transaction(Mark("T", "a", 1)),
    ):
        pass


def test_tables_can_be_made_by_many_at_once_and_by_the_ddl(engine: sa.Engine) -> None:
    problems: list[BaseException] = []

    def make() -> None:
        try:
            SqlSink(engine).create_tables()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []
    with engine.begin() as connection:
        for statement in SqlSink(engine).ddl().split(";\n"):
            if statement.strip():
                connection.execute(sa.text(statement))
    assert {"usher_fences", "usher_uids"} <= set(sa.inspect(engine).get_table_names())


@pytest.mark.parametrize("uid", ["", "ä", "x" * 5000, "a\0b", "a\udcff", "sha256:" + "0" * 64, "%s :x '\""])
def test_any_uid_is_known_again(engine: sa.Engine, handle: Callable[[Mark], None], uid: str) -> None:
    for _ in range(2):
        handle(Mark("T", uid, 1))
        handle(Mark("T", uid + "-", 1))
    assert accounts(engine) == {"T": 2}
    assert storable(storable(uid)) != storable(uid) or storable(uid) == uid


def test_what_is_old_is_removed_and_what_is_young_is_not(engine: sa.Engine, sink: SqlSink) -> None:
    handle = sink.exactly_once(add)
    for number in range(30):
        handle(Mark(f"T{number % 3}", f"u{number}", 1))
    assert sink.prune() == 0
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE usher_uids SET at_s = at_s - 700000 WHERE uid IN ('u0', 'u1', 'u2', 'u3')"))
        connection.execute(sa.text("UPDATE usher_fences SET at_s = at_s - 700000 WHERE ticket = 'T0'"))
    assert sink.prune(at_once=3) == 3 + 1
    assert sink.prune() == 1
    assert (rows(engine, "usher_uids"), rows(engine, "usher_fences")) == (26, 2)
    handle(Mark("T0", "u0", 1))  # what is not known any more is handled again
    assert accounts(engine) == {"T0": 11, "T1": 10, "T2": 10}


def test_removing_happens_by_itself(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("usher.consumer.sinks.sql.PRUNE_EVERY", 5)
    own = SqlSink(engine, keep_s=-5)  # everything is old at once
    own.create_tables()
    for number in range(5):
        own.exactly_once(add)(Mark("T", f"u{number}", 1))
    assert (rows(engine, "usher_uids"), rows(engine, "usher_fences")) == (0, 0)


def test_many_threads_with_all_kinds_of_repeats_and_zombies_add_up(engine: sa.Engine, sink: SqlSink) -> None:
    """Every message is offered three times, under rising fences, in a wild order; whoever is refused for the moment
    comes again."""
    tickets, each = 4, 12
    handle = sink.exactly_once(add)
    work = [
        Mark(f"T{ticket}", f"u{number}", 1 + copy, 1 + number)
        for copy in range(3)
        for number in range(each)
        for ticket in range(tickets)
    ]
    random.Random(7).shuffle(work)
    stale, lock = [], threading.Lock()

    def run() -> None:
        while True:
            with lock:
                if not work:
                    return
                mark = work.pop()
            while True:
                try:
                    handle(mark)
                except StaleFence:
                    stale.append(mark)
                except SinkNotNow:
                    continue
                break

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
    assert stale
    assert accounts(engine) == {f"T{ticket}": each * (each + 1) // 2 for ticket in range(tickets)}


def test_a_locked_database_is_not_now(engine: sa.Engine, database_url: str) -> None:
    impatient = {"timeout": 0.05} if engine.dialect.name == "sqlite" else {"options": "-c lock_timeout=50ms"}
    hasty = SqlSink(sa.create_engine(database_url, connect_args=impatient))
    hasty.create_tables()
    with SqlSink(engine).transaction(Mark("T", "a", 1)) as session:
        add(Mark("T", "a", 1), session)
        with pytest.raises(SinkNotNow) as busy, hasty.transaction(Mark("T", "b", 2)):
            pass
        assert isinstance(busy.value, RetryLater)
        assert 0 < busy.value.after_s < 1
    hasty.exactly_once(add)(Mark("T", "b", 2))
    assert accounts(engine) == {"T": 2}
    hasty.engine.dispose()


def test_a_function_of_which_a_call_runs_nothing_is_refused(sink: SqlSink) -> None:
    def yields(mark: Mark, session: Session) -> Any:
        yield session

    with pytest.raises(SinkMisused, match="this handler is a generator"):
        sink.exactly_once(yields)


def test_a_result_that_shows_that_nothing_was_done_stores_no_uid(engine: sa.Engine, sink: SqlSink) -> None:
    """Else the message would count as done, now and whenever it comes again."""

    async def later(mark: Mark, session: Session) -> None: ...

    @sink.exactly_once
    def handle(mark: Mark, session: Session) -> Any:
        return add(mark, session) if mark.fence == 2 else later(mark, session)

    with pytest.raises(SinkMisused, match="the handler returned 'coroutine', so nothing of the message was done"):
        handle(Mark("T", "u", 1, 10))
    handle(Mark("T", "u", 2, 10))
    assert accounts(engine) == {"T": 10}


def test_a_database_that_takes_no_writes_is_not_now_and_goes_on_when_it_does(
    engine: sa.Engine, database_url: str, sink: SqlSink
) -> None:
    """A standby that a failover has not promoted yet, or a server that was set so because its disk is nearly full."""
    if engine.dialect.name == "sqlite":
        standby = sa.create_engine(f"{database_url.replace('///', '///file:')}?mode=ro&uri=true")
    else:
        standby = sa.create_engine(database_url, connect_args={"options": "-c default_transaction_read_only=on"})
    with pytest.raises(SinkNotNow, match="cannot be reached"):
        SqlSink(standby).exactly_once(add)(Mark("T", "a", 1))
    sink.exactly_once(add)(Mark("T", "a", 1))
    assert accounts(engine) == {"T": 1}
    standby.dispose()


def test_a_pool_that_times_out_is_not_now_and_a_url_has_one_without_a_bound() -> None:
    with pytest.raises(SinkNotNow, match="no connection of the pool is free"), plain_errors():
        raise sa.exc.TimeoutError("QueuePool limit of size 5 overflow 10 reached")
    assert SqlSink("postgresql+psycopg://nobody@127.0.0.1:1/none").engine.pool.size() == 0  # type: ignore[attr-defined]
