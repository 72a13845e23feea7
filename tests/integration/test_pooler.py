"""Behind a pooler (PgBouncer) that gives each transaction another connection of the server: nothing may be left on one
that is another's next."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.outboxes import Outbox
from tests.sinks import Mark, add
from usher.common.outbox.store import CommitNotifier
from usher.consumer.sinks.sql import SqlSink

#: Messages of one connection; psycopg prepares what it sends for the sixth time.
_OFTEN = 8
_PREPARED = "SELECT count(*) FROM pg_prepared_statements"


def test_a_streamer_prepares_nothing(postgres_outbox: Outbox) -> None:
    for _ in range(_OFTEN):
        postgres_outbox.stage_many(1)
        [row] = postgres_outbox.store.batch(10)
        postgres_outbox.store.remove([(row.id, row.uid)])
    with postgres_outbox.store._engine.connect() as connection:
        assert connection.scalar(sa.text(_PREPARED)) == 0


def test_a_sink_made_of_a_url_prepares_nothing(postgres_url: str) -> None:
    sink = SqlSink(postgres_url)
    sink.create_tables()
    with sink.engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE accounts (id TEXT PRIMARY KEY, total BIGINT NOT NULL)"))
    handle = sink.exactly_once(add)
    for n in range(_OFTEN):
        handle(Mark("T", str(n), 1))
    with sink.engine.connect() as connection:
        assert connection.scalar(sa.text(_PREPARED)) == 0
        told = connection.connection.driver_connection.info.get_parameters()  # type: ignore[union-attr]
        assert {"connect_timeout", "tcp_user_timeout"} <= set(told), "a server that is gone without a word is noticed"
    sink.engine.dispose()


@pytest.fixture
def pooler(postgres_outbox: Outbox, tmp_path_short: Path) -> Iterator[str]:
    """URL of the outbox through something that, as a pooler, tells a process id of its own."""
    url = sa.engine.make_url(postgres_outbox.url)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path_short / ".s.PGSQL.5432"))
    server.listen()
    threading.Thread(target=_serve, args=(server, f"{url.query['host']}/.s.PGSQL.5432"), daemon=True).start()
    yield url.update_query_dict({"host": str(tmp_path_short)}).render_as_string(hide_password=False)
    server.shutdown(socket.SHUT_RDWR)  # ends the wait for who comes next; to close it would not
    server.close()


def _serve(server: socket.socket, behind: str) -> None:
    while True:
        try:
            client = server.accept()[0]
        except OSError:
            return
        threading.Thread(target=_join, args=(client, behind), daemon=True).start()


def _join(client: socket.socket, behind: str) -> None:
    """Until both ends are through."""
    with client, socket.socket(socket.AF_UNIX) as to:
        to.connect(behind)
        back = threading.Thread(target=_pass_on, args=(to, client), daemon=True)
        back.start()
        _pass_on(client, to)
        back.join()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    try:
        while octets := one.recv(65_536):
            other.sendall(re.sub(rb"K\0\0\0\x0c....", b"K\0\0\0\x0c\0\0\0\x07", octets, count=1, flags=re.DOTALL))
    except OSError:
        pass
    for sock in (one, other):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # who waits at the other end is told; it is closed by whoever opened it


def test_a_bell_behind_a_pooler_does_not_listen_and_says_so_once(
    postgres_outbox: Outbox, pooler: str, caplog: pytest.LogCaptureFixture
) -> None:
    """LISTEN would stay on a connection of the server that is another client's next, and psycopg keeps what nobody has
    asked for."""
    engine = sa.create_engine(pooler)
    bell = CommitNotifier(engine)
    bell.rings(0.0)
    began_s = time.monotonic()
    assert not bell.rings(0.2)
    assert time.monotonic() - began_s >= 0.2
    assert caplog.text.count("commit_notifications_unavailable") == 1
    assert postgres_outbox.scalar("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'") == 0
    bell.close()
    engine.dispose()
