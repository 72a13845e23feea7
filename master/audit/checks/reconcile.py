"""The reconciler: compare the running totals of log consumers with canonical data.

Canonical is the archive (every message once, by uid, up to the consumer's checkpoint), or a query in the application's
database. The tables are those of the outbox: ``checkpoints`` (name, stream, last_id, version) and ``consumer_states``
(name, stream, state as JSON). A difference is shown as (name, total, last id); ``apply`` writes it, in one transaction
per consumer and only if its checkpoint has not moved since: a running consumer sees another version, and reads its
state again.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import orjson

from usher.common.base.errors import StartRefused
from usher.common.base.extras import how_to_install
from usher.common.base.text import parse_json, pluralize
from usher.common.outbox.sql_files import queries
from usher.common.protocol.stream_id import rank
from usher.master.audit.archive.commits import DataSet, spark_place

_SCALE = 9


@dataclass(frozen=True)
class ConsumerState:
    """The state of a log consumer in its tables. ``total`` None: its state has no such number."""

    name: str
    stream: str
    last_id: str
    version: int
    state: dict[str, Any]
    total: Decimal | None


@dataclass(frozen=True)
class Difference:
    """A consumer's total beside the correct one. ``wanted`` None: the correct one is unknown, and ``why``."""

    name: str
    last_id: str
    total: Decimal | None
    wanted: Decimal | None
    why: str = ""

    @property
    def agrees(self) -> bool:
        return self.wanted is not None and self.total == self.wanted


@contextlib.contextmanager
def _connected(url: str, setting: str) -> Iterator[Any]:
    """Open a transaction. Raises StartRefused, naming ``setting``."""
    try:
        import sqlalchemy as sa
    except ImportError as missing:
        raise StartRefused(f"the reconciler needs SQLAlchemy: {how_to_install('sql')}") from missing
    try:
        engine = sa.create_engine(url)
    except (sa.exc.ArgumentError, ModuleNotFoundError) as wrong:
        raise StartRefused(f"{setting} cannot be used: {wrong}") from wrong
    try:
        with engine.begin() as connection:
            yield connection
    except sa.exc.SQLAlchemyError as failed:
        raise StartRefused(f"{setting}: {str(failed).splitlines()[0]}") from failed
    finally:
        engine.dispose()


def read_states(url: str, stream: str, key: str) -> list[ConsumerState]:
    """Return every log consumer of a stream. ``key``: the number in its state that is compared. Raises StartRefused."""
    import sqlalchemy as sa

    with _connected(url, "--states-url") as sql:
        rows = sql.execute(
            sa.text(
                "SELECT c.name, c.stream, c.last_id, c.version, s.state FROM checkpoints c LEFT JOIN consumer_states s "
                "ON s.name = c.name AND s.stream = c.stream WHERE c.stream = :stream ORDER BY c.name"
            ),
            {"stream": stream},
        ).all()
    found = []
    for name, its_stream, last_id, version, stored in rows:
        try:
            state = stored if isinstance(stored, dict) else parse_json(stored or "{}")
        except ValueError as unreadable:
            raise StartRefused(
                f"--states-url: the state of {name} in consumer_states is not JSON: {unreadable}"
            ) from unreadable
        found.append(ConsumerState(name, its_stream, last_id, version, state, number_of(state.get(key))))
    return found


def number_of(value: Any) -> Decimal | None:
    """Return a stored number, exactly; None for anything else."""
    try:
        return (
            None
            if value is None or isinstance(value, bool)
            else Decimal(str(value)).quantize(Decimal(1).scaleb(-_SCALE))
        )
    except InvalidOperation:
        return None


