"""The SQL sink on a real PostgreSQL with transactions that stand still at the worst places, and connections that break
at the commit."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.postgres import Postgres
from tests.process.machine import ROOT, until
from tests.sinks import Mark, accounts, add, rows
from usher import SinkNotNow, SqlSink, StaleFence

_EVERY = pytest.mark.parametrize("isolation", ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"))


@pytest.fixture
def isolation() -> str:
    return "READ COMMITTED"


@pytest.fixture
def engine(postgres_url: str, isolation: str) -> Iterator[sa.Engine]:
    made = sa.create_engine(postgres_url, isolation_level=isolation)
    with made.begin() as connection:
        connection.execute(sa.text("CREATE TABLE accounts (id TEXT PRIMARY KEY, total BIGINT NOT NULL)"))
    SqlSink(made).create_tables()
    yield made
    made.dispose()


class Execution(threading.Thread):
    """A handler on a thread, which is held inside its transaction until it may go on; ``outcome`` is what it ended
    in."""

    def __init__(self, engine: sa.Engine, mark: Mark) -> None:
        super().__init__(daemon=True)
        self._sink = SqlSink(engine)
        self._mark = mark
        self.is_inside = threading.Event()
        self.may_go_on = threading.Event()
        self.outcome: str = "running"
        self.start()

    def run(self) -> None:
        try:
            with self._sink.transaction(self._mark) as session:
                add(self._mark, session)
                self.is_inside.set()
                self.may_go_on.wait(60)
            self.outcome = "stored"
        except (StaleFence, SinkNotNow) as refused:
            self.outcome = type(refused).__name__

    def ended(self) -> str:
        self.may_go_on.set()
        self.join(60)
        return self.outcome


def waiting(engine: sa.Engine) -> int:
    """Transactions that wait for a row of somebody else."""
    with engine.connect() as connection:
        return int(connection.scalar(sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")) or 0)


@_EVERY
def test_two_zombies_that_wait_for_the_new_owner_are_refused(engine: sa.Engine, isolation: str) -> None:
    """The fence is compared after the wait, with what the new owner has committed: a look before it would have let them
    in."""
    owner = Execution(engine, Mark("T", "m2", 30, 100))
    assert owner.is_inside.wait(60)
    zombies = [Execution(engine, Mark("T", "m1", 10)), Execution(engine, Mark("T", "m2", 20, 100))]
    until(lambda: waiting(engine) == 2, 60, "both zombies wait for the row of their ticket")
    assert owner.ended() == "stored"
    outcomes = {zombie.ended() for zombie in zombies}
    assert outcomes <= {"StaleFence", "SinkNotNow"}
    if isolation == "READ COMMITTED":
        assert outcomes == {"StaleFence"}
    assert accounts(engine) == {"T": 100}
    for mark in (Mark("T", "m1", 10), Mark("T", "m2", 20, 100)):  # and when they try again
        with pytest.raises(StaleFence):
            SqlSink(engine).exactly_once(add)(mark)


@_EVERY
def test_of_two_zombies_that_come_first_each_stores_its_effect_once_and_the_new_owner_finds_it(
    engine: sa.Engine,
) -> None:
    """What commits before the new owner comes is no harm: it is in order, and its uid is there."""
    first = Execution(engine, Mark("T", "m1", 10))
    assert first.is_inside.wait(60)
    second, owner = Execution(engine, Mark("T", "m1", 20)), Execution(engine, Mark("T", "m1", 30))
    until(lambda: waiting(engine) == 2, 60, "second zombie and new owner wait")
    assert first.ended() == "stored"
    second.ended()
    owner.ended()
    SqlSink(engine).exactly_once(add)(Mark("T", "m1", 30))  # whoever was told "not now" comes again
    assert accounts(engine) == {"T": 1}
    with pytest.raises(StaleFence):
        SqlSink(engine).exactly_once(add)(Mark("T", "m2", 29))


def test_a_deadlock_between_two_tickets_is_not_now_for_one_of_them_and_both_effects_are_stored_once(
    postgres_url: str, engine: sa.Engine
) -> None:
    quick = sa.create_engine(postgres_url, connect_args={"options": "-c deadlock_timeout=50ms"})
    both_inside = threading.Barrier(2)
    first_try = [True, True]
    refused = []

    def run(number: int) -> None:
        mark = Mark(f"T{number}", "m1", 1)
        while True:
            try:
                with SqlSink(quick).transaction(mark) as session:
                    for at, shared in enumerate(("x", "y") if number else ("y", "x")):
                        add(Mark(shared, "", 1), session)
                        if at == 0 and first_try[number]:
                            first_try[number] = False
                            both_inside.wait(60)
                return
            except SinkNotNow as not_now:
                refused.append(str(not_now))

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert any("40P01" in told for told in refused)
    assert accounts(engine) == {"x": 2, "y": 2}
    quick.dispose()


_STANDS_STILL = """
import os, signal, sys
import sqlalchemy as sa
from usher.consumer.sinks.sql import SqlSink
from tests.sinks import Mark, add

