"""The reconciler: compare the running totals of log consumers with the archive: every message once, by uid, up to the
consumer's checkpoint.

The tables are those of the outbox. ``apply`` writes a total, in one transaction per consumer and only if its checkpoint
has not moved since: a running consumer sees another version, and reads its state again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

import orjson

from usher.common.base.errors import StartRefused
from usher.common.base.extras import how_to_install
from usher.common.base.text import parse_json, pluralize
from usher.common.outbox.sql_files import queries
from usher.common.protocol.stream_id import ZERO, rank
from usher.master.audit import batches
from usher.master.audit.archive import DataSet
from usher.master.audit.batches import nth, schema_of
from usher.master.audit.engine import Engine, few, quoted, refusing

_SCALE = 9
_STATES = schema_of("", "n nth")


class ConsumerState(NamedTuple):
    """The state of a log consumer in its tables. ``total`` None: its state has no such number."""

    name: str
    stream: str
    last_id: str
    version: int
    state: dict[str, Any]
    total: Decimal | None


@contextlib.contextmanager
def connected(url: str, setting: str) -> Iterator[tuple[Any, Any]]:
    """Yield SQLAlchemy, and a connection in a transaction. Raises StartRefused."""
    try:
        import sqlalchemy as sa
    except ImportError as missing:
        raise StartRefused(f"{setting} needs SQLAlchemy: {how_to_install('sql')}") from missing
    try:
        engine = sa.create_engine(url)
    except (sa.exc.ArgumentError, ModuleNotFoundError) as wrong:
        raise StartRefused(f"{setting} cannot be used: {wrong}") from wrong
    try:
        with engine.begin() as connection:
            yield sa, connection
    except sa.exc.SQLAlchemyError as failed:
        raise StartRefused(f"{setting}: {str(failed).splitlines()[0]}") from failed
    finally:
        engine.dispose()


def read_states(url: str, stream: str, key: str) -> list[ConsumerState]:
    """Return every log consumer of a stream. ``key``: the number in its state that is compared. Raises StartRefused."""
    with connected(url, "--states-url") as (sa, sql):
        asked = (
            "SELECT c.name, c.last_id, c.version, s.state FROM checkpoints c LEFT JOIN consumer_states s ON"
            " s.name = c.name AND s.stream = c.stream WHERE c.stream = :stream ORDER BY c.name"
        )
        rows = sql.execute(sa.text(asked), {"stream": stream}).all()
    found = []
    for name, last_id, version, stored in rows:
        try:
            state = stored if isinstance(stored, dict) else parse_json(stored or "{}")
        except ValueError as odd:
            raise StartRefused(f"--states-url: the state of {name} in consumer_states is not JSON: {odd}") from odd
        found.append(ConsumerState(name, stream, last_id, version, state, number_of(state.get(key))))
    return found


def number_of(value: Any) -> Decimal | None:
    try:
        return None if isinstance(value, bool) else Decimal(str(value)).quantize(Decimal(1).scaleb(-_SCALE))
    except InvalidOperation:
        return None


def totals_of_archive(
    engine: Engine, entries: DataSet, value: str, kind: str, states: Sequence[ConsumerState]
) -> list[tuple[Decimal, str]]:
    """Return the sum of ``value`` (a field, or ``data.name`` for a number inside the JSON of field ``data``) for each
    consumer, over every message up to its checkpoint, each uid once, and why that is not the total, or "". ``kind``:
    only messages whose field ``object`` is this; "" takes all. Raises StartRefused when the archive is not as it was
    written."""
    files, number = entries.complete(ZERO)
    if not files:
        return [(Decimal(0), "")] * len(states)
    field, _, inside = value.partition(".")
    text = f"fields[{quoted([field])}]"
    raw, bad = (f"json_text({text}, {quoted([inside])})", f"NOT is_json({text})") if inside else (text, "false")
    where = f"WHERE fields['object'] = {quoted([kind])}" if kind else ""
    amounts = f"""SELECT id, nth, amount, try_cast(amount AS DECIMAL(38, {_SCALE})) AS number, is_bad FROM (
        SELECT id, nth, {raw} AS amount, {text} IS NOT NULL AND {bad} AS is_bad,
               row_number() OVER (PARTITION BY coalesce(nullif(fields['uid'], ''), id) ORDER BY ms, seq) AS place
          FROM messages {where}) m WHERE place = 1"""
    unread = """SELECT count(*), min_by(id, nth) FROM amounts WHERE nth <= (SELECT max(nth) FROM states)
        AND (is_bad OR (amount IS NOT NULL AND number IS NULL))"""
    with refusing(f"the archive {entries.folder} cannot be read"):
        engine.files("messages", files, batches.STREAM, number)
        engine.arrow("states", few(_STATES, ({"n": n, "nth": nth(s.last_id.encode())} for n, s in enumerate(states))))
        engine.view("amounts", amounts)
        [(wrong, first)] = engine.rows(unread)
        if wrong:  # they would count as 0
            raise StartRefused(
                f"--value: {value} is no number in {pluralize(wrong, 'message')}, the first of them {first}: choose the"
                " right ones with --object"
            )
        of_each = "SELECT s.n, sum(a.number) FROM amounts a JOIN states s ON a.nth <= s.nth GROUP BY s.n"
        sums = dict(engine.rows(of_each))
    chain, found = entries.chain(), []
    for n, state in enumerate(states):
        below = rank(state.last_id.encode())
        why = [f"the archive has a gap: {one.gap}" for one in chain if one.gap and rank(one.after.encode()) < below]
        if rank(chain[-1].last.encode()) < below:
            why.append(f"the archive ends at {chain[-1].last}, before its checkpoint")
        found.append((Decimal(sums.get(n) or 0).quantize(Decimal(1).scaleb(-_SCALE)), next(iter(why), "")))
    return found


def apply(url: str, key: str, state: ConsumerState, wanted: Decimal) -> bool:
    """Write a total. False: the consumer has moved on meanwhile, and nothing was written. Raises StartRefused."""
    try:
        new = orjson.dumps({**state.state, key: to_json_number(wanted)}).decode()
    except TypeError as wrong:  # a whole number of more than 64 bits
        raise StartRefused(f"--apply: the state of {state.name} cannot be written: {wrong}") from wrong
    with connected(url, "--states-url") as (sa, sql):
        known = {"name": state.name, "stream": state.stream}
        where = "name = :name AND stream = :stream AND version = :version"
        moved = sa.text(f"UPDATE checkpoints SET version = version + 1 WHERE {where}")
        if sql.execute(moved, known | {"version": state.version}).rowcount != 1:
            return False
        sql.execute(sa.text(queries(sql.dialect.name)["store_state"]), known | {"state": new})
    return True


def to_json_number(number: Decimal | None) -> int | float | None:
    if number is None:
        return None
    return int(number) if number == number.to_integral_value() else float(number)