def totals_of_archive(
    spark: Any, entries: DataSet, value: str, kind: str, states: Sequence[ConsumerState]
) -> list[Decimal]:
    """Return the sum of ``value`` for each consumer, over every message up to its checkpoint, each uid once. Raises
    StartRefused when the archive is not as it was written.

    ``value``: a field, or ``data.name`` for a number inside the JSON of field ``data``. ``kind``: only messages whose
    field ``object`` is this; "" takes all.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    files, number = entries.complete()
    if not files:
        return [Decimal(0)] * len(states)
    try:
        rows = spark.read.parquet(*map(spark_place, files))
        if (there := rows.count()) != number:
            raise StartRefused(
                f"the archive {entries.folder} has {there:,} rows, and its commits have {number:,}: put its files"
                " back from a copy"
            )
        return _totals(rows, value, kind, states)
    except (PySparkException, Py4JJavaError) as failed:
        told = " ".join(str(failed).splitlines()[:2])
        raise StartRefused(f"the archive {entries.folder} cannot be read: {told[:500]}") from failed


def _totals(rows: Any, value: str, kind: str, states: Sequence[ConsumerState]) -> list[Decimal]:
    from pyspark.sql import functions as F

    if kind:
        rows = rows.filter(F.col("fields")["object"] == kind)
    field, _, inside = value.partition(".")
    raw = F.get_json_object(F.col("fields")[field], f"$.{inside}") if inside else F.col("fields")[field]
    uid = F.expr("coalesce(nullif(fields['uid'], ''), id)")  # an empty uid counts as none
    amount = F.expr(f"try_cast(amount as decimal(38,{_SCALE}))")
    text = F.col("fields")[field]
    is_no_json = text.isNotNull() & F.from_json(text, "map<string,string>").isNull() if inside else F.lit(False)
    first = F.min(F.struct("ms", "seq", "amount", "is_no_json"))
    once = (
        rows.select(uid.alias("uid"), "ms", "seq", raw.alias("amount"), is_no_json.alias("is_no_json"))
        .groupBy("uid")
        .agg(first.alias("first"))
        .select("first.*")
    )
    is_read = [F.struct("ms", "seq") <= _place(state.last_id) for state in states]
    sums = [F.sum(F.when(so_far, amount)).alias(f"of{at}") for at, so_far in enumerate(is_read)]
    unreadable = F.col("is_no_json") | F.col("amount").isNotNull() & amount.isNull()
    wrong = F.when(functools.reduce(operator.or_, is_read, F.lit(False)) & unreadable, F.struct("ms", "seq"))
    row = once.agg(*sums, F.count(wrong).alias("wrong"), F.min(wrong).alias("first")).first()
    if row["wrong"]:  # they would count as 0
        raise StartRefused(
            f"--value: {value} is no number in {pluralize(row['wrong'], 'message')}, the first of them"
            f" {row['first'].ms}-{row['first'].seq}: choose the right ones with --object, or compare with"
            " --source-query"
        )
    return [Decimal(row[f"of{at}"] or 0).quantize(Decimal(1).scaleb(-_SCALE)) for at in range(len(states))]


def _place(entry_id: str) -> Any:
    from pyspark.sql import functions as F

    reached = rank(entry_id.encode())
    parts = {"ms": reached >> 64, "seq": reached & (1 << 64) - 1}
    return F.struct(*(F.lit(part).cast("bigint").alias(name) for name, part in parts.items()))


def total_of_query(url: str, query: str) -> Decimal:
    """Return the one number that a query answers. Raises StartRefused, also while rows wait in the outbox of that
    database: the query's data has them and no log consumer has, so they would be counted once too often."""
    import sqlalchemy as sa

    with _connected(url, "--source-url") as sql:
        number = number_of(sql.execute(sa.text(query)).scalar() or 0)
        staged = (
            sql.scalar(sa.text("SELECT count(*) FROM staged_log_records"))
            if sa.inspect(sql).has_table("staged_log_records")
            else 0
        )
    if staged:
        raise StartRefused(
            f"--source-url: {staged:,} rows of its outbox are not in the stream yet: let `usher streamer` send them,"
            " and try again"
        )
    if number is None:
        raise StartRefused("--source-query must answer one number, for example: SELECT sum(distance) FROM rides")
    return number


def compare(states: Sequence[ConsumerState], wanted: Sequence[Decimal | None], why: Sequence[str]) -> list[Difference]:
    """Return each consumer beside its correct total."""
    return [
        Difference(one.name, one.last_id, one.total, total, told)
        for one, total, told in zip(states, wanted, why, strict=True)
    ]


def apply(url: str, key: str, state: ConsumerState, wanted: Decimal) -> bool:
    """Write a total. False: the consumer has moved on meanwhile, and nothing was written. Raises StartRefused."""
    import sqlalchemy as sa

    try:
        new = orjson.dumps({**state.state, key: to_json_number(wanted)}).decode()
    except TypeError as wrong:  # a whole number of more than 64 bits
        raise StartRefused(f"--apply: the state of {state.name} cannot be written: {wrong}") from wrong
    with _connected(url, "--states-url") as sql:
        moved = sql.execute(
            sa.text(
                "UPDATE checkpoints SET version = version + 1 WHERE name = :name AND stream = :stream AND version ="
                " :version"
            ),
            {"name": state.name, "stream": state.stream, "version": state.version},
        )
        if moved.rowcount != 1:
            return False
        sql.execute(
            sa.text(queries(sql.dialect.name)["store_state"]),
            {"name": state.name, "stream": state.stream, "state": new},
        )
    return True


def to_json_number(number: Decimal | None) -> int | float | None:
    """Return the number as JSON has it."""
    if number is None:
        return None
    return int(number) if number == number.to_integral_value() else float(number)
