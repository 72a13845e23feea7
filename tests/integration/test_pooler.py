"""Behind a pooler (PgBouncer) that gives each transaction another connection of the server: nothing may be left on one
that is another's next."""

from __future__ import annotations

import sqlalchemy as sa

from tests.outboxes import Outbox
from tests.sinks import Mark, add
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
