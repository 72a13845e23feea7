"""Readers of the log: effects, state and checkpoint together or not at all, each record once, and no step over what was
lost.

note_checkpoint.lua's losing side: a note that is late changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import random
import string
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from tests.outboxes import STREAM, Outbox, add, noted_id, read_all, send, until
from usher.common.base.errors import NotNow, SqlTrouble
from usher.common.outbox.log_consumer import LogConsumer, LogLost, Record
from usher.common.outbox.store import OutboxMisused
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.message import EntryView
from usher.common.protocol.stream_id import ZERO, before
from usher.common.redis.client import Link
from usher.common.router.router import Mode, StreamRouter
from usher.master.operations.trimming import Trimming
from usher.master.policy.trim import Nothing, decide, readers

KEYS = LogKeys(STREAM)


def test_everything_is_seen_in_order_and_the_checkpoint_says_so_in_sql_and_redis(
    outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    ids = send(link, *(f"u{n}" for n in range(25)), "")
    consumer = consumers(outbox, batch=10)
    assert [consumer.step(add) for _ in range(4)] == [10, 10, 6, 0]
    last, state = consumer.state()
    assert (last, noted_id(link)) == (ids[-1], ids[-1])
    assert state["uids"] == [f"u{n}" for n in range(25)] + [ids[-1].decode()]
    assert outbox.rows("SELECT version, records FROM checkpoints") == [(3, 26)]


def test_a_record_of_somebody_else_is_named_where_it_is_no_json() -> None:
    with pytest.raises(
        ValueError,
        match=r"^the record 5-1 is no record of an outbox: its field 'data' is not there; it has ticket_id, text$",
    ):
        Record("5-1", "5-1", {"ticket_id": "42", "text": "hello"}).json()
    with pytest.raises(ValueError, match="^the record 5-1 is no record of an outbox: its field 'data' is no JSON"):
        Record("5-1", "5-1", {"data": "hello"}).json()


def test_a_function_that_fails_leaves_nothing_behind(
    outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    send(link, "a", "b", "c")
    consumer = consumers(outbox, batch=2)
    consumer.step(add)
    before = outbox.rows("SELECT * FROM checkpoints"), outbox.rows("SELECT * FROM consumer_states"), noted_id(link)

    def fail(records: Sequence[Record], state: dict[str, Any], sql: sa.Connection) -> None:
        add(records, state, sql)  # type: ignore[arg-type]
        sql.execute(sa.text("INSERT INTO staged_log_records (ticket_id, action, object) VALUES ('T', 'a', 'o')"))
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        consumer.step(fail)
    assert (
        outbox.rows("SELECT * FROM checkpoints"),
        outbox.rows("SELECT * FROM consumer_states"),
        noted_id(link),
    ) == before
    assert outbox.store.waiting() == (0, 0)
    assert outbox.scalar("SELECT count(*) FROM consumer_uids") == 2
    read_all(consumer)
    assert consumer.state()[1]["uids"] == ["a", "b", "c"]


def test_a_record_that_cannot_be_handled_is_given_to_on_error_and_the_others_are_handled(
    outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    """Without it, one record of a stranger's parser stopped the consumer for ever."""
    send(link, "a", "b", "c", "bad", "d", "e")
    given: list[tuple[str, str]] = []

    def handle(records: Sequence[Record], state: dict[str, Any], sql: sa.Connection) -> None:
        add(records, state, sql)  # type: ignore[arg-type]
        if any(record.uid == "bad" for record in records):
            raise ValueError("cannot be read")

    def give_up(record: Record, error: Exception, sql: sa.Connection) -> None:
        sql.execute(
            sa.text("INSERT INTO staged_log_records (ticket_id, action, object) VALUES (:id, 'bury', 'letter')"),
            {"id": record.uid},
        )
        given.append((record.uid, str(error)))

    consumer = consumers(outbox, batch=4)
    until(lambda: consumer.step(handle, on_error=give_up) == consumer._singly == 0)
    assert given == [("bad", "cannot be read")]
    assert consumer.state()[1]["uids"] == ["a", "b", "c", "d", "e"]
    assert outbox.rows("SELECT ticket_id FROM staged_log_records") == [("bad",)]


