"""Four handlers with the same effect - they add up a ticket's amounts in a SQL database - and the verdict of `usher
torture` on each.

::

    usher torture examples.sinks:naive  --effect examples.sinks:total --setup examples.sinks:create    # NOT SAFE
    usher torture examples.sinks:once   --effect examples.sinks:total --setup examples.sinks:create    # SAFE

The database is that of the variable EXAMPLE_DATABASE (a URL of SQLAlchemy), else the file usher-example.db in the
current folder.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from usher.common.sql.alchemy import sa
from usher.consumer.sinks.sql import SqlSink

_METADATA = sa.MetaData()
TOTALS = sa.Table(
    "totals",
    _METADATA,
    sa.Column("ticket", sa.Text, primary_key=True),
    sa.Column("total", sa.BigInteger, nullable=False),
)
SEEN = sa.Table("seen", _METADATA, sa.Column("uid", sa.Text, primary_key=True))


@functools.cache
def sink() -> SqlSink:
    """Make the sink at its first use: importing a handler's module should open nothing."""
    return SqlSink(os.environ.get("EXAMPLE_DATABASE", "sqlite:///usher-example.db"))


def create() -> None:
    """Make the tables, for ``--setup``."""
    _METADATA.create_all(sink().engine)
    sink().create_tables()


def total(ticket: str) -> int:
    """Return the effect, for ``--effect``."""
    with sink().engine.connect() as connection:
        return connection.scalar(sa.select(TOTALS.c.total).where(TOTALS.c.ticket == ticket)) or 0


def _add(transaction: Any, message: Any) -> None:
    changed = transaction.execute(
        sa.update(TOTALS)
        .where(TOTALS.c.ticket == message.ticket_id)
        .values(total=TOTALS.c.total + int(message.fields["amount"]))
    )
    if not changed.rowcount:
        transaction.execute(sa.insert(TOTALS).values(ticket=message.ticket_id, total=int(message.fields["amount"])))


def naive(message: Any) -> None:
    """Add at every call."""
    with sink().engine.begin() as transaction:
        _add(transaction, message)


def asks_first(message: Any) -> None:
    """Know repeats, but ask in one transaction and add in another: an end or a pause in between doubles or loses."""
    with sink().engine.connect() as connection:
        is_known = connection.scalar(sa.select(SEEN.c.uid).where(SEEN.c.uid == message.uid))
    if is_known or not message.still_mine():
        return
    with sink().engine.begin() as transaction:
        _add(transaction, message)
    with sink().engine.begin() as transaction:
        transaction.execute(sa.insert(SEEN).values(uid=message.uid))


def once(message: Any) -> None:
    """Add exactly once: uid, fence and effect are one transaction."""
    with sink().transaction(message) as session:
        _add(session, message)


async def once_async(message: Any) -> None:
    """Add exactly once, in an ``async def`` handler; a sync driver blocks its loop (see
    ``usher.consumer.sinks.sql_async``)."""
    once(message)
