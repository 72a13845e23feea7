"""A table of the application's own as outbox: a trigger stages what is inserted there (take_*.sql). Streamers, their
order and what they refuse stay as they are."""

from __future__ import annotations

import hashlib
import re
import string
from typing import NamedTuple

from usher.common.base.errors import StartRefused
from usher.common.outbox.rows import FIELDS
from usher.common.outbox.sql_files import named, queries
from usher.common.sql.alchemy import sa

_PARTS = ("ticket_id", *FIELDS)
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_TRIGGER = "usher_outbox_take"


class TakenTable(NamedTuple):
    """A table whose rows are taken, its column for each part of a record, and whether its rows are kept."""

    table: str
    columns: dict[str, str]
    keeps: bool

    @property
    def trigger(self) -> str:
        """Return the trigger's name, which tells these settings from others."""
        return f"{_TRIGGER}_{hashlib.sha256(repr(self).encode()).hexdigest()[:8]}"


def taken_table(table: str, columns: str, keeps: bool) -> TakenTable | None:
    """Read the settings; None without a table. Raises StartRefused.

    >>> taken_table("shop.events", "uid=id, ticket_id=order_id, action=kind, object=kind, data=body", False).columns
    {'uid': 'id', 'ticket_id': 'order_id', 'action': 'kind', 'object': 'kind', 'data': 'body'}
    """
    if not table:
        return None
    if not re.fullmatch(rf"({_NAME}\.)?{_NAME}", table):
        raise StartRefused(f"USHER_OUTBOX_FROM={table!r} is no name of a table (table, or schema.table)")
    pairs = [pair.strip().partition("=")[::2] for pair in columns.split(",")]
    given = {part.strip(): column.strip() for part, column in pairs}
    if (
        len(given) < len(pairs)
        or set(given) != set(_PARTS)
        or not all(re.fullmatch(_NAME, at) for at in given.values())
    ):
        raise StartRefused(
            f"USHER_OUTBOX_COLUMNS={columns!r}: name a column for each of {', '.join(_PARTS)}, once: uid=id,"
            "ticket_id=aggregateid,..."
        )
    return TakenTable(table, given, keeps)


def installed(connection: sa.Connection, taken: TakenTable) -> list[str]:
    """Return the names of the triggers that take rows of the table now. Raises what SQLAlchemy raises."""
    dialect = connection.dialect.name
    table = _quoted(taken.table, dialect) if dialect == "postgresql" else taken.table.rpartition(".")[2]
    return list(connection.scalars(sa.text(queries(dialect)["takers"]), {"table": table}))


def take(connection: sa.Connection, taken: TakenTable, order_by: str) -> int:
    """Have rows taken from now on, and, where ``order_by`` names a column, those that are there already in its order,
    in the transaction of ``connection``. Return how many are there and were never taken. Raises StartRefused, and what
    SQLAlchemy raises for a table or column that is not there."""
    if order_by and not re.fullmatch(_NAME, order_by):
        raise StartRefused(f"--take-by {order_by!r} is no name of a column")
    dialect = connection.dialect.name
    if dialect == "mysql" and (order_by or not taken.keeps):
        raise StartRefused(
            "MySQL's triggers cannot delete from their own table, and making one commits: say"
            " USHER_OUTBOX_FROM_ROWS=keep, and leave --take-by out"
        )
    is_postgres = dialect == "postgresql"
    table, schema = _quoted(taken.table, dialect), ""
    if is_postgres:
        connection.exec_driver_sql(f"LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE")
        schema = str(connection.exec_driver_sql("SELECT current_schema()").scalar())
    elif dialect == "mysql":  # until the end of the session
        connection.exec_driver_sql(f"LOCK TABLES {table} WRITE, {table} AS r WRITE")
    # A trigger would miss a column only when it fires; and SQLite takes a quoted name that is none for text, but for r.
    columns = ", ".join(f"r.{_quoted(name, dialect)}" for name in (*taken.columns.values(), *filter(None, (order_by,))))
    connection.exec_driver_sql(f"SELECT {columns} FROM {table} AS r LIMIT 0")
    before = installed(connection, taken)
    if before and order_by:
        raise StartRefused(f"--take-by: rows of {taken.table} are taken already; what is there now was left on purpose")
    if before == [taken.trigger]:
        return 0
    for name in before:
        connection.exec_driver_sql(f"DROP TRIGGER {_quoted(name, dialect)}" + f" ON {table}" * is_postgres)
    sql = _statements(taken, dialect, schema, order_by)
    connection.exec_driver_sql(sql["trigger"])
    if order_by:
        connection.exec_driver_sql(sql["take_all"])
        if not taken.keeps and not is_postgres:
            connection.exec_driver_sql(f"DELETE FROM {table}")
    elif not before:
        return int(connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar() or 0)
    return 0


def _statements(taken: TakenTable, dialect: str, schema: str, order_by: str) -> dict[str, str]:
    """Return the SQL that has rows taken, and the one that takes those that are there. ``schema``: the outbox's, in
    PostgreSQL."""
    table = _quoted(taken.table, dialect)
    names = {f"{part}_name": column for part, column in taken.columns.items()}
    names |= {part: _quoted(column, dialect) for part, column in taken.columns.items()}
    names |= {"table": table, "table_name": taken.table, "trigger": taken.trigger, "schema": _quoted(schema, dialect)}
    row = "r" if dialect == "postgresql" else "NEW"
    names["remove"] = "" if taken.keeps else f"DELETE FROM {table} WHERE {names['uid']} = {row}.{names['uid']};"
    parts = {name: string.Template(part) for name, part in named(f"take_{dialect}.sql", dialect).items()}
    order = f"ORDER BY {_quoted(order_by, dialect)}"
    of_one = parts["staged"].safe_substitute(names, row="NEW", rest="", order="")
    rest = f", r.{_quoted(order_by, dialect)} AS _at FROM {table} AS r"
    all_of = parts["staged"].safe_substitute(names, row="r", rest=rest, order="ORDER BY _at")
    staged = {"trigger": of_one, "take_all": all_of}
    return {name: parts[name].substitute(names, staged=staged[name], order=order) for name in staged if name in parts}


def _quoted(name: str, dialect: str) -> str:
    mark = "`" if dialect == "mysql" else '"'
    return ".".join(f"{mark}{part}{mark}" for part in name.split("."))