def test_on_error_may_stop_and_then_nothing_is_stored(
    outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    send(link, "bad")

    def handle(records: Sequence[Record], state: dict[str, Any], sql: sa.Connection) -> None:
        raise ValueError("cannot be read")

    def stop(record: Record, error: Exception, sql: sa.Connection) -> None:
        raise error

    consumer = consumers(outbox)
    with pytest.raises(ValueError, match="cannot be read"):
        consumer.step(handle, on_error=stop)
    assert outbox.rows("SELECT records FROM checkpoints") == [(0,)]


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, 2**64, 2**70 + 1, -(2**63) - 1, 10**30 + 7])
def test_whole_numbers_of_any_size_stay_whole(number: int) -> None:
    """orjson makes floats of those beyond 64 bits, without a word."""
    data = json.dumps({"id": number, "text": "x"})
    assert Record("5-1", "5-1", {"data": data}).json() == {"id": number, "text": "x"}
    told = EntryView(b"5-1", [b"body", data.encode()]).json()["id"]
    assert (told, type(told)) == (number, int)


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "1e400", '"\\ud800"', "[1] 2", "[" * 2000])
def test_what_is_no_json_is_refused_beside_long_numbers_too(text: str) -> None:
    for body in (text, f"[{text},{2**70}]"):
        with pytest.raises(ValueError, match="."):
            EntryView(b"5-1", [b"body", body.encode()]).json()


def test_two_uids_are_never_taken_for_one(outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link) -> None:
    """The bytes ff and the text \\xff were: the second message was left out as a repeat."""
    for uid in (b"\xff", b"\\xff", b"a\0", b"a\\0"):
        link.call("XADD", STREAM, "*", "ticket_id", "T", "uid", uid, "data", "{}")
    consumer = consumers(outbox)
    read_all(consumer)
    assert len(consumer.state()[1]["uids"]) == 4


