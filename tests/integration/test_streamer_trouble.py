"""What a streamer does when Redis or the database is not what it was a moment ago: nothing is removed that may be lost,
and a streamer that cannot do its work lets another one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.outboxes import STREAM, Hand, Outbox, uids, until
from usher.common.base.errors import NotNow, RedisTrouble, SqlTrouble
from usher.common.outbox.rows import BATCH_BYTES, ROW_BYTES
from usher.common.outbox.store import LogRecord, open_engine
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.embedded import EmbeddedRedis
from usher.master.settings import StreamerSettings
from usher.master.streamer import program as streamer
from usher.master.streamer.program import StreamerProgram

# ---- Redis loses what it has answered ----


@contextlib.contextmanager
def _cannot_remove(hand: Hand) -> Iterator[None]:
    """The database goes away between sending and removing."""
    outbox = hand.streamer._outbox
    remove = outbox.remove

    def away(sent: list[tuple[int, str]]) -> None:
        raise SqlTrouble("away")

    outbox.remove = away  # type: ignore[method-assign]
    yield
    outbox.remove = remove  # type: ignore[method-assign]


def test_rows_that_were_sent_to_a_redis_that_lost_them_are_sent_again(
    sqlite_outbox: Outbox, hands: Callable[..., Hand], tmp_path_short: Path
) -> None:
    written = sqlite_outbox.stage_many(3)
    with EmbeddedRedis(tmp_path_short / "a", port=None, durable=False) as first:
        hand = hands(sqlite_outbox, first.url)
        with _cannot_remove(hand), pytest.raises(SqlTrouble):
            hand.turn()
    with EmbeddedRedis(tmp_path_short / "a", port=None, durable=False) as again:
        assert again.url == first.url
        until(lambda: _elected(hand))
        until(lambda: _turned(hand) and sqlite_outbox.store.waiting()[0] == 0)
        with Link(again.url, "test") as link:
            assert uids(link) == written


def _elected(hand: Hand) -> bool:
    """Under an epoch of its own: the one of before is lost as well."""
    with contextlib.suppress(RedisTrouble):
        hand.lead.lost(hand.lead.epoch or 0)
        return hand.elect() is not None
    return False


def _turned(hand: Hand) -> bool:
    with contextlib.suppress(RedisTrouble):
        hand.turn()
        return True
    return False


@pytest.mark.parametrize("when", ["before the rows are removed", "while it waits for a replica"])
def test_a_redis_that_is_made_a_replica_has_what_the_other_one_has_so_the_rows_stay(
    sqlite_outbox: Outbox, hands: Callable[..., Hand], tmp_path_short: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The connection survives that, the entries do not."""
    monkeypatch.setattr(streamer, "_DURABLE_MS", 20)
    written = sqlite_outbox.stage_many(3)
    waits = when == "while it waits for a replica"
    with (
        EmbeddedRedis(tmp_path_short / "a", durable=False) as first,
        EmbeddedRedis(tmp_path_short / "b", durable=False) as second,
    ):
        hand, link = hands(sqlite_outbox, first.url, outbox_wait_replicas=1 if waits else 0), Link(first.url, "test")
        if waits:
            emit = hand.streamer.emit
            hand.streamer.emit = lambda *given: (emit(*given), _demote(link, second.url))[0]  # type: ignore[method-assign,func-returns-value]
        else:
            with _cannot_remove(hand), pytest.raises(SqlTrouble):
                hand.turn()
            _demote(link, second.url)
        with pytest.raises(NotNow) as trouble:
            hand.turn()
        assert trouble.value.kind == "READONLY"
        assert sqlite_outbox.store.waiting()[0] == 3
        until(lambda: link.call("EXISTS", STREAM) == 0, "it never became like the other one")
        link.call("REPLICAOF", "NO", "ONE")
        if waits:
            hand.streamer.emit = emit  # type: ignore[method-assign]
        until(lambda: _elected(hand))
        until(lambda: _turned(hand) and uids(link) == written)
        assert sqlite_outbox.store.waiting()[0] == (3 if waits else 0)
        link.close()


def _demote(link: Link, to_url: str) -> None:
    link.call("CONFIG", "SET", "masterauth", to_url.partition("://:")[2].partition("@")[0])
    link.call("REPLICAOF", "127.0.0.1", to_url.rpartition(":")[2].partition("/")[0])