engine = sa.create_engine(sys.argv[1], connect_args={"options": "-c idle_in_transaction_session_timeout=1s"})
with SqlSink(engine).transaction(Mark("T", "m1", 10)) as session:
    add(Mark("T", "m1", 10), session)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_stopped_process_inside_its_transaction_does_not_hold_its_ticket_for_ever(
    engine: sa.Engine, postgres_url: str, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _STANDS_STILL, postgres_url], cwd=ROOT, stdout=log, stderr=log
        )
    try:
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, 60, "it stands still")
        SqlSink(engine).exactly_once(add)(Mark("T", "m1", 11))  # waits until the server has ended the other's session
        assert accounts(engine) == {"T": 1}
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 1
        assert "SinkNotNow" in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait(20)
    assert accounts(engine) == {"T": 1}


# ---- broken connections ----


class BreakAtCommit:
    """Stands between a client and PostgreSQL's socket; at each COMMIT it forwards, or drops, the command, and breaks
    the connection."""

    def __init__(self, upstream: str, folder: Path) -> None:
        self._upstream = upstream
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / ".s.PGSQL.5432"))
        self._listener.listen()
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self.mode = "whole"  # or before: the COMMIT never arrives; after: it does, and its answer does not
        self.broken = 0
        self._run(self._accept)

    def _run(self, target: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=target, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._upstream)
            self._sockets += [client, server]
            self._run(self._forward, client, server, True)
            self._run(self._forward, server, client, False)

    def _forward(self, source: socket.socket, target: socket.socket, is_client: bool) -> None:
        commits = False
        with contextlib.suppress(OSError):
            while chunk := source.recv(65_536):
                commits = is_client and b"COMMIT" in chunk and self.mode != "whole"
                if commits and self.mode == "before":
                    self.broken += 1
                    break
                if commits:
                    self.broken += 1
                    source.shutdown(socket.SHUT_WR)  # the client hears nothing any more
                target.sendall(chunk)
                if commits:
                    break
        if not commits or self.mode == "before":
            for sock in (source, target):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(20)


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_connection_that_breaks_at_the_commit_is_not_now_and_the_next_try_does_it_once(
    postgres: Postgres, postgres_url: str, tmp_path_short: Path, mode: str
) -> None:
    upstream = next(Path(postgres_url.partition("host=")[2]).glob(".s.PGSQL.*[0-9]"))
    between = BreakAtCommit(str(upstream), tmp_path_short)
    direct = sa.create_engine(postgres_url)
    far = sa.create_engine(f"{postgres_url.partition('host=')[0]}host={tmp_path_short}")
    sink = SqlSink(far)
    sink.create_tables()
    with direct.begin() as connection:
        connection.execute(sa.text("CREATE TABLE accounts (id TEXT PRIMARY KEY, total BIGINT NOT NULL)"))
    handle = sink.exactly_once(add)
    handle(Mark("T", "m0", 1))
    between.mode = mode
    with pytest.raises(SinkNotNow, match="may or may not have happened"):
        handle(Mark("T", "m1", 1))
    assert between.broken == 1
    between.mode = "whole"
    if mode == "after":
        until(lambda: rows(direct, "usher_uids") == 2, 60, "the server has committed")
    assert rows(direct, "usher_uids") == (2 if mode == "after" else 1)
    handle(Mark("T", "m1", 1))
    assert accounts(direct) == {"T": 2}
    for engine in (direct, far):
        engine.dispose()
    between.close()


def test_a_statement_timeout_while_a_zombie_holds_the_ticket_is_not_the_fault_of_the_message(
    engine: sa.Engine, postgres_url: str
) -> None:
    """Its handler has not begun; a few of these, and it would be a dead letter."""
    hasty = SqlSink(sa.create_engine(postgres_url, connect_args={"options": "-c statement_timeout=50ms"}))
    handle = hasty.exactly_once(add)
    with SqlSink(engine).transaction(Mark("T", "a", 1)) as session:
        add(Mark("T", "a", 1), session)
        with pytest.raises(SinkNotNow, match="statement timeout"):
            handle(Mark("T", "b", 2))
    handle(Mark("T", "b", 2))
    assert accounts(engine) == {"T": 2}

    @hasty.exactly_once
    def slow(mark: Mark, session: Session) -> None:
        session.execute(sa.text("SELECT pg_sleep(1)"))

    with pytest.raises(sa.exc.OperationalError):  # this may be, and would be the same for ever
        slow(Mark("T", "c", 2))
    hasty.engine.dispose()


def test_a_database_that_is_away_is_not_now(tmp_path_short: Path) -> None:
    sink = SqlSink(f"postgresql+psycopg://postgres@/x?host={tmp_path_short}")
    with pytest.raises(SinkNotNow, match="cannot be reached"), sink.transaction(Mark("T", "a", 1)):
        pass
    sink.engine.dispose()