def test_what_runs_nothing_of_the_records_does_not_move_over_them(
    outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    async def waits(records: Sequence[Record], state: dict[str, Any], sql: sa.Connection) -> None: ...

    def yields(records: Sequence[Record], state: dict[str, Any], sql: sa.Connection) -> Iterator[None]:
        yield

    send(link, "a", "b")
    consumer = consumers(outbox)
    for handle, kind in ((waits, "coroutine"), (yields, "generator")):
        with pytest.raises(OutboxMisused, match=f"the handler returned '{kind}', so nothing of the message was done"):
            consumer.step(handle)
    read_all(consumer)
    assert consumer.state()[1]["uids"] == ["a", "b"]


def test_an_engine_in_autocommit_mode_is_refused_before_anything_is_handled(
    outbox: Outbox, redis_url: str, link: Link
) -> None:
    """Else the checkpoint would be stored first: a function that raises then would cost its batch, without a word."""
    send(link, "a", "b")
    careless = sa.create_engine(outbox.engine.url, isolation_level="AUTOCOMMIT")
    with LogConsumer("one", STREAM, careless, redis_url=redis_url) as consumer:
        with pytest.raises(OutboxMisused, match="AUTOCOMMIT"):
            consumer.step(add)
        with pytest.raises(OutboxMisused, match="AUTOCOMMIT"):
            consumer.reset(ZERO, {})
        assert consumer.state() == (ZERO, {})
    careless.dispose()


def test_a_record_that_was_sent_twice_is_seen_once(
    outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    send(link, "a", "b", "a", "b", "c", "a", "", "")
    consumer = consumers(outbox, batch=3)
    read_all(consumer)
    state = consumer.state()[1]
    assert (state["uids"][:3], state["count"]) == (["a", "b", "c"], 5)


def test_the_memory_of_uids_has_the_length_that_was_asked_for(
    sqlite_outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    send(link, "a", *(f"x{n}" for n in range(20)), "a")
    near, far = (
        consumers(sqlite_outbox, "near", batch=5, remember=5),
        consumers(sqlite_outbox, "far", batch=5, remember=22),
    )
    for consumer in (near, far):
        read_all(consumer)
    assert near.state()[1]["count"] == 22, "too far apart for it"
    assert far.state()[1]["count"] == 21
    everything = consumers(sqlite_outbox, "all", batch=5, remember=None)
    read_all(everything)
    assert everything.state()[1]["count"] == 21
    assert sqlite_outbox.scalar("SELECT count(*) FROM consumer_uids WHERE name = 'all'") == 21
    assert sqlite_outbox.scalar("SELECT count(*) FROM consumer_uids WHERE name = 'near'") <= 15


def test_id_and_state_are_of_the_same_commit(outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link) -> None:
    """Another process commits a batch between any two statements of the one that looks."""
    ids = send(link, *"abc")
    working = consumers(outbox, batch=1)
    working.step(add)
    looking = LogConsumer("one", STREAM, outbox.url, redis_url=link.url)
    statements: list[str] = []

    def between(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)
        if len(statements) > 1:
            working.step(add)

    sa.event.listen(looking._engine, "before_cursor_execute", between)
    with looking:
        last_id, state = looking.state()
    assert (last_id, state["uids"]) == (ids[0], ["a"])


def test_an_idle_one_whose_note_redis_has_lost_makes_it_again(
    sqlite_outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    """Else all that it needs might be trimmed as soon as there is more."""
    ids = send(link, *"ab")
    consumer = consumers(sqlite_outbox)
    read_all(consumer)
    link.call("DEL", KEYS.checkpoints)
    for _ in range(2):
        consumer.step(add)
    assert noted_id(link) == ids[-1]


def test_a_checkpoint_that_was_moved_by_hand_is_gone_on_from(
    outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    """With an UPDATE that knows nothing of versions."""
    ids = send(link, *"abc")
    consumer = consumers(outbox, batch=2)
    consumer.step(add)
    with outbox.engine.begin() as connection:
        connection.execute(sa.text("UPDATE checkpoints SET last_id = :last_id"), {"last_id": ids[0].decode()})
        connection.execute(sa.text("DELETE FROM consumer_uids"))
    assert consumer.step(add) == 0, "it is not where it believes to be"
    read_all(consumer)
    assert consumer.state()[1]["uids"] == ["a", "b", "b", "c"]


def test_of_two_processes_with_one_name_one_goes_on(
    outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    send(link, *"abcdef")
    one, two = consumers(outbox, batch=2), consumers(outbox, batch=2)
    assert (one.step(add), two.step(add), two.step(add)) == (2, 2, 2), "the second one began where the first one was"
    assert one.step(add) == 0, "and the first one sees that it is behind"
    send(link, "g")
    assert one.step(add) == 1
    assert two.step(add) == 0
    assert one.state()[1]["uids"] == list("abcdefg")


def test_a_database_that_breaks_in_the_middle_is_asked_again(
    postgres_outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    send(link, "a", "b")
    consumer = consumers(postgres_outbox)

    def cut_off(records: list[Record], state: dict[str, Any], sql: sa.Connection) -> None:
        add(records, state, sql)
        sql.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))

    with pytest.raises(SqlTrouble):
        consumer.step(cut_off)
    read_all(consumer)
    assert consumer.state()[1]["uids"] == ["a", "b"]


def test_run_waits_trouble_out_and_ends_when_asked(
    sqlite_outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    send(link, "a", "b")
    consumer = consumers(sqlite_outbox, batch=1)
    looks: list[int] = []

    def stop() -> bool:
        looks.append(1)
        if len(looks) == 2:  # it has the connection: break it
            link.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        return len(looks) > 2 and consumer.state()[1].get("count") == 2

    consumer.run(add, stop)
    assert consumer.state()[1]["uids"] == ["a", "b"]


@pytest.mark.parametrize("mode", [Mode.CHANGE_DRIVEN, Mode.PORTABLE])
def test_log_consumers_of_many_streams_wait_on_one_router(
    sqlite_outbox: Outbox, redis_url: str, link: Link, mode: Mode
) -> None:
    router = StreamRouter(redis_url, mode=mode)
    router.start()
    streams = [f"log-{n}" for n in range(3)]
    with contextlib.ExitStack() as stack:
        stack.callback(router.stop)
        consumers = [
            stack.enter_context(LogConsumer("one", stream, sqlite_outbox.engine, redis_url=redis_url, router=router))
            for stream in streams
        ]
        for consumer in consumers:
            assert consumer.step(add, 0.05) == 0
        until(
            lambda: router.metrics()["streams"] == 0
        )  # or the next look could see one that is about to go, and not the thread's
        waiting = threading.Thread(target=consumers[1].step, args=(add, 60.0))
        waiting.start()
        until(lambda: router.metrics()["streams"] == 1)
        link.call("XADD", streams[1], "*", "uid", "a")
        waiting.join(30)
        assert not waiting.is_alive(), "the router did not wake it"
        assert [consumer.step(add) for consumer in consumers] == [0, 1, 0]
        link.call("DEL", streams[1])
        link.call("XADD", streams[1], "1-1", "uid", "b")
        with pytest.raises(LogLost):
            consumers[1].step(add, 5.0)


# ---- what was lost ----


def _lose_all(link: Link, ids: list[bytes]) -> None:
    link.call("DEL", STREAM)
    link.call("XADD", STREAM, "1-1", "uid", "new")


@pytest.mark.parametrize(
    ("lose", "loss"),
    [
        (_lose_all, "checkpoint_above_end"),
        (lambda link, ids: link.call("DEL", STREAM), "checkpoint_above_end"),
        (lambda link, ids: link.call("XTRIM", STREAM, "MINID", ids[3]), "checkpoint_below_start"),
        (lambda link, ids: link.call("XTRIM", STREAM, "MAXLEN", 0), "checkpoint_below_start"),
        (lambda link, ids: link.call("XDEL", STREAM, ids[1]), "checkpoint_entry_gone"),
    ],
)
def test_a_stream_that_was_lost_or_cut_stops_its_reader_until_it_is_reset(
    sqlite_outbox: Outbox,
    consumers: Callable[..., LogConsumer],
    link: Link,
    lose: Callable[[Link, list[bytes]], object],
    loss: str,
) -> None:
    ids = send(link, *"abcde")
    consumer = consumers(sqlite_outbox, batch=2)
    assert consumer.step(add) == 2
    lose(link, ids)
    for again in (consumer, consumers(sqlite_outbox)):
        with pytest.raises(LogLost, match=loss) as lost:
            again.step(add)
        assert lost.value.loss == loss
        assert "LogConsumer.reset" in str(lost.value)
    assert consumer.state()[1]["uids"] == ["a", "b"], "nothing was handled meanwhile"
    consumer.reset(b"0-0", {})
    read_all(consumer)
    left = [entry_id for entry_id, _ in link.call("XRANGE", STREAM, "-", "+")]
    assert consumer.state()[1].get("count", 0) == len(left)


@pytest.mark.parametrize(
    ("lose", "loss"),
    [
        (_lose_all, "checkpoint_above_end"),
        (lambda link, ids: link.call("DEL", STREAM), "checkpoint_above_end"),
        (lambda link, ids: link.call("XTRIM", STREAM, "MINID", ids[1]), "checkpoint_below_start"),
        (lambda link, ids: link.call("XTRIM", STREAM, "MAXLEN", 0), "checkpoint_below_start"),
    ],
)
@pytest.mark.parametrize("how", ["first start", "reset"])
def test_a_stream_that_was_lost_or_cut_before_the_first_batch_is_noticed_too(
    sqlite_outbox: Outbox,
    consumers: Callable[..., LogConsumer],
    link: Link,
    lose: Callable[[Link, list[bytes]], object],
    loss: str,
    how: str,
) -> None:
    ids = send(link, *"abcde")
    consumer = consumers(sqlite_outbox)
    if how == "first start":
        consumer.state()
        consumer._open()
    else:
        read_all(consumer)
        consumer.reset(b"0-0", {})
    assert consumer.state()[0] == before(ids[0]) == noted_id(link)
    lose(link, ids)
    for again in (consumer, consumers(sqlite_outbox)):
        with pytest.raises(LogLost, match=loss):
            again.step(add)
    assert "uids" not in consumer.state()[1]


def test_who_has_read_nothing_yet_is_kept_for_and_stops_no_trimming(
    sqlite_outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    ids = send(link, *"abc")
    consumer = consumers(sqlite_outbox)
    consumer._open()
    link.call("XGROUP", "CREATE", STREAM, "g", "$")
    facts = Trimming(link, Keys(STREAM, "g")).facts()
    assert isinstance(decide(facts), Nothing)
    assert readers(facts)[0][:3] == ("checkpoint", "one", before(ids[0]))
    assert readers(facts)[0].why == "has read nothing yet"
    read_all(consumer)
    assert consumer.state()[1]["uids"] == list("abc")


def test_what_is_cut_while_a_name_starts_for_the_first_time_is_no_loss(
    sqlite_outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is trimmed between the look for the first entry and the note of the checkpoint."""
    send(link, *"abc")
    consumer = consumers(sqlite_outbox)
    place, noted = consumer._log.place, []

    def looking(wanted: bytes) -> bytes:
        noted.append(noted_id(link))
        return place(wanted)

    monkeypatch.setattr(consumer._log, "place", looking)
    read_all(consumer)
    assert noted == [b"0-0"]
    assert consumer.state()[1]["uids"] == list("abc")


def test_a_statement_that_took_too_long_is_tried_again_and_told(
    postgres_outbox: Outbox, redis_url: str, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    """statement_timeout: SQLSTATE 57014. It is as slow as the database is now, and was no reason to end for good."""
    caplog.set_level("INFO")
    send(link, "a")
    asked = 0

    def slow_at_first(records: list[Record], state: dict[str, Any], sql: sa.Connection) -> None:
        nonlocal asked
        asked += 1
        sql.execute(sa.text("SET LOCAL statement_timeout = 20"))
        sql.execute(sa.text("SELECT pg_sleep(:s)"), {"s": 5 if asked == 1 else 0})
        add(records, state, sql)

    with LogConsumer("one", STREAM, postgres_outbox.engine, redis_url=redis_url) as consumer:
        consumer.run(slow_at_first, lambda: asked > 1)
        assert consumer.state()[1]["uids"] == ["a"]
    [told] = [record.facts for record in caplog.records if record.getMessage() == "log_consumer_retrying"]  # type: ignore[attr-defined]
    assert (told["failures"], "statement timeout" in told["problem"]) == (1, True)


def test_a_state_that_is_no_json_is_refused_and_nothing_is_stored(
    sqlite_outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    """orjson writes null for NaN: the next batch would begin with no total at all."""
    send(link, "a")
    consumer = consumers(sqlite_outbox)
    with pytest.raises(OutboxMisused, match="state has a NaN or an infinity"):
        consumer.step(lambda records, state, sql: state.update(total=float("nan")))
    assert consumer.state()[1] == {}
    read_all(consumer)
    assert consumer.state()[1]["uids"] == ["a"]


def test_a_statement_that_is_wrong_is_told_and_not_repeated(
    outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    send(link, "a")
    asked = 0

    def wrong(records: list[Record], state: dict[str, Any], sql: sa.Connection) -> None:
        nonlocal asked
        asked += 1
        sql.execute(sa.text("SELECT 1 FROM nobody_made_this"))

    with pytest.raises(sa.exc.DBAPIError, match="nobody_made_this"):
        consumers(outbox).run(wrong)
    assert asked == 1


def test_a_uid_of_any_length_is_told_apart(outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link) -> None:
    """A producer that writes to the stream itself is held to nothing; an index of the database would refuse it, again
    and again."""
    long = "".join(random.Random(1).choices(string.ascii_letters, k=9000))  # what can be compressed would fit
    send(link, long, long, long[:-1] + "-")
    consumer = consumers(outbox)
    read_all(consumer)
    uids = consumer.state()[1]["uids"]
    assert len(uids) == len(set(uids)) == 2


# ---- the note in Redis ----


def _note(link: Link, version: int, last_id: bytes, replace: str = "") -> int:
    return int(link.run("note_checkpoint", (KEYS.checkpoints,), ("one", version, last_id, replace)))


def test_a_late_note_changes_nothing(link: Link) -> None:
    assert _note(link, 10, b"5-1") == 1
    for late in (9, 10, 2):
        assert _note(link, late, b"9-9") == 0
    assert noted_id(link) == b"5-1"
    assert _note(link, 11, b"5-2") == 1
    assert _note(link, 3, b"1-1", "1") == 1, "the start of a consumer says what its SQL has"
    version, last_id, noted_ms = link.call("HGET", KEYS.checkpoints, "one").split()
    assert (version, last_id) == (b"3", b"1-1")
    assert int(noted_ms) > 1_700_000_000_000


def test_a_note_can_be_made_when_memory_is_full(link: Link) -> None:
    _note(link, 1, b"5-1")
    link.call("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(NotNow):
            link.call("SET", "more", "x")
        assert _note(link, 2, b"5-2") == 1
    finally:
        link.call("CONFIG", "SET", "maxmemory", 0)


def test_a_note_that_fails_is_made_up_for_and_never_ahead(
    sqlite_outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    ids = send(link, *"ab")
    consumer = consumers(sqlite_outbox, batch=1)
    consumer.step(add)

    def without_redis(records: list[Record], state: dict[str, Any], sql: sa.Connection) -> None:
        add(records, state, sql)
        link.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    consumer.step(without_redis)
    assert consumer.state()[0] == ids[1]
    assert noted_id(link) == ids[0], "behind SQL, not ahead of it"
    consumer.step(add)
    assert noted_id(link) == ids[1]