def test_what_redis_refuses_for_another_reason_is_told_and_not_sent_again_and_again(
    sqlite_outbox: Outbox, hands: Callable[..., Hand], link: Link
) -> None:
    """Its append-only file is off: nobody can say when what was sent is on disk."""
    written = sqlite_outbox.stage_many(3)
    hand = hands(sqlite_outbox, outbox_wait_aof=True)
    for _ in range(3):
        with pytest.raises(CommandRefused, match="WAITAOF"):
            hand.turn()
    assert (uids(link), sqlite_outbox.store.waiting()[0]) == (written, 3)


# ---- the database ----


def _program(url: str, redis_url: str, lease_s: float = 1.0, poll_s: float = 0.5) -> StreamerProgram:
    settings = StreamerSettings(outbox_url=url, ticket_stream=STREAM)
    program = StreamerProgram(settings, redis_url, lease_s=lease_s)
    program.streamer.poll_s = poll_s
    return program


def test_a_streamer_whose_database_fails_hands_over_to_one_that_has_a_better_way_there(
    postgres_outbox: Outbox, redis_url: str, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    role, schema = f"role_{os.urandom(4).hex()}", postgres_outbox.url.rpartition("%3D")[2]
    with postgres_outbox.engine.begin() as connection:
        connection.execute(sa.text(f"CREATE ROLE {role} LOGIN SUPERUSER"))
    made = sa.engine.make_url(postgres_outbox.url).set(username=role).render_as_string(hide_password=False)
    lease_s = 3.0  # longer than the pauses between two turns that fail
    programs = [_program(made, redis_url, lease_s=lease_s)]
    try:
        programs[0].start()
        first = postgres_outbox.stage_many(3)
        until(lambda: uids(link) == first and postgres_outbox.store.waiting()[0] == 0)
        with postgres_outbox.engine.begin() as connection:
            connection.execute(sa.text(f"ALTER ROLE {role} NOSUPERUSER"))
            connection.execute(sa.text(f"REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {role}"))
        programs.append(_program(postgres_outbox.url, redis_url, lease_s=lease_s))
        programs[1].start()
        second = postgres_outbox.stage_many(3)
        until(lambda: postgres_outbox.store.waiting()[0] == 0, "the one that cannot read kept its lease")
        assert uids(link) == [*first, *second]
        assert caplog.text.count("leadership_not_renewed") == 1
    finally:
        for program in programs:
            program.stop()
        with postgres_outbox.engine.begin() as connection:
            connection.execute(sa.text(f"DROP ROLE {role}"))


def test_rows_that_have_got_the_ids_of_sent_ones_after_a_failover_are_sent_too(
    postgres_outbox: Outbox, hands: Callable[..., Hand], link: Link
) -> None:
    """A standby was promoted that had not got the last commits, nor how far the sequence was."""
    lost = postgres_outbox.stage_many(3)
    hand = hands(postgres_outbox)
    with _cannot_remove(hand), pytest.raises(SqlTrouble):
        hand.turn()
    with postgres_outbox.engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM staged_log_records"))
        connection.execute(sa.text("ALTER SEQUENCE staged_log_records_id_seq RESTART"))
    written = postgres_outbox.stage_many(3)
    hand.turn(3)
    assert uids(link) == [*lost, *written]
    assert postgres_outbox.store.waiting() == (0, 0)


@pytest.mark.parametrize("standby", [False, True])
def test_a_database_that_does_not_answer_one_streamer_is_asked_by_its_standby_or_by_the_next_one(
    postgres_outbox: Outbox, redis_url: str, link: Link, monkeypatch: pytest.MonkeyPatch, standby: bool
) -> None:
    """Its server process is stopped: the kernel still acknowledges what is sent to it. Without a standby the streamer
    ends, for its supervisor to start it again."""
    monkeypatch.setattr(streamer, "_PATIENCE_S", 600.0 if standby else 1.0)
    programs = [_program(postgres_outbox.url, redis_url)]
    with programs[0].streamer._outbox._single.connect() as of_its_pool:
        stopped = of_its_pool.scalar(sa.text("SELECT pg_backend_pid()"))
    try:
        programs[0].start()
        first = postgres_outbox.stage_many(3)
        until(lambda: uids(link) == first and postgres_outbox.store.waiting()[0] == 0)
        os.kill(stopped, signal.SIGSTOP)
        second = postgres_outbox.stage_many(3)
        if not standby:
            assert programs[0].alive
            until(lambda: not programs[0].alive and "has not answered" in programs[0].liveness().stalled)
        programs.append(_program(postgres_outbox.url, redis_url))
        programs[1].start()
        until(lambda: postgres_outbox.store.waiting()[0] == 0, "it hangs")
        assert uids(link) == [*first, *second]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
        for program in programs:
            program.stop()


def test_a_row_that_somebody_holds_is_sent_once_and_its_streamer_keeps_the_lease(
    postgres_outbox: Outbox, redis_url: str, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    """A COMMIT that waits for a synchronous standby holds rows too. Each streamer in turn sent the batch again, and
    left another connection there."""
    written = postgres_outbox.stage_many(3)
    lease_s = 3.0  # longer than the pauses between two turns that fail
    programs = [_program(postgres_outbox.url, redis_url, lease_s=lease_s) for _ in range(2)]
    try:
        with postgres_outbox.engine.begin() as holder:
            holder.execute(sa.text("SELECT id FROM staged_log_records LIMIT 1 FOR UPDATE"))
            for program in programs:
                program.start()
            until(lambda: len(uids(link)) > 3 or sum(program.streamer.failed_turns for program in programs) >= 5)
        until(lambda: postgres_outbox.store.waiting()[0] == 0)
        assert uids(link) == written
        assert "leadership_not_renewed" not in caplog.text
    finally:
        for program in programs:
            program.stop()


def test_a_server_that_is_gone_without_a_word_is_noticed(postgres_outbox: Outbox) -> None:
    raw = postgres_outbox.engine.raw_connection()
    told = raw.driver_connection.info.get_parameters()  # type: ignore[union-attr]
    raw.close()
    assert {"connect_timeout", "tcp_user_timeout", "keepalives_idle"} <= set(told)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = open_engine(f"postgresql+psycopg://u@127.0.0.1:{silent.getsockname()[1]}/d?connect_timeout=2", "test")
        with pytest.raises(sa.exc.OperationalError, match="timeout"):
            engine.connect()
        engine.dispose()


def test_an_idle_streamer_looks_often_enough_to_hold_its_lease(
    sqlite_outbox: Outbox, redis_url: str, link: Link
) -> None:
    program = _program(sqlite_outbox.url, redis_url, poll_s=60)
    try:
        program.start()
        until(lambda: program.streamer.turns >= 12)
        written = sqlite_outbox.stage_many(3)
        until(lambda: uids(link) == written)
        assert program._elector.elections == 1
    finally:
        program.stop()


# ---- rows ----


def test_rows_that_are_refused_do_not_make_the_batches_behind_them_smaller(
    sqlite_outbox: Outbox, hands: Callable[..., Hand], link: Link
) -> None:
    with sqlite_outbox.engine.begin() as connection:
        for _ in range(8):
            connection.execute(
                sa.text("INSERT INTO staged_log_records (ticket_id, action, object) VALUES ('', 'a', 'o')")
            )
    written = sqlite_outbox.stage_many(12)
    hands(sqlite_outbox, batch_rows=10).turn(2)
    assert uids(link) == written
    assert sqlite_outbox.store.waiting() == (0, 8)


@pytest.mark.parametrize("column", ["uid", "ticket_id", "action", "object", "data"])
def test_a_row_is_measured_with_all_its_columns(outbox: Outbox, column: str) -> None:
    outbox.stage_odd(**{column: '"' + "é" * (ROW_BYTES // 2 - 200) + '"'})
    with pytest.raises(sa.exc.DBAPIError, match="too large to become a message"):
        outbox.stage_odd(**{column: '"' + "é" * (ROW_BYTES // 2) + '"'})
    assert outbox.store.waiting() == (1, 0)


def test_a_batch_is_bounded_in_bytes_whatever_column_they_are_in(outbox: Outbox) -> None:
    quarter = BATCH_BYTES // 4
    written = outbox.stage(
        *(LogRecord("T", "a" * quarter, "o") for _ in range(3)),
        *(LogRecord("T", "a", "o", "x" * quarter) for _ in range(3)),
        LogRecord("T", "a", "o"),
    )
    batch = outbox.store.batch(1000)
    assert [row.uid for row in batch] == written[:4]
    outbox.store.remove([(row.id, row.uid) for row in batch])
    assert [row.uid for row in outbox.store.batch(1000)] == written[4:]
